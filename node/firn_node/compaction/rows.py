"""Single rows of a checked batch: a key is compared and a value cut out without decoding the rest.

A batch whose keys and values are stored plain, without tags and headers, is read row by row: its lengths tell
where a row lies, and only these are kept. Any other batch is decoded as a whole.

Invariants: the caller has checked the batch's CRCs since its file was opened; a row is given only to who names
its real key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from firn.batch import (
    HEADER_BYTES,
    LENGTHS_BYTES,
    Batch,
    Codec,
    decode_headers,
    decode_tags,
    padded,
    parse_header,
)
from firn.errors import Corrupt, MalformedBatch
from firn_node.filecache import FileCache

_WHOLE_ROWS_MIN = (
    4  # from so many rows of one batch on, one read of all of it costs less than two reads a row
)


@dataclass(frozen=True, slots=True)
class FoundRow:
    """The newest served row of a key; ``value`` is None for a tombstone in its time."""

    offset: int
    timestamp: int
    value: bytes | None
    tag: str | None
    headers: dict[str, str]


class BatchRows(Protocol):
    def row(self, at: int, key: bytes) -> FoundRow | None:
        """Record ``at`` when its real key is ``key``. *Errors*: Corrupt."""
        ...

    def take(self, rows: Sequence[int], keys: Sequence[bytes]) -> list[FoundRow | None]:
        """As ``row``, for many."""
        ...


def fixed_bytes(records: int, *, is_sparse: bool) -> int:
    """Bytes of a batch up to its first key."""
    fixed = HEADER_BYTES + LENGTHS_BYTES + 2 * padded(4 * records) + 8 * records
    return fixed + (padded(4 * records) if is_sparse else 0)


def plain_rows(
    cache: FileCache, path: str, position: int, head: bytes, *, records: int
) -> "PlainRows | None":
    """The rows of a batch of which ``head`` is all up to the first key; None when it is not a plain one.

    *Errors*: MalformedBatch.
    """
    header = parse_header(head)
    if header.records != records or len(head) != fixed_bytes(records, is_sparse=header.is_sparse):
        raise MalformedBatch(f"batch header: expected {records} records, found {header.records}")
    lengths = np.frombuffer(head, "<u4", 8, HEADER_BYTES).tolist()
    if header.keys_codec != Codec.NONE or header.values_codec != Codec.NONE or lengths[2] or lengths[6]:
        return None
    return PlainRows(cache, path, position, head, records, header.base_offset, header.keys_bytes, header.size)


class PlainRows:
    __slots__ = (
        "_cache", "_deltas", "_first_offset", "_key_lengths", "_keys_at", "_path", "_position", "_size", "_timestamps",
        "_value_lengths", "_values_at", "nbytes",
    )  # fmt: skip

    def __init__(
        self, cache: FileCache, path: str, position: int, head: bytes, records: int, first_offset: int,
        keys_bytes: int, size: int,
    ) -> None:  # fmt: skip
        self._cache, self._path, self._position, self._size = cache, path, position, size
        self._first_offset = first_offset
        self._keys_at, self._values_at = len(head), HEADER_BYTES + keys_bytes
        at = HEADER_BYTES + LENGTHS_BYTES
        self._key_lengths: NDArray[np.int32] = np.frombuffer(head, "<i4", records, at)
        at += padded(4 * records)
        self._value_lengths: NDArray[np.int32] = np.frombuffer(head, "<i4", records, at)
        at += padded(4 * records)
        self._timestamps: NDArray[np.int64] = np.frombuffer(head, "<i8", records, at)
        at += 8 * records
        self._deltas: NDArray[np.uint32] | None = (
            np.frombuffer(head, "<u4", records, at) if at < len(head) else None
        )
        self.nbytes = len(head) + 1024

    def row(self, at: int, key: bytes) -> FoundRow | None:
        if int(self._key_lengths[at]) != len(key):
            return None
        key_start = self._keys_at + int(self._key_lengths[:at].sum(dtype=np.int64))
        with self._cache.reading(self._path) as file:
            if self._checked(file.pread(len(key), self._position + key_start), len(key)) != key:
                return None
            size = int(self._value_lengths[at])
            value = None
            if size >= 0:
                start = self._values_at + int(np.maximum(self._value_lengths[:at], 0).sum(dtype=np.int64))
                self._check_end(start + size)
                value = self._checked(file.pread(size, self._position + start), size)
        return FoundRow(self._offset(at), int(self._timestamps[at]), value, None, {})

    def take(self, rows: Sequence[int], keys: Sequence[bytes]) -> list[FoundRow | None]:
        if len(rows) < _WHOLE_ROWS_MIN:
            return [self.row(at, key) for at, key in zip(rows, keys, strict=True)]
        with self._cache.reading(self._path) as file:
            data = self._checked(file.pread(self._size, self._position), self._size)
        picked = np.asarray(rows, np.int64)
        key_ends = self._keys_at + np.cumsum(self._key_lengths, dtype=np.int64)[picked]
        value_sizes = np.maximum(self._value_lengths, 0)
        value_ends = self._values_at + np.cumsum(value_sizes, dtype=np.int64)[picked]
        self._check_end(int(value_ends.max()))
        offsets = self._first_offset + (
            picked if self._deltas is None else self._deltas[picked].astype(np.int64)
        )
        columns = zip(
            keys, (key_ends - self._key_lengths[picked]).tolist(), key_ends.tolist(),
            (value_ends - value_sizes[picked]).tolist(), value_ends.tolist(),
            (self._value_lengths[picked] < 0).tolist(), offsets.tolist(), self._timestamps[picked].tolist(),
            strict=True,
        )  # fmt: skip
        return [
            FoundRow(offset, stamp, None if is_tombstone else data[start:end], None, {})
            if data[key_start:key_end] == key
            else None
            for key, key_start, key_end, start, end, is_tombstone, offset, stamp in columns
        ]

    def _offset(self, at: int) -> int:
        return self._first_offset + (at if self._deltas is None else int(self._deltas[at]))

    def _check_end(self, end: int) -> None:
        if end > self._size:
            raise self._fault(f"a value ends at byte {end} of a batch of {self._size}")

    def _checked(self, data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise self._fault(f"expected {size} bytes, found {len(data)}")
        return data

    def _fault(self, what: str) -> Corrupt:
        return Corrupt(
            f"{self._path} at byte {self._position}: {what}", file=self._path, position=self._position
        )


class WholeRows:
    """The rows of a decoded batch."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def row(self, at: int, key: bytes) -> FoundRow | None:
        columns = self._batch.columns
        lengths = columns.key_lengths
        if int(lengths[at]) != len(key):
            return None
        start = int(lengths[:at].sum(dtype=np.int64))
        if columns.keys[start : start + len(key)].tobytes() != key:
            return None
        size = int(columns.value_lengths[at])
        value = None
        if size >= 0:
            start = int(np.maximum(columns.value_lengths[:at], 0).sum(dtype=np.int64))
            value = columns.values[start : start + size].tobytes()
        tag, headers = _extras(self._batch, at)
        return FoundRow(int(columns.offsets[at]), int(columns.timestamps[at]), value, tag, headers)

    def take(self, rows: Sequence[int], keys: Sequence[bytes]) -> list[FoundRow | None]:
        return [self.row(at, key) for at, key in zip(rows, keys, strict=True)]


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
