"""The newest record of a key, by fingerprint first and by the real key bytes before it is believed.

Order, newest first: unsealed rows in memory, rows being sealed, sealed dirty segments, the compacted log. Dirty
rows are read from the commit log through the partition index (or, before dispatch, by their pending position).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, iterate, parse_header
from firn.errors import Corrupt, MalformedBatch, OffsetExpired
from firn_node.compaction.rows import FoundRow
from firn_node.engine.api import Found
from firn_node.engine.core import Core
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.kernels import fingerprint

_CACHE_BYTES = 8 << 20
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Newest:
    """A key's newest record; ``value`` None: a tombstone."""

    offset: int
    timestamp: int
    value: bytes | None
    tag: str | None
    headers: dict[str, str]


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
        self.batches = BatchCache(core)

    def fingerprints(self, topic_id: int, keys: Sequence[bytes]) -> tuple[U64, U32]:
        lengths = np.fromiter(map(len, keys), np.int32, len(keys))
        hi, lo = fingerprint(np.frombuffer(b"".join(keys), np.uint8), lengths, topic_id, self._core.secret)
        return hi, lo

    def get(self, partition: Partition, keys: Sequence[bytes]) -> list[Found | None]:
        """The newest dispatched record of each key; None where there is none or it is a tombstone."""
        hi, lo = self.fingerprints(partition.topic.topic_id, keys)
        below, number = partition.dispatched_end, partition.number
        if len(keys) == 1:
            return [_served(number, self.newest(partition, keys[0], int(hi[0]), int(lo[0]), below=below))]
        is_dirty = self._maybe_dirty(partition, hi, lo, below)
        found: list[Found | None] = [None] * len(keys)
        for i in np.flatnonzero(is_dirty).tolist():
            found[i] = _served(number, self.newest(partition, keys[i], int(hi[i]), int(lo[i]), below=below))
        clean = np.flatnonzero(~is_dirty)
        wanted = clean.tolist()
        rows = partition.log.newest_many([keys[i] for i in wanted], hi[clean], lo[clean])
        for i, row in zip(wanted, rows, strict=True):
            found[i] = _served(number, row)
        return found

    def _maybe_dirty(self, partition: Partition, hi: U64, lo: U32, below: int) -> NDArray[np.bool_]:
        """False for the fingerprints that no dirty row has."""
        found: NDArray[np.bool_] = self._partitions.active(partition).newest_many(hi, lo, below=below) >= 0
        for index in reversed(partition.sealing):
            found |= index.newest_many(hi, lo, below=below) >= 0
        return found | partition.log.maybe_dirty(hi, lo)

    def newest(
        self, partition: Partition, key: bytes, hi: int, lo: int, *, below: int | None = None
    ) -> Newest | None:
        """The newest record of ``key``, tombstones included; ``below`` bounds the offsets (None: all appended)."""
        for offset in self._candidates(partition, hi, lo, below):
            row = self._dirty_row(partition, offset)
            if row is not None and row[0] == key:
                return row[1]
        clean = partition.log.newest(key, hi, lo)
        if clean is None:
            return None
        return Newest(clean.offset, clean.timestamp, clean.value, clean.tag, clean.headers)

    def _candidates(self, partition: Partition, hi: int, lo: int, below: int | None) -> Iterator[int]:
        yield from self._partitions.active(partition).newest(hi, lo, below=below)
        for index in reversed(partition.sealing):
            yield from index.newest(hi, lo, below=below)
        yield from partition.log.dirty_newest(hi, lo)

    def _dirty_row(self, partition: Partition, offset: int) -> tuple[bytes, Newest] | None:
        pending = partition.pending_batch(offset)
        if pending is not None:
            return row_of(self.batches.run(pending.position, pending.size)[0], offset)
        entry = self._core.index.find(*partition.key, offset)
        if (
            entry is None
            or not entry.base_offset <= offset < entry.end_offset
            or entry.position < self._core.log.start
        ):
            return None  # expired: a compaction has covered it
        try:
            batches = self.batches.run(entry.position, entry.size)
        except OffsetExpired:
            return None  # the same, since a line ago
        for batch in batches:
            if batch.header.base_offset <= offset <= batch.header.last_offset:
                return row_of(batch, offset)
        return None


def _served(partition: int, row: Newest | FoundRow | None) -> Found | None:
    if row is None or row.value is None:
        return None
    return Found(partition, row.offset, row.timestamp, row.value, row.tag, row.headers)


def row_of(batch: Batch, offset: int) -> tuple[bytes, Newest]:
    """Key and record at ``offset`` of a dense batch."""
    columns, row = batch.columns, offset - batch.header.base_offset
    key_start = int(columns.key_lengths[:row].sum(dtype=np.int64))
    key = columns.keys[key_start : key_start + int(columns.key_lengths[row])].tobytes()
    value: bytes | None = None
    length = int(columns.value_lengths[row])
    if length >= 0:
        start = int(np.maximum(columns.value_lengths[:row], 0).sum(dtype=np.int64))
        value = columns.values[start : start + length].tobytes()
    tag = batch.tag_list()[row] if len(columns.tags) else None
    headers = batch.header_list()[row] if len(columns.headers) else {}
    return key, Newest(offset, int(columns.timestamps[row]), value, tag, headers)
