"""GET and VALUES of the stream: keys and the records found for them, both in columns. Little-endian.

============== ========== ==================================================================
GET data       type       note
============== ========== ==================================================================
key lengths    i32[n]     n is ``meta["keys"]``
keys           ...        one after another
============== ========== ==================================================================

============== ========== ==================================================================
VALUES data    type       note
============== ========== ==================================================================
offsets        i64[n]     in the order of the keys, as all columns are
timestamps     i64[n]     ms since 1970
value lengths  i32[n]     -1: no record, or a tombstone; -2: no room left, ask for this one again
partitions     i32[n]
values         ...        one after another
extras         ...        absent when no record has a tag or headers; else a msgpack map of
                          the key's number to ``[tag, headers]``
============== ========== ==================================================================

At least one key of a GET is answered. One answer holds about 8 MiB of values, so that neither side needs memory for
all values of a long list.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise, repeat, starmap
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from firn.batch import Buffer
from firn.errors import Invalid, InvariantBroken
from firn.record import NO_HEADERS, Record, collector_at_rest

KEYS_MAX = 65_536  # of one GET
NONE = -1
LATER = -2
_KEY_BYTES = 24  # of all columns
_ONE = struct.Struct("<qqii")
assert _ONE.size == _KEY_BYTES

U8 = NDArray[np.uint8]
Extras = dict[int, tuple[str | None, dict[str, str]]]


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """The data of a GET."""
    if len(keys) == 1:
        return len(keys[0]).to_bytes(4, "little") + keys[0]
    return np.fromiter(map(len, keys), "<i4", len(keys)).tobytes() + b"".join(keys)


def unpack_keys(data: Buffer, count: Any) -> tuple[U8, NDArray[np.int64]]:
    """The keys one after another, and where each starts, the end of the last one included.

    Errors: Invalid.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(data) // 4:
        raise Invalid(f"GET: keys: expected how many, found {count!r} with {len(data)} bytes")
    lengths = np.frombuffer(data, "<i4", count)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if (count and int(lengths.min()) < 0) or int(starts[-1]) != len(data) - 4 * count:
        raise Invalid(f"GET: keys: the lengths do not add up to {len(data) - 4 * count} bytes")
    return np.frombuffer(data, np.uint8, offset=4 * count), starts


def pack_one(partition: int, offset: int, timestamp: int, value: bytes | None, extras: Extras) -> bytes:
    """The data of VALUES for one key. ``value`` None: no record."""
    if value is None:
        return _ONE.pack(-1, 0, NONE, partition)
    found = _ONE.pack(offset, timestamp, len(value), partition) + value
    return found + msgpack.packb(extras) if extras else found


def pack_values(
    offsets: NDArray[np.int64], timestamps: NDArray[np.int64], lengths: NDArray[np.int64],
    partitions: NDArray[np.int32], values: U8, extras: Extras,
) -> bytes:  # fmt: skip
    """The data of VALUES."""
    columns = [
        offsets.astype("<i8", copy=False), timestamps.astype("<i8", copy=False), lengths.astype("<i4"),
        partitions.astype("<i4", copy=False), values,
    ]  # fmt: skip
    found = b"".join([column.data.cast("B") for column in columns if len(column)])
    return found + msgpack.packb(extras) if extras else found


def unpack_values(topic: str, keys: Sequence[bytes], data: Buffer) -> tuple[list[Record | None], list[int]]:
    """The record of each key, and the numbers of the keys that have to be asked for again.

    Errors: InvariantBroken for an answer that does not fit the keys.
    """
    count = len(keys)
    if len(data) < _KEY_BYTES * count:
        raise _misfit(count, data)
    if count == 1:
        return _unpack_one(topic, keys[0], data)
    offsets = np.frombuffer(data, "<i8", count).tolist()
    timestamps = np.frombuffer(data, "<i8", count, 8 * count).tolist()
    lengths = np.frombuffer(data, "<i4", count, 16 * count)
    partitions = np.frombuffer(data, "<i4", count, 20 * count)
    ends = np.full(count + 1, _KEY_BYTES * count, np.int64)
    np.cumsum(np.maximum(lengths, 0), out=ends[1:])
    ends[1:] += _KEY_BYTES * count
    end = int(ends[-1])
    if end > len(data):
        raise _misfit(count, data)
    with collector_at_rest():
        rows = zip(
            repeat(topic), _numbers(partitions), offsets, timestamps, keys, _values(data, lengths, ends), *_CONSTANT,
            strict=False,
        )  # fmt: skip
        found: list[Record | None] = list(starmap(tuple.__new__, zip(repeat(Record), rows, strict=False)))
    for at in np.flatnonzero(lengths < 0).tolist():
        found[at] = None
    for at, (tag, headers) in _extras(data, end).items():
        if (record := found[at]) is not None:
            found[at] = record._replace(tag=tag, headers=headers or NO_HEADERS)
    return found, np.flatnonzero(lengths == LATER).tolist()


def _numbers(column: NDArray[np.int32]) -> "list[int] | repeat[int]":
    return repeat(int(column[0])) if len(column) and (column == column[0]).all() else column.tolist()


def _values(data: Buffer, lengths: NDArray[np.int32], ends: NDArray[np.int64]) -> list[bytes]:
    """The values; empty ones where there are none."""
    width = int(lengths[0]) if len(lengths) else 0
    if width > 0 and (lengths == width).all():  # one pass in C: a quarter of the time of slices
        found: list[bytes] = np.frombuffer(data, f"V{width}", len(lengths), int(ends[0])).tolist()
        return found
    raw = bytes(data)
    return [raw[a:b] for a, b in pairwise(ends.tolist())]


_CONSTANT: tuple[Any, ...] = (repeat(None), repeat(NO_HEADERS), repeat(()), repeat(None))


def _unpack_one(topic: str, key: bytes, data: Buffer) -> tuple[list[Record | None], list[int]]:
    offset, timestamp, length, partition = _ONE.unpack_from(data)
    end = _KEY_BYTES + max(length, 0)
    if end > len(data):
        raise _misfit(1, data)
    if length < 0:
        return [None], [0] if length == LATER else []
    tag, headers = _extras(data, end).get(0, (None, NO_HEADERS)) if end < len(data) else (None, NO_HEADERS)
    value = bytes(data[_KEY_BYTES:end])
    return [Record(topic, partition, offset, timestamp, key, value, tag, headers or NO_HEADERS)], []


def _extras(data: Buffer, at: int) -> Extras:
    if at == len(data):
        return {}
    try:
        found: Extras = msgpack.unpackb(data[at:], strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvariantBroken(
            f"the broker's answer to GET has unreadable tags and headers: {error}"
        ) from error
    return found


def _misfit(count: int, data: Buffer) -> InvariantBroken:
    return InvariantBroken(f"the broker answered {count} keys with {len(data)} bytes that do not fit them")
