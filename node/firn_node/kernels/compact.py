"""Kernels of compaction: reduce a key index, merge and decide, renumber, gather.

Rows of several sources (segments) are decided together. A *source* has a number, older ones first; its row ``r``
owns bit ``base[source] + r`` of one bit array for all. Key index columns are read-only arrays (``(hi, word)``,
``word = lo << 32 | row << 1 | tombstone``), sorted by ``hi``, then ``word``: the rows of one fingerprint are
neighbours, oldest first.

The pool of a round is three columns (``hi``, ``word``, ``source``) holding one run of rows per source.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels.inline import load_u64
from firn_node.kernels.jit import helper, kernel
from firn_node.kernels.merging import merge_rows

_U64R = "Array(uint64, 1, 'C', readonly=True)"
_U8R = "Array(uint8, 1, 'C', readonly=True)"
_I32R = "Array(int32, 1, 'C', readonly=True)"
_I64R = "Array(int64, 1, 'C', readonly=True)"

Array = NDArray[Any]


@kernel(
    f"UniTuple(int64, 2)({_U64R}, {_U64R}, uint64, uint64, int64, int64, int64, int64, uint8[::1], "
    "uint64[::1], uint64[::1], uint16[::1], int64, int64)"
)
def reduce_block(
    hi: Array,
    word: Array,
    first: np.uint64,
    last: np.uint64,
    row_start: int,
    row_end: int,
    source: int,
    base: int,
    dead: Array,
    out_hi: Array,
    out_word: Array,
    out_source: Array,
    run_start: int,
    n: int,
) -> tuple[int, int]:
    """(rows looked at, new n): the rows with ``first <= hi <= last``, the newest of each fingerprint.

    They go to the pool from ``n`` on; the run of this source began at ``run_start``. Older rows of a fingerprint
    get their bit in ``dead``. Rows looked at is -1 when the pool is full; fewer than len(hi): the range is over.
    """
    low = np.uint64(0xFFFFFFFF)
    one = np.uint64(1)
    half = np.uint64(32)
    for i in range(len(hi)):
        h = hi[i]
        if h < first:
            continue
        if h > last:
            return i, n
        w = word[i]
        row = np.int64((w & low) >> one)
        if row < row_start or row >= row_end:
            continue
        if n > run_start and out_hi[n - 1] == h and (out_word[n - 1] >> half) == (w >> half):
            bit = base + np.int64((out_word[n - 1] & low) >> one)
            dead[bit >> 3] |= np.uint8(1 << (bit & 7))
            out_word[n - 1] = w
            continue
        if n == len(out_hi):
            return -1, n
        out_hi[n] = h
        out_word[n] = w
        out_source[n] = source
        n += 1
    return len(hi), n


@kernel(
    "int64(uint64[::1], uint64[::1], uint16[::1], int64[::1], int64, uint64[::1], uint64[::1], uint16[::1], "
    "int64[::1], uint8[::1], uint8[::1])"
)
def merge_level(
    hi: Array,
    word: Array,
    source: Array,
    bounds: Array,
    runs: int,
    out_hi: Array,
    out_word: Array,
    out_source: Array,
    base: Array,
    dead: Array,
    held: Array,
) -> int:
    """The number of runs left after neighbouring runs (older, newer) are merged pairwise; ``bounds`` is updated.

    Where both have a fingerprint the older row gets its bit in ``dead``, and a newer tombstone one in ``held``:
    an older segment holds its key.
    """
    low = np.uint64(0xFFFFFFFF)
    one = np.uint64(1)
    half = np.uint64(32)
    n = np.int64(0)
    left = 0
    for r in range(0, runs, 2):
        a = bounds[r]
        a_end = bounds[r + 1]
        b = a_end
        b_end = bounds[r + 2] if r + 1 < runs else a_end
        start = n
        while a < a_end and b < b_end:
            ha = hi[a]
            hb = hi[b]
            la = word[a] >> half
            lb = word[b] >> half
            if ha == hb and la == lb:
                bit = base[source[a]] + np.int64((word[a] & low) >> one)
                dead[bit >> 3] |= np.uint8(1 << (bit & 7))
                if word[a] & one:
                    held[bit >> 3] &= np.uint8(255 - (1 << (bit & 7)))
                if word[b] & one:
                    bit = base[source[b]] + np.int64((word[b] & low) >> one)
                    held[bit >> 3] |= np.uint8(1 << (bit & 7))
                a += 1
                continue
            is_a = (ha < hb) | ((ha == hb) & (la < lb))  # a number, not a branch: see merging
            out_hi[n] = ha if is_a else hb
            out_word[n] = word[a] if is_a else word[b]
            out_source[n] = source[a] if is_a else source[b]
            step = np.int64(is_a)
            a += step
            b += 1 - step
            n += 1
        while a < a_end:
            out_hi[n] = hi[a]
            out_word[n] = word[a]
            out_source[n] = source[a]
            a += 1
            n += 1
        while b < b_end:
            out_hi[n] = hi[b]
            out_word[n] = word[b]
            out_source[n] = source[b]
            b += 1
            n += 1
        bounds[left] = start
        left += 1
    bounds[left] = n
    return left


@kernel(
    "int64(uint64[::1], uint16[::1], int64, int64[::1], int64[:, ::1], int64[::1], uint8[::1], uint8[::1], "
    "int64[::1], int64[::1])"
)
def finish_round(
    word: Array,
    source: Array,
    n: int,
    cut_row: Array,
    cover_rows: Array,
    base: Array,
    dead: Array,
    held: Array,
    newest_over: Array,
    covered: Array,
) -> int:
    """Judge the tombstones among the ``n`` newest rows; the number of those that were not dead before.

    One below ``cut_row[source]`` is over: its bit in ``dead`` is set, ``newest_over[source]`` is the greatest
    such row. Any other loses its bit in ``held`` and is counted in ``covered[p]``, p being the first pair with
    ``row < cover_rows[source, p]``.
    """
    low = np.uint64(0xFFFFFFFF)
    one = np.uint64(1)
    newly = np.int64(0)
    for i in range(n):
        w = word[i]
        if not w & one:
            continue
        s = source[i]
        row = np.int64((w & low) >> one)
        bit = base[s] + row
        if row < cut_row[s]:
            newly += 1 - ((dead[bit >> 3] >> (bit & 7)) & 1)
            dead[bit >> 3] |= np.uint8(1 << (bit & 7))
            newest_over[s] = max(newest_over[s], row)
            continue
        held[bit >> 3] &= np.uint8(255 - (1 << (bit & 7)))
        for p in range(cover_rows.shape[1]):
            if row < cover_rows[s, p]:
                covered[p] += 1
                break
    return int(newly)


@kernel(f"void({_U64R}, {_U64R}, int64, {_U64R}, {_U64R}, uint8[::1])")
def mark_found(
    hi: Array,
    word: Array,
    base: int,
    other_hi: Array,
    other_word: Array,
    found: Array,
) -> None:
    """Set the bits in ``found`` of the rows whose fingerprint is among the other ones."""
    low = np.uint64(0xFFFFFFFF)
    one = np.uint64(1)
    half = np.uint64(32)
    b = 0
    other_end = len(other_hi)
    for a in range(len(hi)):
        h = hi[a]
        l = word[a] >> half
        while b < other_end and (other_hi[b] < h or (other_hi[b] == h and (other_word[b] >> half) < l)):
            b += 1
        if b == other_end:
            return
        if other_hi[b] == h and (other_word[b] >> half) == l:
            bit = base + np.int64((word[a] & low) >> one)
            found[bit >> 3] |= np.uint8(1 << (bit & 7))


RANK_BITS = 512


@helper
def _ones(bits: Any, start: Any, end: Any) -> Any:
    """The number of bits set in the bytes ``[start, end)``."""
    total = np.int64(0)
    at = start
    while at + 8 <= end:
        v = load_u64(bits, at)
        v = v - ((v >> np.uint64(1)) & np.uint64(0x5555555555555555))
        v = (v & np.uint64(0x3333333333333333)) + ((v >> np.uint64(2)) & np.uint64(0x3333333333333333))
        v = (v + (v >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        total += np.int64((v * np.uint64(0x0101010101010101)) >> np.uint64(56))
        at += 8
    while at < end:
        v8 = bits[at]
        v8 = v8 - ((v8 >> 1) & 0x55)
        v8 = (v8 & 0x33) + ((v8 >> 2) & 0x33)
        total += (v8 + (v8 >> 4)) & 0x0F
        at += 1
    return total


@kernel(f"void({_U8R}, int64[::1])")
def rank_blocks(bits: Array, out: Array) -> None:
    """``out[b]`` is the number of bits set before bit ``512 * b``; ``bits`` is whole 64-byte blocks."""
    total = np.int64(0)
    for b in range(len(out)):
        out[b] = total
        total += _ones(bits, b * 64, min(b * 64 + 64, len(bits)))


@kernel(f"int64({_U8R}, int64, int64)")
def count_bits(bits: Array, start: int, end: int) -> int:
    """The number of bits set in ``[start, end)``."""
    total = np.int64(0)
    at = start
    while at < end:
        if at & 7 == 0 and at + 8 <= end:
            total += _ones(bits, at >> 3, end >> 3)
            at = end & ~7
        else:
            total += (bits[at >> 3] >> (at & 7)) & 1
            at += 1
    return int(total)


@kernel(
    f"UniTuple(int64, 2)({_U64R}, {_U64R}, uint64, uint64, int64, int64, int64, {_U8R}, {_I64R}, {_I64R}, "
    "uint64[::1], uint64[::1], uint16[::1], int64)"
)
def renumber_block(
    hi: Array,
    word: Array,
    first: np.uint64,
    last: np.uint64,
    row_start: int,
    row_end: int,
    base: int,
    kept: Array,
    ranks: Array,
    outputs: Array,
    out_hi: Array,
    out_word: Array,
    out_file: Array,
    n: int,
) -> tuple[int, int]:
    """(rows looked at, new n): the kept rows of a range under their new row numbers.

    A row's rank is the number of kept bits before its own; output file ``f`` holds the ranks
    ``[outputs[f], outputs[f + 1])``. Kept rows with no file of this call are passed over. -1: the pool is full.
    """
    low = np.uint64(0xFFFFFFFF)
    one = np.uint64(1)
    high = np.uint64(0xFFFFFFFF00000000)
    files = len(outputs) - 1
    for i in range(len(hi)):
        h = hi[i]
        if h < first:
            continue
        if h > last:
            return i, n
        w = word[i]
        row = np.int64((w & low) >> one)
        if row < row_start or row >= row_end:
            continue
        bit = base + row
        if not (kept[bit >> 3] >> (bit & 7)) & 1:
            continue
        rank = ranks[bit // RANK_BITS] + _ones(kept, bit // RANK_BITS * (RANK_BITS // 8), bit >> 3)
        v = kept[bit >> 3] & np.uint8((1 << (bit & 7)) - 1)
        v = v - ((v >> 1) & 0x55)
        v = (v & 0x33) + ((v >> 2) & 0x33)
        rank += (v + (v >> 4)) & 0x0F
        if rank < outputs[0] or rank >= outputs[files]:
            continue
        f = 0
        if files > 1:
            a = 0
            b = files
            while b - a > 1:
                middle = (a + b) >> 1
                if rank < outputs[middle]:
                    b = middle
                else:
                    a = middle
            f = a
        if n == len(out_hi):
            return -1, n
        out_hi[n] = h
        out_word[n] = (w & high) | (np.uint64(rank - outputs[f]) << one) | (w & one)
        out_file[n] = f
        n += 1
    return len(hi), n


@kernel("void(uint64[::1], uint64[::1], uint16[::1], int64, int64, int64[::1], uint64[::1], uint64[::1])")
def split_by_file(
    hi: Array, word: Array, file: Array, start: int, end: int, at: Array, out_hi: Array, out_word: Array
) -> None:
    """Move rows ``[start, end)`` to the place ``at[file]``, keeping their order; ``at`` moves on."""
    for i in range(start, end):
        to = at[file[i]]
        out_hi[to] = hi[i]
        out_word[to] = word[i]
        at[file[i]] = to + 1


@kernel("void(uint64[::1], uint64[::1], int64, int64, int64, uint64[::1], uint64[::1])")
def merge_two(hi: Array, word: Array, a: int, middle: int, end: int, out_hi: Array, out_word: Array) -> None:
    """Merge the sorted runs ``[a, middle)`` and ``[middle, end)`` into the same places of the out columns."""
    none = np.uint64(0)
    merge_rows(
        hi[a:middle],
        word[a:middle],
        none,
        hi[middle:end],
        word[middle:end],
        none,
        out_hi[a:end],
        out_word[a:end],
    )


@kernel(f"int64({_U8R}, {_I64R}, {_I64R}, uint8[::1])")
def gather_bytes(data: Array, starts: Array, rows: Array, out: Array) -> int:
    """Copies ``data[starts[r]:starts[r + 1]]`` of the given rows, one after another; how many bytes.

    *Shape*: ``rows`` ascend; neighbours are copied together.
    """
    to = 0
    i = 0
    n = len(rows)
    while i < n:
        k = i + 1
        while k < n and rows[k] == rows[k - 1] + 1:
            k += 1
        a = starts[rows[i]]
        size = starts[rows[k - 1] + 1] - a
        out[to : to + size] = data[a : a + size]
        to += size
        i = k
    return to


@kernel(f"int64({_U8R}, {_I32R}, {_I64R}, uint8[::1])")
def gather_texts(data: Array, lengths: Array, rows: Array, out: Array) -> int:
    """As ``gather_bytes`` for rows that lie one after another; a length below 0 takes no bytes."""
    to = np.int64(0)
    at = np.int64(0)
    row = 0
    for i in range(len(rows)):
        while row < rows[i]:
            at += max(lengths[row], 0)
            row += 1
        size = max(lengths[row], 0)
        for b in range(size):
            out[to + b] = data[at + b]
        to += size
        at += size
        row += 1
    return int(to)


def readonly(array: Array) -> Array:
    """A read-only, contiguous view: the one array type that input columns of these kernels have."""
    view: Array = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
