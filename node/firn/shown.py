"""How far a reader has been shown the logs of the broker groups: what it was once shown never goes missing again.

A read that any replica may answer carries it, and so does its answer. It travels as text, ``GROUP:POSITION`` of each
group parted by commas: all that lies before that position of the group's log, or more, was there when the reader
looked. A replica that has not come so far does not answer.
"""

from collections.abc import Iterator, Mapping

from firn.errors import Invalid

ANY = "any"
MASTER = "master"
_TEXT_MAX = 4096
_POSITION_MAX = (1 << 63) - 1


def shown_text(shown: Mapping[int, int]) -> str:
    return ",".join(f"{group}:{position}" for group, position in sorted(shown.items()))


def parse_shown(text: str) -> dict[int, int]:
    """Errors: Invalid, naming the part that is none."""
    if len(text) > _TEXT_MAX:
        raise Invalid(f"shown: {len(text)} characters; at most {_TEXT_MAX}")
    return dict(_parts(text))


def _parts(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(",") if text else ():
        group, _, position = part.partition(":")
        if not (group.isdecimal() and position.isdecimal() and int(position) <= _POSITION_MAX):
            raise Invalid(f"shown: {part[:64]!r}: expected GROUP:POSITION")
        yield int(group), int(position)
