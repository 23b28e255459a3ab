"""Batches as Arrow record batches: built from columns, without a Python loop per record.

========= ==================== ================================================================
column    type                 note
========= ==================== ================================================================
partition int32
offset    int64
timestamp timestamp[ms, UTC]
key       binary
value     binary               null: a tombstone
tag       string               null: none
headers   map<string, string>  null: none (the one column with a loop, where a batch has headers)
========= ==================== ================================================================

pyarrow is imported when first needed.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, Buffer
from firn.client.cursor import Page, Piece
from firn.errors import Invalid

ROWS_AIM = 100_000
BYTES_AIM = 16 << 20


@cache
def pyarrow() -> Any:
    """The module. Errors: Invalid, saying how to install it."""
    try:
        import pyarrow
    except ImportError:
        raise Invalid("Arrow needs pyarrow, which is not installed: pip install 'firn[arrow]'") from None
    return pyarrow


@cache
def schema() -> Any:
    """The schema of every record batch."""
    pa = pyarrow()
    return pa.schema(
        [
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
            pa.field("key", pa.binary(), nullable=False),
            ("value", pa.binary()),
            ("tag", pa.string()),
            ("headers", pa.map_(pa.string(), pa.string())),
        ]
    )


def record_batch(piece: Piece) -> Any:
    """One batch's rows that are to be delivered; its columns are views of the batch where nothing is left out."""
    pa = pyarrow()
    batch = piece.batch
    c, n = batch.columns, batch.header.records
    present = c.value_lengths >= 0
    columns = [
        _numbers(pa.int32(), np.full(n, batch.header.partition, np.int32)),
        _numbers(pa.int64(), c.offsets),
        _numbers(pa.timestamp("ms", tz="UTC"), c.timestamps),
        _binary(pa.binary(), c.key_lengths, c.keys, None),
        _binary(pa.binary(), c.value_lengths, c.values, None if present.all() else present),
        _tags(c.tags, n),
        _headers(batch, n),
    ]
    found = pa.RecordBatch.from_arrays(columns, schema=schema())
    if piece.keep is not None:
        found = found.filter(pa.Array.from_buffers(pa.bool_(), n, [None, _bits(piece.keep)]))
    return found


def _numbers(kind: Any, column: NDArray[Any]) -> Any:
    """A view of the column. ``pyarrow.array`` would look for pandas first: half a second of imports."""
    pa = pyarrow()
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])


def _bits(flags: NDArray[np.bool_]) -> Any:
    return pyarrow().py_buffer(np.packbits(flags, bitorder="little"))


def _binary(
    kind: Any, lengths: NDArray[np.int32], data: NDArray[np.uint8], present: NDArray[np.bool_] | None
) -> Any:
    pa = pyarrow()
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.maximum(lengths, 0), out=starts[1:])
    valid = None if present is None else _bits(present)
    return pa.Array.from_buffers(kind, len(lengths), [valid, pa.py_buffer(starts), pa.py_buffer(data)])


def _tags(column: Buffer, n: int) -> Any:
    pa = pyarrow()
    if not len(column):
        return pa.nulls(n, pa.string())
    lengths = np.frombuffer(column, "<i4", n)
    found = _binary(pa.string(), lengths, np.frombuffer(column, np.uint8, offset=4 * n), lengths >= 0)
    found.validate(full=True)  # the bytes come from elsewhere: they must be UTF-8
    return found


def _headers(batch: Batch, n: int) -> Any:
    pa = pyarrow()
    kind = pa.map_(pa.string(), pa.string())
    if not len(batch.columns.headers):
        return pa.nulls(n, kind)
    return pa.array([list(h.items()) if h else None for h in batch.header_list()], kind)


class Collector:
    """Gathers pages until they make a record batch of about 100,000 rows or 16 MiB."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._rows = 0
        self._bytes = 0

    def add(self, page: Page) -> list[Any]:
        """The record batches that are full with ``page``. Errors: MalformedBatch; nothing of the page was taken."""
        parts = [(record_batch(piece), piece.batch.header.size) for piece in page.pieces]
        found: list[Any] = []
        for part, size in parts:
            if self._rows and (self._rows + part.num_rows > ROWS_AIM or self._bytes + size > BYTES_AIM):
                found += self.rest()
            self._parts.append(part)
            self._rows += part.num_rows
            self._bytes += size
        return found

    def rest(self) -> Iterator[Any]:
        """What is there, as one record batch, if anything is."""
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        self._rows = self._bytes = 0
        if len(parts) == 1:
            yield parts[0]
            return
        yield pyarrow().concat_batches(parts)


def list_of(column: Any) -> list[Any]:
    """The values of an Arrow array as Python objects: of binaries and strings the bytes, cut from its buffers."""
    pa = pyarrow()
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in list_of(chunk)]
    kind = column.type
    if pa.types.is_dictionary(kind):
        return list_of(column.dictionary_decode())
    if not (
        pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_binary(kind)
        or pa.types.is_large_string(kind)
    ):  # fmt: skip
        return list(column.to_pylist())
    wide = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    _, starts_buffer, data = column.buffers()
    width = np.int64 if wide else np.int32
    starts = np.frombuffer(starts_buffer, width, len(column) + 1, column.offset * np.dtype(width).itemsize)
    first, last = int(starts[0]), int(starts[-1])
    raw = data.slice(first, last - first).to_pybytes() if data is not None else b""
    at = (starts - first).tolist()
    found: list[Any] = [raw[a:b] for a, b in pairwise(at)]
    if column.null_count:
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            found[row] = None
    return found


def plain_list_of(column: Any) -> list[Any]:
    """The values of an Arrow array as Python objects; times as ms since 1970."""
    pa = pyarrow()
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz=column.type.tz)).cast(pa.int64())
    return list(column.to_pylist())
