"""Which rows are dead: the newest row per fingerprint, from key indexes alone, in bounded memory.

The fingerprint space is cut into as many ranges as the budget asks for. A round takes one range: every source's
key index is read block by block and reduced to one row per fingerprint (one key's 50 million rows take one
place), the runs are merged pairwise, older rows lose, then the tombstones that are left are judged. The result
is bits, one array for all sources: ``dead``, and ``held``: masked tombstones that have older rows elsewhere.

Memory: the bits (2 per row, 3 with those of the tombstones that are over), one key index block of 64 KiB, and the
pool: 36 bytes a row, sized so that all of it stays within ``memory_bytes``; the pool has at least a quarter of that,
and grows only for more than so many fingerprints with the same upper 64 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from firn_node.compaction.keyindex import BLOCK_BYTES, KeyIndex, first_block
from firn_node.compaction.manifest import CleanSegment
from firn_node.compaction.mask import Bits, bits_bytes, rows_of
from firn_node.compaction.segment import SegmentReader
from firn_node.kernels.compact import finish_round, mark_found, merge_level, readonly, reduce_block

POOL_ROW_BYTES = 36  # two of (hi u64, word u64, source u16)
POOL_ROWS_MIN = 256
HI_END = 1 << 64
REBUILD_BYTES = 16 << 20


@dataclass(slots=True, kw_only=True)
class Source:
    """A key index whose rows ``[row_start, row_end)`` take part; row ``r`` owns bit ``base + r``."""

    index: KeyIndex
    base: int
    row_start: int
    row_end: int
    cut_row: int  # tombstones of lower rows are over
    cover_rows: Sequence[int] = ()  # per cover time: the first row that it did not cover

    @property
    def rows(self) -> int:
        return self.row_end - self.row_start


@dataclass(slots=True)
class Decision:
    dead: Bits
    held: Bits
    rounds: int = 0
    tombstones_over: int = 0  # masked by this decision because their time is over
    newest_over: list[int] = field(
        default_factory=list
    )  # per source: greatest row masked for its time, or -1
    covered: list[int] = field(default_factory=list)  # per cover time: tombstones that are still in it
    # Where asked for: the tombstones whose time is over, masked before or not; they are dead, not superseded.
    over: Bits = field(default_factory=lambda: np.zeros(0, np.uint8))


class Pool:
    """The rows of one round, twice: merges go from one half to the other."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._halves = [self._half(rows), self._half(rows)]

    @staticmethod
    def _half(rows: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint16]]:
        return np.empty(rows, np.uint64), np.empty(rows, np.uint64), np.empty(rows, np.uint16)

    @property
    def front(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint16]]:
        return self._halves[0]

    @property
    def back(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint16]]:
        return self._halves[1]

    def swap(self) -> None:
        self._halves.reverse()

    def grow(self) -> None:
        self.__init__(2 * self.rows)  # type: ignore[misc]


def pool_rows(memory_bytes: int, bits: int, rows: int, *, planes: int = 2) -> int:
    """Rows of a pool that keeps a decision over ``bits`` rows, ``planes`` times, within ``memory_bytes``."""
    left = max(memory_bytes - planes * (bits // 8) - BLOCK_BYTES, memory_bytes // 4)
    return min(max(left // POOL_ROW_BYTES, POOL_ROWS_MIN), max(rows, POOL_ROWS_MIN))


def ranges(pool: Pool, rows: int, fill: Callable[[int, int], int | None]) -> Iterator[int]:
    """Walk all fingerprints range by range; yields the rows that ``fill(first, last)`` put into the pool.

    ``fill`` returns None when the pool does not hold the range: it is tried again with half of it. Ranges adapt
    to what was found, so that a pool is about 80 % full.
    """
    first = 0
    width = HI_END if rows <= pool.rows else max(1, HI_END * pool.rows * 4 // (rows * 5))
    while first < HI_END:
        last = min(first + width, HI_END) - 1
        found = fill(first, last)
        if found is None:
            if width == 1:
                pool.grow()
            width = max(1, (last - first + 1) // 2)
            continue
        yield found
        first = last + 1
        width = min(2 * width, max(1, width * pool.rows * 4 // (max(found, 1) * 5)))


def decide(
    sources: Sequence[Source],
    bits: int,
    memory_bytes: int,
    *,
    masked: Sequence[tuple[int, Bits]] = (),
    check: Callable[[], None] = lambda: None,
    tells_over: bool = False,
) -> Decision:
    """Judge all rows that take part; sources are given oldest first. ``tells_over``: ``Decision.over`` is wanted.

    *Shape*: ``masked`` are the masks there are, each with the bit of its row 0, a multiple of 8: no bit is lost.
    *Errors*: DamagedIndex; what ``check`` raises (it is called per block and stops a cancelled job).
    """
    space = bits_bytes(bits)
    decision = Decision(np.zeros(space, np.uint8), np.zeros(space, np.uint8))
    over = decision.dead
    if tells_over:
        over = decision.over = np.zeros(space, np.uint8)
    for at, mask in masked:
        decision.dead[at >> 3 : (at >> 3) + len(mask)] |= mask
    pairs = len(sources[0].cover_rows) if sources else 0
    base = np.array([s.base for s in sources], np.int64)
    cut_row = np.array([s.cut_row for s in sources], np.int64)
    cover_rows = np.array([list(s.cover_rows) for s in sources], np.int64).reshape(len(sources), pairs)
    newest_over = np.full(len(sources), -1, np.int64)
    covered = np.zeros(pairs, np.int64)
    rows = sum(s.rows for s in sources)
    pool = Pool(pool_rows(memory_bytes, bits, rows, planes=3 if tells_over else 2))
    bounds: list[int] = []

    def fill(first: int, last: int) -> int | None:
        bounds[:] = [0]
        n = 0
        for number, source in enumerate(sources):
            n = _reduce(source, number, first, last, decision.dead, pool, n, check)
            if n < 0:
                return None
            bounds.append(n)
        return n

    for n in ranges(pool, rows, fill):
        decision.rounds += 1
        ends, runs = np.array(bounds, np.int64), len(sources)
        while runs > 1:
            runs = merge_level(*pool.front, ends, runs, *pool.back, base, decision.dead, decision.held)
            pool.swap()
            n = int(ends[runs])
        _, word, source_of = pool.front
        decision.tombstones_over += finish_round(
            word, source_of, n, cut_row, cover_rows, base, over, decision.held, newest_over, covered
        )
    if tells_over:  # the newest row of a fingerprint is in ``dead`` only where a mask had it
        decision.tombstones_over = int(np.bitwise_count(over & ~decision.dead).sum())
        decision.dead |= over
    decision.newest_over, decision.covered = newest_over.tolist(), covered.tolist()
    return decision


def _reduce(
    source: Source,
    number: int,
    first: int,
    last: int,
    dead: Bits,
    pool: Pool,
    n: int,
    check: Callable[[], None],
) -> int:
    """The pool's new end with the rows of one source in a range, or -1 when it is full."""
    index, start = source.index, n
    for block in range(first_block(index, first), len(index.fences)):
        if int(index.fences[block]) > last:
            break
        check()
        hi, word = index.block(block)
        seen, n = reduce_block(
            hi, word, np.uint64(first), np.uint64(last), source.row_start, source.row_end, number, source.base, dead,
            *pool.front, start, n,
        )  # fmt: skip
        if seen < 0:
            return -1
        if seen < len(hi):
            break
    return n


def settle_held(sources: Sequence[Source], is_rewritten: Sequence[bool], decision: Decision) -> None:
    """Leave a bit in ``held`` only where an older segment that is not rewritten holds a row of the fingerprint.

    Those masked tombstones keep their place in the files. *Shape*: bits of segments that are not rewritten are
    left as they are.
    """
    for number, source in enumerate(sources):
        older = [s for s, rewritten in zip(sources[:number], is_rewritten, strict=False) if not rewritten]
        if not is_rewritten[number]:
            continue
        start, end = source.base + source.row_start, source.base + source.row_end
        found = np.zeros_like(decision.held) if older else None
        if found is not None and rows_of(decision.held, start, end).any():
            for block in range(len(source.index.fences)):
                _mark_older(source, block, older, decision.held, found)
        _and_bits(decision.held, found, start, end)


def _mark_older(source: Source, block: int, older: Sequence[Source], held: Bits, found: Bits) -> None:
    hi, word = source.index.block(block)
    rows = ((word & np.uint64(0xFFFFFFFF)) >> np.uint64(1)).astype(np.int64)
    bit = np.clip(source.base + rows, 0, 8 * len(held) - 1)
    mine = (
        (rows >= source.row_start)
        & (rows < source.row_end)
        & ((held[bit >> 3] >> (bit & 7).astype(np.uint8) & 1) > 0)
    )
    if not mine.any():
        return
    his, words = readonly(hi[mine]), readonly(word[mine])
    for other in older:
        for number in range(first_block(other.index, int(his[0])), len(other.index.fences)):
            if other.index.fences[number] > his[-1]:
                break
            mark_found(his, words, source.base, *other.index.block(number), found)


def _and_bits(bits: Bits, with_bits: Bits | None, start: int, end: int) -> None:
    """``bits[start:end] &= with_bits[start:end]``; None has no bit set."""
    for at, stop in ((start, min((start + 7) & ~7, end)), (max(end & ~7, start), end)):
        for bit in range(at, stop):
            if with_bits is None or not with_bits[bit >> 3] >> (bit & 7) & 1:
                bits[bit >> 3] &= 255 - (1 << (bit & 7))
    a, b = (start + 7) >> 3, end >> 3
    if a < b:
        bits[a:b] &= 0 if with_bits is None else with_bits[a:b]


def rebuild_masks(
    segments: Sequence[tuple[CleanSegment, SegmentReader]], tombstone_floor: int
) -> dict[str, Bits]:
    """The masks of all clean segments of a manifest, decided anew; see ``mask`` for why that is exact."""
    sources, at = [], 0
    for info, reader in segments:
        cut = reader.row_of(tombstone_floor)
        sources.append(Source(index=reader.keys, base=at, row_start=0, row_end=info.rows, cut_row=cut))
        at += 8 * bits_bytes(info.rows)
    dead = decide(sources, at, REBUILD_BYTES).dead
    found = {}
    for (info, _), source in zip(segments, sources, strict=True):
        found[info.name] = dead[source.base >> 3 : (source.base >> 3) + bits_bytes(info.rows)].copy()
    return found
