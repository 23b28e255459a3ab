"""The key fingerprints of segments that are still being written, kept for their keys files.

They are computed once, at append, or where what was not appended here is read back for dispatch (a standby's whole
log, a master's epoch start). A keys file that is built of them reads nothing back and hashes nothing twice: 8 bytes a
record and 12 a batch are held until then. Memory is bounded; what is not gathered whole, because there was no room or
the broker began in the middle of a segment, is read from the log instead.

Invariant: the batches of a part lie one after another from the segment's start on; a part that ends where its
segment ends has all of them. Dispatched batches only, so nothing that is gathered is ahead of the durable log.
"""

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels import Group

GATHERED_RECORDS_MAX = 4 << 20  # 32 MiB: a segment of 256 MiB, half of the next one, of records of 100 bytes


class GatheredRecord(Protocol):
    """A batch of one record, from ``position`` to ``end`` of the log; ``hi`` is of its key's fingerprint."""

    @property
    def hi(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def append_ms(self) -> int: ...


@dataclass(slots=True)
class Times:
    """The least and the greatest timestamp and append time of batches, in ms."""

    min_timestamp: int = (1 << 63) - 1
    max_timestamp: int = -1 << 63
    min_append: int = (1 << 63) - 1
    max_append: int = -1 << 63

    def add(self, group: Group, rows: NDArray[np.int64] | slice) -> None:
        """Count in some batches of a group, at least one."""
        least, greatest, append = group.min_timestamp, group.max_timestamp, group.append_timestamp[rows]
        self.widen(int(least[rows].min()), int(greatest[rows].max()), int(append.min()), int(append.max()))

    def widen(self, min_timestamp: int, max_timestamp: int, min_append: int, max_append: int) -> None:
        """Take in such times of further batches."""
        self.min_timestamp = min(self.min_timestamp, min_timestamp)
        self.max_timestamp = max(self.max_timestamp, max_timestamp)
        self.min_append = min(self.min_append, min_append)
        self.max_append = max(self.max_append, max_append)


class Part:
    """What is known of one segment up to ``end``."""

    __slots__ = ("_hi", "_positions", "_records", "end", "times")

    def __init__(self, start: int) -> None:
        self.end = start
        self.times = Times()
        self._hi, self._positions, self._records = array("Q"), array("Q"), array("I")

    def __len__(self) -> int:
        """How many records it has."""
        return len(self._hi)

    def extend(self, group: Group, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Add the batches ``rows`` of a group, which were written at ``positions``."""
        chosen = np.asarray(rows, np.int64)
        records = group.records[chosen]
        if len(rows) == len(group) and int(records.sum()) == len(group.hi):
            hi = group.hi
        else:
            hi = np.concatenate([group.hi[group.rows(i)] for i in rows])
        self._hi.frombytes(hi.view(np.uint8).data)
        self._positions.extend(positions)
        self._records.extend(records.tolist())
        self.times.add(group, chosen)
        self.end = positions[-1] + int(group.size[rows[-1]])

    def extend_records(self, records: "Sequence[GatheredRecord]") -> None:
        """Add batches of one record each, which lie one after another."""
        self._hi.extend([record.hi for record in records])
        self._positions.extend([record.position for record in records])
        self._records.extend([1] * len(records))
        stamps, append = [r.timestamp for r in records], [r.append_ms for r in records]
        self.times.widen(min(stamps), max(stamps), min(append), max(append))
        self.end = records[-1].end

    def columns(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """The fingerprints of all records, and the position and the number of records of each batch."""
        return (
            np.frombuffer(self._hi, np.uint64),
            np.frombuffer(self._positions, np.uint64),
            np.frombuffer(self._records, np.uint32),
        )


class Gathered:
    """Parts of the newest segments. ``add`` is called on the event loop, ``take`` in any thread."""

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}
        self._truncations = 0
        self._lock = threading.Lock()

    def add(
        self,
        group: Group,
        rows: Sequence[int],
        positions: Sequence[int],
        *,
        starts: Sequence[int],
        truncations: int,
    ) -> None:
        """Batches that were dispatched, in log order; those that are known already are passed over.

        ``starts``: of the log's segments. ``truncations``: how often the log was truncated: that voids all parts.
        """
        with self._lock:
            for part, at, end in self._pieces(positions, starts, truncations):
                part.extend(group, rows[at:end], positions[at:end])
            self._bound()

    def add_records(
        self, records: "Sequence[GatheredRecord]", *, starts: Sequence[int], truncations: int
    ) -> None:
        """As ``add``, of batches of one record each."""
        with self._lock:
            for part, at, end in self._pieces([r.position for r in records], starts, truncations):
                part.extend_records(records[at:end])
            self._bound()

    def _pieces(
        self, positions: Sequence[int], starts: Sequence[int], truncations: int
    ) -> "Iterator[tuple[Part, int, int]]":
        """The parts to extend, each with its range of the positions."""
        if truncations != self._truncations:
            self._parts, self._truncations = {}, truncations
        at = 0
        while at < len(positions):
            number = bisect_right(starts, positions[at])
            end = len(positions)
            if number < len(starts) and starts[number] <= positions[-1]:
                end = bisect_right(positions, starts[number] - 1)
            start = starts[number - 1]
            if start not in self._parts and positions[at] == start:
                self._parts[start] = Part(start)
            part = self._parts.get(start)
            if part is not None and part.end == positions[at]:
                yield part, at, end
            at = end

    def _bound(self) -> None:
        if sum(map(len, self._parts.values())) > GATHERED_RECORDS_MAX:
            self._parts = {}

    def take(self, start: int, end: int, *, truncations: int) -> Part | None:
        """The whole segment ``[start, end)``, if it was gathered. It and all before it are let go."""
        with self._lock:
            part = self._parts.get(start)
            self._parts = {first: part for first, part in self._parts.items() if first > start}
            if part is None or part.end != end or truncations != self._truncations:
                return None
            return part
