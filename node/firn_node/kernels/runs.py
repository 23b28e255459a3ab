"""The kernels of ``ActiveIndex``: sorted runs of rows and the unsorted tail.

A run is one ``u64[2, n]``: ``hi`` and ``word``, in key index order. The tail is the same in arrival order.
"""

from typing import Any

import numpy as np

from firn_node.kernels.jit import by_machine, kernel
from firn_node.kernels.lookup import newest_row
from firn_node.kernels.merging import merge_rows

carray = by_machine("carray")
pointer_to = by_machine("pointer_to")

_RUN = "Array(uint64, 2, 'C', readonly=True)"
_KEYS = "Array(uint64, 1, 'C', readonly=True)"
_LOWS = "Array(uint32, 1, 'C', readonly=True)"


@kernel(f"void({_KEYS}, {_LOWS}, Array(boolean, 1, 'C', readonly=True), int64, int64, uint64[:, ::1], int64)")
def put_rows(hi: Any, lo: Any, tombstone: Any, skip: Any, count: Any, into: Any, at: Any) -> Any:
    """Write ``count`` new rows, from ``skip`` on, at column ``at`` of a tail; a row's number is its column."""
    for i in range(count):
        into[0, at + i] = hi[skip + i]
        into[1, at + i] = (
            np.uint64(lo[skip + i]) << np.uint64(32)
            | np.uint64(at + i) << np.uint64(1)
            | np.uint64(tombstone[skip + i])
        )


@kernel(f"int64({_RUN}, uint64, uint64, int64)")
def newest_in_tail(tail: Any, hi: Any, lo: Any, limit: Any) -> Any:
    """The greatest row below ``limit`` with this fingerprint, or -1; searched from column ``limit - 1`` down."""
    for row in range(limit - 1, -1, -1):
        if tail[0, row] == hi and tail[1, row] >> np.uint64(32) == lo:
            return np.int64(row)
    return np.int64(-1)


@kernel(f"int64({_RUN}, int64, int64, Array(int64, 2, 'C', readonly=True), uint64, uint64, int64)")
def newest_offset(tail: Any, tail_base: Any, end: Any, table: Any, hi: Any, lo: Any, below: Any) -> Any:
    """The greatest offset below ``below`` with this fingerprint, in a tail up to offset ``end`` and in runs; or -1.

    *Shape*: ``table`` has a row a run, oldest first: the address of its rows, its base, its end.
    """
    for row in range(min(below, end) - tail_base - 1, -1, -1):
        if tail[0, row] == hi and tail[1, row] >> np.uint64(32) == lo:
            return tail_base + row
    for i in range(len(table) - 1, -1, -1):
        base, rows = table[i, 1], table[i, 2] - table[i, 1]
        run = carray(pointer_to(table[i, 0]), (2, rows), np.uint64)
        row = newest_row(run[0], run[1], rows, hi, lo, min(below, table[i, 2]) - base)
        if row >= 0:
            return base + row
    return np.int64(-1)


@kernel(f"void({_RUN}, {_KEYS}, {_LOWS}, int64, int64, int64[::1])")
def newest_many_in_run(run: Any, hi: Any, lo: Any, limit: Any, base: Any, found: Any) -> Any:
    """Fill in the offsets (``base`` + row) of the fingerprints that have none (-1) yet."""
    for i in range(len(hi)):
        if found[i] < 0:
            row = newest_row(run[0], run[1], run.shape[1], hi[i], lo[i], limit)
            if row >= 0:
                found[i] = base + row


@kernel(f"uint64[:, ::1]({_RUN}, int64, {_RUN}, int64)")
def merged(a: Any, shift_a: Any, b: Any, shift_b: Any) -> Any:
    """One run of two; their rows move up by the shifts."""
    add_a, add_b = np.uint64(shift_a) << np.uint64(1), np.uint64(shift_b) << np.uint64(1)
    out = np.empty((2, a.shape[1] + b.shape[1]), np.uint64)
    merge_rows(a[0], a[1], add_a, b[0], b[1], add_b, out[0], out[1])
    return out


@kernel(f"uint64[:, ::1]({_RUN}, int64, int64)")
def cut(run: Any, start: Any, end: Any) -> Any:
    """The run's rows in ``[start, end)``, numbered from ``start``, in the same order."""
    first, last, drop = np.uint64(start), np.uint64(end), np.uint64(start) << np.uint64(1)
    kept = 0
    for i in range(run.shape[1]):
        row = (run[1, i] & np.uint64(0xFFFFFFFF)) >> np.uint64(1)
        kept += first <= row < last
    out = np.empty((2, kept), np.uint64)
    at = 0
    for i in range(run.shape[1]):
        row = (run[1, i] & np.uint64(0xFFFFFFFF)) >> np.uint64(1)
        if first <= row < last:
            out[0, at], out[1, at] = run[0, i], run[1, i] - drop
            at += 1
    return out
