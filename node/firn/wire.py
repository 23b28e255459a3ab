"""The wire beside plain HTTP: frames of ``/v1/stream``, and the items of a bulk read.

**Stream.** One WebSocket message is one msgpack array ``[op, id, meta, data]`` of at most 64 KiB: ``op`` an
``Op``, ``id`` the sender's number of the exchange, ``meta`` a map, ``data`` bytes. Where ``data`` does not fit,
``meta["size"]`` announces its whole length and ``[MORE, id, {}, data]`` frames carry the rest, in order;
exchanges may be interleaved.

=========== ====== ================================================== =====================================
op          sender meta                                               data
=========== ====== ================================================== =====================================
HELLO       client version, client                                    -
PRODUCE     client if_offset (list of int or null, one a batch; opt.) whole batches, one after another
FETCH       client topic, partition, view, offset, since, queue, tag, -
                   snapshot, projection, max_bytes, credit
CREDIT      client bytes (more that may be sent)                      -
CANCEL      client -                                                  -
GET         client topic, keys (their number)                         keys in columns: ``firn.values``
PING        client -                                                  -
MORE        both   -                                                  the next bytes of a message
OK          broker as asked: HELLO -> version, node, groups, limits   -
ERROR       broker the error's document                               -
ACK         broker results: a list, one item a batch: [partition,     -
                   base_offset] or an error's document
DATA        broker topic_id, next_offset, end, horizon,               items of a bulk read
                   tombstone_floor, generation
VALUES      broker -                                                  records in columns: ``firn.values``
=========== ====== ================================================== =====================================

A FETCH goes on for ever: the broker sends DATA as bytes appear while credit lasts (each DATA takes its length,
at least 1) until CANCEL or ERROR.

**Bulk read** (``application/vnd.firn.batches``): whole batches, one after another. A batch of which some rows
are masked follows a mask block; masked rows are to be left out by the reader:

====== ==== ========== ==================================================
offset type field      note
====== ==== ========== ==================================================
0      u32  magic      0x4B534D46, the bytes ``FMSK``
4      u32  size       whole block, a multiple of 8
8      u32  records    rows of the batch that follows
12     u32  crc        CRC-32C of the bits
16     ...  bits       1 bit a row, least significant first; 1: masked
====== ==== ========== ==================================================

A reader of the raw view that asks for ``positions`` finds, before the first batch of each run, where that batch
lies in the commit log; those behind it follow without a gap. Message ids are made of it.

====== ==== ========== ==================================================
offset type field      note
====== ==== ========== ==================================================
0      u32  magic      0x534F5046, the bytes ``FPOS``
4      u32  size       24
8      u32  group      the broker group
12     u32  crc        CRC-32C of the last 8 bytes
16     u64  position   of the batch that follows
====== ==== ========== ==================================================
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, Buffer, parse_header
from firn.crc import crc32c
from firn.errors import Invalid, LimitExceeded, MalformedBatch
from firn.limits import FRAME_BYTES_MAX

STREAM_VERSION = 1
BATCHES_TYPE = "application/vnd.firn.batches"
MSGPACK_TYPE = "application/msgpack"


class Op(IntEnum):
    HELLO = 1
    PRODUCE = 2
    FETCH = 3
    CREDIT = 4
    CANCEL = 5
    GET = 6
    PING = 7
    MORE = 8
    OK = 16
    ERROR = 17
    ACK = 18
    DATA = 19
    VALUES = 20


@dataclass(slots=True)
class Message:
    op: int
    id: int
    meta: dict[str, Any] = field(default_factory=dict)
    data: Buffer = b""


_OPS = frozenset(op.value for op in Op)  # plain numbers: asking the enum costs more than unpacking a frame

# Room for the array, its numbers and the head of ``data``; a larger ``meta`` takes room from ``data``.
_HEAD_BYTES = 64
_DATA_BYTES = FRAME_BYTES_MAX - _HEAD_BYTES


def frames(op: int, id: int, meta: dict[str, Any] | None = None, data: Buffer = b"") -> Iterator[bytes]:
    """The WebSocket messages of one message, each at most 64 KiB as long as ``meta`` itself fits."""
    for parts in frame_parts(op, id, meta, data):
        yield parts[0] if len(parts) == 1 else b"".join(parts)


def frame_parts(
    op: int, id: int, meta: dict[str, Any] | None = None, data: Buffer = b""
) -> Iterator[tuple[bytes] | tuple[bytes, memoryview]]:
    """As ``frames``, for who joins them with more: of a message in several, the data are views, uncopied."""
    meta = meta or {}
    if len(data) + 256 * len(meta) <= _DATA_BYTES:  # the common case, without measuring meta
        packed = msgpack.packb([op, id, meta, data])
        if len(packed) <= FRAME_BYTES_MAX:
            yield (packed,)
            return
    view = memoryview(data)
    room = max(0, _DATA_BYTES - len(msgpack.packb(meta)))
    yield _with_data(msgpack.packb([op, id, {**meta, "size": len(data)}, b""]), view[:room])
    more = msgpack.packb([Op.MORE, id, {}, b""])
    for at in range(room, len(data), _DATA_BYTES):
        yield _with_data(more, view[at : at + _DATA_BYTES])


_BIN8, _BIN16, _BIN32 = 0xC4, 0xC5, 0xC6  # msgpack: bytes, behind a length of so many bits
_ARRAY_OF_4, _UINT32 = 0x94, 0xCE
_SMALL_HEAD = struct.Struct(">BBBI")
EMPTY_META = msgpack.packb({})
SMALL_BYTES_MAX = 4096  # of the data of a ``small_frame``


def small_frame(op: int, id: int, packed_meta: bytes, data: Buffer) -> bytes:
    """The one frame of a small message, whose meta of a few fields is packed already: a third of what ``frames`` costs.

    *Shape*: as msgpack has it, but the id takes 32 bits even where fewer would do.
    """
    if 0 <= id < 1 << 32:
        head = _SMALL_HEAD.pack(_ARRAY_OF_4, op, _UINT32, id)
    else:
        head = bytes((_ARRAY_OF_4, op)) + msgpack.packb(id)
    size = len(data)
    of_data = (_BIN8, size) if size < 1 << 8 else (_BIN16, size >> 8, size & 0xFF)
    return b"".join((head, packed_meta, bytes(of_data), data))


def _with_data(without_data: bytes, data: memoryview) -> tuple[bytes, memoryview]:
    """A packed frame that has no data, with these data in their place."""
    size = len(data)
    if size < 1 << 8:
        head = bytes((_BIN8, size))
    elif size < 1 << 16:
        head = bytes((_BIN16,)) + size.to_bytes(2, "big")
    else:
        head = bytes((_BIN32,)) + size.to_bytes(4, "big")
    return without_data[:-2] + head, data


class Assembler:
    """Puts messages together from frames. Memory: at most ``bytes_max`` of unfinished data.

    A frame that cannot be understood is an error of that frame alone, unless ``is_broken`` says that the
    connection cannot go on.
    """

    def __init__(self, *, bytes_max: int, open_max: int = 64) -> None:
        self._bytes_max = bytes_max
        self._open_max = open_max
        self._open: dict[int, tuple[Message, memoryview, int]] = {}
        self._bytes = 0

    def feed(self, frame: bytes | memoryview) -> Message | None:
        """The message that this frame completes, or None. Nothing of the frame is kept but by copy.

        Errors: Invalid (malformed frame), LimitExceeded (too much announced or open); ``details["id"]`` is the
        exchange where it is known. Later frames of a refused message are passed over silently.
        """
        if frame[:2] == _MORE_HEAD and (more := _parse_more(frame)) is not None:
            return self._more(*more)
        op, id, meta, data = _parse_frame(frame)
        if op == Op.MORE:
            return self._more(id, data)
        size = meta.get("size")
        if size is None or (type(size) is int and size == len(data)):
            return Message(op, id, meta, data)
        if type(size) is not int or size < len(data):
            raise Invalid(
                f"frame: size {size!r} does not hold the {len(data)} bytes that came with it", id=id
            )
        if id in self._open:
            raise Invalid(f"frame: exchange {id} has an unfinished message", id=id)
        if self._bytes + size > self._bytes_max or len(self._open) >= self._open_max:
            raise LimitExceeded(
                f"frame: a message of {size} bytes with {self._bytes} of others unfinished; at most {self._bytes_max}",
                id=id,
            )
        whole = np.empty(size, np.uint8).data  # handed on when every byte of it was written
        whole[: len(data)] = data
        self._open[id] = (Message(op, id, meta), whole, len(data))
        self._bytes += size
        return None

    def _more(self, id: int, data: Buffer) -> Message | None:
        found = self._open.get(id)
        if found is None:
            return None  # the rest of a message that was refused
        message, whole, filled = found
        if filled + len(data) > len(whole):
            self._drop(id)
            raise Invalid(f"frame: more bytes than the {len(whole)} that were announced", id=id)
        whole[filled : filled + len(data)] = data
        filled += len(data)
        if filled < len(whole):
            self._open[id] = (message, whole, filled)
            return None
        self._drop(id)
        message.data = whole
        return message

    def _drop(self, id: int) -> None:
        _, whole, _ = self._open.pop(id)
        self._bytes -= len(whole)


_MORE_HEAD = bytes((0x94, Op.MORE))  # an array of four; the first is MORE
_EMPTY_MAP_BIN16 = bytes((0x80, _BIN16))
_UINT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # msgpack: unsigned integers from 128 on


def _parse_more(frame: bytes | memoryview) -> tuple[int, memoryview] | None:
    """(id, data) of a MORE as ``frames`` makes it, without a copy; None for one of another shape, or malformed."""
    first = frame[2] if len(frame) > 2 else 0xFF
    width = 0 if first < 0x80 else _UINT_BYTES.get(first)
    if width is None:
        return None
    at = 3 + width
    id = int.from_bytes(frame[3:at], "big") if width else first
    if len(frame) < at + 4 or frame[at : at + 2] != _EMPTY_MAP_BIN16:
        return None
    data = memoryview(frame)[at + 4 :]
    return (id, data) if len(data) == int.from_bytes(frame[at + 2 : at + 4], "big") else None


def _parse_frame(frame: bytes | memoryview) -> tuple[int, int, dict[str, Any], bytes]:
    try:
        found = msgpack.unpackb(frame)
    except (ValueError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid(f"frame: not msgpack: {error}") from error
    if not isinstance(found, list) or len(found) != 4:
        raise Invalid("frame: expected an array [op, id, meta, data]")
    op, id, meta, data = found
    if not isinstance(id, int) or isinstance(id, bool):
        raise Invalid(f"frame: id: expected an integer, found {id!r}")
    if not isinstance(op, int) or not isinstance(meta, dict) or not isinstance(data, bytes):
        raise Invalid("frame: expected [integer, integer, map, bytes]", id=id)
    if op not in _OPS:
        raise Invalid(f"frame: op {op} is unknown", id=id)
    return op, id, meta, data


MASK_MAGIC = 0x4B534D46
_MASK = struct.Struct("<IIII")


def mask_block(masked: NDArray[np.bool_]) -> bytes:
    """The block that precedes a batch of which the rows with True are masked."""
    bits = np.packbits(masked, bitorder="little").tobytes()
    bits += bytes(-len(bits) % 8)
    return _MASK.pack(MASK_MAGIC, _MASK.size + len(bits), len(masked), crc32c(bits)) + bits


PLACE_MAGIC = 0x534F5046
_PLACE = struct.Struct("<IIIIQ")


def place_block(group: int, position: int) -> bytes:
    """The block that says where the batch behind it lies in the commit log of a broker group."""
    return _PLACE.pack(PLACE_MAGIC, _PLACE.size, group, crc32c(position.to_bytes(8, "little")), position)


def _parse_place(view: memoryview, at: int) -> tuple[tuple[int, int], int]:
    _, size, group, crc, position = _PLACE.unpack_from(view, at)
    if size != _PLACE.size or crc != crc32c(position.to_bytes(8, "little")):
        raise MalformedBatch(f"position block at byte {at}: malformed")
    return (group, position), at + size


@dataclass(frozen=True, slots=True)
class Item:
    """A batch of a bulk read; ``masked`` is None when every row is to be delivered."""

    batch: Batch
    masked: NDArray[np.bool_] | None
    place: tuple[int, int] | None = None  # (broker group, commit log position), where asked for


def items(data: Buffer, *, keys_only: bool = False) -> Iterator[Item]:
    """The batches of a bulk read with their masks. ``keys_only``: batches without their values part.

    Errors: MalformedBatch.
    """
    view, at, masked, place = memoryview(data), 0, None, None
    while at < len(view):
        magic = int.from_bytes(view[at : at + 4], "little")
        if magic == MASK_MAGIC and len(view) - at >= _MASK.size:
            masked, at = _parse_mask(view, at)
            continue
        if magic == PLACE_MAGIC and len(view) - at >= _PLACE.size:
            place, at = _parse_place(view, at)
            continue
        header = parse_header(view, at)
        size = 104 + header.keys_bytes if keys_only else header.size
        if at + size > len(view):
            raise MalformedBatch(f"bulk read: a batch of {size} bytes announced, {len(view) - at} there")
        if masked is not None and len(masked) != header.records:
            raise MalformedBatch(
                f"bulk read: a mask of {len(masked)} rows before a batch of {header.records}"
            )
        yield Item(Batch(view[at : at + size], header), masked, place)
        masked = None
        place = None if place is None else (place[0], place[1] + header.size)
        at += size


def _parse_mask(view: memoryview, at: int) -> tuple[NDArray[np.bool_], int]:
    _, size, records, crc = _MASK.unpack_from(view, at)
    bits = view[at + _MASK.size : at + size]
    if size % 8 or size < _MASK.size or len(bits) != size - _MASK.size or records > 8 * len(bits):
        raise MalformedBatch(f"mask block of {size} bytes for {records} rows: malformed")
    if (found := crc32c(bits)) != crc:
        raise MalformedBatch(f"mask block CRC: expected {crc:#010x}, found {found:#010x}")
    unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=records)
    return unpacked.astype(np.bool_), at + size
