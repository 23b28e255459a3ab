"""A statement about offsets: what a task of a forced compaction on Spark has found in its slice of a partition.

Of the offsets below ``plan_end`` it says which the task has *seen* and which of these are *dead*: a newer record with
the same key bytes lies below ``plan_end`` as well. On committed offsets of one topic that stays true for ever. A slice
holds all records of the keys that are its own, so that slices of one partition never speak of the same offset.

Little-endian. A head of 80 bytes:

====== ==== ============ =====================================================================
offset type field        note
====== ==== ============ =====================================================================
0      u32  magic        0x504E5246, the bytes ``FRNP``
4      u16  version      1
6      u16  zero         0
8      u64  plan         its id, a number of 16 hex digits
16     u64  topic_id
24     u32  partition
28     u32  slice
32     u32  slices
36     u32  zero         0
40     i64  plan_end     every offset is below it
48     u64  seen         number of offsets, in all blocks
56     u64  dead         of these
64     u64  blocks       number of blocks behind the head
72     u32  zero         0
76     u32  crc          CRC-32C of bytes 0..76
====== ==== ============ =====================================================================

Then blocks of 65,536 offsets each, ascending; a block without a seen offset is left out:

====== ==== ============ =====================================================================
0      u64  number       of the block: its first offset / 65,536
8      u32  seen         1 to 65,536
12     u32  dead         at most ``seen``
16     u16  kind         0 lists, 1 bits
18     u16  zero         0
20     u32  crc          CRC-32C of bytes 0..20 and of what follows
24     --   lists        seen, then dead: u16 each (offset % 65,536), ascending; padded with zeros to 8 bytes
24     --   bits         8,192 bytes seen, 8,192 bytes dead: offset % 65,536 = i is bit i % 8 of byte i / 8
====== ==== ============ =====================================================================

The writer takes the shorter kind.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.crc import crc32c
from firn.errors import Invalid

MAGIC = 0x504E5246
VERSION = 1
BLOCK_OFFSETS = 1 << 16
BITS_BYTES = BLOCK_OFFSETS // 8
_LISTS, _BITS = 0, 1
_HEAD = struct.Struct("<IHHQQIIIIqQQQII")
_BLOCK = struct.Struct("<QIIHHI")
HEAD_BYTES = _HEAD.size
BLOCK_HEAD_BYTES = _BLOCK.size
BYTES_MAX = (
    256 << 20
)  # 5 M offsets take 20 MiB where they lie dense, 120 MiB where each has a block to itself

Offsets = NDArray[np.int64]
Bits = NDArray[np.uint8]
Read = Callable[[int, int], bytes]  # (size, position) -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a statement is about."""

    plan: str
    topic_id: int
    partition: int
    slice: int
    slices: int
    plan_end: int


@dataclass(frozen=True, slots=True)
class Block:
    """The offsets from ``number * BLOCK_OFFSETS`` on, as bits."""

    number: int
    seen: Bits
    dead: Bits


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement whose head was checked; its blocks are checked while they are read."""

    subject: Subject
    seen: int
    dead: int
    count: int
    size: int
    _read: Read

    def blocks(self) -> Iterator[Block]:
        """All blocks, ascending. *Errors*: Invalid, saying where what is wrong."""
        at, before, seen, dead = HEAD_BYTES, -1, 0, 0
        for _ in range(self.count):
            block, size = self._block(at, before)
            before = block.number
            seen += int(np.bitwise_count(block.seen).sum())
            dead += int(np.bitwise_count(block.dead).sum())
            yield block
            at += size
        _check(at == self.size, 64, f"{at} bytes", f"{self.size} bytes")
        _check((seen, dead) == (self.seen, self.dead), 48, f"{self.seen}, {self.dead}", f"{seen}, {dead}")

    def _block(self, at: int, before: int) -> tuple[Block, int]:
        head = self._read(BLOCK_HEAD_BYTES, at)
        _check(len(head) == BLOCK_HEAD_BYTES, at, "a block", f"{len(head)} bytes")
        number, seen, dead, kind, zero, crc = _BLOCK.unpack(head)
        _check(zero == 0 and kind in (_LISTS, _BITS), at + 16, "kind 0 or 1", f"{kind}, {zero}")
        _check(0 < seen <= BLOCK_OFFSETS and dead <= seen, at + 8, "dead <= seen <= 65536", f"{dead}, {seen}")
        _check(before < number < 1 << 47, at, f"a number above {before}", str(number))
        size = 2 * BITS_BYTES if kind == _BITS else _padded(2 * (seen + dead))
        body = self._read(size, at + BLOCK_HEAD_BYTES)
        found = crc32c(head[:20] + body)
        _check(len(body) == size and found == crc, at + 20, f"CRC {crc:#010x}", f"{found:#010x}")
        bits = _bits_of(body) if kind == _BITS else _bits_of_lists(body, seen, dead, at)
        self._check_block(Block(number, *bits), seen, dead, at)
        return Block(number, *bits), BLOCK_HEAD_BYTES + size

    def _check_block(self, block: Block, seen: int, dead: int, at: int) -> None:
        found = (int(np.bitwise_count(block.seen).sum()), int(np.bitwise_count(block.dead).sum()))
        _check(found == (seen, dead), at + 8, f"{seen}, {dead}", f"{found[0]}, {found[1]}")
        _check(not (block.dead & ~block.seen).any(), at, "dead offsets among the seen", "others")
        left = self.subject.plan_end - block.number * BLOCK_OFFSETS
        if left < BLOCK_OFFSETS:
            last = int(np.flatnonzero(np.unpackbits(block.seen, bitorder="little"))[-1])
            _check(last < left, at, f"offsets below {self.subject.plan_end}", f"{last - left} past it")


def encode(subject: Subject, seen: Offsets, dead: Offsets) -> list[bytes]:
    """A statement, in pieces that follow one another.

    *Shape*: ``seen`` and ``dead`` ascend, ``dead`` are among the ``seen``.
    """
    numbers, starts = np.unique(seen >> 16, return_index=True)
    bounds = [*starts.tolist(), len(seen)]
    dead_bounds = [*np.searchsorted(dead, numbers << 16).tolist(), len(dead)]
    pieces = [_head(subject, len(seen), len(dead), len(numbers))]
    for at, number in enumerate(numbers.tolist()):
        pieces += _encode_block(
            number, seen[bounds[at] : bounds[at + 1]], dead[dead_bounds[at] : dead_bounds[at + 1]]
        )
    return pieces


def parse(read: Read, size: int) -> Statement:
    """A statement of ``size`` bytes. *Errors*: Invalid, saying where what is wrong."""
    _check(HEAD_BYTES <= size <= BYTES_MAX, 0, f"{HEAD_BYTES} to {BYTES_MAX} bytes", f"{size}")
    head = read(HEAD_BYTES, 0)
    (
        magic, version, zero, plan, topic_id, partition, slice, slices, zero2, plan_end, seen, dead, count, zero3, crc,
    ) = _HEAD.unpack(head)  # fmt: skip
    _check(magic == MAGIC, 0, f"{MAGIC:#010x}", f"{magic:#010x}")
    _check(version == VERSION, 4, f"version {VERSION}", str(version))
    _check(crc32c(head[:76]) == crc, 76, f"CRC {crc:#010x}", f"{crc32c(head[:76]):#010x}")
    _check((zero, zero2, zero3) == (0, 0, 0), 6, "zeros", f"{zero}, {zero2}, {zero3}")
    _check(slice < slices and plan_end >= 0, 28, "slice < slices", f"{slice}, {slices}")
    subject = Subject(
        plan=f"{plan:016x}", topic_id=topic_id, partition=partition, slice=slice, slices=slices, plan_end=plan_end
    )  # fmt: skip
    return Statement(subject, seen, dead, count, size, read)


def reader_of(data: bytes) -> Read:
    """Reads a statement in memory."""
    return lambda size, position: data[position : position + size]


def _head(subject: Subject, seen: int, dead: int, blocks: int) -> bytes:
    s = subject
    fields = (
        MAGIC, VERSION, 0, int(s.plan, 16), s.topic_id, s.partition, s.slice, s.slices, 0, s.plan_end, seen, dead, blocks, 0,
    )  # fmt: skip
    crc = crc32c(_HEAD.pack(*fields, 0)[:76])
    return _HEAD.pack(*fields, crc)


def _encode_block(number: int, seen: Offsets, dead: Offsets) -> list[bytes]:
    lists = 2 * (len(seen) + len(dead))
    if _padded(lists) < 2 * BITS_BYTES:
        parts = [(part & (BLOCK_OFFSETS - 1)).astype("<u2").tobytes() for part in (seen, dead)]
        kind, body = _LISTS, b"".join(parts) + bytes(_padded(lists) - lists)
    else:
        kind, body = _BITS, _packed(seen) + _packed(dead)
    head = _BLOCK.pack(number, len(seen), len(dead), kind, 0, 0)
    crc = crc32c(head[:20] + body)
    return [head[:20] + crc.to_bytes(4, "little"), body]


def _packed(offsets: Offsets) -> bytes:
    flags = np.zeros(BLOCK_OFFSETS, np.bool_)
    flags[offsets & (BLOCK_OFFSETS - 1)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def _bits_of(body: bytes) -> tuple[Bits, Bits]:
    both = np.frombuffer(body, np.uint8)
    return both[:BITS_BYTES], both[BITS_BYTES:]


def _bits_of_lists(body: bytes, seen: int, dead: int, at: int) -> tuple[Bits, Bits]:
    lists = np.frombuffer(body, "<u2")
    for part in (lists[:seen], lists[seen : seen + dead]):
        _check(bool((part[1:] > part[:-1]).all()), at + BLOCK_HEAD_BYTES, "ascending offsets", "others")
    _check(not lists[seen + dead :].any(), at + BLOCK_HEAD_BYTES, "zeros behind the lists", "others")
    found = [_packed(part.astype(np.int64)) for part in (lists[:seen], lists[seen : seen + dead])]
    return np.frombuffer(found[0], np.uint8), np.frombuffer(found[1], np.uint8)


def _padded(size: int) -> int:
    return (size + 7) & ~7


def _check(is_right: Any, position: int, expected: str, found: str) -> None:
    if not is_right:
        raise Invalid(f"statement: at byte {position}: expected {expected}, found {found}")
