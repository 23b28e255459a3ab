"""A table's map of one topic: the newest value per key, and what changed. No I/O.

New and changed keys are objects in a dictionary, the *young* ones, until they are many; then they are packed
(``firn.client.packedrows``). Batches of many rows are packed at once, by columns. Memory follows the live
keys; a deleted key leaves nothing behind.

Invariants: a key is young or packed, never both. What the map shows of a key never goes back to an older record. A
partition is read in offset order, so only a *pass* (reading a partition anew, after SnapshotExpired, perhaps from
another replica) can bring older records: it is held apart and applied as a whole once it has reached what was known
before, and then only what differs is reported. Rows do not move during a pass. A key lives in one partition (the one
its hash names): a record of it in another one is taken as newer.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn.client.cursor import Piece
from firn.client.packedrows import CHUNK_BYTES, Chunk, PackedRows

Change = Callable[[bytes, bytes | None, bytes | None], None]
Bools = NDArray[np.bool_]

YOUNG_ROWS = 16_384
YOUNG_BYTES = 16 << 20
COLUMN_ROWS = 512  # a batch of fewer new rows is not worth a chunk


class _Known(NamedTuple):
    partition: int
    offset: int
    value: bytes


_NOTHING: tuple[int, bytes | None] = (-2, None)  # below every offset, and below -1: see ``forget_offsets``


class _Pass:
    """A partition being read anew: what differs from the map, and which keys were met as they are."""

    __slots__ = ("found", "met", "met_young")

    def __init__(self) -> None:
        self.found: dict[bytes, tuple[int, bytes | None]] = {}
        self.met: dict[Chunk, bytearray] = {}
        self.met_young: set[bytes] = set()


class TableState:
    """The map. Changes are reported to ``changed`` as (key, old, new); None is absence. While ``is_watched`` is False
    those of ``apply_piece`` may be left out."""

    def __init__(self, changed: Change, hash_of: Callable[[bytes], int] = hash) -> None:
        self.is_watched = True
        self._changed = changed
        self._young: dict[bytes, _Known] = {}
        self._young_bytes = 0
        self._packed = PackedRows(hash_of)
        self._passes: dict[int, _Pass] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._packed)

    def __iter__(self) -> Iterator[bytes]:
        for chunk, rows in self._packed.live_rows():
            keys = chunk.key_list()
            yield from keys if len(rows) == len(keys) else map(keys.__getitem__, rows.tolist())
        yield from list(self._young)

    def __contains__(self, key: object) -> bool:
        return key in self._young or (isinstance(key, bytes) and self._packed.find(key) is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of what is packed."""
        return self._packed.nbytes

    def get(self, key: bytes) -> bytes | None:
        young = self._young.get(key)
        if young is not None:
            return young.value
        found = self._packed.find(key)
        return None if found is None else found[0].value(found[1])

    def offset(self, key: bytes) -> int | None:
        """The offset of the key's record, as ``if_offset`` wants it."""
        known = self._known(key)
        return None if known is None else known.offset

    def _known(self, key: bytes) -> _Known | None:
        found = self._young.get(key)
        if found is None and (place := self._packed.find(key)) is not None:
            chunk, at = place
            found = _Known(int(chunk.partitions[at]), int(chunk.offsets[at]), chunk.value(at))
        return found

    def apply_piece(self, partition: int, piece: Piece) -> None:
        """Take the next records of a partition, in order."""
        keys, count = piece.batch.key_list(), piece.batch.header.records
        left = np.ones(count, np.bool_) if piece.keep is None else piece.keep
        if count >= COLUMN_ROWS and partition not in self._passes and not self.is_watched:
            left = self._pack(partition, piece, keys, left)
        columns, rows = piece.batch.columns, np.flatnonzero(left)
        starts, raw = columns.value_starts()[rows].tolist(), columns.values.data
        lengths, offsets = columns.value_lengths[rows].tolist(), columns.offsets[rows].tolist()
        for row, start, length, offset in zip(rows.tolist(), starts, lengths, offsets, strict=True):
            value = None if length < 0 else bytes(raw[start : start + length])
            self.apply(partition, offset, keys[row], value)

    def _pack(self, partition: int, piece: Piece, keys: list[bytes], chosen: Bools) -> Bools:
        """Packs the last row of each key, of the chosen rows, where that is simple; which are left to be applied."""
        columns, packed = piece.batch.columns, self._packed
        tags = packed.tags_of(keys)
        ordered = np.sort(tags)
        packed.reserve(len(keys))
        is_known, places = packed.probe(tags)
        fit = columns.value_lengths >= 0
        if (ordered[1:] == ordered[:-1]).any():
            last = {keys[row]: row for row in np.flatnonzero(chosen).tolist()}
            chosen = np.zeros(len(keys), np.bool_)
            chosen[list(last.values())] = True
        if self._young:
            fit &= ~np.fromiter(map(self._young.__contains__, keys), np.bool_, len(keys))
        doubted = np.flatnonzero(chosen & fit & is_known)
        if len(doubted):
            names = [keys[row] for row in doubted.tolist()]
            fit[doubted] = packed.are_older(places[doubted], names, partition, columns.offsets[doubted])
        fit &= chosen
        rows = np.flatnonzero(fit)
        if len(rows) < COLUMN_ROWS:
            return chosen
        if 8 * len(rows) > 7 * len(keys):  # whole columns: the few others are dead rows
            chunk = Chunk(
                columns.keys.tobytes(), columns.key_starts()[1:].astype(np.uint32).data,
                columns.values.tobytes(), columns.value_starts()[1:].astype(np.uint32).data,
                columns.offsets.copy(), np.full(len(keys), partition, np.int32),
            )  # fmt: skip
            packed.replace(chunk, rows, tags[rows], places[rows], is_known[rows])
        else:
            values, picked = piece.batch.value_list(), rows.tolist()
            chunk = Chunk.of(
                [keys[row] for row in picked], [values[row] or b"" for row in picked], columns.offsets[rows],
                np.full(len(rows), partition, np.int32),
            )  # fmt: skip
            packed.replace(chunk, np.arange(len(rows)), tags[rows], places[rows], is_known[rows])
        self._tidy()
        return chosen & ~fit

    def apply(self, partition: int, offset: int, key: bytes, value: bytes | None) -> None:
        """Take the next record of a partition."""
        current = self._passes.get(partition)
        if current is not None:
            self._apply_to_pass(current, partition, offset, key, value)
        elif value is None:
            self._remove(key, partition, offset)
        else:
            self._put(key, partition, offset, value)

    def _put(self, key: bytes, partition: int, offset: int, value: bytes) -> None:
        known = self._known(key)
        if known is not None:
            if known.partition == partition and known.offset >= offset:
                return
            self._drop(key)
        self._young[key] = _Known(partition, offset, value)
        self._young_bytes += len(key) + len(value)
        self._tidy()
        old = None if known is None else known.value
        if old != value:
            self._changed(key, old, value)

    def _remove(self, key: bytes, partition: int, offset: int) -> None:
        known = self._known(key)
        if known is None or (known.partition == partition and known.offset > offset):
            return
        self._drop(key)
        self._tidy()
        self._changed(key, known.value, None)

    def _drop(self, key: bytes) -> None:
        """Takes out a key that is there."""
        young = self._young.pop(key, None)
        if young is None:
            self._packed.remove(key)
        else:
            self._young_bytes -= len(key) + len(young.value)

    def _tidy(self) -> None:
        """Packs the young keys when they are many, and gives memory back; not during a pass, which knows rows."""
        if self._passes:
            return
        if len(self._young) >= YOUNG_ROWS or self._young_bytes >= YOUNG_BYTES:
            self._pack_young()
        self._packed.tidy()

    def _pack_young(self) -> None:
        keys, known = list(self._young), list(self._young.values())
        self._young, self._young_bytes = {}, 0
        ends = np.cumsum([len(key) + len(row.value) for key, row in zip(keys, known, strict=True)])
        cuts = [0, *(np.flatnonzero(np.diff(ends // CHUNK_BYTES)) + 1).tolist(), len(keys)]
        for a, b in pairwise(cuts):
            rows, names = known[a:b], keys[a:b]
            chunk = Chunk.of(
                names, [row.value for row in rows], np.array([row.offset for row in rows], np.int64),
                np.array([row.partition for row in rows], np.int32),
            )  # fmt: skip
            self._packed.add(chunk, self._packed.tags_of(names))

    def begin_pass(self, partition: int) -> None:
        """The partition is read anew from its start; an unfinished pass of it is forgotten."""
        self._passes[partition] = _Pass()

    def is_in_pass(self, partition: int) -> bool:
        return partition in self._passes

    def forget_offsets(self, partition: int) -> None:
        """The topic was created anew: any record of its new life is newer than what is known."""
        for key, known in self._young.items():
            if known.partition == partition:
                self._young[key] = known._replace(offset=-1)
        self._packed.forget_offsets(partition)

    def _apply_to_pass(
        self, current: _Pass, partition: int, offset: int, key: bytes, value: bytes | None
    ) -> None:
        known = self._known(key)
        if known is None or (known.partition, known.offset) != (partition, offset):
            current.found[key] = (offset, value)
            return
        current.found.pop(key, None)
        if key in self._young:
            current.met_young.add(key)
        elif (place := self._packed.find(key)) is not None:
            chunk, at = place
            current.met.setdefault(chunk, bytearray(chunk.rows))[at] = 1

    def end_pass(self, partition: int) -> None:
        """The pass has reached everything that was known: the map becomes what it found."""
        current = self._passes.pop(partition, None)
        if current is None:
            return
        # A record that the pass did not meet, nor a newer one of its key, is gone: its key was deleted, and the
        # tombstone too is gone by now. An older record of the key that the pass met says nothing against that.
        gone = [
            (key, offset)
            for key, offset in self._not_met(current, partition)
            if current.found.get(key, _NOTHING)[0] <= offset
        ]
        for key, offset in gone:
            current.found.pop(key, None)
            self._remove(key, partition, offset)
        for key, (offset, value) in current.found.items():
            if value is None:
                self._remove(key, partition, offset)
            else:
                self._put(key, partition, offset, value)

    def _not_met(self, current: _Pass, partition: int) -> Iterator[tuple[bytes, int]]:
        """The partition's keys, with their offsets, that the pass did not meet as they are."""
        for key, known in self._young.items():
            if known.partition == partition and key not in current.met_young:
                yield key, known.offset
        for chunk, rows in self._packed.live_rows():
            rows = rows[chunk.partitions[rows] == partition]
            if (met := current.met.get(chunk)) is not None:
                rows = rows[np.frombuffer(met, np.uint8)[rows] == 0]
            for at in rows.tolist():
                yield chunk.key(at), int(chunk.offsets[at])
