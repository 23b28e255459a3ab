"""Walking whole batches by their headers, and checking them by their checksums: the loops of ``log.walk``."""

from typing import Any

import numpy as np

from firn.batch import FLAGS_KNOWN, HEADER_BYTES, LENGTHS_BYTES, MAGIC, VERSION
from firn_node.kernels.checksum import crc32c_of, header_crc_of
from firn_node.kernels.inline import load_i64, load_u16, load_u32, load_u64
from firn_node.kernels.jit import kernel

_HEADER = HEADER_BYTES
_MAGIC = MAGIC


@kernel("int64(Array(uint8, 1, 'C', readonly=True), int64[::1], int64[::1], uint64[::1], int64[::1])")
def walk(data: Any, starts: Any, sizes: Any, topic_ids: Any, append_ms: Any) -> Any:
    """Fill the arrays with one row a whole batch; their count. Empty arrays: count alone."""
    at = np.int64(0)
    count = 0
    while at + _HEADER <= len(data):
        size = np.int64(load_u32(data, at + 12))
        if load_u32(data, at) != _MAGIC or size < _HEADER or size % 8 != 0 or at + size > len(data):
            break
        if len(starts):
            topic_ids[count] = load_u64(data, at + 32)
            append_ms[count] = load_i64(data, at + 96)
            starts[count] = at
            sizes[count] = size
        at += size
        count += 1
    return count


@kernel("int64(Array(uint8, 1, 'C', readonly=True))")
def sound(data: Any) -> Any:
    """Bytes of the whole batches at the beginning whose header and checksums hold."""
    at = np.int64(0)
    while at + _HEADER <= len(data):
        flags = np.int64(load_u16(data, at + 6))
        size = np.int64(load_u32(data, at + 12))
        keys_bytes = np.int64(load_u32(data, at + 16))
        if load_u32(data, at) != _MAGIC or load_u16(data, at + 4) != VERSION or flags & ~FLAGS_KNOWN:
            break
        if flags & 3 == 3 or flags >> 2 & 3 == 3 or flags >> 4 & 3 == 3 or load_u32(data, at + 20) < 1:
            break
        if np.uint64(load_u32(data, at + 8)) != header_crc_of(data, at) or at + size > len(data):
            break
        split = at + _HEADER + keys_bytes
        if size % 8 or keys_bytes % 8 or keys_bytes < LENGTHS_BYTES or split > at + size:
            break
        if crc32c_of(data, at + _HEADER, split) != np.uint64(load_u32(data, at + 24)):
            break
        if crc32c_of(data, split, at + size) != np.uint64(load_u32(data, at + 28)):
            break
        at += size
    return at
