"""Searches in one key index: two u64 columns sorted by ``hi``, then ``word``.

Fingerprints are uniform, so the place of one is known to within a few times the square root of the rows: the
search looks there first and falls back to the whole column, which a hot key can bend but not break.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels.jit import aligned, helper, kernel

_COLUMN = "Array(uint64, 1, 'C', readonly=True)"
_LOW = "Array(uint32, 1, 'C', readonly=True)"
_PLACES = "Array(int64, 1, 'C', readonly=True)"
# A uniform fingerprint's place differs from the expected one by sqrt(n) / 2 at one standard deviation.
_DEVIATIONS = 4


@helper
def first_at_least(hi: Any, word: Any, n: Any, key: Any, least: Any) -> Any:
    """The first of the n rows with ``(hi, word) >= (key, least)``, or n."""
    low, high = np.int64(0), np.int64(n)
    if n > 64:
        guess = np.int64((key >> np.uint64(32)) * np.uint64(n) >> np.uint64(32))
        slack = np.int64(_DEVIATIONS * np.sqrt(np.float64(n))) + 8
        a, b = guess - slack, guess + slack
        if a > 0:
            if hi[a] < key or (hi[a] == key and word[a] < least):
                low = a + 1
            else:
                high = a
        if low < b < high:
            if hi[b] < key or (hi[b] == key and word[b] < least):
                low = b + 1
            else:
                high = b
    while low < high:
        middle = (low + high) >> 1
        if hi[middle] < key or (hi[middle] == key and word[middle] < least):
            low = middle + 1
        else:
            high = middle
    return low


@helper
def newest_row(hi: Any, word: Any, n: Any, key: Any, low32: Any, limit: Any) -> Any:
    """The greatest row below ``limit`` (at most 2^31) with this fingerprint, or -1."""
    if limit <= 0:
        return np.int64(-1)
    bottom = np.uint64(low32) << np.uint64(32)
    # The last word wanted, not the one after it: that would wrap for limit 2^31 and lo 2^32 - 1.
    top = bottom | ((np.uint64(limit) << np.uint64(1)) - np.uint64(1))
    at = first_at_least(hi, word, n, key, top)
    if not (at < n and hi[at] == key and word[at] == top):
        at -= 1
    if at < 0 or hi[at] != key or word[at] < bottom:
        return np.int64(-1)
    return np.int64((word[at] & np.uint64(0xFFFFFFFF)) >> np.uint64(1))


@kernel(f"void({_COLUMN}, {_COLUMN}, {_COLUMN}, {_LOW}, int64[::1])")
def _newest(hi: Any, word: Any, keys: Any, lows: Any, found: Any) -> Any:
    for i in range(len(keys)):
        found[i] = newest_row(hi, word, len(hi), keys[i], lows[i], np.int64(1) << 31)


@kernel(f"void({_COLUMN}, {_COLUMN}, {_COLUMN}, {_LOW}, int64[::1], int64[::1])")
def _ranges(hi: Any, word: Any, keys: Any, lows: Any, first: Any, last: Any) -> Any:
    for i in range(len(keys)):
        bottom = np.uint64(lows[i]) << np.uint64(32)
        top = bottom | np.uint64(0xFFFFFFFF)
        first[i] = first_at_least(hi, word, len(hi), keys[i], bottom)
        end = first_at_least(hi, word, len(hi), keys[i], top)
        while end < len(hi) and hi[end] == keys[i] and word[end] == top:
            end += 1
        last[i] = end


@kernel(f"void({_COLUMN}, {_PLACES}, {_PLACES}, {_PLACES}, {_COLUMN}, int64[::1])")
def _near(windows: Any, counts: Any, firsts: Any, rows: Any, keys: Any, found: Any) -> Any:
    start = 0
    for i in range(len(keys)):
        n, key = counts[i], keys[i]
        low, high = start, start + n
        while low < high:
            middle = (low + high) >> 1
            if windows[middle] < key:
                low = middle + 1
            else:
                high = middle
        at, end = low - start, start + n
        if (at == 0 and firsts[i] > 0) or (at == n and firsts[i] + n < rows[i]):
            found[i] = -2  # it may lie outside of the window
        elif at == n or windows[low] != key:
            found[i] = -1
        elif (low + 1 < end and windows[low + 1] == key) or (at == n - 1 and firsts[i] + n < rows[i]):
            found[i] = -2  # several rows, or perhaps
        else:
            found[i] = firsts[i] + at
        start += n


def near(
    windows: NDArray[np.uint64], counts: NDArray[np.int64], firsts: NDArray[np.int64], rows: NDArray[np.int64],
    hi: NDArray[np.uint64],
) -> NDArray[np.int64]:  # fmt: skip
    """Where in its block the only row of each key's ``hi`` lies; -1: there is none, -2: the window cannot tell.

    *Shape*: ``windows`` are ``counts[i]`` values of ``hi`` from row ``firsts[i]`` of a block of ``rows[i]`` on, one
    window after another.
    """
    found = np.empty(len(hi), np.int64)
    _near(windows, counts, firsts, rows, aligned(hi, np.uint64), found)
    return found


def lookup_newest(
    hi_sorted: NDArray[np.uint64],
    word_sorted: NDArray[np.uint64],
    hi: NDArray[np.uint64],
    lo: NDArray[np.uint32],
) -> NDArray[np.int64]:
    """The newest (greatest) row of each fingerprint in one key index; -1 where it has none.

    *Shape*: as ``hi`` and ``lo``.
    """
    found = np.empty(len(hi), np.int64)
    _newest(
        aligned(hi_sorted, np.uint64), aligned(word_sorted, np.uint64),
        aligned(hi, np.uint64), aligned(lo, np.uint32),
        found,
    )  # fmt: skip
    return found


def lookup_range(
    hi_sorted: NDArray[np.uint64],
    word_sorted: NDArray[np.uint64],
    hi: NDArray[np.uint64],
    lo: NDArray[np.uint32],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where in the index the rows of each fingerprint lie: ``[first, last)``, empty when there are none.

    *Shape*: as ``hi`` and ``lo``; within a range rows ascend, so ``last - 1`` is the newest.
    """
    first, last = np.empty(len(hi), np.int64), np.empty(len(hi), np.int64)
    _ranges(
        aligned(hi_sorted, np.uint64), aligned(word_sorted, np.uint64),
        aligned(hi, np.uint64), aligned(lo, np.uint32),
        first, last,
    )  # fmt: skip
    return first, last
