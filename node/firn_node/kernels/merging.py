"""Merging two sorted runs of key rows: the helper of all kernels that do it.

Which of the two rows comes first is a coin toss, which a branch would mispredict every other time (16 ns a row
instead of 6): it is computed as a number, and both places move on by it.
"""

from typing import Any

import numpy as np

from firn_node.kernels.jit import helper


@helper
def merge_rows(
    hi_a: Any, word_a: Any, add_a: Any, hi_b: Any, word_b: Any, add_b: Any, out_hi: Any, out_word: Any
) -> None:
    """The rows of a and b in key index order; ``add_a`` and ``add_b`` are added to their words."""
    i = np.int64(0)
    j = np.int64(0)
    rows_a = len(hi_a)
    rows_b = len(hi_b)
    while i < rows_a and j < rows_b:
        a = hi_a[i]
        b = hi_b[j]
        p = word_a[i] + add_a
        q = word_b[j] + add_b
        is_a = (a < b) | ((a == b) & (p <= q))
        out_hi[i + j] = a if is_a else b
        out_word[i + j] = p if is_a else q
        step = np.int64(is_a)
        i += step
        j += 1 - step
    while i < rows_a:
        out_hi[i + j] = hi_a[i]
        out_word[i + j] = word_a[i] + add_a
        i += 1
    while j < rows_b:
        out_hi[i + j] = hi_b[j]
        out_word[i + j] = word_b[j] + add_b
        j += 1
