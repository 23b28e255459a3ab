"""The map of a topic: of each key the newest row, unless it is a tombstone; out of a pinned snapshot.

The compacted view is a log: above the horizon a key may have several rows. A task therefore reads its partition
twice from the same snapshot: keys and offsets alone, to find the rows that count, then the records, of which it keeps
those. Both reads see the same state, and that is checked: the second finds exactly the rows that the first named.

*Units*: the first read holds one partition's keys in memory, about 100 bytes and the key for each.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from firn.errors import InvariantBroken
from firn_spark.connection import Connection
from firn_spark.fetch import Range, read
from firn_spark.jobs import tasks

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("partition", "offset", "timestamp", "key", "value", "tag", "headers")


def live_rows(connection: Connection, part: Range) -> "Iterator[RecordBatch]":
    """The records of one partition's map, in the order of their offsets. ``part`` names a snapshot.

    Errors: those of ``fetch.read``; InvariantBroken when the snapshot has changed under the reader.
    """
    import pyarrow as pa

    keys = replace(part, projection="keys")
    wanted = live_offsets(read(connection, [keys]))
    found = 0
    for batch in read(connection, [replace(part, projection="records")]):
        offsets = _numbers(batch, "offset")
        at = np.searchsorted(wanted, offsets)
        keep = (
            wanted[np.minimum(at, len(wanted) - 1)] == offsets
            if len(wanted)
            else np.zeros(len(offsets), bool)
        )
        count = int(keep.sum())
        found += count
        if count:
            yield batch if count == batch.num_rows else batch.filter(pa.array(keep))
    if found != len(wanted):
        raise InvariantBroken(
            f"{part.topic}, partition {part.partition}: snapshot {part.snapshot} showed {len(wanted)} live keys, "
            f"then {found} of their records"
        )


def live_frame(spark: "SparkSession", connection: Connection, parts: Sequence[Range]) -> "DataFrame":
    """The maps of these partitions as a frame, one task a partition, rows of each in the order of their offsets."""
    columns = (
        "partition int NOT NULL, offset long NOT NULL, timestamp timestamp NOT NULL, key binary NOT NULL, "
    )
    columns += "value binary, tag string, headers map<string, string>"
    return tasks.each(spark, parts, partial(_of_task, connection), columns)


def _of_task(connection: Connection, part: Range) -> "Iterator[RecordBatch]":
    for batch in live_rows(connection, part):
        yield batch.select(COLUMNS)


def live_offsets(batches: "Iterable[RecordBatch]") -> NDArray[np.int64]:
    """The offsets, ascending, of the newest row of every key that is no tombstone; ``batches``: key, offset, tombstone."""
    import pyarrow as pa

    offsets: list[NDArray[np.int64]] = []
    tombstones: list[NDArray[np.bool_]] = []
    columns: list[Any] = []
    for batch in batches:
        offsets.append(_numbers(batch, "offset"))
        tombstones.append(batch.column("tombstone").to_numpy(zero_copy_only=False))
        columns.append(batch.select(["key", "offset"]))
    if not columns:
        return np.zeros(0, np.int64)
    newest = pa.Table.from_batches(columns).group_by("key", use_threads=False).aggregate([("offset", "max")])
    last = np.sort(newest.column("offset_max").to_numpy())
    every, dead = np.concatenate(offsets), np.concatenate(tombstones)
    found: NDArray[np.int64] = last[~dead[np.searchsorted(every, last)]]
    return found


def _numbers(batch: "RecordBatch", name: str) -> NDArray[np.int64]:
    found: NDArray[np.int64] = batch.column(name).to_numpy()
    return found
