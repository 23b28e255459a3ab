"""Segments of the commit log: their names, what is in them by topic, and the file that remembers it.

A segment that starts at position s is ``<s, 20 digits>.log``; beside a sealed one lie ``.summary`` (this
module) and ``.keys`` (``keysfile``). Both are derived: bound to the segment by start and end, rebuilt when
missing, damaged or of another extent, and removed before the segment is cut.

Summary file, little-endian:

====== ==== ============ ======================================================
offset type field        note
====== ==== ============ ======================================================
0      u32  magic        0x4D555346, the bytes ``FSUM``
4      u16  version      1
6      u16  reserved     0
8      i64  start        of the segment
16     i64  end          of the segment
24     u32  topics       number of rows
28     u32  crc          CRC-32C of all other bytes
32     rows              topic_id u64, bytes u64, newest append time i64 (ms); ascending by topic_id
====== ==== ============ ======================================================
"""

import os
import re
import struct
from dataclasses import dataclass

from firn.crc import crc32c
from firn_node.disk import Disk, File, read_file
from firn_node.log.headpage import HEAD_BYTES
from firn_node.log.walk import TopicBytes, add_topics, walk_file

_NAME = re.compile(r"(\d{20})\.(log|summary|keys)")
SUMMARY_MAGIC = 0x4D555346
SUMMARY_VERSION = 1
_SUMMARY = struct.Struct("<IHHqqII")
_ROW = struct.Struct("<QQq")
assert _SUMMARY.size == 32

Topics = dict[int, TopicBytes]


def segment_path(folder: str, start: int) -> str:
    return os.path.join(folder, f"{start:020d}.log")


def summary_path(folder: str, start: int) -> str:
    return os.path.join(folder, f"{start:020d}.summary")


def keys_path(folder: str, start: int) -> str:
    return os.path.join(folder, f"{start:020d}.keys")


def parse_name(name: str) -> tuple[int, str] | None:
    """The start position and the kind (``log``, ``summary``, ``keys``) of a file of the log's folder."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What retention needs to know of a segment: ``[start, end)`` and, per topic, bytes and newest append."""

    start: int
    end: int
    sealed: bool
    topics: Topics


class Segment:
    """One segment of an open log. ``file`` is its write handle: kept until it is sealed and synced."""

    __slots__ = ("file", "path", "start", "topics")

    def __init__(
        self, folder: str, start: int, *, file: File | None = None, topics: Topics | None = None
    ) -> None:
        self.start = start
        self.path = segment_path(folder, start)
        self.file = file
        self.topics = topics  # None: not loaded

    def byte_of(self, position: int) -> int:
        """Where in the file a position is."""
        return HEAD_BYTES + position - self.start


def count_topics(file: File, segment_start: int, end: int) -> Topics:
    """The topics of ``[segment_start, end)``, by a walk over the headers.

    Errors: Corrupt, also when ``end`` lies within a batch.
    """
    topics: Topics = {}
    for _, found in walk_file(file, segment_start, end, first_byte=HEAD_BYTES):
        add_topics(topics, found)
    return topics


def encode_summary(start: int, end: int, topics: Topics) -> bytes:
    rows = b"".join(_ROW.pack(topic_id, *topics[topic_id]) for topic_id in sorted(topics))
    head = _SUMMARY.pack(SUMMARY_MAGIC, SUMMARY_VERSION, 0, start, end, len(topics), 0)[:28]
    return head + crc32c(head + rows).to_bytes(4, "little") + rows


def parse_summary(data: bytes, *, start: int, end: int) -> Topics | None:
    """The topics of a summary; None when it is damaged or of another extent: it is then rebuilt."""
    if len(data) < _SUMMARY.size or crc32c(data[:28] + data[32:]) != int.from_bytes(data[28:32], "little"):
        return None
    magic, version, _, found_start, found_end, topics, _ = _SUMMARY.unpack_from(data)
    if (magic, version, found_start, found_end) != (SUMMARY_MAGIC, SUMMARY_VERSION, start, end):
        return None
    if len(data) != _SUMMARY.size + topics * _ROW.size:
        return None
    rows = _ROW.iter_unpack(data[_SUMMARY.size :])
    return {topic_id: TopicBytes(size, stamp) for topic_id, size, stamp in rows}


def load_summary(disk: Disk, folder: str, start: int, end: int) -> Topics | None:
    """The stored summary of a segment, None when there is no usable one."""
    try:
        data = read_file(disk, summary_path(folder, start))
    except FileNotFoundError:
        return None
    return parse_summary(data, start=start, end=end)


def store_summary(disk: Disk, folder: str, start: int, end: int, topics: Topics) -> None:
    """*Effects*: not durable, and need not be: a missing or torn summary is rebuilt."""
    path = summary_path(folder, start)
    temporary = f"{path}.tmp"
    disk.unlink(temporary)
    file = disk.open(temporary, "create")
    try:
        file.pwrite([encode_summary(start, end, topics)], 0)
    finally:
        file.close()
    disk.rename(temporary, path)


def drop_derived(disk: Disk, folder: str, start: int) -> None:
    """Remove what was derived from a segment that is about to be cut; durable with the folder's next sync."""
    disk.unlink(summary_path(folder, start))
    disk.unlink(keys_path(folder, start))
