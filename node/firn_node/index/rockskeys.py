"""Keys and values of the RocksDB index (`docs/formats-index.md`).

All families live in **one** RocksDB column family, told apart by the first byte of the key, so that a flush of the
one memtable is atomic by construction. Keys are big-endian, so that they sort as their numbers do.

| family | key after the family byte | value (little-endian) |
|---|---|---|
| ``e`` entries | topic u64, partition u32, last offset u64 | base i64, position u64, size u32, tag u32, max time i64 |
| ``b`` bounds | topic u64, partition u32 | end offset i64, running maximum of timestamps i64 |
| ``l`` light | topic u64, partition u32, name length u8, name, queue offset u64 | position u64, row u32, offset, time i64 |
| ``s`` state | topic u64, partition u32 | the engine's bytes |
| ``p`` producers | topic u64, partition u32, producer u64 | the engine's bytes; begin with last use i64 |
| ``m`` meta | ``checkpoint`` / ``log_start`` / ``format`` | u64 |

An entry's key holds its *last* offset, so one seek finds the entry that covers an offset, or the next one.
"""

import struct

from firn_node.index.base import Entry

FORMAT = 1
ENTRIES, BOUNDS, LIGHT, STATE, PRODUCERS, META = b"e", b"b", b"l", b"s", b"p", b"m"
FAMILIES_OF_TOPIC = (ENTRIES, BOUNDS, LIGHT, STATE, PRODUCERS)

CHECKPOINT_KEY, LOG_START_KEY, FORMAT_KEY = b"mcheckpoint", b"mlog_start", b"mformat"

pack_entry_key = struct.Struct(">cQIQ").pack
unpack_entry_key = struct.Struct(">cQIQ").unpack
pack_partition_key = struct.Struct(">cQI").pack
unpack_partition_key = struct.Struct(">cQI").unpack
pack_topic_key = struct.Struct(">cQ").pack
pack_producer_key = struct.Struct(">cQIQ").pack
unpack_producer_key = struct.Struct(">cQIQ").unpack
pack_entry = struct.Struct("<qQIIq").pack
unpack_entry = struct.Struct("<qQIIq").unpack
pack_bounds = struct.Struct("<qq").pack
unpack_bounds = struct.Struct("<qq").unpack
pack_light = struct.Struct("<QIqq").pack
unpack_light = struct.Struct("<QIqq").unpack
pack_offset = struct.Struct(">Q").pack
unpack_offset = struct.Struct(">Q").unpack
pack_number = struct.Struct("<Q").pack
unpack_number = struct.Struct("<Q").unpack

PARTITION_KEY_BYTES = 13
ENTRY_KEY_BYTES = 21
OFFSET_MAX = 2**64 - 1
BYTE = [bytes((n,)) for n in range(256)]


def light_prefix(topic_id: int, partition: int, name: str) -> bytes:
    """The key of a light queue without the queue offset; no such prefix is the beginning of another."""
    encoded = name.encode()
    return pack_partition_key(LIGHT, topic_id, partition) + BYTE[len(encoded)] + encoded


def after(prefix: bytes) -> bytes:
    """The least key above all keys that begin with ``prefix`` followed by 8 bytes."""
    return prefix + b"\xff" * 8 + b"\0"


def entry_of(key: bytes, value: bytes) -> Entry:
    base, position, size, tag_hash, max_timestamp = unpack_entry(value)
    return Entry(base, unpack_offset(key[13:])[0] + 1, position, size, tag_hash, max_timestamp)


def next_topic_key(family: bytes, topic_id: int) -> bytes:
    """The end of a topic's keys within its family."""
    return pack_topic_key(family, topic_id + 1) if topic_id < OFFSET_MAX else bytes((family[0] + 1,))
