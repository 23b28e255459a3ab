"""Pages of a partition as Arrow record batches, built from the columns of their batches without a loop per record.

========== =================== ============ =============================================================
column     Spark               projection   note
========== =================== ============ =============================================================
topic      string              both
partition  int                 both
offset     long                both
timestamp  timestamp           both         the format's ms as us
key        binary              both
value      binary              records      null: a tombstone
tombstone  boolean             keys         instead of the value, which is not sent
tag        string              both         null: none
headers    map<string, string> both         null: none (the one column with a loop, where a batch has headers)
========== =================== ============ =============================================================

Spark takes a record batch only if its schema is exactly the announced one, nullability included. Columns of a run of
batches are joined before they become Arrow arrays: joining small record batches afterwards cost three times as much.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from firn.batch import Batch
from firn.client.cursor import Piece
from firn.errors import Invalid

Projection = Literal["records", "keys"]
ROWS_AIM = 100_000
BYTES_AIM = 16 << 20
US_OF_MS = 1000
_MS_MAX = (1 << 63) // US_OF_MS - 1
_ROW_BYTES = 32  # what a row takes beside its key and value, about


@cache
def arrow_schema(projection: Projection) -> Any:
    """The schema of every record batch."""
    payload = pa.field("value", pa.binary())
    if projection == "keys":
        payload = pa.field("tombstone", pa.bool_(), nullable=False)
    return pa.schema(
        [
            pa.field("topic", pa.string(), nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("key", pa.binary(), nullable=False),
            payload,
            pa.field("tag", pa.string()),
            pa.field("headers", _headers_type()),
        ]
    )


def _headers_type() -> Any:
    return pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string()))


class Joiner:
    """Gathers the pieces of one partition until they make a record batch of about 100,000 rows or 16 MiB."""

    def __init__(self, topic: str, projection: Projection) -> None:
        self._topic = topic
        self._projection: Projection = projection
        self._pieces: list[Piece] = []
        self._rows = 0
        self._bytes = 0

    def add(self, pieces: Iterable[Piece]) -> Iterator[Any]:
        """The record batches that are full. Errors: MalformedBatch."""
        for piece in pieces:
            columns = piece.batch.columns
            size = len(columns.keys) + len(columns.values) + _ROW_BYTES * columns.records
            if self._rows and (self._rows + columns.records > ROWS_AIM or self._bytes + size > BYTES_AIM):
                yield from self.rest()
            self._pieces.append(piece)
            self._rows += columns.records
            self._bytes += size

    def rest(self) -> Iterator[Any]:
        """What is there, as one record batch, if anything is."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._rows = self._bytes = 0
            yield record_batch(pieces, self._topic, self._projection)


def record_batch(pieces: Sequence[Piece], topic: str, projection: Projection) -> Any:
    """The rows of these pieces of one partition that are to be delivered. Errors: MalformedBatch, Invalid."""
    every = [piece.batch.columns for piece in pieces]
    n = sum(columns.records for columns in every)
    lengths = _joined([columns.value_lengths for columns in every])
    if projection == "keys":
        payload = _array(pa.bool_(), n, _bits(lengths < 0))
    else:
        present = lengths >= 0
        payload = _binary(
            pa.binary(), lengths, _joined([c.values for c in every]), None if present.all() else present
        )
    columns = [
        _constant(topic, n),
        _array(pa.int32(), n, np.full(n, pieces[0].batch.header.partition, np.int32)),
        _array(pa.int64(), n, _joined([columns.offsets for columns in every])),
        _array(pa.timestamp("us", tz="UTC"), n, _microseconds(_joined([c.timestamps for c in every]))),
        _binary(pa.binary(), _joined([c.key_lengths for c in every]), _joined([c.keys for c in every]), None),
        payload,
        _tags([piece.batch for piece in pieces], n),
        _headers([piece.batch for piece in pieces], n),
    ]
    found = pa.RecordBatch.from_arrays(columns, schema=arrow_schema(projection))
    if all(piece.keep is None for piece in pieces):
        return found
    keep = _joined([np.ones(p.batch.header.records, np.bool_) if p.keep is None else p.keep for p in pieces])
    return found.filter(_array(pa.bool_(), n, _bits(keep)))


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _array(kind: Any, n: int, column: NDArray[Any]) -> Any:
    """A view of the column."""
    return pa.Array.from_buffers(kind, n, [None, pa.py_buffer(np.ascontiguousarray(column))])


def _bits(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(flags, bitorder="little")


def _binary(
    kind: Any, lengths: NDArray[np.int32], data: NDArray[np.uint8], present: NDArray[np.bool_] | None
) -> Any:
    """*Shape*: lengths below 0 are taken for 0; where ``present`` is False there is a null."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths if present is None else np.maximum(lengths, 0), out=starts[1:])
    valid = None if present is None else pa.py_buffer(_bits(present))
    return pa.Array.from_buffers(kind, len(lengths), [valid, pa.py_buffer(starts), pa.py_buffer(data)])


def _constant(text: str, n: int) -> Any:
    raw = text.encode()
    starts = np.arange(n + 1, dtype=np.int32) * np.int32(len(raw))
    return pa.Array.from_buffers(pa.string(), n, [None, pa.py_buffer(starts), pa.py_buffer(raw * n)])


def _microseconds(stamps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Errors: Invalid for a time that Spark's timestamps do not reach."""
    if len(stamps) and (int(stamps.max()) > _MS_MAX or int(stamps.min()) < -_MS_MAX):
        found = int(stamps[(stamps > _MS_MAX) | (stamps < -_MS_MAX)][0])
        raise Invalid(f"a record's timestamp is {found} ms since 1970, which no timestamp of Spark holds")
    return stamps * US_OF_MS


def _tags(batches: Sequence[Batch], n: int) -> Any:
    if not any(len(batch.columns.tags) for batch in batches):
        return pa.nulls(n, pa.string())
    lengths, data = [], []
    for batch in batches:
        column, records = batch.columns.tags, batch.header.records
        if len(column):
            lengths.append(np.frombuffer(column, "<i4", records))
            data.append(np.frombuffer(column, np.uint8, offset=4 * records))
        else:
            lengths.append(np.full(records, -1, np.int32))
    joined = _joined(lengths)
    found = _binary(pa.string(), joined, _joined(data), joined >= 0)
    found.validate(full=True)  # the bytes come from elsewhere: they must be UTF-8
    return found


def _headers(batches: Sequence[Batch], n: int) -> Any:
    if not any(len(batch.columns.headers) for batch in batches):
        return pa.nulls(n, _headers_type())
    rows: list[list[tuple[str, str]] | None] = []
    for batch in batches:
        if len(batch.columns.headers):
            rows += [list(found.items()) if found else None for found in batch.header_list()]
        else:
            rows += [None] * batch.header.records
    return pa.array(rows, _headers_type())
