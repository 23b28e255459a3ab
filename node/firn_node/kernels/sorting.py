"""Sorting of key indexes: two u64 columns ``(hi, word)``, by ``hi``, then by ``word``.

What is sorted is one column: ``hi`` with its lowest bits replaced by the row's number, as many as the numbers need.
NumPy sorts such words by vector instructions, several times faster than pairs can be; then both columns are gathered
in that order. Fingerprints are uniform, so the upper bits nearly always decide, and rows of one key keep the order
they came in, which is mostly theirs. A walk finds the neighbours that are not in order after all, and what shares
their upper bits is sorted by itself: by insertion, and above 64 rows merge sorted with the most frequent fingerprint
set apart first, which keeps the worst case at n log n.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels.jit import aligned, helper, kernel
from firn_node.kernels.merging import merge_rows

_INSERTION_ROWS_MAX = 64
_WORDS = "Array(uint64, 1, 'C', readonly=True)"


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


@kernel(f"uint64[:, ::1]({_WORDS}, {_WORDS}, {_WORDS}, uint64)")
def _gathered(hi: Any, word: Any, order: Any, numbers: Any) -> Any:
    """The rows in the order of ``order``, whose ``numbers`` bits name them; those that only seem equal put right."""
    n = len(order)
    out = np.empty((2, n), np.uint64)
    for i in range(n):
        row = order[i] & numbers
        out[0, i], out[1, i] = hi[row], word[row]
    found_hi, found_word = out[0], out[1]
    i = 1
    while i < n:
        if not is_after(found_hi[i - 1], found_word[i - 1], found_hi[i], found_word[i]):
            i += 1
            continue
        start, end, upper = i - 1, i + 1, found_hi[i] & ~numbers
        while start > 0 and found_hi[start - 1] & ~numbers == upper:
            start -= 1
        while end < n and found_hi[end] & ~numbers == upper:
            end += 1
        _sort_bucket(
            found_hi[start:end], found_word[start:end], np.empty(end - start, np.uint64),
            np.empty(end - start, np.uint64), 0, end - start,
        )  # fmt: skip
        i = end
    return out


def sorted_rows(hi: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The rows of a key index in its order: by ``hi``, then ``word``. The arguments are left as they are.

    *Shape*: ``u64[2, n]``; duplicates stay. Memory: 24 bytes a row, and 8 more for a moment.
    """
    hi, word = aligned(hi, np.uint64), aligned(word, np.uint64)
    numbers = np.uint64((1 << (len(hi) - 1).bit_length()) - 1 if len(hi) else 0)
    order = hi & ~numbers
    order |= np.arange(len(hi), dtype=np.uint64)
    order.sort()
    found: NDArray[np.uint64] = _gathered(hi, word, order, numbers)
    return found


def sort_key_index(
    hi: NDArray[np.uint64], word: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """``sorted_rows`` as two columns."""
    found = sorted_rows(hi, word)
    return found[0], found[1]
