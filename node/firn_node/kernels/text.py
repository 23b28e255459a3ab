"""Checks of text columns: UTF-8, and the msgpack maps of the headers column.

They accept a subset of what Python's strict ``utf-8`` codec and ``msgpack.unpackb`` accept, so that a reader
can always decode what was appended.
"""

from typing import Any

import numpy as np

from firn_node.kernels.inline import load_i32, load_u64
from firn_node.kernels.jit import helper

_HIGH_BITS = np.uint64(0x8080808080808080)


@helper
def is_ascii(data: Any, at: Any, end: Any) -> Any:
    while end - at >= 8:
        if load_u64(data, at) & _HIGH_BITS:
            return False
        at += 8
    while at < end:
        if data[at] >= 0x80:
            return False
        at += 1
    return True


@helper
def _sequence_bytes(first: Any, second: Any) -> Any:
    """Length of the UTF-8 sequence that starts with these two bytes; 0 when no valid one does.

    The second byte's range rules out long forms, surrogates and what is above U+10FFFF.
    """
    if first < 0xC2 or first > 0xF4:
        return 0
    if first < 0xE0:
        return 2
    low = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
    high = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
    if second < low or second > high:
        return 0
    return 3 if first < 0xF0 else 4


@helper
def is_utf8(data: Any, at: Any, end: Any) -> Any:
    while at < end:
        if data[at] < 0x80:
            at += 1
            continue
        if at + 1 >= end:
            return False
        length = _sequence_bytes(data[at], data[at + 1])
        if length == 0 or length > end - at:
            return False
        for i in range(at + 1, at + length):
            if data[i] & 0xC0 != 0x80:
                return False
        at += length
    return True


@helper
def _big_endian(data: Any, at: Any, width: Any) -> Any:
    found = np.int64(0)
    for i in range(at, at + width):
        found = found << 8 | np.int64(data[i])
    return found


@helper
def _after_string(data: Any, at: Any, end: Any) -> Any:
    """Where the msgpack string at ``at`` ends, or -1."""
    if at >= end:
        return np.int64(-1)
    kind = data[at]
    at += 1
    if 0xA0 <= kind <= 0xBF:
        length = np.int64(kind) - 0xA0
    elif 0xD9 <= kind <= 0xDB:
        width = 1 << (np.int64(kind) - 0xD9)
        if width > end - at:
            return np.int64(-1)
        length = _big_endian(data, at, width)
        at += width
    else:
        return np.int64(-1)
    if length > end - at or not is_utf8(data, at, at + length):
        return np.int64(-1)
    return at + length


@helper
def _is_string_map(data: Any, at: Any, end: Any) -> Any:
    """Whether ``data[at:end]`` is exactly one msgpack map of str to str."""
    kind = data[at]
    at += 1
    if 0x80 <= kind <= 0x8F:
        pairs = np.int64(kind) - 0x80
    elif kind == 0xDE or kind == 0xDF:
        width = 2 if kind == 0xDE else 4
        if width > end - at:
            return False
        pairs = _big_endian(data, at, width)
        at += width
    else:
        return False
    for _ in range(2 * pairs):
        at = _after_string(data, at, end)
        if at < 0:
            return False
    return at == end


@helper
def first_bad_headers(data: Any, at: Any, size: Any, records: Any, most: Any) -> Any:
    """The first record whose headers are no map of strings, -1 when all are good.

    -2: the lengths do not add up to the column; -3 - i: record i has more than ``most`` bytes.
    """
    body = at + 4 * records
    end = at + size
    if body > end:
        return np.int64(-2)
    for i in range(records):
        length = np.int64(load_i32(data, at + 4 * i))
        if length < 0 or length > end - body:
            return np.int64(-2)
        if length > most:
            return np.int64(-3) - i
        if length > 0 and not _is_string_map(data, body, body + length):
            return np.int64(i)
        body += length
    return np.int64(-1) if body == end else np.int64(-2)
