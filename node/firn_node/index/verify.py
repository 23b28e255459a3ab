"""Compares two partition indexes offset by offset, in bounded memory."""

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar

from firn.errors import Corrupt
from firn_node.index.base import Entry, PartitionEnd, PartitionIndex

DIFFERENCES_MAX = 100

T = TypeVar("T")


def verify(a: PartitionIndex, b: PartitionIndex, *, limit: int = DIFFERENCES_MAX) -> list[str]:
    """One sentence per difference, at most ``limit``; empty when the two answer alike.

    *Shape*: checkpoint, then partition by partition the end and the first differing offset, then states,
    producers and light queues. Entries below the later of the two log starts are not compared.
    """
    found: list[str] = []
    for difference in _differences(a, b):
        found.append(difference)
        if len(found) >= limit:
            break
    return found


def require_equal(a: PartitionIndex, b: PartitionIndex) -> None:
    """*Errors*: Corrupt, with the first differences."""
    if differences := verify(a, b, limit=5):
        raise Corrupt(f"indexes differ: {'; '.join(differences)}", differences=differences)


def _differences(a: PartitionIndex, b: PartitionIndex) -> Iterator[str]:
    names = (a.kind, b.kind)
    if a.checkpoint != b.checkpoint:
        yield f"checkpoint: {a.kind} has {a.checkpoint}, {b.kind} has {b.checkpoint}"
    log_start = max(a.log_start, b.log_start)
    for key, ends in _paired(a.partitions(), b.partitions(), lambda end: end[:2]):
        where = f"topic {key[0]} partition {key[1]}"
        if ends[0] != ends[1]:
            yield _sentence(f"{where}: end", names, *ends)
        yield from _entry_differences(a, b, key, log_start)
    for what, rows in (
        ("state", _paired(a.states(), b.states(), lambda row: row[:2])),
        ("producer", _paired(a.producers(), b.producers(), lambda row: row[:3])),
        ("light entry", _paired(a.lights(), b.lights(), lambda row: (row[0], row[1], *_name_order(row)))),
    ):
        for key, (left, right) in rows:
            if left != right:
                yield _sentence(f"{what} {key}", names, left, right)


def _name_order(row: Any) -> tuple[int, bytes, int]:
    name = row[2].encode()
    return len(name), name, row[3]


def _entry_differences(
    a: PartitionIndex, b: PartitionIndex, key: tuple[int, int], log_start: int
) -> Iterator[str]:
    pairs = zip_longest(_entries(a, key, log_start), _entries(b, key, log_start))
    for left, right in pairs:
        if left != right:
            offset = min(entry.base_offset for entry in (left, right) if entry is not None)
            where = f"topic {key[0]} partition {key[1]} offset {offset}"
            yield _sentence(where, (a.kind, b.kind), left, right)
            return


def _entries(index: PartitionIndex, key: tuple[int, int], log_start: int) -> Iterator[Entry]:
    offset = 0
    while entries := index.scan(*key, offset):
        yield from (entry for entry in entries if entry.position >= log_start)
        offset = entries[-1].end_offset


def _paired(
    left: Iterable[T], right: Iterable[T], key: Callable[[T], Any]
) -> Iterator[tuple[Any, tuple[T | None, T | None]]]:
    """Merge two iterables sorted by ``key``; what one of them lacks is None."""
    lefts, rights = iter(left), iter(right)
    a, b = next(lefts, None), next(rights, None)
    while a is not None or b is not None:
        if b is None or (a is not None and key(a) < key(b)):
            assert a is not None
            yield key(a), (a, None)
            a = next(lefts, None)
        elif a is None or key(b) < key(a):
            yield key(b), (None, b)
            b = next(rights, None)
        else:
            yield key(a), (a, b)
            a, b = next(lefts, None), next(rights, None)


def _sentence(where: str, names: tuple[str, str], left: object, right: object) -> str:
    return f"{where}: {names[0]} has {_text(left)}, {names[1]} has {_text(right)}"


def _text(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, PartitionEnd):
        return f"end {value.end_offset}, newest time {value.max_timestamp}"
    return str(tuple(value)) if isinstance(value, tuple) else str(value)
