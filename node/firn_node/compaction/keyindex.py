"""Key indexes: which row holds which key's fingerprint, sorted.

A row is ``(hi, word)``: the upper 64 bits of the fingerprint, and ``lo << 32 | row << 1 | tombstone``. Sorted by
``hi``, then ``word``: the rows of one fingerprint are neighbours, oldest first. In a file it lies in blocks:

============= ============== ==============================================================
part          type           note
============= ============== ==============================================================
blocks        64 KiB each    ``hi`` u64[m], then ``word`` u64[m]; m is 4096, in the last block fewer
fences        u64[blocks]    the first ``hi`` of each block
block CRCs    u32[blocks]    CRC-32C of each block; padded with zeros to 8 bytes
============= ============== ==============================================================

The footer of the file holds a CRC of fences and block CRCs. A block's CRC is checked whenever the block is read as
a whole by ``block``; look-ups check it at their first touch since the file was opened, and then read the few rows
around the place where a fingerprint must lie. Invariant: fences never fall.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from firn.batch import padded
from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.compaction.ahead import AHEAD, BLOCKS
from firn_node.disk import File, gather
from firn_node.filecache import FileCache, FileRange
from firn_node.kernels.compact import readonly
from firn_node.kernels.jit import aligned
from firn_node.kernels.lookup import lookup_newest, near
from firn_node.kernels.single import NO_ROW, UNDECIDED, row_near
from firn_node.kernels.windows import windows_in_blocks

BLOCK_ROWS = 4096
ROW_BYTES = 16
BLOCK_BYTES = BLOCK_ROWS * ROW_BYTES
# The place of a uniform fingerprint within a block is known to 32 rows at one standard deviation: this is four.
_NEAR_ROWS = 256
# From so many look-ups in one block on, the whole of it is read once.
_WHOLE_BLOCK_MIN = 4
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]


class DamagedIndex(Corrupt):
    """A key index or batch index that does not fit its CRC: rebuilt from the batches, never trusted."""


class KeyIndex(Protocol):
    rows: int
    fences: U64

    def block(self, number: int) -> tuple[U64, U64]:
        """(hi, word) of one block, read-only. *Errors*: DamagedIndex."""
        ...

    def once_checked(self, number: int) -> tuple[U64, U64]:
        """As ``block``; its CRC is checked unless that was done since the file was opened."""
        ...

    def find(self, hi: int, lo: int) -> list[int]:
        """The rows of a fingerprint, newest first. *Errors*: DamagedIndex."""
        ...

    def find_newest(self, hi: U64, lo: U32, numbers: I64) -> I64:
        """The newest row of each fingerprint, which block ``numbers`` alone may hold; -1: none, -2: doubtful."""
        ...


class ArrayKeyIndex:
    """A key index in memory: the rows of an active segment."""

    def __init__(self, hi: U64, word: U64) -> None:
        self.rows = len(hi)
        self._hi, self._word = readonly(hi), readonly(word)
        self.fences: U64 = self._hi[::BLOCK_ROWS]

    def block(self, number: int) -> tuple[U64, U64]:
        at = number * BLOCK_ROWS
        return self._hi[at : at + BLOCK_ROWS], self._word[at : at + BLOCK_ROWS]

    def once_checked(self, number: int) -> tuple[U64, U64]:
        return self.block(number)

    def find(self, hi: int, lo: int) -> list[int]:
        return candidates(self, hi, lo)

    def find_newest(self, hi: U64, lo: U32, numbers: I64) -> I64:
        found = np.empty(len(hi), np.int64)
        for number in np.unique(numbers).tolist():
            some = numbers == number
            found[some] = lookup_newest(*self.block(number), hi[some], lo[some])
        return found


class BlockCache:
    """Recently used batches, at most ``bytes_max`` of them; shared by all logs of a process."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._found: OrderedDict[tuple[object, ...], tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def limit(self, bytes_max: int) -> None:
        """Hold at most so many bytes from now on."""
        with self._lock:
            self._bytes_max = bytes_max
            self._shrink()

    def get(self, key: tuple[object, ...], load: Callable[[], tuple[Any, int]]) -> Any:
        """The value under ``key``; ``load`` gives it and its bytes. What is larger than a quarter is not kept."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
                return found[0]
        value, size = load()
        if size <= self._bytes_max // 4:
            with self._lock:
                if key not in self._found:
                    self._found[key] = (value, size)
                    self._bytes += size
                    self._shrink()
        return value

    def _shrink(self) -> None:
        while self._bytes > self._bytes_max:
            self._bytes -= self._found.popitem(last=False)[1][1]


class FileKeyIndex:
    """A key index in a file, read block by block."""

    def __init__(
        self, cache: FileCache, path: str, *, position: int, rows: int, fences: U64, crcs: NDArray[Any]
    ) -> None:
        self.rows = rows
        self.fences = fences
        self.path = path
        self._cache = cache
        self._position = position
        self._crcs = crcs
        self._fence_view = fences.data
        self._is_checked = bytearray(len(fences))  # 1: the block's CRC was found good

    def block(self, number: int) -> tuple[U64, U64]:
        return self._block(number, is_checked=False)

    def once_checked(self, number: int) -> tuple[U64, U64]:
        return self._block(number, is_checked=bool(self._is_checked[number]))

    def find(self, hi: int, lo: int) -> list[int]:
        fences = self._fence_view
        number = max(bisect_left(fences, hi) - 1, 0)
        above = fences[number + 1] if number + 1 < len(fences) else 1 << 64
        if above > hi and len(fences) and self._is_checked[number]:
            with self._cache.lease(self.path) as file:
                found = self._rows_near(file, number, hi, lo, above)
            if found is not None:
                return found
        is_first = number < len(fences) and not self._is_checked[number]
        rows = candidates(self, hi, lo)
        if is_first:
            self._ask_ahead(number)
        return rows

    def _ask_ahead(self, number: int) -> None:
        """Have the blocks behind one that was touched for the first time checked."""
        behind = [
            n
            for n in range(number + 1, min(number + 1 + BLOCKS, len(self.fences)))
            if not self._is_checked[n]
        ]
        if behind and self._range(0, 0).is_real():
            AHEAD.ask(partial(self._check_ahead, behind))

    def _check_ahead(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            rows, position = self._extent(number)
            if self._range(position, rows * ROW_BYTES).is_in_memory() and not self._is_checked[number]:
                self.block(number)

    def _range(self, position: int, size: int) -> FileRange:
        return FileRange(self._cache.lease(self.path), position, size)

    def _rows_near(self, file: File, number: int, hi: int, lo: int, above: int) -> list[int] | None:
        """As ``find``, in a block whose next fence is ``above``; None: they are not where they should be."""
        rows, position = self._extent(number)
        least = self._fence_view[number]
        guess = (hi - least) * rows // (above - least) if hi > least else 0
        first = max(0, min(guess, rows) - _NEAR_ROWS // 2)
        count = min(_NEAR_ROWS, rows - first)
        if (fd := file.fileno()) is not None:
            row = row_near(fd, position, rows, first, count, hi, lo)
            if row != UNDECIDED:
                return [] if row == NO_ROW else [row]
        data = file.pread(8 * count, position + 8 * first)
        if len(data) != 8 * count:
            return None
        his = memoryview(data).cast("Q")
        if (first and his[0] >= hi) or (first + count < rows and his[-1] <= hi):
            return None
        a = bisect_left(his, hi)
        b = bisect_right(his, hi, a)
        raw = file.pread(8 * (b - a), position + 8 * (rows + first + a)) if a < b else b""
        if len(raw) != 8 * (b - a):
            return None
        return [(word & 0xFFFFFFFF) >> 1 for word in reversed(memoryview(raw).cast("Q")) if word >> 32 == lo]

    def find_newest(self, hi: U64, lo: U32, numbers: I64) -> I64:
        """Reads near the place of each, all at once; what is not near, or not alone there, is doubtful."""
        for number in numbers.tolist():
            if not self._is_checked[number]:
                self.block(number)
        hi = aligned(hi, np.uint64)
        starts, rows, first, count, sizes = np.empty((5, len(hi)), np.int64)
        windows_in_blocks(
            self.fences, self.rows, BLOCK_ROWS, _NEAR_ROWS, hi, numbers, starts, rows, first, count, sizes
        )
        positions = self._position + ROW_BYTES * starts
        found = np.full(len(hi), -2, np.int64)
        with self._cache.lease(self.path) as file:
            data = gather(file, positions + 8 * first, sizes)
            if data is None:
                return found
            at = near(data.view(np.uint64), count, first, rows, hi)
            found[at == -1] = -1
            hits = np.flatnonzero(at >= 0)
            words = gather(file, (positions + 8 * rows)[hits] + 8 * at[hits], np.full(len(hits), 8))
        if words is not None:
            word = words.view(np.uint64)
            is_same = word >> np.uint64(32) == lo[hits]
            found[hits] = np.where(
                is_same, (word & np.uint64(0xFFFFFFFF)) >> np.uint64(1), np.uint64(0)
            ).astype(np.int64)
            found[hits[~is_same]] = -1
        return found

    def _extent(self, number: int) -> tuple[int, int]:
        """Rows and position of a block."""
        return min(BLOCK_ROWS, self.rows - number * BLOCK_ROWS), self._position + number * BLOCK_BYTES

    def _block(self, number: int, *, is_checked: bool) -> tuple[U64, U64]:
        rows, position = self._extent(number)
        with self._cache.lease(self.path) as file:
            data = file.pread(rows * ROW_BYTES, position)
        expected = int(self._crcs[number])
        if len(data) != rows * ROW_BYTES or (not is_checked and (found := crc32c(data)) != expected):
            what = f"{len(data)} bytes" if len(data) != rows * ROW_BYTES else f"{found:#010x}"
            raise DamagedIndex(
                f"{self.path} at byte {position}: key index block {number}: expected CRC {expected:#010x}, found {what}",
                file=self.path, position=position, expected=f"{expected:#010x}", found=what,
            )  # fmt: skip
        self._is_checked[number] = 1
        both = np.frombuffer(data, np.uint64)
        return both[:rows], both[rows:]


def tables_bytes(rows: int) -> int:
    """Bytes of fences and block CRCs."""
    blocks = -(-rows // BLOCK_ROWS)
    return 8 * blocks + padded(4 * blocks)


def first_block(index: KeyIndex, hi: int) -> int:
    """The number of the first block that may hold ``hi``."""
    return max(int(np.searchsorted(index.fences, np.uint64(hi), "left")) - 1, 0)


def candidates(index: KeyIndex, hi: int, lo: int) -> list[int]:
    """The rows of a fingerprint, newest first, by whole blocks."""
    found: list[int] = []
    low, high = np.uint64(lo << 32), np.uint64((lo << 32) | 0xFFFFFFFF)
    blocks = len(index.fences)
    for number in range(first_block(index, hi), blocks):
        if int(index.fences[number]) > hi:
            break
        his, words = index.once_checked(number)
        a, b = np.searchsorted(his, np.uint64(hi), "left"), np.searchsorted(his, np.uint64(hi), "right")
        if a == b:
            continue
        group = words[a:b]
        group = group[(group >= low) & (group <= high)]
        found += ((group & np.uint64(0xFFFFFFFF)) >> np.uint64(1)).astype(np.int64).tolist()
    return found[::-1]


def newest_rows(index: KeyIndex, hi: U64, lo: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The newest row of each fingerprint: -1 where there is none, -2 where ``find`` has to tell.

    *Shape*: as ``hi`` and ``lo``. Every block is read once at most. *Errors*: DamagedIndex.
    """
    found = np.full(len(hi), -1, np.int64)
    if not len(index.fences):
        return found
    last = np.searchsorted(index.fences, hi, "right") - 1
    first = np.maximum(np.searchsorted(index.fences, hi, "left") - 1, 0)
    found[last > first] = -2
    order = np.argsort(hi)
    order = order[last[order] == first[order]]
    blocks = first[order]
    cuts = np.flatnonzero(np.diff(blocks, prepend=-1))
    counts = np.diff(np.append(cuts, len(blocks)))
    few = np.repeat(counts < _WHOLE_BLOCK_MIN, counts)
    if few.any():
        found[order[few]] = index.find_newest(hi[order[few]], lo[order[few]], blocks[few])
    for at, count in zip(cuts.tolist(), counts.tolist(), strict=True):
        if count >= _WHOLE_BLOCK_MIN:
            part = order[at : at + count]
            his, words = index.once_checked(int(blocks[at]))
            found[part] = lookup_newest(his, words, hi[part], lo[part])
    return found


class KeyIndexWriter:
    """Writes sorted rows, given in pieces of any size, as blocks; keeps 12 bytes a block in memory."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._hi: list[U64] = []
        self._word: list[U64] = []
        self._pending = 0
        self._fences: list[int] = []
        self._crcs: list[int] = []
        self.rows = 0
        self.tombstones = 0  # of what was written

    def add(self, hi: U64, word: U64) -> None:
        """*Shape*: not below what was added before. The arrays are copied or written before return."""
        self.rows += len(hi)
        at = 0
        if self._pending:
            at = min(BLOCK_ROWS - self._pending, len(hi))
            self._hold(hi[:at], word[:at])
            if self._pending < BLOCK_ROWS:
                return
            self._write_held()
        while at + BLOCK_ROWS <= len(hi):
            self._block(hi[at : at + BLOCK_ROWS], word[at : at + BLOCK_ROWS])
            at += BLOCK_ROWS
        self._hold(hi[at:], word[at:])

    def _hold(self, hi: U64, word: U64) -> None:
        if len(hi):
            self._hi.append(hi.copy())
            self._word.append(word.copy())
            self._pending += len(hi)

    def _write_held(self) -> None:
        self._block(np.concatenate(self._hi), np.concatenate(self._word))
        self._hi, self._word, self._pending = [], [], 0

    def finish(self) -> bytes:
        """The last block is written; the bytes of fences and block CRCs come back."""
        if self._pending:
            self._write_held()
        crcs = np.array(self._crcs, "<u4").tobytes()
        return np.array(self._fences, "<u8").tobytes() + crcs + bytes(-len(crcs) % 8)

    def _block(self, hi: U64, word: U64) -> None:
        data = hi.tobytes() + word.tobytes()
        self.tombstones += int(np.count_nonzero(word & np.uint64(1)))
        self._fences.append(int(hi[0]))
        self._crcs.append(crc32c(data))
        self._write(data)
