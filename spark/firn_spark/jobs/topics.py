"""What jobs ask about topics: how far their partitions go, whether a target may be written to."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from firn.errors import Invalid, Unavailable, UnknownTopic

if TYPE_CHECKING:
    from firn.client.blocking import Client

Offsets = dict[int, int]
_COPIED = ("compaction", "retention", "durability")  # of a spec; who may use a topic is for its owner to say


def latest(described: Mapping[str, Any]) -> Offsets:
    """The end of each partition, of a topic's description. Errors: as ``_rows``."""
    return {int(p["partition"]): int(p["latest"]) for p in _rows(described)}


def earliest(described: Mapping[str, Any]) -> Offsets:
    """The first offset of each partition that the raw view still has. Errors: as ``_rows``."""
    return {int(p["partition"]): int(p["earliest"]) for p in _rows(described)}


def _rows(described: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Those of all partitions. Errors: Unavailable: a broker group has not told of its own."""
    found: Sequence[Mapping[str, Any]] = described["partitions"]
    if len(found) != (count := int(described["spec"]["partitions"])):
        why = (
            "; ".join(map(str, described.get("silent", {}).values()))
            or "a broker group has yet to take it over"
        )
        raise Unavailable(f"{described['name']}: {len(found)} of {count} partitions are told of: {why}")
    return found


def ready_target(
    client: "Client",
    name: str,
    *,
    partitions: int | None,
    may_append: bool,
    spec: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The description of a topic that is to be written to; one that is not there is made, if ``partitions`` says how.

    ``spec``: the topic's where the records are from; a new topic gets its compaction, retention and durability.
    Errors: UnknownTopic; Unavailable, as ``latest``; Invalid for a topic that is not empty, unless ``may_append``, or has
    other partitions.
    """
    try:
        described = client.describe(name)
    except UnknownTopic:
        if partitions is None:
            raise UnknownTopic(
                f"{name} is not there: create it, or say --partitions N for a new topic"
            ) from None
        client.create_topic(name, partitions, **{key: spec[key] for key in _COPIED if spec and key in spec})
        return client.describe(name)
    found = len(latest(described))
    if partitions not in (None, found):
        raise Invalid(
            f"{name} is there with {found} partitions, not {partitions}; their number cannot change"
        )
    records = sum(latest(described).values())
    if records and not may_append:
        raise Invalid(
            f"{name} is not empty: {records:,} records were written to it, and old values would lie over newer ones; "
            "take an empty topic, or say --append"
        )
    return described
