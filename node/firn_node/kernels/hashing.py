"""Fingerprints of keys: SipHash-2-4 with 128-bit output, keyed, over ``topic_id (u64 LE) | key``.

``hi`` is the first 8 result bytes as little-endian u64, ``lo`` the low 32 bits of the second 8. The secret
never leaves the data folder, so no client can construct two keys that collide. Source: Aumasson and
Bernstein, "SipHash: a fast short-input PRF", and the reference C code's 128-bit variant.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.errors import MalformedBatch
from firn_node.kernels.inline import siphash_of_key
from firn_node.kernels.jit import aligned, kernel


@kernel(
    "boolean(Array(uint8, 1, 'C', readonly=True), Array(int32, 1, 'C', readonly=True),"
    " uint64, uint64, uint64, uint64[::1], uint32[::1])"
)
def _fingerprint(keys: Any, lengths: Any, topic_id: Any, k0: Any, k1: Any, hi: Any, lo: Any) -> Any:
    """Fill ``hi`` and ``lo``; False when a length is negative or reaches past the key bytes."""
    at, end = 0, len(keys)
    for i in range(len(lengths)):
        length = lengths[i]
        if length < 0 or length > end - at:
            return False
        first, second = siphash_of_key(keys, at, length, topic_id, k0, k1)
        hi[i] = first
        lo[i] = np.uint32(second & np.uint64(0xFFFFFFFF))
        at += length
    return True


@kernel("UniTuple(uint64, 2)(Array(uint8, 1, 'C', readonly=True), uint64, uint64, uint64)")
def fingerprint_of(key: Any, topic_id: Any, k0: Any, k1: Any) -> Any:
    """(hi, lo) of one key."""
    first, second = siphash_of_key(key, 0, len(key), topic_id, k0, k1)
    return first, second & np.uint64(0xFFFFFFFF)


def fingerprint(
    keys: NDArray[np.uint8], lengths: NDArray[np.int32], topic_id: int, secret: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """(hi, lo) of each key.

    *Shape*: ``keys`` are the plain key bytes one after another, ``lengths`` one per key, and so are the
    results. *Errors*: MalformedBatch when a length is negative or reaches past the bytes.
    """
    n = len(lengths)
    hi, lo = np.empty(n, np.uint64), np.empty(n, np.uint32)
    if not _fingerprint(
        aligned(keys, np.uint8), aligned(lengths, np.int32), np.uint64(topic_id), secret[0], secret[1], hi, lo
    ):
        raise MalformedBatch(f"the lengths of {n} keys do not fit {len(keys)} bytes of keys")
    return hi, lo


def secret_of(raw: bytes) -> NDArray[np.uint64]:
    """The two key words of a 16-byte secret."""
    return np.frombuffer(raw, "<u8", 2).astype(np.uint64)
