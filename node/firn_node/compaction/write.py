"""Survivors become segments.

Batches of ``COPY_BYTES`` or more that lose no row are copied byte for byte. The rows of the others are gathered
and joined to about ``JOIN_BYTES`` under the same codecs, with new CRCs, the flag ``rebuilt``, producer 0 and the
largest epoch and append time of their sources. Every source batch was checked against its CRCs before.

The key index of what was written is made from the old ones: rows that went are dropped, the others get their new
number, runs are merged; in rounds over fingerprint ranges, within the same memory as the decision. Nothing is
hashed again.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firn.batch import HEADER_BYTES, Batch, Buffer, Codecs
from firn_node.compaction.decide import Pool, Source, pool_rows, ranges
from firn_node.compaction.keyindex import first_block
from firn_node.compaction.manifest import ROWS_MAX, SPAN_MAX
from firn_node.compaction.mask import Bits
from firn_node.compaction.rebuild import Piece, join, piece_of, rebuilt_identity
from firn_node.compaction.segment import SegmentWriter
from firn_node.kernels.compact import merge_two, rank_blocks, readonly, renumber_block, split_by_file

COPY_BYTES = 16 << 10
JOIN_BYTES = 256 << 10
JOIN_ROWS_MAX = 65_536


@dataclass(slots=True)
class _Joined:
    """Records waiting to become one batch."""

    pieces: list[Piece]
    codecs: tuple[int, int, int]
    weight: int = 0
    rows: int = 0
    epoch: int = 0
    append_timestamp: int = 0


class Output:
    """The segments that one group of neighbouring sources becomes. Batches are given in offset order.

    ``writers`` in order; ``first_rank`` is the number of survivors of the partition before this group.
    """

    def __init__(
        self, new_writer: Callable[[], SegmentWriter], *, segment_bytes: int, topic_id: int, partition: int
    ) -> None:
        self.writers: list[SegmentWriter] = []
        self.rows = 0
        self.bytes = 0
        self.sources: list[int] = []
        self._new_writer = new_writer
        self._segment_bytes = segment_bytes
        self._identity = (topic_id, partition)
        self._joined: _Joined | None = None

    def add(self, batch: Batch, keep: NDArray[np.bool_]) -> int:
        """Take the rows of a checked batch where ``keep`` is True; the bytes written so far come back."""
        h, kept = batch.header, int(np.count_nonzero(keep))
        if kept == 0:
            return self.bytes
        self.rows += kept
        if kept == h.records and h.size >= COPY_BYTES:
            self.flush()
            self._write(batch.data, h.records, h.base_offset, h.last_offset, h.keys_bytes, h.max_timestamp)
            return self.bytes
        rows = None if kept == h.records else np.flatnonzero(keep)
        weight = h.size * kept // h.records
        if weight <= 2 * JOIN_BYTES:
            self._join(batch, rows, weight)
            return self.bytes
        rows = np.arange(h.records) if rows is None else rows
        for piece in np.array_split(rows, -(-weight // JOIN_BYTES)):
            if len(piece):
                self._join(batch, piece, weight * len(piece) // kept)
        return self.bytes

    def flush(self) -> None:
        """Write what waits to be joined."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        identity = rebuilt_identity(*self._identity, joined.epoch, joined.append_timestamp)
        data = join(joined.pieces, identity, Codecs(*joined.codecs))
        h = Batch(data).header
        self._write(data, h.records, h.base_offset, h.last_offset, h.keys_bytes, h.max_timestamp)

    def add_plain(self, piece: Piece, *, epoch: int, append_timestamp: int) -> int:
        """Take records of checked batches without codecs; the bytes written so far come back."""
        kept = len(piece.offsets)
        self.rows += kept
        weight = HEADER_BYTES + 16 * kept + len(piece.keys) + len(piece.values)
        self._append(piece, (0, 0, 0), weight, epoch, append_timestamp)
        return self.bytes

    def _join(self, batch: Batch, rows: NDArray[np.int64] | None, weight: int) -> None:
        h = batch.header
        codecs = (h.keys_codec, h.headers_codec, h.values_codec)
        self._append(piece_of(batch.columns, rows), codecs, weight, h.epoch, h.append_timestamp)

    def _append(
        self, piece: Piece, codecs: tuple[int, int, int], weight: int, epoch: int, append_timestamp: int
    ) -> None:
        joined, kept = self._joined, len(piece.offsets)
        if joined is not None:
            first = int(joined.pieces[0].offsets[0])
            is_full = joined.weight + weight > JOIN_BYTES or joined.rows + kept > JOIN_ROWS_MAX
            if is_full or joined.codecs != codecs or int(piece.offsets[-1]) - first >= SPAN_MAX:
                self.flush()
                joined = None
        if joined is None:
            joined = self._joined = _Joined([], codecs)
        joined.pieces.append(piece)
        joined.weight += weight
        joined.rows += kept
        joined.epoch = max(joined.epoch, epoch)
        joined.append_timestamp = max(joined.append_timestamp, append_timestamp)

    def _write(
        self, data: Buffer, rows: int, first: int, last: int, keys_bytes: int, max_timestamp: int
    ) -> None:
        writer = self.writers[-1] if self.writers else None
        if (
            writer is None
            or (writer.bytes and writer.bytes + len(data) > self._segment_bytes)
            or writer.rows + rows > ROWS_MAX
            or last + 1 - writer.start > SPAN_MAX
        ):
            writer = self._new_writer()
            self.writers.append(writer)
        writer.add_batch(
            data, rows=rows, first=first, last=last, keys_bytes=keys_bytes, max_timestamp=max_timestamp
        )
        self.bytes += len(data)


def ranks_of(kept: Bits) -> NDArray[np.int64]:
    """The number of kept bits before each block of 512."""
    ranks = np.zeros(-(-len(kept) // 64), np.int64)
    rank_blocks(readonly(kept), ranks)
    return ranks


def write_keys(
    sources: Sequence[Source],
    writers: Sequence[SegmentWriter],
    *,
    first_rank: int,
    kept: Bits,
    ranks: NDArray[np.int64],
    memory_bytes: int,
    check: Callable[[], None],
) -> None:
    """Give the writers of one group their key rows; ``sources`` are the group's, oldest first.

    *Errors*: DamagedIndex; what ``check`` raises.
    """
    bounds = np.cumsum([first_rank, *(w.rows for w in writers)]).astype(np.int64)
    rows = int(bounds[-1] - bounds[0])
    if rows == 0:
        return
    pool = Pool(pool_rows(memory_bytes, 8 * len(kept), rows))
    kept, ranks, outputs = readonly(kept), readonly(ranks), readonly(bounds)
    ends: list[int] = []

    def fill(first: int, last: int) -> int | None:
        ends[:] = [0]
        n = 0
        for source in sources:
            n = _renumber(source, first, last, kept, ranks, outputs, pool, n, check)
            if n < 0:
                return None
            ends.append(n)
        return n

    for n in ranges(pool, rows, fill):
        if n:
            _hand_out(pool, ends, n, writers)


def _renumber(
    source: Source, first: int, last: int, kept: Bits, ranks: NDArray[np.int64], outputs: NDArray[np.int64],
    pool: Pool, n: int, check: Callable[[], None],
) -> int:  # fmt: skip
    """The pool's new end with the kept rows of one source in a range, or -1 when it is full."""
    index = source.index
    for block in range(first_block(index, first), len(index.fences)):
        if int(index.fences[block]) > last:
            break
        check()
        hi, word = index.block(block)
        seen, n = renumber_block(
            hi, word, np.uint64(first), np.uint64(last), source.row_start, source.row_end, source.base, kept, ranks,
            outputs, *pool.front, n,
        )  # fmt: skip
        if seen < 0:
            return -1
        if seen < len(hi):
            break
    return n


def _hand_out(pool: Pool, ends: Sequence[int], n: int, writers: Sequence[SegmentWriter]) -> None:
    """Sort the pool's runs (one per source) by writer, merge them, and give each writer its rows."""
    hi, word, file = pool.front
    if len(writers) == 1:
        runs = [list(ends)]
    else:
        to_hi, to_word, _ = pool.back
        counts = np.bincount(file[:n], minlength=len(writers))
        at = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        runs = [[int(a)] for a in at]
        for start, end in itertools.pairwise(ends):
            split_by_file(hi, word, file, start, end, at, to_hi, to_word)
            for number, run in enumerate(runs):
                run.append(int(at[number]))
        pool.swap()
    for writer, run in zip(writers, runs, strict=True):
        hi, word = _merge_runs(pool, run)
        writer.add_keys(hi[run[0] : run[-1]], word[run[0] : run[-1]])


def _merge_runs(pool: Pool, bounds: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The columns in which the runs lie merged, at the same place."""
    (hi, word, _), (spare_hi, spare_word, _) = pool.front, pool.back
    bounds = [b for i, b in enumerate(bounds) if i == 0 or b > bounds[i - 1]]
    while len(bounds) > 2:
        merged = bounds[::2] if len(bounds) % 2 else [*bounds[::2], bounds[-1]]
        for a in range(0, len(bounds) - 1, 2):
            middle = bounds[a + 1]
            merge_two(
                hi,
                word,
                bounds[a],
                middle,
                bounds[a + 2] if a + 2 < len(bounds) else middle,
                spare_hi,
                spare_word,
            )
        hi, word, spare_hi, spare_word = spare_hi, spare_word, hi, word
        bounds = merged
    return hi, word
