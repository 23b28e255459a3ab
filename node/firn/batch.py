"""Batch format v1: the unit of writing, checksumming, replication and reading.

A batch holds 1..n records of one partition: a 104-byte header, then a columnar payload. Little-endian. Every
column, and so every batch, is padded with zeros to 8 bytes, so that arrays are views of the bytes.

Header:

====== ==== ================== ==================================================================
offset type field              note
====== ==== ================== ==================================================================
0      u32  magic              0x4E524946, the bytes ``FIRN``
4      u16  version            1
6      u16  flags              see ``Flag``; unknown bits are refused
8      u32  header_crc         CRC-32C of header bytes 0..8 and 12..104; rewritten by the broker
12     u32  size               whole batch in bytes, header included, a multiple of 8
16     u32  keys_bytes         length of the payload's first part: everything but the values
20     u32  records            1..65,536
24     u32  keys_crc           CRC-32C of the first part, computed by the producer
28     u32  values_crc         CRC-32C of the rest, computed by the producer
32     u64  topic_id
40     u32  partition
44     u32  epoch
48     i64  base_offset        assigned by the master
56     i64  last_offset        assigned by the master
64     u64  producer_id        0: not idempotent
72     u32  producer_epoch
76     u32  sequence           counts this producer's batches in this partition, from 0
80     i64  min_timestamp      ms since 1970
88     i64  max_timestamp      ms since 1970
96     i64  append_timestamp   ms, log clock of the master
====== ==== ================== ==================================================================

Payload, first part (the ``keys`` projection, a byte range with a CRC of its own):

==================== ======================== ========================================================
column               present                  content
==================== ======================== ========================================================
lengths u32[8]       always                   keys stored, keys plain, headers stored, headers plain,
                                              values stored, values plain, tags, queues: bytes before
                                              padding
key lengths i32[n]   always                   -1 would be a null key, which produce refuses
value lengths i32[n] always                   -1 is a tombstone
timestamps i64[n]    always                   ms since 1970
deltas u32[n]        flag offsets_sparse      offset - base_offset, ascending; else record i has
                                              base_offset + i
keys                 always                   the keys, one after another; compressed by the keys codec
tags                 flag has_tags            i32[n] lengths (-1: none), then UTF-8
queues               flag has_queues          u16[n] names per record, u16[m] name lengths, then UTF-8
headers              flag has_headers         i32[n] lengths (0: none), then per record a msgpack map of
                                              str to str; compressed by the headers codec
==================== ======================== ========================================================

Second part: the values, one after another, compressed by the values codec. A column is stored plain (codec
none) when compression does not make it smaller. Sizes are known, and bounded, before a byte is decompressed.

Invariants: records >= 1; last_offset - base_offset + 1 == records unless sparse; the columns' padded lengths
add up to the size exactly. Source: the design's storage chapter; `docs/formats.md` has a worked hex example.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cached_property, wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import cramjam
import msgpack
import numpy as np
from numpy.typing import NDArray

from firn.crc import crc32c
from firn.errors import Corrupt, Invalid, LimitExceeded, MalformedBatch

MAGIC = 0x4E524946
VERSION = 1
HEADER = struct.Struct("<IHHIIIIIIQIIqqQIIqqq")
HEADER_BYTES = HEADER.size
LENGTHS_BYTES = 32
assert HEADER_BYTES == 104

Buffer = bytes | bytearray | memoryview
Bytes8 = NDArray[np.uint8]


class Codec(IntEnum):
    NONE = 0
    LZ4 = 1
    ZSTD = 2


class Flag(IntFlag):
    """Bits 0-1, 2-3 and 4-5 are the codecs of keys, headers and values."""

    HAS_HEADERS = 1 << 6
    HAS_TAGS = 1 << 7
    HAS_QUEUES = 1 << 8
    OFFSETS_SPARSE = 1 << 9
    REBUILT = 1 << 10
    CONTROL = 1 << 11


FLAGS_KNOWN = (1 << 12) - 1


@dataclass(frozen=True, slots=True)
class BatchHeader:
    flags: int
    size: int
    keys_bytes: int
    records: int
    keys_crc: int
    values_crc: int
    topic_id: int
    partition: int
    epoch: int
    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    sequence: int
    min_timestamp: int
    max_timestamp: int
    append_timestamp: int

    @property
    def is_sparse(self) -> bool:
        return bool(self.flags & Flag.OFFSETS_SPARSE)

    @property
    def keys_codec(self) -> int:
        return self.flags & 3

    @property
    def headers_codec(self) -> int:
        return self.flags >> 2 & 3

    @property
    def values_codec(self) -> int:
        return self.flags >> 4 & 3

    def encode(self) -> bytes:
        """The 104 header bytes with their CRC."""
        head = bytearray(
            HEADER.pack(
                MAGIC, VERSION, self.flags, 0, self.size, self.keys_bytes, self.records, self.keys_crc, self.values_crc,
                self.topic_id, self.partition, self.epoch, self.base_offset, self.last_offset, self.producer_id,
                self.producer_epoch, self.sequence, self.min_timestamp, self.max_timestamp, self.append_timestamp,
            )
        )  # fmt: skip
        struct.pack_into("<I", head, 8, header_crc(head))
        return bytes(head)


def header_crc(head: Buffer) -> int:
    """CRC-32C of a 104-byte header without its own field."""
    return crc32c(bytes(head[:8]) + bytes(head[12:HEADER_BYTES]))


def padded(length: int) -> int:
    """``length`` rounded up to a multiple of 8."""
    return (length + 7) & ~7


def parse_header(data: Buffer, at: int = 0, *, check_crc: bool = True) -> BatchHeader:
    """The header at byte ``at``.

    Errors: MalformedBatch, naming the field, the expected and the found value.
    """
    if len(data) - at < HEADER_BYTES:
        raise MalformedBatch(f"batch header: expected {HEADER_BYTES} bytes, found {len(data) - at}")
    fields = HEADER.unpack_from(data, at)
    magic, version, flags, crc, size, keys_bytes, records = fields[:7]
    if magic != MAGIC:
        raise MalformedBatch(f"batch magic: expected {MAGIC:#010x}, found {magic:#010x}")
    if version != VERSION:
        raise MalformedBatch(f"batch version: expected {VERSION}, found {version}; upgrade this reader")
    if check_crc and crc != (expected := header_crc(memoryview(data)[at : at + HEADER_BYTES])):
        raise MalformedBatch(f"batch header CRC: expected {expected:#010x}, found {crc:#010x}")
    if flags & ~FLAGS_KNOWN or 3 in (flags & 3, flags >> 2 & 3, flags >> 4 & 3):
        raise MalformedBatch(f"batch flags: {flags:#06x} has bits that version {VERSION} does not know")
    if size % 8 or size < HEADER_BYTES + keys_bytes or keys_bytes < LENGTHS_BYTES or keys_bytes % 8:
        raise MalformedBatch(f"batch size {size} with keys part {keys_bytes}: not a sum of padded columns")
    if records < 1:
        raise MalformedBatch("batch records: expected at least 1, found 0")
    return BatchHeader(flags, size, keys_bytes, records, *fields[7:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The records of a batch as arrays, all plain (decompressed).

    *Shape*: ``n`` records in offset order; ``keys`` and ``values`` are the concatenated bytes.
    ``tags``, ``queues`` and ``headers`` are the raw column bytes as the format has them, empty when absent.
    ``values`` is empty and every length kept when only the ``keys`` projection was read.
    """

    key_lengths: NDArray[np.int32]
    value_lengths: NDArray[np.int32]
    timestamps: NDArray[np.int64]
    offsets: NDArray[np.int64]
    keys: Bytes8
    values: Bytes8
    tags: Buffer = b""
    queues: Buffer = b""
    headers: Buffer = b""

    @property
    def records(self) -> int:
        return len(self.key_lengths)

    @property
    def tombstones(self) -> NDArray[np.bool_]:
        return self.value_lengths < 0

    def key_starts(self) -> NDArray[np.int64]:
        """Byte offset of each key in ``keys``, and the end of the last: n + 1 values."""
        return _starts(self.key_lengths)

    def value_starts(self) -> NDArray[np.int64]:
        """Byte offset of each value in ``values``, and the end of the last: n + 1 values."""
        return _starts(np.maximum(self.value_lengths, 0))


def _starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def compress(codec: int, plain: Buffer) -> bytes:
    """The bytes of ``plain`` under ``codec`` (raw lz4 block, or one zstd frame)."""
    if codec == Codec.LZ4:
        return bytes(cramjam.lz4.compress_block(plain, store_size=False))
    if codec == Codec.ZSTD:
        return bytes(cramjam.zstd.compress(plain, 3))
    return bytes(plain)


def decompress(codec: int, stored: Buffer, plain_bytes: int) -> Buffer:
    """The ``plain_bytes`` bytes that ``stored`` holds. Never allocates more than ``plain_bytes``.

    Errors: MalformedBatch when the stored bytes hold anything else.
    """
    if codec == Codec.NONE:
        if len(stored) != plain_bytes:
            raise MalformedBatch(f"uncompressed column: expected {plain_bytes} bytes, found {len(stored)}")
        return stored
    out = bytearray(plain_bytes)
    try:
        if codec == Codec.LZ4:
            found = cramjam.lz4.decompress_block_into(stored, out)
        else:
            found = cramjam.zstd.decompress_into(stored, out)
    except Exception as error:  # cramjam has one exception class for every fault of the input
        raise MalformedBatch(f"compressed column: not valid {Codec(codec).name.lower()}: {error}") from error
    if found != plain_bytes:
        raise MalformedBatch(f"compressed column: expected {plain_bytes} bytes, found {found}")
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Where a batch belongs and who wrote it. ``base_offset`` is the broker's to assign at append."""

    topic_id: int
    partition: int
    epoch: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    sequence: int = 0
    append_timestamp: int = 0
    flags: int = 0  # REBUILT and CONTROL only; the others follow from the columns


@dataclass(frozen=True, slots=True)
class Codecs:
    keys: int = Codec.NONE
    headers: int = Codec.NONE
    values: int = Codec.NONE


def encode(columns: Columns, identity: Identity, codecs: Codecs | None = None) -> bytes:
    """One whole batch. Offsets are stored sparse when they are not dense.

    Errors: LimitExceeded past the batch limits, Invalid for no record.
    """
    codecs = codecs or Codecs()
    n = columns.records
    if n == 0:
        raise Invalid("a batch holds at least one record")
    offsets = columns.offsets
    base, last = int(offsets[0]), int(offsets[-1])
    sparse = last - base + 1 != n
    flags = identity.flags | (Flag.OFFSETS_SPARSE if sparse else 0)
    flags |= Flag.HAS_TAGS if len(columns.tags) else 0
    flags |= Flag.HAS_QUEUES if len(columns.queues) else 0
    flags |= Flag.HAS_HEADERS if len(columns.headers) else 0
    keys, keys_codec = _stored(codecs.keys, columns.keys)
    headers, headers_codec = _stored(codecs.headers, columns.headers)
    values, values_codec = _stored(codecs.values, columns.values)
    flags |= keys_codec | headers_codec << 2 | values_codec << 4
    lengths = np.array(
        [
            len(keys), len(columns.keys), len(headers), len(columns.headers),
            len(values), len(columns.values), len(columns.tags), len(columns.queues),
        ],
        "<u4",
    )  # fmt: skip
    first: list[Buffer] = [lengths.data]
    for column in (columns.key_lengths, columns.value_lengths, columns.timestamps):
        first += _padding(np.ascontiguousarray(column).data)
    if sparse:
        first += _padding((offsets - base).astype("<u4").data)
    for stored in (keys, columns.tags, columns.queues, headers):
        first += _padding(stored)
    keys_part = b"".join(first)
    values_part = _padding(values)
    values_crc = 0
    for piece in values_part:
        values_crc = crc32c(piece, values_crc)
    size = HEADER_BYTES + len(keys_part) + padded(len(values))
    if size >= 1 << 32:
        raise LimitExceeded(f"batch of {size} bytes: the format holds at most 4 GiB")
    header = BatchHeader(
        flags, size, len(keys_part), n, crc32c(keys_part), values_crc, identity.topic_id,
        identity.partition, identity.epoch, base, last, identity.producer_id, identity.producer_epoch,
        identity.sequence, int(columns.timestamps.min()), int(columns.timestamps.max()), identity.append_timestamp,
    )  # fmt: skip
    return b"".join((header.encode(), keys_part, *values_part))


def _stored(codec: int, plain: Any) -> tuple[Buffer, int]:
    """The stored bytes of a column and the codec in force: plain, and uncopied, when compression does not help."""
    if codec == Codec.NONE or not len(plain):
        return plain if type(plain) is bytes else memoryview(plain), Codec.NONE
    data = bytes(plain)
    packed = compress(codec, data)
    return (packed, codec) if len(packed) < len(data) else (data, Codec.NONE)


def _padding(data: Buffer) -> list[Buffer]:
    """A column's bytes and the zeros behind it, uncopied."""
    rest = -memoryview(data).nbytes % 8
    return [data, bytes(rest)] if rest else [data]


def columns_of(
    keys: Sequence[bytes],
    values: Sequence[bytes | None],
    timestamps: Sequence[int] | NDArray[np.int64] | int,
    *,
    tags: Sequence[str | None] | None = None,
    queues: Sequence[Sequence[str]] | None = None,
    headers: Sequence[Mapping[str, str] | None] | None = None,
    base_offset: int = 0,
) -> Columns:
    """Columns of records given as lists; dense offsets from ``base_offset``.

    Errors: Invalid for a null key, naming the record's index.
    """
    n = len(keys)
    try:
        key_lengths = np.fromiter(map(len, keys), "<i4", n)
    except TypeError:
        at = next(i for i, key in enumerate(keys) if not isinstance(key, bytes | bytearray | memoryview))
        raise Invalid(
            f"record {at}: the key is {keys[at]!r}; a key is bytes, and may be empty but not null"
        ) from None
    if any(value is None for value in values):
        value_lengths = np.fromiter((-1 if v is None else len(v) for v in values), "<i4", n)
        joined = b"".join([v for v in values if v is not None])
    else:
        value_lengths = np.fromiter(map(len, values), "<i4", n)  # type: ignore[arg-type]
        joined = b"".join(values)  # type: ignore[arg-type]
    if isinstance(timestamps, int):
        stamps = np.full(n, timestamps, "<i8")
    else:
        stamps = np.asarray(timestamps, "<i8")
    return Columns(
        key_lengths=key_lengths,
        value_lengths=value_lengths,
        timestamps=stamps,
        offsets=np.arange(base_offset, base_offset + n, dtype=np.int64),
        keys=np.frombuffer(b"".join(keys), np.uint8),
        values=np.frombuffer(joined, np.uint8),
        tags=encode_tags(tags),
        queues=encode_queues(queues),
        headers=encode_headers(headers),
    )


P = ParamSpec("P")
R = TypeVar("R")


def _refusing(column: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decoder of a text column raise MalformedBatch for bytes that it cannot hold."""

    def wrap(decode: Callable[P, R]) -> Callable[P, R]:
        @wraps(decode)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return decode(*args, **kwargs)
            except (ValueError, IndexError, TypeError, msgpack.UnpackException) as error:
                raise MalformedBatch(f"batch {column}: {error}") from error

        return checked

    return wrap


def encode_tags(tags: Sequence[str | None] | None) -> bytes:
    if tags is None or all(tag is None for tag in tags):
        return b""
    raw = [None if tag is None else tag.encode() for tag in tags]
    lengths = np.array([-1 if tag is None else len(tag) for tag in raw], "<i4")
    return lengths.tobytes() + b"".join(tag for tag in raw if tag)


@_refusing("tags")
def decode_tags(column: Buffer, records: int) -> list[str | None]:
    if not len(column):
        return [None] * records
    lengths = np.frombuffer(column, "<i4", records).tolist()
    return [None if n < 0 else str(raw, "utf-8") for n, raw in _cut(column, 4 * records, lengths)]


def encode_queues(queues: Sequence[Sequence[str]] | None) -> bytes:
    if queues is None or not any(queues):
        return b""
    counts = np.array([len(names) for names in queues], "<u2")
    names = [name.encode() for group in queues for name in group]
    return counts.tobytes() + np.array([len(n) for n in names], "<u2").tobytes() + b"".join(names)


@_refusing("queues")
def decode_queues(column: Buffer, records: int) -> list[tuple[str, ...]]:
    if not len(column):
        return [()] * records
    counts = np.frombuffer(column, "<u2", records).tolist()
    total = sum(counts)
    lengths = np.frombuffer(column, "<u2", total, 2 * records).tolist()
    names = [str(raw, "utf-8") for _, raw in _cut(column, 2 * (records + total), lengths)]
    found, at = [], 0
    for count in counts:
        found.append(tuple(names[at : at + count]))
        at += count
    return found


def encode_headers(headers: Sequence[Mapping[str, str] | None] | None) -> bytes:
    if headers is None or not any(headers):
        return b""
    maps = [msgpack.packb(dict(sorted(h.items()))) if h else b"" for h in headers]
    return np.array([len(m) for m in maps], "<i4").tobytes() + b"".join(maps)


@_refusing("headers")
def decode_headers(column: Buffer, records: int) -> list[dict[str, str]]:
    if not len(column):
        return [{}] * records
    lengths = np.frombuffer(column, "<i4", records).tolist()
    return [msgpack.unpackb(raw) if n > 0 else {} for n, raw in _cut(column, 4 * records, lengths)]


def _cut(column: Buffer, at: int, lengths: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    view = memoryview(column)
    for length in lengths:
        end = at + max(length, 0)
        yield length, view[at:end]
        at = end


class Batch:
    """One batch: a view of its bytes, decoded when asked.

    ``data`` may hold the header and the keys part alone (the ``keys`` projection).
    """

    __slots__ = ("__dict__", "data", "header")

    def __init__(self, data: Buffer, header: BatchHeader | None = None) -> None:
        self.data = memoryview(data)
        self.header = header or parse_header(data)
        if len(self.data) not in (self.header.size, HEADER_BYTES + self.header.keys_bytes):
            raise MalformedBatch(f"batch bytes: expected {self.header.size}, found {len(self.data)}")

    @property
    def has_values(self) -> bool:
        return len(self.data) == self.header.size

    def verify(self) -> None:
        """Check both payload CRCs.

        Errors: MalformedBatch naming the part, the expected and the found CRC.
        """
        h = self.header
        split = HEADER_BYTES + h.keys_bytes
        if (found := crc32c(self.data[HEADER_BYTES:split])) != h.keys_crc:
            raise MalformedBatch(f"batch keys CRC: expected {h.keys_crc:#010x}, found {found:#010x}")
        if self.has_values and (found := crc32c(self.data[split : h.size])) != h.values_crc:
            raise MalformedBatch(f"batch values CRC: expected {h.values_crc:#010x}, found {found:#010x}")

    @cached_property
    def columns(self) -> Columns:
        """The decoded columns; every length is checked against the bytes that are there first.

        Errors: MalformedBatch, naming the column.
        """
        h, n = self.header, self.header.records
        if HEADER_BYTES + h.keys_bytes > len(self.data):
            raise MalformedBatch(
                f"batch keys part: expected {h.keys_bytes} bytes, found {len(self.data) - HEADER_BYTES}"
            )
        keys_stored, keys_plain, headers_stored, headers_plain, values_stored, values_plain, tags, queues = (
            np.frombuffer(self.data, "<u4", 8, HEADER_BYTES).tolist()
        )
        fixed = LENGTHS_BYTES + 2 * padded(4 * n) + 8 * n + (padded(4 * n) if h.is_sparse else 0)
        wanted = fixed + padded(keys_stored) + padded(tags) + padded(queues) + padded(headers_stored)
        if wanted != h.keys_bytes:
            raise MalformedBatch(
                f"batch keys part: columns add up to {wanted} bytes, the header says {h.keys_bytes}"
            )
        if padded(values_stored) != h.size - HEADER_BYTES - h.keys_bytes:
            raise MalformedBatch(
                f"batch values: {values_stored} stored bytes do not fill the rest of the batch"
            )
        at = HEADER_BYTES + LENGTHS_BYTES
        key_lengths = np.frombuffer(self.data, "<i4", n, at)
        at += padded(4 * n)
        value_lengths = np.frombuffer(self.data, "<i4", n, at)
        at += padded(4 * n)
        timestamps = np.frombuffer(self.data, "<i8", n, at)
        at += 8 * n
        if h.is_sparse:
            offsets = h.base_offset + np.frombuffer(self.data, "<u4", n, at).astype(np.int64)
            at += padded(4 * n)
        else:
            offsets = np.arange(h.base_offset, h.base_offset + n, dtype=np.int64)
        _check_lengths("key", key_lengths, 0, keys_plain)
        _check_lengths("value", value_lengths, -1, values_plain)
        _check_plain("keys", h.keys_codec, keys_stored, keys_plain)
        keys = decompress(h.keys_codec, self.data[at : at + keys_stored], keys_plain)
        at += padded(keys_stored)
        tags_column = self.data[at : at + tags]
        at += padded(tags)
        queues_column = self.data[at : at + queues]
        at += padded(queues)
        _check_plain("headers", h.headers_codec, headers_stored, headers_plain)
        headers = decompress(h.headers_codec, self.data[at : at + headers_stored], headers_plain)
        values: Buffer = b""
        if self.has_values:
            at = HEADER_BYTES + h.keys_bytes
            _check_plain("values", h.values_codec, values_stored, values_plain)
            values = decompress(h.values_codec, self.data[at : at + values_stored], values_plain)
        return Columns(
            key_lengths=key_lengths, value_lengths=value_lengths, timestamps=timestamps, offsets=offsets,
            keys=np.frombuffer(keys, np.uint8), values=np.frombuffer(values, np.uint8),
            tags=tags_column, queues=queues_column, headers=headers,
        )  # fmt: skip

    def key_list(self) -> list[bytes]:
        c = self.columns
        return _bytes_list(c.keys, c.key_lengths)

    def value_list(self) -> list[bytes | None]:
        c = self.columns
        found: list[bytes | None] = list(_bytes_list(c.values, c.value_lengths))
        for at in np.flatnonzero(c.value_lengths < 0).tolist():
            found[at] = None
        return found

    def tag_list(self) -> list[str | None]:
        return decode_tags(self.columns.tags, self.header.records)

    def queue_list(self) -> list[tuple[str, ...]]:
        return decode_queues(self.columns.queues, self.header.records)

    def header_list(self) -> list[dict[str, str]]:
        return decode_headers(self.columns.headers, self.header.records)


def _bytes_list(data: Bytes8, lengths: NDArray[np.int32]) -> list[bytes]:
    """The parts of ``data`` that have these lengths (below 0: empty)."""
    width = int(lengths[0])
    if width > 0 and len(data) == width * len(lengths) and (lengths == width).all():
        found: list[bytes] = data.view(f"V{width}").tolist()  # one pass in C: a quarter of the time of slices
        return found
    raw = data.tobytes()
    return [raw[a:b] for a, b in pairwise(_starts(np.maximum(lengths, 0)).tolist())]


# A compressed column may not claim more than this many times its stored bytes: an lz4 block reaches 255, and
# zstd more only for runs that no record has; bounds what a hostile length can make a reader allocate.
PLAIN_RATIO_MAX = 1 << 16
PLAIN_BYTES_MAX = 1 << 30


def _check_plain(name: str, codec: int, stored: int, plain: int) -> None:
    if codec == Codec.NONE and stored != plain:
        raise MalformedBatch(f"batch {name}: {stored} stored bytes of an uncompressed column of {plain}")
    if plain > PLAIN_BYTES_MAX or plain > max(stored, 1) * PLAIN_RATIO_MAX:
        raise MalformedBatch(f"batch {name}: {stored} stored bytes cannot hold {plain} plain ones")


def _check_lengths(name: str, lengths: NDArray[np.int32], least: int, total: int) -> None:
    if len(lengths) and int(lengths.min()) < least:
        at = int(lengths.argmin())
        what = "null keys are refused; " if name == "key" and int(lengths[at]) == -1 else ""
        raise MalformedBatch(
            f"batch record {at}: {what}{name} length {int(lengths[at])}, expected {least} or more"
        )
    found = int(np.maximum(lengths, 0).sum(dtype=np.int64))
    if found != total:
        raise MalformedBatch(f"batch {name} lengths add up to {found}, the column has {total} bytes")


def iterate(data: Buffer, *, check_crc: bool = True) -> Iterator[Batch]:
    """The whole batches that ``data`` is made of, in order.

    Errors: MalformedBatch for anything that is not a whole number of batches.
    """
    view, at = memoryview(data), 0
    while at < len(view):
        header = parse_header(view, at, check_crc=check_crc)
        if at + header.size > len(view):
            raise MalformedBatch(f"batch at byte {at}: {header.size} bytes announced, {len(view) - at} there")
        yield Batch(view[at : at + header.size], header)
        at += header.size


def corrupt(error: MalformedBatch, *, file: str, position: int) -> Corrupt:
    """What a MalformedBatch means when the bytes came from our own disk."""
    return Corrupt(f"{file} at byte {position}: {error.message}", file=file, position=position)
