"""Rows of a DataFrame as batches of a topic: columns to columns, without a loop per record where there are no headers.

====================== ======================= ==================================================================
column                 type                    note
====================== ======================= ==================================================================
key                    binary or string        required; null is refused
value                  binary or string        required, unless every row is a tombstone: null
timestamp              timestamp               absent or null: the task's clock
tag                    string
headers                map<string, string>
partition              int or long             absent or null: the one that the key's hash names
====================== ======================= ==================================================================

``topic`` and ``offset``, which a read has, are passed over; any other column is refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from firn import limits
from firn.batch import Columns, encode_headers
from firn.errors import Invalid, LimitExceeded, UnknownPartition
from firn.partitioner import partitions_in

_TYPES: dict[str, tuple[type, ...]] = {
    "key": (BinaryType, StringType),
    "value": (BinaryType, StringType),
    "timestamp": (TimestampType,),
    "tag": (StringType,),
    "headers": (MapType,),
    "partition": (IntegerType, LongType),
}
_PASSED_OVER = ("topic", "offset")
_ROW_BYTES = 32  # what a row takes beside its key and value, about
_US_OF_MS = 1000


def check_columns(schema: StructType) -> None:
    """Errors: Invalid, naming the column."""
    fields = {field.name: field for field in schema.fields}
    for name, field in fields.items():
        if name in _PASSED_OVER:
            continue
        known = _TYPES.get(name)
        if known is None:
            names = ", ".join((*_TYPES, *_PASSED_OVER))
            raise Invalid(f"column {name}: a record has none of this name; it may have {names}")
        if not isinstance(field.dataType, known):
            raise Invalid(
                f"column {name}: expected {' or '.join(kind.__name__[:-4].lower() for kind in known)}, found "
                f"{field.dataType.simpleString()}"
            )
    for name in ("key", "value"):
        if name not in fields:
            raise Invalid(
                f"column {name} is missing: rows to write have key and value, and may have {', '.join(_TYPES)}"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one batch-to-be."""

    partition: int
    columns: Columns


def parts(batch: Any, partitions: int, *, batch_bytes: int, now_ms: int) -> Iterator[Part]:
    """The rows of a record batch by partition, in their order, each part within ``batch_bytes`` where one row is.

    Errors: Invalid, LimitExceeded, UnknownPartition, for a row that cannot be written.
    """
    if not batch.num_rows:
        return
    columns = {name: batch.column(name) for name in batch.schema.names if name in _TYPES}
    keys, values = (_binary(columns[name]) for name in ("key", "value"))
    if keys.null_count:
        raise Invalid("a row's key is null; a key is bytes, and may be empty")
    key_lengths, value_lengths = _lengths(keys), _lengths(values)
    _check_lengths(key_lengths, value_lengths)
    stamps = _stamps(columns.get("timestamp"), batch.num_rows, now_ms)
    placed = _placed(keys, columns.get("partition"), partitions)
    tags, headers = _tags(columns.get("tag")), _headers(columns.get("headers"))
    sizes = key_lengths + np.maximum(value_lengths, 0) + _ROW_BYTES
    if tags is not None:
        sizes += np.maximum(_lengths(tags), 0)
    if headers is not None:
        sizes += np.fromiter(map(_headers_bytes, headers), np.int64, len(headers))
    if (placed != placed[0]).any():
        order = np.argsort(placed, kind="stable")
        taken = pa.array(order)
        keys, values = keys.take(taken), values.take(taken)
        tags = None if tags is None else tags.take(taken)
        headers = None if headers is None else [headers[row] for row in order.tolist()]
        placed, stamps, sizes = placed[order], stamps[order], sizes[order]
        key_lengths, value_lengths = key_lengths[order], value_lengths[order]
    for start, end in _cuts(placed, sizes, batch_bytes):
        count = end - start
        yield Part(
            int(placed[start]),
            Columns(
                key_lengths=key_lengths[start:end].astype("<i4"),
                value_lengths=value_lengths[start:end].astype("<i4"),
                timestamps=stamps[start:end],
                offsets=np.arange(count, dtype=np.int64),
                keys=_bytes(keys.slice(start, count)),
                values=_bytes(values.slice(start, count)),
                tags=b"" if tags is None else _tags_column(tags.slice(start, count)),
                headers=encode_headers(None if headers is None else headers[start:end]),
            ),
        )


def _binary(column: Any) -> Any:
    """As an array of 32-bit binaries."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _lengths(column: Any) -> NDArray[np.int64]:
    """-1 for null."""
    found: NDArray[np.int64] = pc.fill_null(pc.binary_length(column), -1).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)


def _check_lengths(keys: NDArray[np.int64], values: NDArray[np.int64]) -> None:
    if int(keys.max()) > limits.KEY_BYTES_MAX:
        raise LimitExceeded(f"a row has a key of {int(keys.max())} bytes; at most {limits.KEY_BYTES_MAX}")
    if int(values.max()) > limits.VALUE_BYTES_MAX:
        raise LimitExceeded(
            f"a row has a value of {int(values.max())} bytes; at most {limits.VALUE_BYTES_MAX}"
        )


def _stamps(column: Any, rows: int, now_ms: int) -> NDArray[np.int64]:
    if column is None:
        return np.full(rows, now_ms, np.int64)
    micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    given: NDArray[np.int64] = pc.fill_null(micros, now_ms * _US_OF_MS).to_numpy(zero_copy_only=False)
    return given // _US_OF_MS


def _placed(keys: Any, column: Any, partitions: int) -> NDArray[np.int64]:
    starts = np.frombuffer(keys.buffers()[1], np.int32, len(keys) + 1, 4 * keys.offset).astype(np.int64)
    data = keys.buffers()[2]
    raw = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    found = partitions_in(raw, starts, partitions)
    if column is None:
        return found
    wanted = pc.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    given = ~column.is_null().to_numpy(zero_copy_only=False)
    if (given & ((wanted < 0) | (wanted >= partitions))).any():
        wrong = int(wanted[given & ((wanted < 0) | (wanted >= partitions))][0])
        raise UnknownPartition(f"a row names partition {wrong}: the topic has {partitions}")
    return np.where(given, wanted, found)


def _cuts(placed: NDArray[np.int64], sizes: NDArray[np.int64], batch_bytes: int) -> Iterator[tuple[int, int]]:
    sums = np.concatenate(([0], np.cumsum(sizes)))
    ends = [*(np.flatnonzero(np.diff(placed)) + 1).tolist(), len(placed)]
    at = 0
    for end in ends:
        while at < end:
            upto = int(np.searchsorted(sums, sums[at] + batch_bytes, side="right")) - 1
            upto = min(max(upto, at + 1), end, at + limits.BATCH_RECORDS_MAX)
            yield at, upto
            at = upto


def _bytes(column: Any) -> NDArray[np.uint8]:
    """The values one after another; nulls have none."""
    if column.null_count:
        column = column.drop_null()
    data = column.buffers()[2]
    if data is None or not len(column):
        return np.empty(0, np.uint8)
    starts = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    return np.frombuffer(data, np.uint8)[int(starts[0]) : int(starts[-1])]


def _tags(column: Any) -> Any:
    """As bytes; None where no row has one."""
    if column is None or column.null_count == len(column):
        return None
    found = _binary(column)
    longest = int(_lengths(found).max())
    if longest > limits.TAG_BYTES_MAX:
        raise LimitExceeded(f"a row has a tag of {longest} bytes; at most {limits.TAG_BYTES_MAX}")
    return found


def _tags_column(tags: Any) -> bytes:
    if tags.null_count == len(tags):
        return b""
    return _lengths(tags).astype("<i4").tobytes() + _bytes(tags).tobytes()


def _headers(column: Any) -> list[dict[str, str] | None] | None:
    """None where no row has any."""
    if column is None or column.null_count == len(column):
        return None
    found = [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    for headers in filter(None, found):
        missing = [name for name, text in headers.items() if text is None]
        if missing:
            raise Invalid(f"a row's headers have no value for {missing[0]!r}")
        if _headers_bytes(headers) > limits.HEADERS_BYTES_MAX:
            raise LimitExceeded(f"a row has headers of more than {limits.HEADERS_BYTES_MAX} bytes")
    return found


def _headers_bytes(headers: Mapping[str, str] | None) -> int:
    return sum(10 + len(k.encode()) + len(v.encode()) for k, v in headers.items()) if headers else 0
