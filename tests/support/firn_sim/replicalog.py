"""The log of a simulated replica: entries of (epoch, ident), where a sync ends, what a power loss leaves.

Positions are those of the core; one entry is ``size`` long. A running hash of everything up to a position
(``chain_at``) makes "equal up to there" one comparison. ``FirnLog`` (``firnlog``) keeps the same entries in a
real commit log above a simulated disk.
"""

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from firn.types import Epoch, Position
from firn_node.replication.messages import EpochStart, History

EPOCH_START = 0  # the ident of an epoch-start record
KEYS = 24
Map = dict[bytes, bytes]  # the value of each key that has one


def record_of(ident: int) -> tuple[bytes, bytes | None]:
    """The record of an entry: few keys, each written and deleted again and again."""
    return b"key-%02d" % (ident % KEYS), None if ident % 5 == 0 else b"%013d" % ident


def apply(found: Map, records: Iterable[tuple[bytes, bytes | None]]) -> Map:
    """``found``, changed by records in their order."""
    for key, value in records:
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


class Entry(NamedTuple):
    epoch: int
    ident: int
    size: int = 1


class ReplicaLog:
    entry_size = 1

    def __init__(self, start: int = 0, chain: int = 0) -> None:
        self.base = start  # the first position that the replica ever held
        self.start = start  # ... that retention has left
        self.durable = start
        self.cuts = 0
        self.entries: list[Entry] = []
        self.ends: list[int] = [start]
        self._chain: dict[int, int] = {start: chain}

    def entry(self, epoch: int, ident: int) -> Entry:
        return Entry(epoch, ident, self.size_of(ident))

    def size_of(self, ident: int) -> int:
        return self.entry_size

    @property
    def written(self) -> int:
        return self.ends[-1]

    def append(self, entries: Sequence[Entry]) -> int:
        """In the page cache; the new end."""
        end, chain = self.ends[-1], self._chain[self.ends[-1]]
        for entry in entries:
            end += entry.size
            chain = hash((chain, entry.epoch, entry.ident))
            self.entries.append(entry)
            self.ends.append(end)
            self._chain[end] = chain
        return end

    def synced(self, end: int, cuts: int) -> None:
        """A sync has ended that began at these cuts and covered the log up to ``end``."""
        if cuts == self.cuts:
            self.durable = max(self.durable, min(end, self.written))

    def cut(self, end: int) -> None:
        """Durable on return."""
        self._drop_after(end)
        self.durable = min(self.durable, end)
        self.cuts += 1

    def _drop_after(self, end: int) -> None:
        keep = bisect_left(self.ends, end)
        for gone in self.ends[keep + 1 :]:
            del self._chain[gone]
        del self.ends[keep + 1 :]
        del self.entries[keep:]

    def kill(self) -> None:
        """The process ends, the page cache stays."""

    def lose_power(self, rng: random.Random) -> None:
        """Any prefix of the unsynced tail survives; often none."""
        first = bisect_left(self.ends, self.durable)
        last = first if rng.random() < 0.4 else len(self.ends) - 1
        self._drop_after(self.ends[rng.randint(first, last)])

    def recover(self) -> None:
        """A new process opens the log and syncs what it finds."""
        self.durable = self.written
        self.cuts = 0

    def release(self, before: int) -> None:
        self.start = max(self.start, min(before, self.durable))

    def between(self, start: int, end: int) -> list[Entry]:
        first, last = bisect_left(self.ends, start), bisect_left(self.ends, end)
        return self.entries[first:last]

    def records(self, start: int, end: int) -> list[tuple[bytes, bytes | None]]:
        """Keys and values of what lies between, epoch starts left out."""
        return [record_of(entry.ident) for entry in self.between(start, end) if entry.ident != EPOCH_START]

    def frame_end(self, start: int, entries_max: int) -> int:
        """Where a frame of at most so many entries from ``start`` on ends."""
        first = bisect_left(self.ends, start)
        return self.ends[min(first + entries_max, len(self.ends) - 1)]

    def chain_at(self, position: int) -> int | None:
        """The hash of everything before the position; None where no entry ends."""
        return self._chain.get(position)

    def entry_ending_at(self, end: int) -> Entry:
        return self.entries[bisect_left(self.ends, end) - 1]

    def ends_between(self, start: int, end: int) -> list[int]:
        """The ends of the entries in ``(start, end]``."""
        return self.ends[bisect_left(self.ends, start) + 1 : bisect_left(self.ends, end) + 1]

    def history(self) -> History:
        """The epoch history as the batch headers tell it."""
        return epoch_starts(self.entries, self.base)


def epoch_starts(entries: Sequence[Entry], start: int) -> History:
    """The epochs that begin within entries that begin at ``start``; the first one counts as a beginning."""
    starts: list[EpochStart] = []
    at = start
    for entry in entries:
        if not starts or entry.epoch != starts[-1].epoch:
            starts.append(EpochStart(Epoch(entry.epoch), Position(at)))
        at += entry.size
    return tuple(starts)
