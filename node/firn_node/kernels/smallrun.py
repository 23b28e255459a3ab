"""One kernel for runs of small plain batches: compaction takes their surviving rows without a Python loop.

Batches of one record cost more in Python than in bytes. A batch is taken here when it is plain: no codec, no
tags, queues or headers, dense offsets, below the size that is copied whole. Any other, and any that does not fit
its CRCs or lengths, stops the kernel; the caller treats that batch by the general code, which names the fault.
Field offsets are those of ``firn.batch``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.batch import HEADER_BYTES, LENGTHS_BYTES, MAGIC, VERSION
from firn_node.kernels.checksum import crc32c_of, header_crc_of
from firn_node.kernels.inline import load_i32, load_i64, load_u32, load_u64
from firn_node.kernels.jit import kernel

Array = NDArray[Any]
_U8R = "Array(uint8, 1, 'C', readonly=True)"

# Columns of the state array: where the run stands, and what was taken so far.
AT, ROWS, KEYS, VALUES, EPOCH, APPENDED, SEEN = range(7)
STATE_COLUMNS = 7


@kernel(
    f"void({_U8R}, int64, uint64, int64, {_U8R}, int64, int64, int64, int32[::1], int32[::1], int64[::1], "
    "int64[::1], uint8[::1], uint8[::1], int64[::1])"
)
def take_small(
    data: Array,
    size_max: int,
    topic_id: np.uint64,
    partition: int,
    kept: Array,
    base: int,
    start: int,
    end: int,
    key_lengths: Array,
    value_lengths: Array,
    timestamps: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    state: Array,
) -> None:
    """Take the kept rows of plain batches from ``state[AT]`` on, until the end or a batch that is not plain.

    Offset ``o`` in ``[start, end)`` is kept when bit ``base + o`` is set; batches without a kept row are passed
    over unread. The out columns hold as many rows and bytes as ``data`` may; ``state`` says how many they hold.
    """
    at = state[AT]
    while at + HEADER_BYTES <= len(data):
        if load_u32(data, at) != MAGIC or load_u32(data, at + 4) != VERSION:  # version 1, no flag
            return
        if np.uint64(load_u32(data, at + 8)) != header_crc_of(data, at):
            return
        size = np.int64(load_u32(data, at + 12))
        keys_part = np.int64(load_u32(data, at + 16))
        n = np.int64(load_u32(data, at + 20))
        if size >= size_max or at + size > len(data) or load_u64(data, at + 32) != topic_id:
            return
        first = np.int64(load_i64(data, at + 48))
        if (
            np.int64(load_u32(data, at + 40)) != partition
            or np.int64(load_i64(data, at + 56)) - first + 1 != n
        ):
            return
        padded = (4 * n + 7) & ~7
        fixed = LENGTHS_BYTES + 2 * padded + 8 * n
        if n < 1 or fixed > keys_part or HEADER_BYTES + keys_part > size:
            return
        a = first if first > start else np.int64(start)
        b = first + n if first + n < end else np.int64(end)
        alive = False
        for each in range(a, b):
            if (kept[(base + each) >> 3] >> ((base + each) & 7)) & 1:
                alive = True
                break
        if alive:
            split = at + HEADER_BYTES + keys_part
            if np.uint64(load_u32(data, at + 24)) != crc32c_of(data, at + HEADER_BYTES, split):
                return
            if np.uint64(load_u32(data, at + 28)) != crc32c_of(data, split, at + size):
                return
            lengths = at + HEADER_BYTES
            keys_bytes = np.int64(load_u32(data, lengths))
            values_bytes = np.int64(load_u32(data, lengths + 16))
            if fixed + ((keys_bytes + 7) & ~7) != keys_part:
                return
            if HEADER_BYTES + keys_part + ((values_bytes + 7) & ~7) != size:
                return
            key_column = lengths + LENGTHS_BYTES
            value_column = key_column + padded
            time_column = value_column + padded
            key_sum = np.int64(0)
            value_sum = np.int64(0)
            for i in range(n):
                k = np.int64(load_i32(data, key_column + 4 * i))
                v = np.int64(load_i32(data, value_column + 4 * i))
                if k < 0 or v < -1:
                    return
                key_sum += k
                value_sum += v if v > 0 else np.int64(0)
            if key_sum != keys_bytes or value_sum != values_bytes:
                return
            key_at = time_column + 8 * n
            value_at = split
            for i in range(n):
                k = np.int64(load_i32(data, key_column + 4 * i))
                v = np.int64(load_i32(data, value_column + 4 * i))
                offset = first + i
                bit = base + offset
                if offset >= a and offset < b and (kept[bit >> 3] >> (bit & 7)) & 1:
                    row = state[ROWS]
                    key_lengths[row] = k
                    value_lengths[row] = v
                    timestamps[row] = load_i64(data, time_column + 8 * i)
                    offsets[row] = offset
                    for c in range(k):
                        keys[state[KEYS] + c] = data[key_at + c]
                    for c in range(v):
                        values[state[VALUES] + c] = data[value_at + c]
                    state[ROWS] = row + 1
                    state[KEYS] += k
                    state[VALUES] += v if v > 0 else np.int64(0)
                key_at += k
                value_at += v if v > 0 else np.int64(0)
            state[EPOCH] = max(state[EPOCH], np.int64(load_u32(data, at + 44)))
            state[APPENDED] = max(state[APPENDED], np.int64(load_i64(data, at + 96)))
        state[SEEN] += b - a if b > a else np.int64(0)
        at += size
        state[AT] = at
