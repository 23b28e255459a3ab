"""Keys that a query names, looked up in the driver: a few requests instead of a read of the whole topic.

What is found travels in the plan, so that a repeated task gives the same rows. As everywhere (``Client.get``), a key is
looked for in the partition that its hash names, and a deleted one is not found.
"""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from firn.record import Record
from firn_spark.columns import US_OF_MS, Projection, arrow_schema
from firn_spark.connection import Connection

KEYS_MAX = 1000  # more are found by a read: each costs the master a look into its index
BYTES_MAX = 8 << 20  # of rows in a plan


def looked_up(
    connection: Connection, topic: str, keys: Iterable[bytes], projection: Projection
) -> bytes | None:
    """The newest records of these keys, as an Arrow stream; None when they are too much for a plan."""
    with connection.client() as client:
        found = [record for record in client.get_many(topic, sorted(keys)) if record is not None]
    if sum(len(record.key) + len(record.value or b"") for record in found) > BYTES_MAX:
        return None
    batch = pa.RecordBatch.from_pylist(
        [_row(record, projection) for record in found], arrow_schema(projection)
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def _row(record: Record, projection: Projection) -> dict[str, Any]:
    payload = {"tombstone": record.value is None} if projection == "keys" else {"value": record.value}
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp * US_OF_MS,
        "key": record.key,
        **payload,
        "tag": record.tag,
        "headers": list(record.headers.items()) or None,
    }


def record_batches(stream: bytes) -> list[Any]:
    """The record batches of an Arrow stream."""
    with pa.ipc.open_stream(stream) as reader:
        return list(reader)
