"""Sorting of key indexes: two u64 columns ``(hi, word)``, by ``hi``, then by ``word``.

The top bits of ``hi``, as many as leave about 2 rows a bucket, are sorted by stable radix passes of at most
11 bits (2,048 open write streams still fit the caches); what shares these bits is then sorted by insertion.
Fingerprints are uniform, so big buckets mean a hot key: above 64 rows its rows are set apart, which are
mostly in order already, and what is not is merge sorted, which keeps the worst case at n log n.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels.jit import helper, kernel
from firn_node.kernels.merging import merge_rows

_INSERTION_ROWS_MAX = 64
_PASS_BITS_MAX = 11


@helper
def is_after(hi_a: Any, word_a: Any, hi_b: Any, word_b: Any) -> Any:
    """Whether row a belongs after row b."""
    return hi_a > hi_b or (hi_a == hi_b and word_a > word_b)


@helper
def _insertion_sort(hi: Any, word: Any, start: Any, end: Any) -> Any:
    for i in range(start + 1, end):
        h, w = hi[i], word[i]
        j = i
        while j > start and is_after(hi[j - 1], word[j - 1], h, w):
            hi[j], word[j] = hi[j - 1], word[j - 1]
            j -= 1
        hi[j], word[j] = h, w


@helper
def _merge_runs(hi: Any, word: Any, to_hi: Any, to_word: Any, start: Any, middle: Any, end: Any) -> Any:
    """Merge the sorted ``[start, middle)`` and ``[middle, end)`` into the same range of ``to``."""
    none = np.uint64(0)
    merge_rows(
        hi[start:middle], word[start:middle], none, hi[middle:end], word[middle:end], none,
        to_hi[start:end], to_word[start:end],
    )  # fmt: skip


@helper
def _merge_sort(hi: Any, word: Any, spare_hi: Any, spare_word: Any, start: Any, end: Any) -> Any:
    """Sort ``[start, end)`` bottom-up from insertion-sorted runs; the same range of ``spare`` is scratch."""
    width = _INSERTION_ROWS_MAX
    for at in range(start, end, width):
        _insertion_sort(hi, word, at, min(at + width, end))
    from_hi, from_word, to_hi, to_word = hi, word, spare_hi, spare_word
    swaps = 0
    while width < end - start:
        at = start
        while at < end:
            _merge_runs(
                from_hi, from_word, to_hi, to_word, at, min(at + width, end), min(at + 2 * width, end)
            )
            at += 2 * width
        from_hi, from_word, to_hi, to_word = to_hi, to_word, from_hi, from_word
        swaps += 1
        width *= 2
    if swaps & 1:
        hi[start:end] = spare_hi[start:end]
        word[start:end] = spare_word[start:end]


@helper
def _is_sorted(hi: Any, word: Any, start: Any, end: Any) -> Any:
    for i in range(start + 1, end):  # noqa: SIM110 - Numba knows no generator expressions
        if is_after(hi[i - 1], word[i - 1], hi[i], word[i]):
            return False
    return True


@helper
def _split_by(hi: Any, word: Any, spare_hi: Any, spare_word: Any, start: Any, end: Any, pivot: Any) -> Any:
    """Stable: rows below the pivot, then those that have it, then those above. Returns the middle's range."""
    below, equal = 0, 0
    for i in range(start, end):
        below += hi[i] < pivot
        equal += hi[i] == pivot
    first, last = start + below, start + below + equal
    a, b, c = start, first, last
    for i in range(start, end):
        if hi[i] < pivot:
            spare_hi[a], spare_word[a] = hi[i], word[i]
            a += 1
        elif hi[i] == pivot:
            spare_hi[b], spare_word[b] = hi[i], word[i]
            b += 1
        else:
            spare_hi[c], spare_word[c] = hi[i], word[i]
            c += 1
    hi[start:end] = spare_hi[start:end]
    word[start:end] = spare_word[start:end]
    return first, last


@helper
def _most_frequent(hi: Any, start: Any, end: Any) -> Any:
    """The value that more than half of the rows have, if there is one (Boyer and Moore's vote)."""
    found, votes = hi[start], 0
    for i in range(start, end):
        if votes == 0:
            found = hi[i]
        votes += 1 if hi[i] == found else -1
    return found


@helper
def _sort_bucket(hi: Any, word: Any, spare_hi: Any, spare_word: Any, start: Any, end: Any) -> Any:
    if end - start <= _INSERTION_ROWS_MAX:
        _insertion_sort(hi, word, start, end)
        return
    # A hot key with a few others: take it out first, so that its rows, in order by themselves, are not moved again.
    pivot = _most_frequent(hi, start, end)
    first, last = _split_by(hi, word, spare_hi, spare_word, start, end, pivot)
    for a, b in ((start, first), (first, last), (last, end)):
        if not _is_sorted(hi, word, a, b):
            _merge_sort(hi, word, spare_hi, spare_word, a, b)


@helper
def _radix_pass(hi: Any, word: Any, to_hi: Any, to_word: Any, shift: Any, bits: Any) -> Any:
    """Stable distribution by ``bits`` bits of ``hi`` above ``shift``."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    starts = np.zeros((1 << bits) + 1, np.int64)
    for i in range(len(hi)):
        starts[((hi[i] >> np.uint64(shift)) & mask) + np.uint64(1)] += 1
    for digit in range(1 << bits):
        starts[digit + 1] += starts[digit]
    for i in range(len(hi)):
        digit = (hi[i] >> np.uint64(shift)) & mask
        at = starts[digit]
        starts[digit] = at + 1
        to_hi[at], to_word[at] = hi[i], word[i]


@kernel("void(uint64[::1], uint64[::1], uint64[::1], uint64[::1])")
def _sort(hi: Any, word: Any, spare_hi: Any, spare_word: Any) -> Any:
    """Sort ``hi, word`` in place, by way of ``spare``."""
    n = len(hi)
    bits = 0
    while n >> bits > 2:
        bits += 1
    if n <= _INSERTION_ROWS_MAX:
        bits = 0
    passes = (bits + _PASS_BITS_MAX - 1) // _PASS_BITS_MAX
    from_hi, from_word, to_hi, to_word = hi, word, spare_hi, spare_word
    done = 0
    for step in range(passes):
        # Least significant digit first, from the lowest of the top `bits` bits upwards.
        width = (bits - done) // (passes - step)
        _radix_pass(from_hi, from_word, to_hi, to_word, 64 - bits + done, width)
        from_hi, from_word, to_hi, to_word = to_hi, to_word, from_hi, from_word
        done += width
    if passes & 1:
        hi[:] = spare_hi
        word[:] = spare_word
    if bits == 0:
        _sort_bucket(hi, word, spare_hi, spare_word, 0, n)
        return
    shift = np.uint64(64 - bits)
    start = 0
    while start < n:
        end = start + 1
        prefix = hi[start] >> shift
        while end < n and hi[end] >> shift == prefix:
            end += 1
        if end - start > 1:
            _sort_bucket(hi, word, spare_hi, spare_word, start, end)
        start = end


def sort_key_index(
    hi: NDArray[np.uint64], word: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The rows of a key index in its order: by ``hi``, then ``word``. The arguments are left as they are.

    *Shape*: two new columns, as long as the arguments; duplicates stay.
    """
    sorted_hi, sorted_word = np.array(hi, np.uint64), np.array(word, np.uint64)
    _sort(sorted_hi, sorted_word, np.empty_like(sorted_hi), np.empty_like(sorted_word))
    return sorted_hi, sorted_word
