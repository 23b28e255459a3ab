"""CRC-32C inside kernels: the SSE 4.2 instruction in three streams, or tables where there is none.

One stream waits three cycles for each eight bytes. Three streams over neighbouring blocks of 512 bytes keep
the unit busy; their sums are joined by tables that move a sum over 512 zero bytes. Source: Mark Adler,
crc32c.c.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn_node.kernels.cpu import HAS_CRC32_INSTRUCTION
from firn_node.kernels.inline import load_u64
from firn_node.kernels.jit import by_machine, helper

_POLYNOMIAL = 0x82F63B78
_BLOCK_BYTES = 512


def _zero_byte_tables(count: int) -> NDArray[np.uint32]:
    """Table k: the sum after byte value b and k zero bytes."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    tables = [table]
    for _ in range(count - 1):
        tables.append(table[tables[-1] & 0xFF] ^ (tables[-1] >> np.uint32(8)))
    return np.array(tables, np.uint32)


def _moved(tables: NDArray[np.uint32], sums: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """``sums`` after ``_BLOCK_BYTES`` zero bytes."""
    for _ in range(_BLOCK_BYTES // 4):
        sums = (
            tables[3][sums & 0xFF]
            ^ tables[2][sums >> np.uint32(8) & 0xFF]
            ^ tables[1][sums >> np.uint32(16) & 0xFF]
            ^ tables[0][sums >> np.uint32(24)]
        )
    return sums


_SLICES = _zero_byte_tables(8)
_BYTES = np.arange(256, dtype=np.uint32)
_MOVES = _moved(_SLICES, np.concatenate([_BYTES << np.uint32(8 * k) for k in range(4)])).reshape(4, 256)


_crc_of_u64 = by_machine("crc_of_u64")


@helper
def _step_byte(crc: Any, byte: Any) -> Any:
    return np.uint64(_SLICES[0, (crc ^ np.uint64(byte)) & np.uint64(0xFF)]) ^ (crc >> np.uint64(8))


@helper
def _move(crc: Any) -> Any:
    return np.uint64(
        _MOVES[0, crc & np.uint64(0xFF)]
        ^ _MOVES[1, crc >> np.uint64(8) & np.uint64(0xFF)]
        ^ _MOVES[2, crc >> np.uint64(16) & np.uint64(0xFF)]
        ^ _MOVES[3, crc >> np.uint64(24) & np.uint64(0xFF)]
    )


@helper
def _update_hardware(crc: Any, data: Any, at: Any, end: Any) -> Any:
    while end - at >= 3 * _BLOCK_BYTES:
        second, third = np.uint64(0), np.uint64(0)
        for i in range(at, at + _BLOCK_BYTES, 8):
            crc = _crc_of_u64(crc, load_u64(data, i))
            second = _crc_of_u64(second, load_u64(data, i + _BLOCK_BYTES))
            third = _crc_of_u64(third, load_u64(data, i + 2 * _BLOCK_BYTES))
        crc = _move(_move(crc) ^ second) ^ third
        at += 3 * _BLOCK_BYTES
    while end - at >= 8:
        crc = _crc_of_u64(crc, load_u64(data, at))
        at += 8
    while at < end:
        crc = _step_byte(crc, data[at])
        at += 1
    return crc


@helper
def update_software(crc: Any, data: Any, at: Any, end: Any) -> Any:
    """The running sum after ``data[at:end]``, eight bytes a step by eight tables."""
    low = np.uint64(0xFF)
    while end - at >= 8:
        word = load_u64(data, at) ^ crc
        crc = np.uint64(
            _SLICES[7, word & low]
            ^ _SLICES[6, word >> np.uint64(8) & low]
            ^ _SLICES[5, word >> np.uint64(16) & low]
            ^ _SLICES[4, word >> np.uint64(24) & low]
            ^ _SLICES[3, word >> np.uint64(32) & low]
            ^ _SLICES[2, word >> np.uint64(40) & low]
            ^ _SLICES[1, word >> np.uint64(48) & low]
            ^ _SLICES[0, word >> np.uint64(56) & low]
        )
        at += 8
    while at < end:
        crc = _step_byte(crc, data[at])
        at += 1
    return crc


_update = _update_hardware if HAS_CRC32_INSTRUCTION else update_software


@helper
def crc32c_of(data: Any, start: Any, end: Any) -> Any:
    """CRC-32C of ``data[start:end]`` as u64."""
    return _update(np.uint64(0xFFFFFFFF), data, start, end) ^ np.uint64(0xFFFFFFFF)


@helper
def header_crc_of(data: Any, at: Any) -> Any:
    """CRC-32C of the 104-byte batch header at ``at`` without its own field (bytes 8 to 12)."""
    crc = _update(np.uint64(0xFFFFFFFF), data, at, at + 8)
    return _update(crc, data, at + 12, at + 104) ^ np.uint64(0xFFFFFFFF)
