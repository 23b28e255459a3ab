"""Where in the blocks of a key index some fingerprints must lie: see ``firn_node.compaction.keyindex``."""

from typing import Any

import numpy as np

from firn_node.kernels.jit import kernel

_COLUMN = "Array(uint64, 1, 'C', readonly=True)"
_NUMBERS = "Array(int64, 1, 'C', readonly=True)"


@kernel(
    f"void({_COLUMN}, int64, int64, int64, {_COLUMN}, {_NUMBERS}, int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1])"
)
def windows_in_blocks(
    fences: Any, all_rows: Any, block_rows: Any, window_rows: Any, hi: Any, numbers: Any,
    starts: Any, rows: Any, first: Any, count: Any, sizes: Any,
) -> Any:  # fmt: skip
    """For each ``hi`` in block ``numbers``: the block's first row, its rows, and the window of them around its place.

    ``sizes``: bytes of a window. Fingerprints are uniform between two fences.
    """
    for i in range(len(hi)):
        number = numbers[i]
        starts[i] = number * block_rows
        n = rows[i] = min(block_rows, all_rows - starts[i])
        least = fences[number]
        # The last block ends at 2^64: in 64 bits the difference is right though that itself is not.
        above = fences[number + 1] if number + 1 < len(fences) else np.uint64(0)
        guess = 0
        if hi[i] > least:
            share = np.float64(hi[i] - least) / np.float64(max(above - least, np.uint64(1)))
            guess = min(np.int64(share * n), n)
        first[i] = min(max(guess - window_rows // 2, 0), max(n - window_rows, 0))
        count[i] = min(window_rows, n - first[i])
        sizes[i] = 8 * count[i]
