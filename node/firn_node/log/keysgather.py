"""The key fingerprints of segments that are still being written, kept for their keys files.

They are computed once, at append. A keys file that is built of them reads nothing back and hashes nothing twice:
8 bytes a record and 12 a batch are held until then. Memory is bounded; what is not gathered whole, because there
was no room or the broker began in the middle of a segment, is read from the log instead.

Invariant: the batches of a part lie one after another from the segment's start on; a part that ends where its
segment ends has all of them. Dispatched batches only, so nothing that is gathered is ahead of the durable log.
"""

import threading
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels import Group

GATHERED_RECORDS_MAX = 4 << 20  # 32 MiB: a segment of 256 MiB, half of the next one, of records of 100 bytes


@dataclass(slots=True)
class Times:
    """The least and the greatest timestamp and append time of batches, in ms."""

    min_timestamp: int = (1 << 63) - 1
    max_timestamp: int = -1 << 63
    min_append: int = (1 << 63) - 1
    max_append: int = -1 << 63

    def add(self, group: Group, rows: NDArray[np.int64] | slice) -> None:
        """Count in some batches of a group, at least one."""
        append = group.append_timestamp[rows]
        self.min_timestamp = min(self.min_timestamp, int(group.min_timestamp[rows].min()))
        self.max_timestamp = max(self.max_timestamp, int(group.max_timestamp[rows].max()))
        self.min_append = min(self.min_append, int(append.min()))
        self.max_append = max(self.max_append, int(append.max()))


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
            if truncations != self._truncations:
                self._parts, self._truncations = {}, truncations
            at = 0
            while at < len(rows):
                number = bisect_right(starts, positions[at])
                end = len(rows)
                if number < len(starts) and starts[number] <= positions[-1]:
                    end = bisect_right(positions, starts[number] - 1)
                self._extend(starts[number - 1], group, rows[at:end], positions[at:end])
                at = end
            if sum(map(len, self._parts.values())) > GATHERED_RECORDS_MAX:
                self._parts = {}

    def _extend(self, start: int, group: Group, rows: Sequence[int], positions: Sequence[int]) -> None:
        part = self._parts.get(start)
        if part is None and positions[0] == start:
            part = self._parts[start] = Part(start)
        if part is not None and part.end == positions[0]:
            part.extend(group, rows, positions)

    def take(self, start: int, end: int, *, truncations: int) -> Part | None:
        """The whole segment ``[start, end)``, if it was gathered. It and all before it are let go."""
        with self._lock:
            part = self._parts.get(start)
            self._parts = {first: part for first, part in self._parts.items() if first > start}
            if part is None or part.end != end or truncations != self._truncations:
                return None
            return part
