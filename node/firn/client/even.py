"""Plain records whose keys are all of one length, and whose values are: the usual bulk, by arrays from end to end.

To ask a list of ``bytes`` for its types, its lengths and its joined bytes are three passes of the interpreter's C code,
65 ns an object. msgpack makes one of them, 34 ns: it gives each object a head that names its kind and its length. Where
every row of the packed matrix begins with the head of the first, all objects are byte strings of that length, and where
each lies is known. What follows (placing on partitions, parting, encoding) is arithmetic on two matrices.

Whatever is not even goes the way of ``chunks.plain_lengths``; batches are the same bytes by either way.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from firn import limits
from firn.batch import HEADER, HEADER_BYTES, LENGTHS_BYTES, MAGIC, VERSION, Columns, header_crc, padded
from firn.client.small import Writer
from firn.crc import crc32c
from firn.errors import InvariantBroken

Rows = NDArray[np.void]  # one byte string each; perhaps not contiguous
ROW_BYTES = 16  # what a record takes in a batch beside its key and value: two lengths and a timestamp
EVEN_RECORDS_MIN = 32  # below, arrays cost more than they save
AT_ONCE_BYTES_MAX = 16 << 20  # 20 ms: as long as a broker is busy with what is under way to it
# msgpack: heads of byte strings and of arrays, by the bytes of the length in them.
_BIN = {1: 0xC4, 2: 0xC5, 4: 0xC6}
_ARRAY_HEAD_BYTES = ((16, 1), (1 << 16, 3), (1 << 32, 5))  # below so many items: bytes of the head


@dataclass(frozen=True, slots=True)
class Even:
    """Records as two columns of rows, in the order sent; ``timestamp`` is that of all."""

    keys: Rows
    values: Rows
    timestamp: int = 0

    @property
    def records(self) -> int:
        return len(self.keys)

    @property
    def row_bytes(self) -> int:
        """Bytes of one record in a batch."""
        return self.keys.dtype.itemsize + self.values.dtype.itemsize + ROW_BYTES

    def stamped(self, timestamp: int) -> "Even":
        return Even(self.keys, self.values, timestamp)

    def take(self, order: NDArray[np.int64]) -> "Even":
        return Even(self.keys[order], self.values[order], self.timestamp)

    def slice(self, start: int, end: int) -> "Even":
        return Even(self.keys[start:end], self.values[start:end], self.timestamp)

    def lists(self) -> tuple[list[bytes], list[bytes | None]]:
        """Keys and values as ``small`` takes them."""
        return self.keys.tolist(), self.values.tolist()

    def key_matrix(self) -> NDArray[np.uint8]:
        """The keys' bytes, (records, length)."""
        return np.ascontiguousarray(self.keys).view(np.uint8).reshape(len(self.keys), -1)

    def columns(self) -> Columns:
        """The same records for ``batch.encode``."""
        n = self.records
        return Columns(
            key_lengths=np.full(n, self.keys.dtype.itemsize, "<i4"),
            value_lengths=np.full(n, self.values.dtype.itemsize, "<i4"),
            timestamps=np.full(n, self.timestamp, "<i8"),
            offsets=np.arange(n, dtype=np.int64),
            keys=np.ascontiguousarray(self.keys).view(np.uint8),
            values=np.ascontiguousarray(self.values).view(np.uint8),
        )


def even_rows(keys: Sequence[Any], values: Sequence[Any]) -> Even | None:
    """The records, when they are even and within the limits of a record; None when not, or when they are few."""
    if len(keys) < EVEN_RECORDS_MIN:
        return None
    return _even(keys, values)


def even_parts(
    keys: Sequence[Any], values: Sequence[Any], *, part_bytes: int, at_once_max: int = AT_ONCE_BYTES_MAX
) -> Iterable[Even] | None:
    """Even records in parts of about ``part_bytes``; None when they are not even, or are few.

    Up to ``at_once_max`` bytes are copied before this returns, and msgpack's pass is the check. Of more the objects are
    looked at first, and a part is copied when it is asked for: the parts before it are on their way by then.
    *Effects*: none; what happens to the lists afterwards does not show in the parts.
    """
    if len(keys) < EVEN_RECORDS_MIN or not (type(keys[0]) is bytes and type(values[0]) is bytes):
        return None
    row_bytes = len(keys[0]) + len(values[0]) + ROW_BYTES
    step = max(1, min(limits.BATCH_RECORDS_MAX, part_bytes // row_bytes))
    if step < EVEN_RECORDS_MIN:
        return None
    if row_bytes * len(keys) > at_once_max:
        kept = _kept(keys, limits.KEY_BYTES_MAX), _kept(values, limits.VALUE_BYTES_MAX)
        if kept[0] is None or kept[1] is None:
            return None
        return _parts_later(kept[0], kept[1], step)
    parts = []
    for at in range(0, len(keys), step):
        part = _even(keys[at : at + step], values[at : at + step])
        if part is None or part.row_bytes != row_bytes:
            return None
        parts.append(part)
    return parts


def _parts_later(keys: list[bytes], values: list[bytes], step: int) -> Iterator[Even]:
    for at in range(0, len(keys), step):
        part = _even(keys[at : at + step], values[at : at + step])
        if part is None:
            raise InvariantBroken("byte strings of one length are no longer that")
        yield part


def _kept(column: Sequence[Any], bytes_max: int) -> list[bytes] | None:
    """A list of the caller's objects, when all are byte strings of one length from 1 to ``bytes_max``."""
    found = list(column)
    if set(map(type, found)) != {bytes}:
        return None
    lengths = set(map(len, found))
    return found if len(lengths) == 1 and 1 <= min(lengths) <= bytes_max else None


def _even(keys: Sequence[Any], values: Sequence[Any]) -> Even | None:
    found = _rows(keys, limits.KEY_BYTES_MAX)
    if found is None:
        return None
    others = _rows(values, limits.VALUE_BYTES_MAX)
    return None if others is None else Even(found, others)


def _rows(column: Sequence[Any], bytes_max: int) -> Rows | None:
    """The objects' bytes, when all are byte strings of one length from 1 to ``bytes_max``."""
    first, n = column[0], len(column)
    if (
        type(first) is not bytes
        or type(column[-1]) is not bytes
        or not len(first) == len(column[-1]) <= bytes_max
    ):
        return None
    width = len(first)
    if width == 0:
        return None
    of_length = 1 if width < 1 << 8 else 2 if width < 1 << 16 else 4
    skipped = next(size for below, size in _ARRAY_HEAD_BYTES if n < below)
    size = skipped + n * (1 + of_length + width)
    packer = msgpack.Packer(autoreset=False, buf_size=size)
    try:
        packer.pack(column)
    except Exception:  # whatever an object of the caller's raises: the closer look names it
        return None
    packed = packer.getbuffer()
    if len(packed) != size:
        return None
    row = np.dtype([("kind", "u1"), ("length", f">u{of_length}"), ("bytes", f"V{width}")])
    rows = np.frombuffer(packed, row, n, skipped)
    # Row by row: one that begins with this head ends where the next begins.
    if (rows["kind"] != _BIN[of_length]).any() or (rows["length"] != width).any():
        return None
    return rows["bytes"]


def encode_even(even: Even, writer: Writer) -> memoryview:
    """One whole batch: what ``batch.encode`` gives of the same columns, written in place."""
    n = even.records
    keys_bytes, values_bytes = n * even.keys.dtype.itemsize, n * even.values.dtype.itemsize
    values_at = HEADER_BYTES + LENGTHS_BYTES + 2 * padded(4 * n) + 8 * n + padded(keys_bytes)
    size = values_at + padded(values_bytes)
    batch = np.empty(size, np.uint8)
    at = HEADER_BYTES
    lengths = (keys_bytes, keys_bytes, 0, 0, values_bytes, values_bytes, 0, 0)
    at = _put(batch, at, "<u4", 8, lengths)
    at = _put(batch, at, "<i4", n, even.keys.dtype.itemsize)
    at = _put(batch, at, "<i4", n, even.values.dtype.itemsize)
    at = _put(batch, at, "<i8", n, even.timestamp)
    at = _put(batch, at, even.keys.dtype, n, even.keys)
    _put(batch, at, even.values.dtype, n, even.values)
    head = HEADER.pack(
        MAGIC, VERSION, 0, 0, size, values_at - HEADER_BYTES, n,
        crc32c(batch[HEADER_BYTES:values_at]), crc32c(batch[values_at:]),
        writer.topic_id, writer.partition, 0, 0, n - 1, writer.producer_id, writer.producer_epoch, writer.sequence,
        even.timestamp, even.timestamp, 0,
    )  # fmt: skip
    found = batch.data
    found[:HEADER_BYTES] = b"".join((head[:8], header_crc(head).to_bytes(4, "little"), head[12:]))
    return found


def _put(batch: NDArray[np.uint8], at: int, dtype: Any, count: int, what: Any) -> int:
    """Write a column at byte ``at``, and the zeros behind it; where the next one begins."""
    column = np.frombuffer(batch, dtype, count, at)
    column[:] = what
    end = at + column.nbytes
    if end % 8:
        batch[end : padded(end)] = 0
    return padded(end)
