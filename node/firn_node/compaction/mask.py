"""Masks: the rows of a clean segment that are never served. No bit is ever cleared.

File of one mask, little-endian:

====== ==== ======= ==================================================
offset type field   note
====== ==== ======= ==================================================
0      u32  magic   0x4B4E5246, the bytes ``FRNK``
4      u16  version 1
6      u16  zero    0
8      u32  rows    of the segment
12     u32  masked  number of bits set
16     u32  crc     CRC-32C of bytes 0..16 and the bits
20     u32  zero    0
24     --   bits    row ``r`` is bit ``r % 8`` of byte ``r // 8``; padded with zeros to 8 bytes
====== ==== ======= ==================================================

**A damaged mask is decided anew, exactly.** A mask is a function of what the manifest and the key indexes hold:
a row is masked when a newer row of the clean segments has its fingerprint, or when it is a tombstone below
``tombstone_floor``. Nothing else can be needed, because a row that supersedes others stays in a file until they
are gone: a superseded row goes only while its superseder stays, and a masked tombstone goes only when no older
segment holds a row of its key. So a lost mask neither serves a superseded row nor resurrects a deleted key, and
no second copy is kept.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.kernels.compact import count_bits, readonly

MAGIC = 0x4B4E5246
VERSION = 1
_HEAD = struct.Struct("<IHHIIII")
HEAD_BYTES = _HEAD.size
Bits = NDArray[np.uint8]


def bits_bytes(rows: int) -> int:
    """Bytes of the bits of so many rows, padded to 8."""
    return -(-rows // 64) * 8


def encode(bits: Bits, rows: int) -> bytes:
    """The file of a mask; ``bits`` has ``bits_bytes(rows)`` bytes and none set past ``rows``."""
    masked = int(count_bits(readonly(bits), 0, rows))
    head = _HEAD.pack(MAGIC, VERSION, 0, rows, masked, 0, 0)
    crc = crc32c(head[:16] + bits.tobytes())
    return _HEAD.pack(MAGIC, VERSION, 0, rows, masked, crc, 0) + bits.tobytes()


def decode(data: bytes, *, file: str, rows: int, masked: int) -> Bits:
    """The bits, read-only. *Errors*: Corrupt, naming what does not fit; the caller decides the mask anew."""

    def fault(position: int, expected: object, found: object) -> Corrupt:
        return Corrupt(
            f"{file} at byte {position}: expected {expected}, found {found}",
            file=file, position=position, expected=str(expected), found=str(found),
        )  # fmt: skip

    if len(data) != HEAD_BYTES + bits_bytes(rows):
        raise fault(0, f"{HEAD_BYTES + bits_bytes(rows)} bytes", len(data))
    magic, version, _, found_rows, found_masked, crc, _ = _HEAD.unpack_from(data)
    for position, expected, found in (
        (0, MAGIC, magic),
        (4, VERSION, version),
        (8, rows, found_rows),
        (12, masked, found_masked),
    ):
        if expected != found:
            raise fault(position, expected, found)
    if (found := crc32c(data[:16] + data[HEAD_BYTES:])) != crc:
        raise fault(16, f"CRC {crc:#010x}", f"{found:#010x}")
    return np.frombuffer(data, np.uint8, offset=HEAD_BYTES)


def rows_of(bits: NDArray[Any], start: int, end: int) -> NDArray[np.bool_]:
    """Bits ``[start, end)`` as booleans."""
    piece = np.unpackbits(bits[start >> 3 : (end + 7) >> 3], bitorder="little")
    return piece[start & 7 : (start & 7) + end - start].view(np.bool_)
