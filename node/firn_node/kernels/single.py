"""One key's row: found in its block of a key index, and read out of its batch, in one call each.

Each of them reads the same bytes as several calls of Python would, which cost ten times the reads.
"""

import struct
from typing import Any

import numpy as np

from firn_node.kernels.gathering import pread
from firn_node.kernels.jit import kernel

_BYTES = "Array(uint8, 1, 'C', readonly=True)"
NO_ROW, UNDECIDED = -1, -2
# What ``even_row`` fills: timestamp, offset delta (0 where they are dense), then the value.
STAMP_AND_DELTA = struct.Struct("<qI4x")
VALUE_AT = STAMP_AND_DELTA.size
OTHER_KEY, FOUND, UNREADABLE = 0, 1, -1


@kernel("int64(int32, int64, int64, int64, int64, uint64, uint64)")
def row_near(fd: Any, position: Any, rows: Any, first: Any, count: Any, hi: Any, lo: Any) -> Any:
    """The row of a fingerprint in a block of a key index, looked for in ``count`` of its rows from ``first`` on.

    *Shape*: NO_ROW; UNDECIDED when it may lie outside of these, has several rows, or they cannot be read.
    """
    his = np.empty(count, np.uint64)
    if pread(fd, his.ctypes.data, 8 * count, position + 8 * first) != 8 * count:
        return np.int64(UNDECIDED)
    if (first > 0 and his[0] >= hi) or (first + count < rows and his[count - 1] <= hi):
        return np.int64(UNDECIDED)
    low, high = np.int64(0), np.int64(count)
    while low < high:
        middle = (low + high) >> 1
        if his[middle] < hi:
            low = middle + 1
        else:
            high = middle
    if low == count or his[low] != hi:
        return np.int64(NO_ROW)
    if low + 1 < count and his[low + 1] == hi:
        return np.int64(UNDECIDED)
    if pread(fd, his.ctypes.data, np.uint64(8), position + 8 * (rows + first + low)) != 8:
        return np.int64(UNDECIDED)
    if his[0] >> np.uint64(32) != lo:
        return np.int64(NO_ROW)
    return np.int64((his[0] & np.uint64(0xFFFFFFFF)) >> np.uint64(1))


@kernel(f"int64(int32, int64, int64, int64, int64, int64, int64, int64, int64, {_BYTES}, uint8[::1])")
def even_row(
    fd: Any, start: Any, row: Any, keys_at: Any, values_at: Any, value_size: Any, stamps_at: Any, deltas_at: Any,
    size: Any, key: Any, out: Any,
) -> Any:  # fmt: skip
    """Fill ``out`` with a row of an even batch of ``size`` bytes from byte ``start`` of a file on: OTHER_KEY, FOUND
    or UNREADABLE. ``key`` is as long as its keys; ``deltas_at`` is negative where offsets are dense.
    """
    n, length = len(key), max(value_size, np.int64(0))
    if keys_at + (row + 1) * n > values_at or values_at + (row + 1) * length > size:
        return np.int64(UNREADABLE)
    own = np.empty(max(n, 1), np.uint8)
    if pread(fd, own.ctypes.data, n, start + keys_at + row * n) != n:
        return np.int64(UNREADABLE)
    for i in range(n):
        if own[i] != key[i]:
            return np.int64(OTHER_KEY)
    at = out.ctypes.data
    if pread(fd, at, np.uint64(8), start + stamps_at + 8 * row) != 8:
        return np.int64(UNREADABLE)
    if deltas_at >= 0 and pread(fd, at + 8, np.uint64(4), start + deltas_at + 4 * row) != 4:
        return np.int64(UNREADABLE)
    if length and pread(fd, at + VALUE_AT, length, start + values_at + row * length) != length:
        return np.int64(UNREADABLE)
    return np.int64(FOUND)
