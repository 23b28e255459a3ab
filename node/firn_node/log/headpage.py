"""The head page of a commit log segment: what was known to be durable before the newest appends.

The first 4 KiB of a segment file are outside of positions: position p of the segment that starts at s is byte
``4096 + p - s``. The page holds two slots, at bytes 0 and 2048, which are sectors of their own at any sector
size up to 2 KiB; a larger sector is one write and changes both or none. Slot ``counter & 1`` is rewritten
before the batches of an append, so the fdatasync that covers them covers it too. The rest of the page is zeros.

An append writes no slot when the newest one is of an append to the same segment and neither ``durable_end`` nor
``log_start`` have moved since: opening would decide the same by either. It uses ``end`` to tell a marker, which no
append's slot is, and to know from where on it must read batches for their append times: at or before ``end``
``append_ms`` speaks for all. So a marker is always replaced before the first bytes after it, and small appends
between two syncs cost one write each.

====== ==== ============ ========================================================================
offset type field        note
====== ==== ============ ========================================================================
0      u32  magic        0x474F4C46, the bytes ``FLOG``
4      u16  version      1
6      u16  reserved     0
8      u64  counter      grows by one at every slot written in the log, over all segments
16     i64  start        position of the segment's first byte, as its name says
24     i64  log_start    first position that retention has left; whole segments below are leftovers
32     i64  durable_end  all bytes of the log before it were durable when the slot was written
40     i64  end          written end of the log with this append; later ones may lie behind it
48     i64  append_ms    newest append time of batches before ``end``
56     u32  reserved     0
60     u32  crc          CRC-32C of bytes 0..60
====== ==== ============ ========================================================================

Invariants:

- the newest valid slot of all segments (greatest counter) speaks for the log;
- ``end == durable_end`` is a *marker* (clean stop, truncation): nothing at or after it exists, whatever the
  file holds. An append's slot is never one, because an append is not empty and not yet durable;
- a slot that reads as zeros was never written; one that is neither zeros nor valid is damaged, and beside a
  damaged one no marker is believed: the damaged one may have been newer, and bytes after the marker real.
"""

import struct
from dataclasses import dataclass

from firn.crc import crc32c
from firn_node.disk import Disk, File

HEAD_BYTES = 4096
MAGIC = 0x474F4C46
VERSION = 1
SLOT = struct.Struct("<IHHQqqqqqII")
SLOT_BYTES = SLOT.size
SLOT_STRIDE = HEAD_BYTES // 2
CRC_AT = SLOT_BYTES - 4
assert SLOT_BYTES == 64


@dataclass(frozen=True, slots=True)
class Slot:
    counter: int
    start: int
    log_start: int
    durable_end: int
    end: int
    append_ms: int

    @property
    def is_marker(self) -> bool:
        return self.end == self.durable_end

    @property
    def offset(self) -> int:
        """Where in the file this slot goes."""
        return slot_offset(self.counter)

    def encode(self) -> bytes:
        """The 64 bytes of the slot."""
        raw = SLOT.pack(
            MAGIC, VERSION, 0, self.counter, self.start, self.log_start, self.durable_end, self.end,
            self.append_ms, 0, 0,
        )  # fmt: skip
        return raw[:CRC_AT] + crc32c(raw[:CRC_AT]).to_bytes(4, "little")


def slot_offset(counter: int) -> int:
    return (counter & 1) * SLOT_STRIDE


def first_page(slot: Slot) -> bytes:
    """The whole head page of a new segment."""
    page = bytearray(HEAD_BYTES)
    page[slot.offset : slot.offset + SLOT_BYTES] = slot.encode()
    return bytes(page)


@dataclass(frozen=True, slots=True)
class HeadPage:
    """What a segment's head page says. ``newest`` is None when no slot is valid."""

    newest: Slot | None
    is_damaged: bool  # a slot is neither valid nor empty


def parse_page(page: bytes, start: int) -> HeadPage:
    """The head page of the segment that starts at ``start``; bytes that are missing count as zeros."""
    newest: Slot | None = None
    is_damaged = False
    for at in (0, SLOT_STRIDE):
        raw = page[at : at + SLOT_BYTES].ljust(SLOT_BYTES, b"\0")
        slot = _parse_slot(raw, start)
        if slot is None:
            is_damaged = is_damaged or any(raw)
        elif newest is None or slot.counter > newest.counter:
            newest = slot
    return HeadPage(newest, is_damaged)


def _parse_slot(raw: bytes, start: int) -> Slot | None:
    if crc32c(raw[:CRC_AT]) != int.from_bytes(raw[CRC_AT:], "little"):
        return None
    magic, version, _, counter, found, log_start, durable_end, end, append_ms, _, _ = SLOT.unpack(raw)
    if magic != MAGIC or version != VERSION or found != start:
        return None
    return Slot(counter, found, log_start, durable_end, end, append_ms)


def read_page(disk: Disk, path: str, start: int) -> tuple[HeadPage, int]:
    """A segment's head page, and the bytes of batches that its file has room for."""
    file = disk.open(path)
    try:
        return parse_page(file.pread(HEAD_BYTES, 0), start), max(0, file.size() - HEAD_BYTES)
    finally:
        file.close()


def write_slot(file: File, slot: Slot) -> None:
    """*Effects*: in the page cache; durable with the file's next sync."""
    file.pwrite([slot.encode()], slot.offset)
