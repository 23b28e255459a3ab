"""Building a keys file in bounded memory, whatever the number of keys in its segment.

Pairs (fingerprint, position of the batch) are collected chunk by chunk, sorted and freed of repeats; a chunk that
is full goes to a scratch file, cut into buckets by the upper bits of the fingerprint. Then bucket after bucket is
read back, sorted and written as pages. A segment of few keys needs no scratch file, and neither does one whose
fingerprints were gathered (``keysgather``): they are parted into the same buckets in memory.

Memory: about 40 bytes a pair of one chunk or one bucket, ``CHUNK_PAIRS`` of them, and one read of the log; or 4
bytes a gathered pair.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from firn_node.disk import Disk, File
from firn_node.kernels import sort_key_index
from firn_node.kernels.keypages import BUCKETS, buckets_of
from firn_node.log.keysfile import PAGE_PAIRS, Words, encode_pages
from firn_node.log.keysgather import Part

CHUNK_PAIRS = 1 << 19
_SHIFT = np.uint64(58)  # 64 - log2(BUCKETS)
_WRITE_PAGES = 256


class Pairs:
    """Pairs added in any order; ``ascending`` gives them sorted, each once. To be closed."""

    def __init__(self, disk: Disk, scratch_path: str) -> None:
        self._disk = disk
        self._path = scratch_path
        self._scratch: File | None = None
        self._scratch_bytes = 0
        # Of each bucket: where its fingerprints and its positions lie in the scratch file, and how many.
        self._extents: list[list[tuple[int, int, int]]] = [[] for _ in range(BUCKETS)]
        self._held: list[tuple[Words, Words]] = []
        self._held_pairs = 0

    def add(self, hi: Words, positions: Words) -> None:
        self._held.append((hi, positions))
        self._held_pairs += len(hi)
        if self._held_pairs >= CHUNK_PAIRS:
            self._spill()

    def ascending(self) -> Iterator[tuple[Words, Words]]:
        """Sorted by fingerprint, then position, without repeats, a bucket at a time."""
        if self._scratch is None:
            yield self._taken()
            return
        self._spill()
        for extents in self._extents:
            parts = [self._read(*extent) for extent in extents]
            if parts:
                yield _sorted(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
            self._disk.unlink(self._path)

    def _taken(self) -> tuple[Words, Words]:
        held, self._held, self._held_pairs = self._held, [], 0
        if not held:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        return _sorted(np.concatenate([h for h, _ in held]), np.concatenate([p for _, p in held]))

    def _spill(self) -> None:
        hi, positions = self._taken()
        if self._scratch is None:
            self._disk.unlink(self._path)  # left over by a crash
            self._scratch = self._disk.open(self._path, "create")
        ends = np.searchsorted(hi >> _SHIFT, np.arange(1, BUCKETS + 1, dtype=np.uint64))
        at = self._scratch_bytes
        self._scratch_bytes += self._scratch.pwrite([hi.tobytes(), positions.tobytes()], at)
        first = 0
        for bucket, end in enumerate(ends.tolist()):
            if end > first:
                self._extents[bucket].append((at + 8 * first, at + 8 * (len(hi) + first), end - first))
            first = end

    def _read(self, hi_at: int, positions_at: int, count: int) -> tuple[Words, Words]:
        assert self._scratch is not None, "extents are of the scratch file"
        hi = np.frombuffer(self._scratch.pread(8 * count, hi_at), np.uint64)
        return hi, np.frombuffer(self._scratch.pread(8 * count, positions_at), np.uint64)


def ascending(part: Part) -> Iterator[tuple[Words, Words]]:
    """The pairs of a gathered segment, as ``Pairs.ascending`` gives them."""
    for hi, positions in buckets_of(*part.columns()):
        yield _sorted(hi, positions)


def _sorted(hi: Words, positions: Words) -> tuple[Words, Words]:
    hi, positions = sort_key_index(hi, positions)
    if len(hi) > 1:
        keep = np.empty(len(hi), np.bool_)
        keep[0] = True
        np.not_equal(hi[1:], hi[:-1], out=keep[1:])
        keep[1:] |= positions[1:] != positions[:-1]
        if not keep.all():
            hi, positions = hi[keep], positions[keep]
    return hi, positions


def pages_of(buckets: Iterator[tuple[Words, Words]]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(pairs, pages) in portions: all pages but the very last one are full."""
    rest_hi, rest_at = np.empty(0, np.uint64), np.empty(0, np.uint64)
    number = 1
    for hi, positions in buckets:
        rest_hi, rest_at = np.concatenate([rest_hi, hi]), np.concatenate([rest_at, positions])
        whole = len(rest_hi) // PAGE_PAIRS * PAGE_PAIRS
        for first in range(0, whole, PAGE_PAIRS * _WRITE_PAGES):
            end = min(whole, first + PAGE_PAIRS * _WRITE_PAGES)
            pages = encode_pages(rest_hi[first:end], rest_at[first:end], first_number=number)
            number += len(pages)
            yield end - first, pages
        rest_hi, rest_at = rest_hi[whole:], rest_at[whole:]
    if len(rest_hi):
        yield len(rest_hi), encode_pages(rest_hi, rest_at, first_number=number)
