"""The kernels that walk whole batches in one buffer: check them, hash their keys, stamp their headers.

Every length is checked against the bytes that are there before it is used, in i64, where a sum of any eight
u32 cannot overflow. A batch is checked in the order header, CRCs, column sums, columns; the first fault
stands.

The walk goes on past a faulty batch as long as the header's own CRC vouches for its size; else the rest of
the buffer is one row with the fault ``NOT_A_BATCH``. Field offsets are those of ``firn.batch``.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from firn import limits
from firn.batch import (
    FLAGS_KNOWN,
    HEADER_BYTES,
    LENGTHS_BYTES,
    MAGIC,
    PLAIN_BYTES_MAX,
    PLAIN_RATIO_MAX,
    VERSION,
)
from firn_node.kernels.checksum import crc32c_of, header_crc_of
from firn_node.kernels.inline import (
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    load_u64,
    siphash_of_key,
    store_i64,
    store_u32,
)
from firn_node.kernels.jit import helper, kernel
from firn_node.kernels.text import first_bad_headers, is_utf8


class Fault(IntEnum):
    """Why a batch is refused. ``Group.detail`` has the record that is to blame, where there is one."""

    OK = 0
    NOT_A_BATCH = 1  # magic, version, header CRC or size: this and all that follows cannot be walked
    HEADER = 2
    KEYS_CRC = 3
    VALUES_CRC = 4
    STRUCTURE = 5
    NULL_KEY = 6
    BATCH_LIMIT = 7
    KEY_LIMIT = 8
    VALUE_LIMIT = 9
    TAG_LIMIT = 10
    QUEUES_LIMIT = 11
    HEADERS_LIMIT = 12
    TEXT = 13  # a tag, queue name or header that is not valid UTF-8 or msgpack
    NEEDS_DECODE = 14  # within this package: good so far, but some column is compressed
    UNDECODABLE = 15


OK = int(Fault.OK)
NOT_A_BATCH = int(Fault.NOT_A_BATCH)
HEADER = int(Fault.HEADER)
KEYS_CRC = int(Fault.KEYS_CRC)
VALUES_CRC = int(Fault.VALUES_CRC)
STRUCTURE = int(Fault.STRUCTURE)
NULL_KEY = int(Fault.NULL_KEY)
BATCH_LIMIT = int(Fault.BATCH_LIMIT)
KEY_LIMIT = int(Fault.KEY_LIMIT)
VALUE_LIMIT = int(Fault.VALUE_LIMIT)
TAG_LIMIT = int(Fault.TAG_LIMIT)
QUEUES_LIMIT = int(Fault.QUEUES_LIMIT)
HEADERS_LIMIT = int(Fault.HEADERS_LIMIT)
TEXT = int(Fault.TEXT)
NEEDS_DECODE = int(Fault.NEEDS_DECODE)

BATCH_BYTES_MAX = limits.BATCH_BYTES_MAX
BATCH_RECORDS_MAX = limits.BATCH_RECORDS_MAX
KEY_BYTES_MAX = limits.KEY_BYTES_MAX
VALUE_BYTES_MAX = limits.VALUE_BYTES_MAX
TAG_BYTES_MAX = limits.TAG_BYTES_MAX
QUEUES_PER_RECORD_MAX = limits.QUEUES_PER_RECORD_MAX
QUEUE_NAME_BYTES_MAX = limits.QUEUE_NAME_BYTES_MAX
HEADERS_BYTES_MAX = limits.HEADERS_BYTES_MAX
UNLIMITED = 1 << 62

READ_U8 = "Array(uint8, 1, 'C', readonly=True)"
# Least bytes of a record in a batch: its two lengths and its timestamp.
RECORD_BYTES_MIN = 16


@helper
def _u32(data: Any, at: Any) -> Any:
    return np.int64(load_u32(data, at))


@helper
def _padded(length: Any) -> Any:
    return (length + 7) & ~7


@helper
def _trusted_size(data: Any, at: Any) -> Any:
    """The size of the batch at ``at``, or -1 when nothing vouches for it."""
    if len(data) - at < HEADER_BYTES or load_u32(data, at) != MAGIC or load_u16(data, at + 4) != VERSION:
        return np.int64(-1)
    if np.uint64(load_u32(data, at + 8)) != header_crc_of(data, at):
        return np.int64(-1)
    size = _u32(data, at + 12)
    return size if size % 8 == 0 and HEADER_BYTES <= size <= len(data) - at else np.int64(-1)


@helper
def _plausible_records(data: Any, at: Any, size: Any) -> Any:
    records = _u32(data, at + 20)
    return records if records * RECORD_BYTES_MIN <= size else np.int64(0)


@helper
def _check_header(data: Any, at: Any, size: Any, is_produce: Any) -> Any:
    flags, keys_bytes, records = np.int64(load_u16(data, at + 6)), _u32(data, at + 16), _u32(data, at + 20)
    if flags & ~FLAGS_KNOWN or flags & 3 == 3 or flags >> 2 & 3 == 3 or flags >> 4 & 3 == 3:
        return HEADER
    if keys_bytes < LENGTHS_BYTES or keys_bytes % 8 or HEADER_BYTES + keys_bytes > size or records < 1:
        return HEADER
    if is_produce and (size > BATCH_BYTES_MAX or records > BATCH_RECORDS_MAX):
        return BATCH_LIMIT
    split = at + HEADER_BYTES + keys_bytes
    if crc32c_of(data, at + HEADER_BYTES, split) != np.uint64(load_u32(data, at + 24)):
        return KEYS_CRC
    if crc32c_of(data, split, at + size) != np.uint64(load_u32(data, at + 28)):
        return VALUES_CRC
    return OK


@helper
def _check_plain(codec: Any, stored: Any, plain: Any) -> Any:
    if codec == 0 and stored != plain:
        return STRUCTURE
    return STRUCTURE if plain > PLAIN_BYTES_MAX or plain > max(stored, 1) * PLAIN_RATIO_MAX else OK


@helper
def _check_sums(data: Any, at: Any, size: Any, is_produce: Any) -> Any:
    """The columns fill the two parts exactly, are there when the flags say so, and claim no impossible
    size."""
    flags, keys_bytes, n = np.int64(load_u16(data, at + 6)), _u32(data, at + 16), _u32(data, at + 20)
    lengths = at + HEADER_BYTES
    keys, keys_plain = _u32(data, lengths), _u32(data, lengths + 4)
    headers, headers_plain = _u32(data, lengths + 8), _u32(data, lengths + 12)
    values, values_plain = _u32(data, lengths + 16), _u32(data, lengths + 20)
    tags, queues = _u32(data, lengths + 24), _u32(data, lengths + 28)
    fixed = LENGTHS_BYTES + 2 * _padded(4 * n) + 8 * n + (_padded(4 * n) if flags & 1 << 9 else 0)
    if is_produce and fixed + keys_plain + tags + queues + headers_plain + values_plain > BATCH_BYTES_MAX:
        return BATCH_LIMIT
    if fixed + _padded(keys) + _padded(tags) + _padded(queues) + _padded(headers) != keys_bytes:
        return STRUCTURE
    if _padded(values) != size - HEADER_BYTES - keys_bytes:
        return STRUCTURE
    present = (headers_plain > 0) << 6 | (tags > 0) << 7 | (queues > 0) << 8
    if flags & (7 << 6) != present:
        return STRUCTURE
    for codec, stored, plain in (
        (flags & 3, keys, keys_plain), (flags >> 2 & 3, headers, headers_plain),
        (flags >> 4 & 3, values, values_plain),
    ):  # fmt: skip
        if _check_plain(codec, stored, plain) != OK:
            return STRUCTURE
    return OK


@helper
def _check_lengths(data: Any, at: Any, records: Any, total: Any, least: Any, most: Any, too_long: Any) -> Any:
    """(fault, record) of a column of i32 lengths that add up to ``total``."""
    found = np.int64(0)
    for i in range(records):
        length = np.int64(load_i32(data, at + 4 * i))
        if length < least:
            return (NULL_KEY if least == 0 and length == -1 else STRUCTURE), i
        if length > most:
            return too_long, i
        if length > 0:
            found += length
    return (OK if found == total else STRUCTURE), -1


@helper
def _check_times(data: Any, at: Any, records: Any, batch: Any) -> Any:
    """The header's least and greatest timestamp are those of the column."""
    least, greatest = load_i64(data, at), load_i64(data, at)
    for i in range(1, records):
        found = load_i64(data, at + 8 * i)
        least, greatest = min(least, found), max(greatest, found)
    return OK if load_i64(data, batch + 80) == least and load_i64(data, batch + 88) == greatest else STRUCTURE


@helper
def _check_offsets(data: Any, at: Any, records: Any, batch: Any, is_sparse: Any) -> Any:
    """(fault, record): sparse deltas ascend from 0 to the last offset; dense ones are as many as the
    records."""
    base, last = load_i64(data, batch + 48), load_i64(data, batch + 56)
    span = load_u64(data, batch + 56) - load_u64(data, batch + 48)
    if last < base or not is_sparse:
        return (OK if last >= base and span == np.uint64(records - 1) else STRUCTURE), -1
    if load_u32(data, at) != 0 or np.uint64(load_u32(data, at + 4 * (records - 1))) != span:
        return STRUCTURE, -1
    for i in range(1, records):
        if load_u32(data, at + 4 * i) <= load_u32(data, at + 4 * (i - 1)):
            return STRUCTURE, i
    return OK, -1


@helper
def _check_tags(data: Any, at: Any, size: Any, records: Any, most: Any) -> Any:
    """(fault, record, hash): the hash is the tag's CRC-32C when all records have the same one, else 0."""
    start = at + 4 * records
    body, end = start, at + size
    if body > end:
        return STRUCTURE, -1, 0
    first = np.int64(load_i32(data, at))
    is_same = bool(first >= 0)
    for i in range(records):
        length = np.int64(load_i32(data, at + 4 * i))
        if length < -1 or length > end - body:
            return STRUCTURE, i, 0
        if length > most:
            return TAG_LIMIT, i, 0
        if length != first:
            is_same = False
        if is_same:
            for k in range(length):
                if data[body + k] != data[start + k]:
                    is_same = False
                    break
        body += max(length, 0)
        if length > 0 and not is_utf8(data, body - length, body):
            return TEXT, i, 0
    if body != end:
        return STRUCTURE, -1, 0
    return OK, -1, np.int64(crc32c_of(data, start, start + first)) if is_same else 0


@helper
def _check_queues(data: Any, at: Any, size: Any, records: Any, is_produce: Any) -> Any:
    """(fault, record) of the queues column."""
    end = at + size
    lengths = at + 2 * records
    if lengths > end:
        return STRUCTURE, -1
    names = np.int64(0)
    for i in range(records):
        count = np.int64(load_u16(data, at + 2 * i))
        if is_produce and count > QUEUES_PER_RECORD_MAX:
            return QUEUES_LIMIT, i
        names += count
    body = lengths + 2 * names
    if body > end:
        return STRUCTURE, -1
    for i in range(records):
        for _ in range(load_u16(data, at + 2 * i)):
            length = np.int64(load_u16(data, lengths))
            lengths += 2
            if length > end - body:
                return STRUCTURE, i
            if is_produce and (length < 1 or length > QUEUE_NAME_BYTES_MAX):
                return QUEUES_LIMIT, i
            if not is_utf8(data, body, body + length):
                return TEXT, i
            body += length
    return (OK if body == end else STRUCTURE), -1


@helper
def headers_fault(data: Any, at: Any, size: Any, records: Any, most: Any) -> Any:
    """(fault, record) of a plain headers column."""
    found = first_bad_headers(data, at, size, records, most)
    if found >= 0:
        return TEXT, found
    if found == -2:
        return STRUCTURE, np.int64(-1)
    return (OK, np.int64(-1)) if found == -1 else (HEADERS_LIMIT, -3 - found)


@helper
def _check_batch(data: Any, at: Any, size: Any, is_produce: Any) -> Any:
    """(fault, record, tag hash, byte of the keys column)."""
    none = np.int64(-1)
    fault = _check_header(data, at, size, is_produce)
    if fault == OK:
        fault = _check_sums(data, at, size, is_produce)
    if fault != OK:
        return fault, none, np.int64(0), none
    flags, n, lengths = np.int64(load_u16(data, at + 6)), _u32(data, at + 20), at + HEADER_BYTES
    key_lengths = lengths + LENGTHS_BYTES
    value_lengths = key_lengths + _padded(4 * n)
    times = value_lengths + _padded(4 * n)
    deltas = times + 8 * n
    keys = deltas + (_padded(4 * n) if flags & 1 << 9 else 0)
    tags = keys + _padded(_u32(data, lengths))
    queues = tags + _padded(_u32(data, lengths + 24))
    headers = queues + _padded(_u32(data, lengths + 28))
    most_key, most_value = (KEY_BYTES_MAX, VALUE_BYTES_MAX) if is_produce else (UNLIMITED, UNLIMITED)
    most_tag, most_headers = (TAG_BYTES_MAX, HEADERS_BYTES_MAX) if is_produce else (UNLIMITED, UNLIMITED)
    tag_hash = np.int64(0)
    fault, record = _check_lengths(data, key_lengths, n, _u32(data, lengths + 4), 0, most_key, KEY_LIMIT)
    if fault == OK:
        fault, record = _check_lengths(
            data, value_lengths, n, _u32(data, lengths + 20), -1, most_value, VALUE_LIMIT
        )
    if fault == OK:
        fault = _check_times(data, times, n, at)
    if fault == OK:
        fault, record = _check_offsets(data, deltas, n, at, flags & 1 << 9 != 0)
    if fault == OK and flags & 1 << 7:
        fault, record, tag_hash = _check_tags(data, tags, _u32(data, lengths + 24), n, most_tag)
    if fault == OK and flags & 1 << 8:
        fault, record = _check_queues(data, queues, _u32(data, lengths + 28), n, is_produce)
    if fault == OK and flags & 1 << 6 and flags >> 2 & 3 == 0:
        fault, record = headers_fault(data, headers, _u32(data, lengths + 8), n, most_headers)
    if fault == OK and flags & 63:
        fault = NEEDS_DECODE
    return fault, np.int64(record), tag_hash, keys


@helper
def _fill_rows(
    data: Any, at: Any, keys: Any, row: Any, k0: Any, k1: Any, hi: Any, lo: Any, tombstone: Any
) -> Any:
    """Fingerprints and tombstones of a good batch's records; keys under a codec are left to the caller."""
    n, topic_id = _u32(data, at + 20), load_u64(data, at + 32)
    key_lengths = at + HEADER_BYTES + LENGTHS_BYTES
    value_lengths = key_lengths + _padded(4 * n)
    is_plain = load_u16(data, at + 6) & 3 == 0
    for i in range(n):
        tombstone[row + i] = load_i32(data, value_lengths + 4 * i) < 0
        if is_plain:
            length = np.int64(load_i32(data, key_lengths + 4 * i))
            first, second = siphash_of_key(data, keys, length, topic_id, k0, k1)
            hi[row + i] = first
            lo[row + i] = np.uint32(second & np.uint64(0xFFFFFFFF))
            keys += length


@helper
def _stamp(data: Any, at: Any, base: Any, epoch: Any, append_ms: Any) -> Any:
    span = load_i64(data, at + 56) - load_i64(data, at + 48)
    store_u32(data, at + 44, np.uint32(epoch))
    store_i64(data, at + 48, base)
    store_i64(data, at + 56, base + span)
    store_i64(data, at + 96, append_ms)
    store_u32(data, at + 8, np.uint32(header_crc_of(data, at)))


@kernel(f"UniTuple(int64, 2)({READ_U8})")
def count(data: Any) -> Any:
    """(batches, most records) that ``inspect`` needs room for."""
    at, batches, rows = np.int64(0), np.int64(0), np.int64(0)
    while at < len(data):
        batches += 1
        size = _trusted_size(data, at)
        if size < 0:
            break
        rows += _plausible_records(data, at, size)
        at += size
    return batches, rows


@kernel(
    f"int64({READ_U8}, uint64, uint64, boolean, int64[:, ::1], uint8[:, ::1],"
    " uint64[::1], uint32[::1], boolean[::1])"
)
def inspect(
    data: Any, k0: Any, k1: Any, is_produce: Any, table: Any, headers: Any, hi: Any, lo: Any, tombstone: Any
) -> Any:
    """Fill one row a batch of ``table`` (start, size, fault, record, tag hash, first row), its header, its
    rows.

    Returns how many record rows there are.
    """
    at, row, b = np.int64(0), np.int64(0), 0
    while at < len(data):
        size = _trusted_size(data, at)
        table[b, 0], table[b, 1], table[b, 3], table[b, 4], table[b, 5] = at, size, -1, 0, row
        if size < 0:
            table[b, 1], table[b, 2] = len(data) - at, NOT_A_BATCH
            headers[b, :] = 0
            break
        headers[b, :] = data[at : at + HEADER_BYTES]
        fault, record, tag_hash, keys = _check_batch(data, at, size, is_produce)
        table[b, 2], table[b, 3], table[b, 4] = fault, record, tag_hash
        if fault in (OK, NEEDS_DECODE):
            _fill_rows(data, at, keys, row, k0, k1, hi, lo, tombstone)
            row += _u32(data, at + 20)
        at += size
        b += 1
    return row


@kernel(f"UniTuple(int64, 2)({READ_U8}, int64, int64)")
def check_headers(column: Any, records: Any, most: Any) -> Any:
    """(fault, record) of a decompressed headers column."""
    fault, record = headers_fault(column, 0, len(column), records, most)
    return np.int64(fault), np.int64(record)


@kernel("void(uint8[::1], uint8[:, ::1], int64[::1], int64[::1], int64, int64)")
def stamp(data: Any, headers: Any, starts: Any, base_offsets: Any, epoch: Any, append_ms: Any) -> Any:
    """Write what the master assigns and the header's CRC, in the buffer and in the copy of the headers."""
    for b in range(len(starts)):
        at, base = starts[b], base_offsets[b]
        if base < 0:
            continue
        _stamp(data, at, base, epoch, append_ms)
        headers[b, :] = data[at : at + HEADER_BYTES]


@kernel("UniTuple(uint64, 3)(uint8[::1], uint64, uint64, int64, int64, int64)")
def admit_record(data: Any, k0: Any, k1: Any, base: Any, epoch: Any, append_ms: Any) -> Any:
    """(1, hi, lo << 1 | tombstone) of a batch of one plain record, which is stamped; zeros, and nothing done, when
    ``data`` is anything else or has a fault.
    """
    refused = (np.uint64(0), np.uint64(0), np.uint64(0))
    if _trusted_size(data, 0) != len(data) or load_u16(data, 6) != 0 or _u32(data, 20) != 1:
        return refused
    fault, _, _, keys = _check_batch(data, 0, len(data), True)
    if fault != OK:
        return refused
    hi, lo, tombstone = np.empty(1, np.uint64), np.empty(1, np.uint32), np.empty(1, np.bool_)
    _fill_rows(data, 0, keys, 0, k0, k1, hi, lo, tombstone)
    _stamp(data, 0, base, epoch, append_ms)
    return np.uint64(1), hi[0], np.uint64(lo[0]) << np.uint64(1) | np.uint64(tombstone[0])
