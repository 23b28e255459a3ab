"""Rows of a table as chunks of bytes, found by key: beside its own bytes a key costs 31 to 41.

A *chunk* holds keys, one after another, their values, and columns of ends, offsets and partitions. A row's number is
its chunk's base and its place there. An open hash table of two columns, *tag* (32 bits of the key's hash) and row
number, names the live row of each key; who does not find it at its place goes on to the next one. Objects are made of
what is asked, alone.

Invariants: a row is live if and only if the hash table names it; no key has two; ``_live`` is what the live rows of each
chunk weigh; at most three quarters of the places are taken; after ``tidy`` dead rows weigh at most ``SLACK_BYTES`` more
than live ones. Hashes are Python's own, so that who chooses keys cannot choose where they meet.

A dictionary of objects for keys, values and places was measured first: 180 bytes a key beside its own.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from firn.errors import LimitExceeded

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]

ROW_BYTES = 20  # of columns
SLACK_BYTES = 8 << 20
CHUNK_BYTES = 8 << 20  # where chunks are merged; with the largest batch behind it below what u32 ends can say
ROWS_MAX = 0xFFFF_FFFE
_EMPTY, _GONE = 0xFFFF_FFFF, 0xFFFF_FFFE  # instead of a row: never taken; its key was removed
_PLACES_MIN = 1 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """*Shape*: one item a row; ``key_ends`` and ``value_ends`` are where its bytes end."""

    keys: bytes
    key_ends: memoryview  # u32, as the next; of one row a view gives an int faster than an array
    values: bytes
    value_ends: memoryview
    offsets: I64
    partitions: NDArray[np.int32]

    @classmethod
    def of(
        cls, keys: Sequence[bytes], values: Sequence[bytes], offsets: I64, partitions: NDArray[np.int32]
    ) -> "Chunk":
        return cls(b"".join(keys), _ends(keys), b"".join(values), _ends(values), offsets, partitions)

    @property
    def rows(self) -> int:
        return len(self.offsets)

    @property
    def weight(self) -> int:
        """Bytes of keys, values and columns."""
        return len(self.keys) + len(self.values) + ROW_BYTES * self.rows

    def weights(self) -> I64:
        """Of each row."""
        return np.diff(self.key_ends, prepend=0) + np.diff(self.value_ends, prepend=0) + np.int64(ROW_BYTES)

    def weight_of(self, at: int) -> int:
        keys, values = self.key_ends, self.value_ends
        before = keys[at - 1] + values[at - 1] if at else 0
        return keys[at] + values[at] - before + ROW_BYTES

    def key(self, at: int) -> bytes:
        return self.keys[self.key_ends[at - 1] if at else 0 : self.key_ends[at]]

    def value(self, at: int) -> bytes:
        return self.values[self.value_ends[at - 1] if at else 0 : self.value_ends[at]]

    def key_list(self) -> list[bytes]:
        return [self.keys[a:b] for a, b in pairwise([0, *self.key_ends.tolist()])]


def _ends(parts: Sequence[bytes]) -> memoryview:
    return np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts))).astype(np.uint32).data


class PackedRows:
    def __init__(self, hash_of: Callable[[bytes], int] = hash) -> None:
        self._hash_of = hash_of
        self._chunks: list[Chunk] = []
        self._bases: list[int] = []  # ascending
        self._live: list[int] = []  # bytes of live rows
        self._next_row = 0
        self._count = 0  # live rows
        self.live_bytes = 0
        self._held_bytes = 0  # what all chunks weigh
        self._tags: U32 = np.zeros(0, np.uint32)
        self._rows: U32 = np.zeros(0, np.uint32)
        self._resize(0)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._held_bytes + self._tags.nbytes + self._rows.nbytes

    def tags_of(self, keys: Sequence[bytes]) -> U32:
        return np.fromiter(map(self._hash_of, keys), np.int64, len(keys)).astype(np.uint32)

    def find(self, key: bytes) -> tuple[Chunk, int] | None:
        """Where the key's live row is."""
        found = self._find(key)
        return None if found is None else (self._chunks[found[1]], found[2])

    def remove(self, key: bytes) -> None:
        """The row of a key, which has one, is no longer live."""
        found = self._find(key)
        assert found is not None, "only what was found is removed"
        place, number, at = found
        self._bury(number, at)
        self._rows[place] = _GONE
        self._count -= 1

    def _bury(self, number: int, at: int) -> None:
        weight = self._chunks[number].weight_of(at)
        self._live[number] -= weight
        self.live_bytes -= weight

    def _find(self, key: bytes) -> tuple[int, int, int] | None:
        """The place that names the key's row, the number of its chunk, and where the row is there."""
        tags, rows, last = self._tag_view, self._row_view, len(self._row_view) - 1
        tag = self._hash_of(key) & 0xFFFF_FFFF
        place = tag >> self._shift
        while (row := rows[place]) != _EMPTY:
            if tags[place] == tag and row != _GONE:
                number = bisect_right(self._bases, row) - 1
                at = row - self._bases[number]
                if self._chunks[number].key(at) == key:
                    return place, number, at
            place = place + 1 & last
        return None

    def probe(self, tags: U32) -> tuple[NDArray[np.bool_], I64]:
        """Of the tag of each key whether the key may be here (False is certain), and the place that may name it, or
        the empty one for it."""
        found = np.zeros(len(tags), np.bool_)
        places = self._firsts(tags)
        asked, at = np.arange(len(tags)), places
        while True:
            rows = self._rows[at]
            taken = np.flatnonzero(rows != _EMPTY)
            if not len(taken):
                return found, places
            asked, at = asked[taken], at[taken]
            hit = (rows[taken] != _GONE) & (self._tags[at] == tags[asked])
            found[asked[hit]] = True
            asked, at = asked[~hit], self._behind(at[~hit])
            places[asked] = at

    def are_older(
        self, places: I64, keys: Sequence[bytes], partition: int, offsets: I64
    ) -> NDArray[np.bool_]:
        """Whether the rows that these places name are of these keys, and older than such offsets of a partition."""
        found = []
        for key, offset, (number, at) in zip(keys, offsets.tolist(), self._rows_at(places), strict=True):
            chunk = self._chunks[number]
            is_older = chunk.offsets[at] < offset or chunk.partitions[at] != partition
            found.append(bool(is_older and chunk.key(at) == key))
        return np.array(found, np.bool_)

    def _rows_at(self, places: I64) -> Iterator[tuple[int, int]]:
        """Of each place the number of the chunk of the row that it names, and where the row is there."""
        rows, bases = self._rows[places].astype(np.int64), np.array(self._bases, np.int64)
        numbers = np.searchsorted(bases, rows, side="right") - 1
        return zip(numbers.tolist(), (rows - bases[numbers]).tolist(), strict=True)

    def _places(self, tags: U32, rows: U32) -> I64:
        """Of each row with its tag the place that names it; -1 when none does."""
        found = np.full(len(rows), -1, np.int64)
        asked, places = np.arange(len(rows)), self._firsts(tags)
        while len(asked):
            there = self._rows[places]
            hit = there == rows[asked]
            found[asked[hit]] = places[hit]
            on = ~hit & (there != _EMPTY)
            asked, places = asked[on], self._behind(places[on])
        return found

    def _firsts(self, tags: U32) -> I64:
        return (tags >> np.uint32(self._shift)).astype(np.int64)

    def _behind(self, places: I64) -> I64:
        return (places + 1) & (len(self._rows) - 1)

    def reserve(self, rows: int) -> None:
        """Makes room for so many more keys; places that were found before are no longer right."""
        if 4 * (self._taken + rows) > 3 * len(self._rows):
            self._resize(self._count + rows)

    def add(self, chunk: Chunk, tags: U32) -> None:
        """Rows of keys that are not here, each once. Errors: LimitExceeded for more than 4 billion rows."""
        self.reserve(chunk.rows)
        nothing = np.zeros(chunk.rows, np.bool_)
        self.replace(chunk, np.arange(chunk.rows), tags, self._firsts(tags), nothing)

    def replace(self, chunk: Chunk, rows: I64, tags: U32, places: I64, is_known: NDArray[np.bool_]) -> None:
        """Rows of a chunk, each of another key, become the live ones; it has none beside them.

        Shape: ``rows`` ascending; of each its tag, the place that ``probe`` found, and whether that names a row of
        the same key, which is dead from now on; else the key is not here.
        Errors: as ``add``.
        """
        base = self._append(chunk)
        for number, at in self._rows_at(places[is_known]):
            self._bury(number, at)
        weight = chunk.weight if len(rows) == chunk.rows else int(chunk.weights()[rows].sum())
        self._live[-1] += weight
        self.live_bytes += weight
        numbers = (rows + base).astype(np.uint32)
        self._rows[places[is_known]] = numbers[is_known]
        is_new = ~is_known
        self._count += int(is_new.sum())
        self._insert(tags[is_new], numbers[is_new], places[is_new])

    def _append(self, chunk: Chunk) -> int:
        """The base of a chunk that now is the last one; none of its rows is live yet."""
        if self._next_row + chunk.rows > ROWS_MAX:
            self._renumber()
            if self._next_row + chunk.rows > ROWS_MAX:
                raise LimitExceeded(f"a table holds at most {ROWS_MAX} rows")
        base = self._next_row
        self._chunks.append(chunk)
        self._bases.append(base)
        self._live.append(0)
        self._next_row += chunk.rows
        self._held_bytes += chunk.weight
        return base

    def _renumber(self) -> None:
        """Numbers from 0 again, without those of dropped chunks."""
        sizes = np.array([chunk.rows for chunk in self._chunks], np.int64)
        bases, fresh = np.array(self._bases, np.int64), np.cumsum(sizes) - sizes
        live = self._rows < _GONE
        rows = self._rows[live].astype(np.int64)
        number = np.searchsorted(bases, rows, side="right") - 1
        self._rows[live] = rows - bases[number] + fresh[number]
        self._bases = fresh.tolist()
        self._next_row = int(sizes.sum())

    def _resize(self, rows: int) -> None:
        """The hash table anew, with places for so many rows and some more; those of removed keys go."""
        live = self._rows < _GONE
        tags, numbers = self._tags[live], self._rows[live]
        places = _PLACES_MIN
        while 5 * rows > 3 * places:
            places *= 2
        self._shift = 33 - places.bit_length()
        self._tags = np.zeros(places, np.uint32)
        self._rows = np.full(places, _EMPTY, np.uint32)
        self._taken = 0
        self._insert(tags, numbers, self._firsts(tags))
        self._tag_view, self._row_view = self._tags.data, self._rows.data  # faster for one

    def _insert(self, tags: U32, rows: U32, places: I64) -> None:
        """Names rows at empty places. Of those that want the same one a single one stays; the others go on."""
        self._taken += len(rows)
        while len(rows):
            empty = np.flatnonzero(self._rows[places] == _EMPTY)
            self._rows[places[empty]] = rows[empty]
            is_named = self._rows[places] == rows
            named, on = np.flatnonzero(is_named), np.flatnonzero(~is_named)
            self._tags[places[named]] = tags[named]
            places, tags, rows = self._behind(places[on]), tags[on], rows[on]

    def live_rows(self) -> Iterator[tuple[Chunk, I64]]:
        """Of each chunk that has any the places of its live rows, ascending."""
        rows = np.sort(self._rows[self._rows < _GONE])
        cuts = [*np.searchsorted(rows, np.array(self._bases, np.uint32)).tolist(), len(rows)]
        for chunk, base, (a, b) in zip(list(self._chunks), list(self._bases), pairwise(cuts), strict=True):
            if a < b:
                yield chunk, rows[a:b].astype(np.int64) - base

    def forget_offsets(self, partition: int) -> None:
        """The rows of a partition have offset -1 from now on."""
        for chunk in self._chunks:
            chunk.offsets[chunk.partitions == partition] = -1

    def tidy(self) -> None:
        """Writes chunks anew of which less than half is live, when dead rows weigh more than live ones."""
        while self._held_bytes - self.live_bytes > self.live_bytes + SLACK_BYTES:
            group: list[int] = []
            size = 0
            for number, chunk in enumerate(self._chunks):
                if 2 * self._live[number] <= chunk.weight:
                    group.append(number)
                    size += self._live[number]
                    if size >= CHUNK_BYTES:
                        break
            self._merge(group)
        if len(self._rows) > max(_PLACES_MIN, 8 * self._count):
            self._resize(self._count)

    def _merge(self, group: list[int]) -> None:
        """One chunk of the live rows of some, which are dropped."""
        keys: list[bytes] = []
        values: list[bytes] = []
        offsets, partitions, places = [], [], []
        for number in group:
            chunk, base = self._chunks[number], self._bases[number]
            names = chunk.key_list()
            found = self._places(self.tags_of(names), np.arange(base, base + chunk.rows, dtype=np.uint32))
            live = np.flatnonzero(found >= 0)
            keys += map(names.__getitem__, live.tolist())
            values += map(chunk.value, live.tolist())
            offsets.append(chunk.offsets[live])
            partitions.append(chunk.partitions[live])
            places.append(found[live])
        for number in reversed(group):
            self._held_bytes -= self._chunks[number].weight
            del self._chunks[number], self._bases[number], self._live[number]
        if keys:
            merged = Chunk.of(keys, values, np.concatenate(offsets), np.concatenate(partitions))
            base = self._append(merged)
            self._live[-1] = merged.weight
            self._rows[np.concatenate(places)] = np.arange(base, base + merged.rows, dtype=np.uint32)
