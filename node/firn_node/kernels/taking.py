"""Taking rows out of a batch whose keys and values are stored plain: keys compared, values copied, in one pass.

The bytes were checked by their CRCs before, perhaps long ago: every length is held to the bytes that are there, and
one that leaves them is a fault. ``firn.batch`` has the layout.
"""

from typing import Any

import numpy as np

from firn.batch import HEADER_BYTES, LENGTHS_BYTES
from firn_node.kernels.inline import load_i32, load_i64, load_u32
from firn_node.kernels.jit import kernel

_LENGTHS_AT = HEADER_BYTES + LENGTHS_BYTES
_BYTES = "Array(uint8, 1, 'C', readonly=True)"
_PLACES = "Array(int64, 2, 'C', readonly=True)"
_WHERE = "Array(int64, 1, 'C', readonly=True)"
NONE = -1  # no record, or a tombstone
AGAIN = -3  # another key's row, or a doubtful one: the look-up of a single key tells


@kernel(
    f"int64({_BYTES}, int64, int64, int64, int64, boolean, {_WHERE}, {_WHERE}, {_BYTES}, {_WHERE},"
    " int64[::1], int64[::1], int64[::1], int64[::1], uint8[::1], int64)"
)
def take_rows(
    data: Any, records: Any, keys_at: Any, values_at: Any, base: Any, is_sparse: Any, rows: Any, picks: Any,
    keys: Any, key_starts: Any, offsets: Any, timestamps: Any, lengths: Any, starts: Any, arena: Any, used: Any,
) -> Any:  # fmt: skip
    """Bytes that the values take; -1: the batch's lengths do not fit its bytes.

    Row ``rows[i]`` (ascending) is looked at for the wanted key ``picks[i]``, whose offset, timestamp, value length
    and place in ``arena`` (from ``used`` on) are filled in; ``lengths`` is AGAIN where the row has another key. When
    the values take more than what is left of ``arena``, none is copied: the caller comes again with more.
    """
    column = (4 * records + 7) & ~7
    value_lengths = _LENGTHS_AT + column
    stamps = value_lengths + column
    deltas = stamps + 8 * records
    key, value, at, needed = keys_at, values_at, np.int64(0), np.int64(0)
    for i in range(len(rows)):
        if rows[i] >= records:
            return np.int64(-1)
        while at < rows[i]:
            size, length = load_i32(data, _LENGTHS_AT + 4 * at), load_i32(data, value_lengths + 4 * at)
            if size < 0:
                return np.int64(-1)
            key += size
            value += max(length, 0)
            at += 1
        size, length = load_i32(data, _LENGTHS_AT + 4 * at), load_i32(data, value_lengths + 4 * at)
        if size < 0 or key + size > values_at or value + max(length, 0) > len(data):
            return np.int64(-1)
        pick = picks[i]
        first = key_starts[pick]
        is_same = key_starts[pick + 1] - first == size
        if is_same:
            for j in range(size):
                if data[key + j] != keys[first + j]:
                    is_same = False
                    break
        if not is_same:
            lengths[pick] = AGAIN
            continue
        offsets[pick] = base + (np.int64(load_u32(data, deltas + 4 * at)) if is_sparse else at)
        timestamps[pick] = load_i64(data, stamps + 8 * at)
        lengths[pick] = length if length >= 0 else NONE
        starts[pick] = value
        needed += max(length, 0)
    if needed > len(arena) - used:
        return needed
    for i in range(len(rows)):
        pick = picks[i]
        length = lengths[pick]
        if length == AGAIN:
            continue
        first = starts[pick]
        starts[pick] = used
        for j in range(length):
            arena[used + j] = data[first + j]
        used += max(length, 0)
    return needed


@kernel(
    f"int64({_PLACES}, {_WHERE}, {_WHERE}, {_WHERE}, {_WHERE}, int64, int64[::1], int64[::1], int64[::1])"
)
def ranges_of_rows(
    places: Any, numbers: Any, rows: Any, picks: Any, key_starts: Any, shift: Any, lengths: Any,
    positions: Any, sizes: Any,
) -> Any:  # fmt: skip
    """How many ranges hold the wanted rows of even batches; ``positions`` and ``sizes`` have room for four a row.

    Of each row: key, timestamp, offset delta (where offsets are sparse), value. One whose key has another length
    has no ranges, its length is AGAIN. ``places``: the columns of ``firn_node.compaction.taking``; ``shift`` is
    added to their positions.
    """
    n = 0
    for i in range(len(rows)):
        number, row, pick = numbers[i], rows[i], picks[i]
        start = places[number, 0] + shift
        key_size, value_size = places[number, 3], max(places[number, 5], 0)
        if key_starts[pick + 1] - key_starts[pick] != key_size:
            lengths[pick] = AGAIN
            continue
        positions[n], sizes[n] = start + places[number, 2] + row * key_size, key_size
        positions[n + 1], sizes[n + 1] = start + places[number, 6] + 8 * row, 8
        n += 2
        if places[number, 7] >= 0:
            positions[n], sizes[n] = start + places[number, 7] + 4 * row, 4
            n += 1
        positions[n], sizes[n] = start + places[number, 4] + row * value_size, value_size
        n += 1
    return n


@kernel(
    f"int64({_PLACES}, {_WHERE}, {_WHERE}, {_WHERE}, {_BYTES}, {_WHERE}, {_BYTES},"
    " int64[::1], int64[::1], int64[::1], int64[::1], uint8[::1], int64)"
)
def take_ranges(
    places: Any, numbers: Any, rows: Any, picks: Any, keys: Any, key_starts: Any, data: Any,
    offsets: Any, timestamps: Any, lengths: Any, starts: Any, arena: Any, used: Any,
) -> Any:  # fmt: skip
    """Where ``arena`` ends with the values of the rows, whose ranges (``ranges_of_rows``) are in ``data``.

    ``arena`` has room for them from ``used`` on. As ``take_rows`` otherwise.
    """
    at = 0
    for i in range(len(rows)):
        number, row, pick = numbers[i], rows[i], picks[i]
        key_size, value_size = places[number, 3], places[number, 5]
        first = key_starts[pick]
        if key_starts[pick + 1] - first != key_size:
            continue
        is_same = True
        for j in range(key_size):
            if data[at + j] != keys[first + j]:
                is_same = False
        at += key_size
        offset, timestamp = places[number, 8] + row, load_i64(data, at)
        at += 8
        if places[number, 7] >= 0:
            offset = places[number, 8] + np.int64(load_u32(data, at))
            at += 4
        if is_same:
            offsets[pick], timestamps[pick] = offset, timestamp
            lengths[pick], starts[pick] = value_size if value_size >= 0 else NONE, used
            for j in range(value_size):
                arena[used + j] = data[at + j]
            used += max(value_size, 0)
        else:
            lengths[pick] = AGAIN
        at += max(value_size, 0)
    return used


@kernel("void(Array(uint8, 1, 'C', readonly=True), int64[::1], int64[::1], uint8[::1])")
def in_order(arena: Any, starts: Any, lengths: Any, out: Any) -> Any:
    """The values of ``arena`` one after another in the order of ``lengths``; negative ones have none."""
    at = 0
    for i in range(len(lengths)):
        first = starts[i]
        for j in range(lengths[i]):
            out[at + j] = arena[first + j]
        at += max(lengths[i], 0)
