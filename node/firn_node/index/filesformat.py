"""Bytes of the file index (`docs/formats-index.md`). Little-endian; CRC-32C.

An entry, 48 bytes, many to a file of ``ENTRIES_PER_FILE``::

    0 base i64 | 8 end i64 | 16 position u64 | 24 size u32 | 28 tag hash u32 | 32 running max i64 | 40 crc u32 | 44 zero u32

CHECKPOINT: a 32-byte head, then msgpack ``[partitions, states, producers]``::

    0 magic u32 | 4 format u32 | 8 checkpoint u64 | 16 log start u64 | 24 payload size u32 | 28 crc u32 of all else

``partitions`` is one byte string of 44-byte rows: topic id u64, partition u32, first entry u64, end entry u64,
end offset i64, running maximum i64. ``states`` are ``[topic id, partition, bytes]``, ``producers`` are
``[topic id, partition, producer id, bytes]``.
"""

import struct
from dataclasses import dataclass, field

import msgpack

from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.index.base import Entry

MAGIC = 0x58444946  # "FIDX"
FORMAT = 1
ENTRIES_PER_FILE = 65_536
ENTRY_BYTES = 48
HEAD_BYTES = 32
NEVER = -(2**63)

_ENTRY = struct.Struct("<qqQIIq")
_ENTRY_TAIL = struct.Struct("<II")
_HEAD = struct.Struct("<IIQQI")
_ROW = struct.Struct("<QIQQqq")
_CRC = struct.Struct("<I")


@dataclass(slots=True)
class PartitionRow:
    """What the checkpoint says of one partition. Entries are numbered from 0; ``[first_entry, end_entry)`` exist."""

    first_entry: int = 0
    end_entry: int = 0
    end_offset: int = 0
    max_timestamp: int = NEVER


@dataclass(slots=True)
class Snapshot:
    """The content of CHECKPOINT. What it does not name does not exist."""

    checkpoint: int = 0
    log_start: int = 0
    partitions: dict[tuple[int, int], PartitionRow] = field(default_factory=dict)
    states: dict[tuple[int, int], bytes] = field(default_factory=dict)
    producers: dict[tuple[int, int, int], bytes] = field(default_factory=dict)


def pack_entry(entry: Entry) -> bytes:
    body = _ENTRY.pack(*entry)
    return body + _ENTRY_TAIL.pack(crc32c(body), 0)


def unpack_entry(data: bytes, path: str, position: int) -> Entry:
    """*Errors*: Corrupt, naming file and position."""
    body, expected = data[: _ENTRY.size], crc32c(data[: _ENTRY.size])
    found = _ENTRY_TAIL.unpack_from(data, _ENTRY.size)[0] if len(data) == ENTRY_BYTES else None
    if found != expected:
        raise Corrupt(
            f"{path} at {position}: index entry with checksum {found}, expected {expected}",
            file=path,
            position=position,
            expected=expected,
            found=found,
        )
    return Entry(*_ENTRY.unpack(body))


def pack_snapshot(snapshot: Snapshot) -> bytes:
    rows = b"".join(
        _ROW.pack(*key, row.first_entry, row.end_entry, row.end_offset, row.max_timestamp)
        for key, row in snapshot.partitions.items()
    )
    states = [[*key, state] for key, state in snapshot.states.items()]
    producers = [[*key, row] for key, row in snapshot.producers.items()]
    payload: bytes = msgpack.packb([rows, states, producers])
    head = _HEAD.pack(MAGIC, FORMAT, snapshot.checkpoint, snapshot.log_start, len(payload))
    return head + _CRC.pack(crc32c(head + payload)) + payload


def unpack_snapshot(data: bytes, path: str) -> Snapshot:
    """*Errors*: Corrupt: the index is to be removed and rebuilt from the log."""
    if len(data) < HEAD_BYTES:
        raise _damaged(path, "size", f"at least {HEAD_BYTES}", len(data))
    magic, version, checkpoint, log_start, size = _HEAD.unpack_from(data)
    if (magic, version) != (MAGIC, FORMAT):
        raise _damaged(path, "magic and format", f"{MAGIC:#x} {FORMAT}", f"{magic:#x} {version}")
    if len(data) != HEAD_BYTES + size:
        raise _damaged(path, "size", HEAD_BYTES + size, len(data))
    crc = crc32c(data[: _HEAD.size] + data[HEAD_BYTES:])
    if crc != _CRC.unpack_from(data, _HEAD.size)[0]:
        raise _damaged(path, "checksum", crc, _CRC.unpack_from(data, _HEAD.size)[0])
    rows, states, producers = msgpack.unpackb(data[HEAD_BYTES:])
    return Snapshot(
        checkpoint,
        log_start,
        {(row[0], row[1]): PartitionRow(*row[2:]) for row in _ROW.iter_unpack(rows)},
        {(topic, partition): state for topic, partition, state in states},
        {(topic, partition, producer): row for topic, partition, producer, row in producers},
    )


def _damaged(path: str, what: str, expected: object, found: object) -> Corrupt:
    return Corrupt(
        f"{path}: {what} is {found}, expected {expected}; remove the index folder, it is rebuilt from the log",
        file=path,
        position=0,
        expected=str(expected),
        found=str(found),
    )
