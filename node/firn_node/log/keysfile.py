"""The keys file of a sealed segment: which batches hold a key, by the upper 64 bits of its fingerprint.

Little-endian, 4 KiB pages. Page 0 is the header, padded with zeros:

====== ==== ============== =======================================================================
offset type field          note
====== ==== ============== =======================================================================
0      u32  magic          0x59454B46, the bytes ``FKEY``
4      u16  version        1
6      u16  reserved       0
8      i64  start          of the segment
16     i64  end            of the segment
24     u64  pairs          in all pages
32     u64  probe          fingerprint of the empty key of topic 0: tells the data folder's secret apart
40     i64  min_timestamp  of the segment's records, ms
48     i64  max_timestamp  of the segment's records, ms
56     i64  min_append     of the segment's batches, ms
64     i64  max_append     of the segment's batches, ms
72     u32  reserved       0
76     u32  crc            CRC-32C of bytes 0..76
====== ==== ============== =======================================================================

Every further page:

====== ==== ============== =======================================================================
0           pairs          255 of (hi u64, position u64); zeros after the last one
4080   u32  count          1..255; 255 in all pages but the last
4084   u32  page           1, 2, ...
4088   u32  reserved       0
4092   u32  crc            CRC-32C of bytes 0..4092
====== ==== ============== =======================================================================

Invariants: pairs ascend by hi, then position, over all pages; each occurs once. The file is immutable.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.disk import File
from firn_node.kernels.keypages import fill_pages

MAGIC = 0x59454B46
VERSION = 1
PAGE_BYTES = 4096
PAGE_PAIRS = 255
_HEADER = struct.Struct("<IHHqqQQqqqqII")
_TAIL = struct.Struct("<IIII")
assert _HEADER.size == 80
assert PAGE_PAIRS * 16 + _TAIL.size == PAGE_BYTES

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysHeader:
    start: int
    end: int
    pairs: int
    probe: int
    min_timestamp: int
    max_timestamp: int
    min_append: int
    max_append: int

    @property
    def pages(self) -> int:
        return -(-self.pairs // PAGE_PAIRS)

    def encode(self) -> bytes:
        """Page 0."""
        raw = _HEADER.pack(
            MAGIC, VERSION, 0, self.start, self.end, self.pairs, self.probe, self.min_timestamp,
            self.max_timestamp, self.min_append, self.max_append, 0, 0,
        )[:-4]  # fmt: skip
        return (raw + crc32c(raw).to_bytes(4, "little")).ljust(PAGE_BYTES, b"\0")


def encode_pages(hi: Words, positions: Words, *, first_number: int = 1) -> NDArray[np.uint8]:
    """Pages after the header. ``hi`` and ``positions`` are one row a pair, sorted and without repeats.

    *Shape*: one row a page, all of them full but the last one.
    """
    pages = np.empty((-(-len(hi) // PAGE_PAIRS), PAGE_BYTES), np.uint8)
    fill_pages(hi, positions, first_number=first_number, pages=pages)
    return pages


def _damaged(file: File, at: int, expected: str, found: object) -> Corrupt:
    return Corrupt(
        f"{file.path} at byte {at}: expected {expected}, found {found}", file=file.path, position=at
    )


def read_header(file: File) -> KeysHeader:
    """Page 0. *Errors*: Corrupt: scan the segment instead, and rebuild the file."""
    raw = file.pread(_HEADER.size, 0)
    if len(raw) < _HEADER.size:
        raise _damaged(file, 0, f"{_HEADER.size} header bytes", len(raw))
    if (crc := crc32c(raw[:-4])) != int.from_bytes(raw[-4:], "little"):
        raise _damaged(file, 0, f"CRC {crc:#010x}", f"{int.from_bytes(raw[-4:], 'little'):#010x}")
    magic, version, _, *fields, _, _ = _HEADER.unpack(raw)
    if (magic, version) != (MAGIC, VERSION):
        raise _damaged(file, 0, f"magic {MAGIC:#x} and version {VERSION}", f"{magic:#x} and {version}")
    header = KeysHeader(**dict(zip(KeysHeader.__slots__, fields, strict=True)))
    if file.size() != PAGE_BYTES * (1 + header.pages):
        raise _damaged(file, 0, f"{1 + header.pages} pages", f"{file.size()} bytes")
    return header


def _read_page(file: File, header: KeysHeader, number: int) -> tuple[Words, Words]:
    """(hi, positions) of page ``number``, from 1. *Errors*: Corrupt."""
    at = number * PAGE_BYTES
    raw = file.pread(PAGE_BYTES, at)
    if len(raw) < PAGE_BYTES:
        raise _damaged(file, at, f"{PAGE_BYTES} bytes", len(raw))
    count, found, _, crc = _TAIL.unpack_from(raw, PAGE_BYTES - _TAIL.size)
    if (expected := crc32c(raw[:-4])) != crc:
        raise _damaged(file, at, f"CRC {expected:#010x}", f"{crc:#010x}")
    if found != number or count != min(PAGE_PAIRS, header.pairs - (number - 1) * PAGE_PAIRS):
        raise _damaged(file, at, f"page {number}", f"page {found} of {count} pairs")
    pairs: NDArray[Any] = np.frombuffer(raw, "<u8", 2 * count).reshape(count, 2)
    return pairs[:, 0], pairs[:, 1]


def positions_of(file: File, header: KeysHeader, hi: int) -> list[int]:
    """Positions of the batches with a key of this fingerprint, ascending; reads a few pages, not the file.

    *Errors*: Corrupt, when a page that is needed is damaged.
    """
    target = np.uint64(hi)
    low, high, is_guess = 1, header.pages + 1, True
    while low < high:  # the first page whose last pair is not below the target
        # Fingerprints are uniform, so the place can be computed; every other probe halves what is left, so
        # that many pairs of one hot key cost no more than a logarithm.
        guess = 1 + (hi * header.pages >> 64)
        middle = min(max(guess, low), high - 1) if is_guess else (low + high) // 2
        is_guess = not is_guess
        words, _ = _read_page(file, header, middle)
        if words[-1] < target:
            low = middle + 1
        elif words[0] < target:
            low = high = middle
        else:
            high = middle
    found: list[int] = []
    for number in range(low, header.pages + 1):
        words, positions = _read_page(file, header, number)
        first, last = np.searchsorted(words, target, "left"), np.searchsorted(words, target, "right")
        found += positions[first:last].tolist()
        if last < len(words):
            break
    return found
