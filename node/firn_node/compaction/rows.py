"""Single rows of a checked batch: a key is compared and a value cut out without decoding the rest.

A batch whose keys and values are stored plain, without tags and headers, is read row by row: of its lengths one start
in 64 is kept, none where all are the same. Any other batch is decoded as a whole.

Invariants: the caller has checked the batch's CRCs since its file was opened; what is read again is held to the
batch's bounds; a row is given only to who names its real key.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from firn.batch import (
    HEADER_BYTES,
    LENGTHS_BYTES,
    Batch,
    BatchHeader,
    Codec,
    decode_headers,
    decode_tags,
    padded,
    parse_header,
)
from firn.errors import MalformedBatch
from firn.values import LATER
from firn_node.compaction.answers import I64, FoundRow
from firn_node.compaction.taking import ROW_COSTS_BYTES, Even, Source, Taking
from firn_node.kernels.jit import aligned
from firn_node.kernels.single import FOUND, OTHER_KEY, STAMP_AND_DELTA, UNREADABLE, VALUE_AT, even_row
from firn_node.kernels.taking import take_rows

_HELD_BYTES_MAX = 4096  # a batch of at most so many bytes is kept whole
_GROUP = 64
_LENGTHS_AT = HEADER_BYTES + LENGTHS_BYTES


Read = Callable[[int, int], bytes]  # so many bytes from a byte of the batch on, or Corrupt


class BatchRows(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes that are held in memory, about."""
        ...

    @property
    def even(self) -> Even | None:
        """Where the rows lie, if that is a product."""
        ...

    def row(self, at: int, key: bytes) -> FoundRow | None:
        """Record ``at`` when its real key is ``key``. *Errors*: Corrupt."""
        ...

    def take(self, rows: I64, picks: I64, taking: Taking) -> None:
        """Answers the picks from the rows (ascending), one each, perhaps not before ``taking`` is flushed.

        AGAIN where a row has another key.

        *Errors*: as ``row``.
        """
        ...


def open_rows(source: Source, position: int, records: int, whole: Batch | None) -> BatchRows:
    """The rows of a batch of ``records`` records; ``whole``: its bytes, where the caller has them already.

    *Errors*: Corrupt, MalformedBatch.
    """
    header = whole.header if whole is not None else parse_header(_read(source, position, HEADER_BYTES))
    if header.records != records:
        raise MalformedBatch(f"batch header: expected {records} records, found {header.records}")
    fixed = padded(4 * records) * (3 if header.is_sparse else 2) + 8 * records
    if header.keys_bytes < LENGTHS_BYTES + fixed:
        raise MalformedBatch(f"batch keys part: {header.keys_bytes} bytes do not hold {records} records")
    size = _LENGTHS_AT + fixed
    head = bytes(whole.data[:size]) if whole is not None else _read(source, position, size)
    lengths = np.frombuffer(head, "<u4", 8, HEADER_BYTES).tolist()
    if header.keys_codec == header.values_codec == Codec.NONE and not lengths[2] and not lengths[6]:
        held = b""
        if header.size <= _HELD_BYTES_MAX:
            held = bytes(whole.data) if whole is not None else _read(source, position, header.size)
        return PlainRows(source, position, header, head, held)
    return WholeRows(whole or Batch(_read(source, position, header.size)))


class _Column:
    """Where each record's bytes begin, of a column of lengths and one of bytes."""

    __slots__ = ("_first", "_lengths_at", "_starts", "nbytes", "same")

    def __init__(self, lengths: NDArray[np.int32], *, lengths_at: int, first: int) -> None:
        self._lengths_at, self._first = lengths_at, first
        least = int(lengths.min())
        self.same: int | None = least if least == int(lengths.max()) else None
        self._starts: list[int] = []
        if self.same is None:
            sums = np.add.reduceat(np.maximum(lengths, 0), np.arange(0, len(lengths), _GROUP), dtype=np.int64)
            self._starts = [0, *np.cumsum(sums)[:-1].tolist()]
        self.nbytes = 40 * len(self._starts)

    def place(self, read: Read, at: int) -> tuple[int, int]:
        """Start and length (-1: a tombstone) of record ``at``."""
        if self.same is not None:
            return self._first + at * max(self.same, 0), self.same
        group, within = divmod(at, _GROUP)
        raw = read(self._lengths_at + 4 * _GROUP * group, 4 * within + 4)
        lengths = memoryview(raw).cast("i").tolist()
        length = lengths.pop()
        return self._first + self._starts[group] + sum(n for n in lengths if n > 0), length


class _Reading:
    """Reads of one batch: its file is leased once for all of them."""

    __slots__ = ("_held", "_part", "_position", "_size", "_source")

    def __init__(self, source: Source, position: int, size: int, held: bytes) -> None:
        self._source, self._position, self._size, self._held = source, position, size, held

    def __enter__(self) -> Read:
        if self._held:
            return self._of_held
        self._part = self._source.range(self._position, self._size)
        return self._of_file

    def __exit__(self, *_: object) -> None:
        if not self._held:
            self._part.lease.release()

    def _of_held(self, at: int, size: int) -> bytes:
        return self._held[at : at + size]

    def _of_file(self, at: int, size: int) -> bytes:
        data = self._part.lease.file.pread(size, self._part.start + at)
        if len(data) != size:
            raise self._source.fault(self._position, f"expected {size} bytes at byte {at}, found {len(data)}")
        return data


def _read(source: Source, position: int, size: int) -> bytes:
    with _Reading(source, position, size, b"") as read:
        return read(0, size)


class PlainRows:
    __slots__ = (
        "_base", "_deltas_at", "_held", "_is_sparse", "_keys", "_keys_at", "_position", "_records", "_size",
        "_source", "_stamps_at", "_values", "_values_at", "even", "nbytes",
    )  # fmt: skip

    def __init__(self, source: Source, position: int, header: BatchHeader, head: bytes, held: bytes) -> None:
        """``head``: all up to the first key; ``held``: the whole batch, or nothing."""
        n = header.records
        self._source, self._position, self._size, self._held = source, position, header.size, held
        self._records, self._base, self._is_sparse = n, header.base_offset, header.is_sparse
        self._keys_at, self._values_at = len(head), HEADER_BYTES + header.keys_bytes
        lengths_at = _LENGTHS_AT + padded(4 * n)
        self._stamps_at = lengths_at + padded(4 * n)
        self._deltas_at = self._stamps_at + 8 * n
        keys, values = np.frombuffer(head, "<i4", n, _LENGTHS_AT), np.frombuffer(head, "<i4", n, lengths_at)
        self._keys = _Column(keys, lengths_at=_LENGTHS_AT, first=self._keys_at)
        self._values = _Column(values, lengths_at=lengths_at, first=self._values_at)
        self.even: Even | None = None
        if self._keys.same is not None and self._values.same is not None:
            self.even = Even(
                self._keys_at, self._keys.same, self._values_at, self._values.same, self._stamps_at,
                self._deltas_at if self._is_sparse else -1, self._base,
            )  # fmt: skip
        self.nbytes = 1024 + len(held) + self._keys.nbytes + self._values.nbytes

    def row(self, at: int, key: bytes) -> FoundRow | None:
        if self.even is not None and not self._held:
            if len(key) != self.even.key_size:
                return None
            out = np.zeros(VALUE_AT + max(self.even.value_size, 0), np.uint8)
            found = self._even_row(self.even, at, np.frombuffer(key, np.uint8), out)
            if found == OTHER_KEY:
                return None
            if found == FOUND:
                raw = out.tobytes()
                stamp, delta = STAMP_AND_DELTA.unpack_from(raw)
                value = None if self.even.value_size < 0 else raw[VALUE_AT:]
                return FoundRow(self._base + (delta if self._is_sparse else at), stamp, value, None, {})
        with self._reading() as read:
            return self._row(read, at, key)

    def _even_row(self, even: Even, at: int, key: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        part = self._source.range(self._position, self._size)
        with part.lease as file:
            if (fd := file.fileno()) is None:
                return UNREADABLE
            found: int = even_row(
                fd, part.start, at, even.keys_at, even.values_at, even.value_size, even.stamps_at, even.deltas_at,
                self._size, key, out,
            )  # fmt: skip
        return found

    def _row(self, read: Read, at: int, key: bytes) -> FoundRow | None:
        start, size = self._keys.place(read, at)
        if size != len(key):
            return None
        self._check_end(start + size, self._values_at)
        if read(start, size) != key:
            return None
        start, size = self._values.place(read, at)
        value = None
        if size >= 0:
            self._check_end(start + size, self._size)
            value = read(start, size)
        stamp = int.from_bytes(read(self._stamps_at + 8 * at, 8), "little", signed=True)
        delta = int.from_bytes(read(self._deltas_at + 4 * at, 4), "little") if self._is_sparse else at
        return FoundRow(self._base + delta, stamp, value, None, {})

    def take(self, rows: I64, picks: I64, taking: Taking) -> None:
        wanted, answers = taking.wanted, taking.answers
        if answers.is_full:
            answers.lengths[picks] = LATER
            return
        if self.even is not None and len(rows) * ROW_COSTS_BYTES < self._size:
            taking.scattered(self._source, self._position, self._size, self.even, rows, picks)
            return
        if len(rows) * ROW_COSTS_BYTES < self._size:
            with self._reading() as read:
                for at, pick in zip(rows.tolist(), picks.tolist(), strict=True):
                    answers.put(pick, self._row(read, at, wanted.key(pick)), is_known=False)
            return
        if self._held:
            data = np.frombuffer(self._held, np.uint8)
        else:
            data = taking.whole(self._source, self._position, self._size)
        rows, picks = aligned(rows, np.int64), aligned(picks, np.int64)
        while True:
            needed = int(
                take_rows(
                    data, self._records, self._keys_at, self._values_at, self._base, self._is_sparse, rows, picks,
                    wanted.keys, wanted.starts, answers.offsets, answers.timestamps, answers.lengths, answers.starts,
                    answers.arena, answers.used,
                )
            )  # fmt: skip
            if needed < 0:
                raise self._source.fault(self._position, f"lengths that do not fit its {self._size} bytes")
            if answers.used + needed <= len(answers.arena):
                answers.used += needed
                return
            answers.make_room(needed)

    def _reading(self) -> "_Reading":
        return _Reading(self._source, self._position, self._size, self._held)

    def _check_end(self, end: int, limit: int) -> None:
        if end > limit:
            raise self._source.fault(self._position, f"a record ends at byte {end}, its column at {limit}")


class WholeRows:
    """The rows of a decoded batch."""

    __slots__ = ("_batch", "_key_starts", "_value_starts", "even", "nbytes")

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        columns = batch.columns
        self._key_starts, self._value_starts = columns.key_starts(), columns.value_starts()
        self.even: Even | None = None
        self.nbytes = len(batch.data) + len(columns.values) + len(columns.keys) + 24 * columns.records

    def row(self, at: int, key: bytes) -> FoundRow | None:
        columns = self._batch.columns
        start, end = int(self._key_starts[at]), int(self._key_starts[at + 1])
        if end - start != len(key) or columns.keys[start:end].tobytes() != key:
            return None
        value = None
        if columns.value_lengths[at] >= 0:
            value = columns.values[int(self._value_starts[at]) : int(self._value_starts[at + 1])].tobytes()
        tag, headers = _extras(self._batch, at)
        return FoundRow(int(columns.offsets[at]), int(columns.timestamps[at]), value, tag, headers)

    def take(self, rows: I64, picks: I64, taking: Taking) -> None:
        for at, pick in zip(rows.tolist(), picks.tolist(), strict=True):
            taking.answers.put(pick, self.row(at, taking.wanted.key(pick)), is_known=False)


def by_batch(numbers: I64, rows: I64, picks: I64) -> Iterator[tuple[int, I64, I64]]:
    """(batch number, its rows, their picks) of rows of batches ``numbers``, which ascend."""
    cuts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
    for a, b in pairwise([*cuts, len(rows)]):
        yield int(numbers[a]), rows[a:b], picks[a:b]


def _extras(batch: Batch, at: int) -> tuple[str | None, dict[str, str]]:
    """Tag and headers of one record."""
    columns, n = batch.columns, batch.header.records
    tag = decode_tags(one(columns.tags, n, at), 1)[0]
    headers = decode_headers(one(columns.headers, n, at), 1)[0]
    return tag, headers


def one(column: Any, records: int, at: int) -> bytes:
    """The same kind of column (i32 lengths, then bytes) with record ``at`` alone."""
    if not len(column):
        return b""
    lengths = np.frombuffer(column, "<i4", records)
    start = 4 * records + int(np.maximum(lengths[:at], 0).sum(dtype=np.int64))
    return lengths[at : at + 1].tobytes() + bytes(column[start : start + max(int(lengths[at]), 0)])
