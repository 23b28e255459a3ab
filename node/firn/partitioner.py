"""Which partition a key belongs to: murmur2 with Kafka's seed, so that a Kafka user's placement carries over.

``partition = (murmur2(key) & 0x7fffffff) % partitions``. Source: ``org.apache.kafka.common.utils.Utils.murmur2``
and ``DefaultPartitioner``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_M = 0x5BD1E995
_SEED = 0x9747B28C
_MASK = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The unsigned 32-bit hash of one key."""
    length = len(key)
    h = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if length & 3:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of one key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions if partitions > 1 else 0


def partitions_of(
    keys: Sequence[bytes], partitions: int, lengths: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The partitions of many keys: one pass of array arithmetic for each length that occurs.

    Shape: as ``keys``. ``lengths``: theirs, where they are known. Where there is one partition nothing is looked at.
    """
    if partitions == 1:
        return np.zeros(len(keys), np.int64)
    if lengths is None:
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    starts = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return partitions_in(np.frombuffer(b"".join(keys), np.uint8), starts, partitions)


def partitions_of_rows(keys: NDArray[np.uint8], partitions: int) -> NDArray[np.int64]:
    """The partitions of keys of one length, (keys, length)."""
    return (_murmur2_rows(keys) & 0x7FFFFFFF) % partitions


def partitions_in(keys: NDArray[np.uint8], starts: NDArray[np.int64], partitions: int) -> NDArray[np.int64]:
    """As ``partitions_of``, of keys that lie one after another; ``starts`` has the end of the last one too."""
    lengths = np.diff(starts)
    found = np.zeros(len(lengths), np.int64)
    if partitions == 1:
        return found
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        if len(rows) == len(lengths):
            matrix = keys[int(starts[0]) : int(starts[-1])].reshape(len(rows), length)
        else:
            matrix = keys[starts[rows, np.newaxis] + np.arange(length)]
        found[rows] = partitions_of_rows(matrix, partitions)
    return found


def _murmur2_rows(matrix: NDArray[np.uint8]) -> NDArray[np.int64]:
    """murmur2 of each row of an (n, length) matrix of key bytes."""
    n, length = matrix.shape
    m = np.uint32(_M)
    h = np.full(n, (_SEED ^ length) & _MASK, np.uint32)
    whole = length & ~3
    words = np.ascontiguousarray(matrix[:, :whole]).view("<u4") if whole else np.empty((n, 0), np.uint32)
    for column in range(whole // 4):
        k = words[:, column] * m
        k ^= k >> np.uint32(24)
        k *= m
        h *= m
        h ^= k
    if length & 3:
        tail = np.zeros((n, 4), np.uint8)
        tail[:, : length - whole] = matrix[:, whole:]
        h ^= tail.view("<u4")[:, 0]
        h *= m
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    return h.astype(np.int64)
