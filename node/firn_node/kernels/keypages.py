"""The loops of keys files (``firn_node.log.keysfile``): pairs parted into buckets, sorted pairs laid out as pages."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels.checksum import crc32c_of
from firn_node.kernels.inline import store_i64, store_u32
from firn_node.kernels.jit import aligned, kernel

U64 = NDArray[np.uint64]
_WORDS = "Array(uint64, 1, 'C', readonly=True)"
_BUCKET_BITS = 6
BUCKETS = 1 << _BUCKET_BITS
_BUCKETS_AT_ONCE = BUCKETS // 4
_SHIFT = np.uint64(64 - _BUCKET_BITS)
_TAIL_BYTES = 16


@kernel(f"void({_WORDS}, int64[::1])")
def _count(hi: Any, counts: Any) -> Any:
    for i in range(len(hi)):
        counts[hi[i] >> _SHIFT] += 1


@kernel(
    f"void({_WORDS}, {_WORDS}, Array(uint32, 1, 'C', readonly=True), int64, int64, int64[::1], uint64[::1], "
    "uint64[::1])"
)
def _part(
    hi: Any, positions: Any, records: Any, first: Any, last: Any, at: Any, to_hi: Any, to_positions: Any
) -> Any:
    """Put the pairs of buckets ``[first, last)`` where ``at`` says, which moves on to the ends of the buckets."""
    row = 0
    for batch in range(len(records)):
        for _ in range(records[batch]):
            bucket = np.int64(hi[row] >> _SHIFT)
            if first <= bucket < last:
                to_hi[at[bucket]], to_positions[at[bucket]] = hi[row], positions[batch]
                at[bucket] += 1
            row += 1


def buckets_of(hi: U64, positions: U64, records: NDArray[np.uint32]) -> Iterator[tuple[U64, U64]]:
    """The pairs (``hi``, position of its batch), unsorted, a bucket of equal top bits of ``hi`` at a time.

    *Shape*: ``hi`` a row, ``positions`` and ``records`` a batch; ``records`` add up to the rows. Buckets ascend.
    Memory: 16 bytes a pair of ``_BUCKETS_AT_ONCE`` buckets, which is why the pairs are passed over several times.
    """
    counts = np.zeros(BUCKETS, np.int64)
    _count(hi, counts)
    for first in range(0, BUCKETS, _BUCKETS_AT_ONCE):
        ends = np.cumsum(counts[first : first + _BUCKETS_AT_ONCE])
        at = np.zeros(BUCKETS, np.int64)
        at[first + 1 : first + _BUCKETS_AT_ONCE] = ends[:-1]
        to_hi, to_positions = np.empty(ends[-1], np.uint64), np.empty(ends[-1], np.uint64)
        _part(hi, positions, records, first, first + _BUCKETS_AT_ONCE, at, to_hi, to_positions)
        start = 0
        for end in ends.tolist():
            yield to_hi[start:end], to_positions[start:end]
            start = end


@kernel(f"void({_WORDS}, {_WORDS}, int64, uint8[:, ::1])")
def _fill(hi: Any, positions: Any, first_number: Any, pages: Any) -> Any:
    tail = pages.shape[1] - _TAIL_BYTES
    pairs = tail // 16
    for number in range(pages.shape[0]):
        page, start = pages[number], number * pairs
        count = min(pairs, len(hi) - start)
        for i in range(count):
            store_i64(page, 16 * i, np.int64(hi[start + i]))
            store_i64(page, 16 * i + 8, np.int64(positions[start + i]))
        page[16 * count : tail] = 0
        store_u32(page, tail, np.uint32(count))
        store_u32(page, tail + 4, np.uint32(first_number + number))
        store_u32(page, tail + 8, np.uint32(0))
        store_u32(page, tail + 12, np.uint32(crc32c_of(page, 0, tail + 12)))


def fill_pages(hi: U64, positions: U64, *, first_number: int, pages: NDArray[np.uint8]) -> None:
    """Fill ``pages`` with sorted pairs: each page has as many as it holds, but for the last one.

    *Shape*: a page is pairs of two u64, zeros behind the last one, then count, number, 0 and CRC-32C as u32.
    """
    _fill(aligned(hi, np.uint64), aligned(positions, np.uint64), first_number, pages)
