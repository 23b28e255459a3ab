"""Small pieces that LLVM inlines into the kernels: unaligned loads and stores, SipHash rounds.

Received bytes start at any address, so numbers are loaded from ``uint8`` arrays with alignment 1 instead of
through typed views. None of these checks bounds: the kernel that calls has to.
"""

from typing import Any

import numpy as np

from firn_node.kernels.jit import by_machine, helper

load_u16 = by_machine("load_u16")
load_u32 = by_machine("load_u32")
load_i32 = by_machine("load_i32")
load_u64 = by_machine("load_u64")
load_i64 = by_machine("load_i64")
store_u32 = by_machine("store_u32")
store_i64 = by_machine("store_i64")

_SIP0 = np.uint64(0x736F6D6570736575)
_SIP1 = np.uint64(0x646F72616E646F6D ^ 0xEE)
_SIP2 = np.uint64(0x6C7967656E657261)
_SIP3 = np.uint64(0x7465646279746573)


@helper
def _sip_round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0 += v1
    v1 = (v1 << np.uint64(13)) | (v1 >> np.uint64(51))
    v1 ^= v0
    v0 = (v0 << np.uint64(32)) | (v0 >> np.uint64(32))
    v2 += v3
    v3 = (v3 << np.uint64(16)) | (v3 >> np.uint64(48))
    v3 ^= v2
    v0 += v3
    v3 = (v3 << np.uint64(21)) | (v3 >> np.uint64(43))
    v3 ^= v0
    v2 += v1
    v1 = (v1 << np.uint64(17)) | (v1 >> np.uint64(47))
    v1 ^= v2
    v2 = (v2 << np.uint64(32)) | (v2 >> np.uint64(32))
    return v0, v1, v2, v3


@helper
def siphash_of_key(data: Any, at: Any, length: Any, topic_id: Any, k0: Any, k1: Any) -> Any:
    """SipHash-2-4-128 of ``topic_id | data[at:at + length]``: (first u64, second u64)."""
    v0, v1, v2, v3 = k0 ^ _SIP0, k1 ^ _SIP1, k0 ^ _SIP2, k1 ^ _SIP3
    v3 ^= topic_id
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0 ^= topic_id
    end = at + length
    while at + 8 <= end:
        m = load_u64(data, at)
        v3 ^= m
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0 ^= m
        at += 8
    m = np.uint64((length + 8) & 0xFF) << np.uint64(56)
    shift = np.uint64(0)
    while at < end:
        m |= np.uint64(data[at]) << shift
        shift += np.uint64(8)
        at += 1
    v3 ^= m
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0 ^= m
    v2 ^= np.uint64(0xEE)
    for _ in range(4):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    first = v0 ^ v1 ^ v2 ^ v3
    v1 ^= np.uint64(0xDD)
    for _ in range(4):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return first, v0 ^ v1 ^ v2 ^ v3
