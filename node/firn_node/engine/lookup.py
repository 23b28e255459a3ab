"""The newest record of a key, by fingerprint first and by the real key bytes before it is believed.

Order, newest first: unsealed rows in memory, rows being sealed, sealed dirty segments, the compacted log. Dirty
rows are read from the commit log through the partition index (or, before dispatch, by their pending position).

A list of keys is looked up in bulk: each step takes all keys that the steps before it left over, one pass over an
index for all of them and one over a batch for all of its rows. What the newest row of a fingerprint does not decide
is looked up alone.
"""

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, iterate, parse_header
from firn.errors import Corrupt, MalformedBatch, OffsetExpired
from firn_node.compaction.answers import I64, U8, Answers, FoundRow, Wanted, joined
from firn_node.compaction.rows import WholeRows
from firn_node.compaction.taking import Taking
from firn_node.engine.api import Found
from firn_node.engine.core import Core
from firn_node.engine.logrows import LogRows
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.kernels import ActiveIndex, fingerprint
from firn_node.kernels.hashing import fingerprint_of
from firn_node.kernels.taking import AGAIN

_CACHE_BYTES = 8 << 20
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]


class BatchCache:
    """Checked batches of the commit log by position, bounded in bytes, the least recently used dropped first."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._held: OrderedDict[int, Batch] = OrderedDict()
        self._bytes = 0

    def run(self, position: int, size: int) -> list[Batch]:
        """The batches of a run.

        Errors: Corrupt, naming the position.
        """
        known = self._held.get(position)
        if known is not None and known.header.size == size:
            self._held.move_to_end(position)
            return [known]
        try:
            batches = list(iterate(self._core.log.read(position, size)))
            for batch in batches:
                batch.verify()
        except MalformedBatch as error:
            raise Corrupt(f"commit log position {position}: {error.message}", position=position) from error
        if len(batches) == 1:
            self._keep(position, batches[0])
        return batches

    def at(self, position: int) -> Batch:
        """The one batch that begins at ``position``."""
        known = self._held.get(position)
        if known is not None:
            return known
        try:
            header = parse_header(self._core.log.read(position, 104))
        except MalformedBatch as error:
            raise Corrupt(f"commit log position {position}: {error.message}", position=position) from error
        return self.run(position, header.size)[0]

    def clear(self) -> None:
        """Forget all: what was not dispatched may be cut off the log, and other batches come to lie there."""
        self._held.clear()
        self._bytes = 0

    def _keep(self, position: int, batch: Batch) -> None:
        self._held[position] = batch
        self._bytes += batch.header.size
        while self._bytes > _CACHE_BYTES and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.header.size


class Lookup:
    def __init__(self, core: Core, partitions: Partitions) -> None:
        self._core = core
        self._partitions = partitions
        self._secret = core.secret.tolist()
        self._rows = LogRows(core)
        self.batches = BatchCache(core)

    def wanted(self, topic_id: int, keys: U8, starts: I64) -> Wanted:
        """Keys with their fingerprints."""
        hi, lo = fingerprint(keys, np.diff(starts).astype(np.int32), topic_id, self._core.secret)
        return Wanted(keys, starts, hi, lo)

    def get(self, partition: Partition, keys: Sequence[bytes]) -> list[Found | None]:
        """The newest dispatched record of each key; None where there is none or it is a tombstone."""
        if len(keys) == 1:
            return [self._get_one(partition, keys[0])]
        wanted = self.wanted(partition.topic.topic_id, *joined(keys))
        answers = Answers(len(keys), bytes_max=sys.maxsize)
        self.bulk(partition, wanted, np.arange(len(keys)), answers)()
        return found_list(answers)

    def _get_one(self, partition: Partition, key: bytes) -> Found | None:
        hi, lo = fingerprint_of(np.frombuffer(key, np.uint8), partition.topic.topic_id, *self._secret)
        return _served(partition.number, self.newest(partition, key, hi, lo, below=partition.dispatched_end))

    def newest(
        self, partition: Partition, key: bytes, hi: int, lo: int, *, below: int | None = None
    ) -> FoundRow | None:
        """The newest record of ``key``, tombstones included; ``below`` bounds the offsets (None: all appended)."""
        indexes = [self._partitions.active(partition), *reversed(partition.sealing)]
        return self._newest(partition, indexes, key, hi, lo, below)

    def _newest(
        self, partition: Partition, indexes: Sequence[ActiveIndex], key: bytes, hi: int, lo: int, below: int | None
    ) -> FoundRow | None:  # fmt: skip
        for offset in _candidates(partition, indexes, hi, lo, below):
            found = self._dirty_row(partition, offset, key)
            if found is not None:
                return found
        return partition.log.newest(key, hi, lo)

    def _dirty_row(self, partition: Partition, offset: int, key: bytes) -> FoundRow | None:
        """The record at a dirty offset when its key is ``key``."""
        pending = partition.pending_batch(offset) if offset >= partition.dispatched_end else None
        if pending is not None:
            batch = self.batches.run(pending.position, pending.size)[0]
            return WholeRows(batch).row(offset - pending.base, key)
        found = self._rows.find(partition.key, offset, of_one=True)
        try:
            return None if found is None else found[1].row(offset - found[0].base, key)
        except OffsetExpired:
            return None  # as where none is found: a compaction has covered it

    def bulk(self, partition: Partition, wanted: Wanted, picks: I64, answers: Answers) -> "Bulk":
        """The look-up of many keys of one partition, to be called: here, or once in another thread."""
        indexes = [self._partitions.active(partition), *reversed(partition.sealing)]
        return Bulk(self, partition, indexes, partition.dispatched_end, wanted, picks, answers)


@dataclass(frozen=True, slots=True)
class Bulk:
    """What is in memory was taken note of on the event loop, and is looked at before the files: a row moves from
    memory to a sealed segment, and from there to the compacted log, so that none is missed on the way.
    """

    lookup: Lookup
    partition: Partition
    indexes: Sequence[ActiveIndex]
    below: int
    wanted: Wanted
    picks: I64
    answers: Answers

    def __call__(self) -> None:
        """Answers all picks. *Errors*: Corrupt."""
        log, wanted, answers = self.partition.log, self.wanted, self.answers
        answers.partitions[self.picks] = self.partition.number
        offsets = self._dirty_offsets()
        answers.lengths[self.picks[offsets == -2]] = AGAIN
        is_dirty = offsets >= 0
        expired = self._take_dirty(offsets[is_dirty], self.picks[is_dirty])
        log.newest_many(wanted, np.concatenate([self.picks[offsets == -1], expired]), answers)
        for pick in answers.doubtful():
            hi, lo = int(wanted.hi[pick]), int(wanted.lo[pick])
            row = self.lookup._newest(self.partition, self.indexes, wanted.key(pick), hi, lo, self.below)
            answers.put(pick, row, is_known=True)

    def _dirty_offsets(self) -> I64:
        """The newest dirty offset of each pick's fingerprint; -1: none, -2: doubtful."""
        hi, lo = self.wanted.hi[self.picks], self.wanted.lo[self.picks]
        order = np.argsort(hi)  # neighbours in an index are found in the same cache lines
        hi, lo = hi[order], lo[order]
        found = np.full(len(hi), -1, np.int64)
        left = np.arange(len(hi))
        for index in self.indexes:
            if index.end > index.start:
                found[left] = index.newest_many(hi[left], lo[left], below=self.below)
                left = np.flatnonzero(found == -1)
        found[left] = self.partition.log.dirty_newest_many(hi[left], lo[left])
        in_order = np.empty_like(found)
        in_order[order] = found
        return in_order

    def _take_dirty(self, offsets: I64, picks: I64) -> I64:
        """Answers picks from the commit log; those whose offset has expired come back."""
        order = np.argsort(offsets)
        offsets, picks = offsets[order], picks[order]
        expired: list[I64] = []
        at = 0
        with Taking(self.wanted, self.answers) as taking:
            is_left = self.lookup._rows.take_known(self.partition.key, offsets, picks, taking)
            offsets, picks = offsets[is_left], picks[is_left]
            while at < len(offsets):
                found = self.lookup._rows.find(self.partition.key, int(offsets[at]))
                end = at + 1 if found is None else bisect_left(offsets.data, found[0].end, at)
                try:
                    if found is None:
                        expired.append(picks[at:end])
                    else:
                        found[1].take(offsets[at:end] - found[0].base, picks[at:end], taking)
                except OffsetExpired:  # since a line ago
                    expired.append(picks[at:end])
                at = end
            taking.flush()
        return np.concatenate([np.empty(0, np.int64), *expired])


def _candidates(
    partition: Partition, indexes: Sequence[ActiveIndex], hi: int, lo: int, below: int | None
) -> Iterator[int]:
    for index in indexes:
        yield from index.newest(hi, lo, below=below)
    yield from partition.log.dirty_newest(hi, lo)


def found_list(answers: Answers) -> list[Found | None]:
    """The records of all keys; every one of them must have been answered."""
    numbers = answers.partitions.tolist()
    return [_served(number, answers.row(pick)) for pick, number in enumerate(numbers)]


def _served(partition: int, row: FoundRow | None) -> Found | None:
    if row is None or row.value is None:
        return None
    return Found(partition, row.offset, row.timestamp, row.value, row.tag, row.headers)
