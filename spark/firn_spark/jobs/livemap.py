"""The map of a topic: of each key the newest row, unless it is a tombstone; out of a pinned snapshot.

The compacted view is a log: above the horizon a key may have several rows. A task therefore reads its partition
twice from the same snapshot: keys and offsets alone, to find the rows that count, then the records, of which it keeps
those. Both reads see the same state, and that is checked: the second finds exactly the rows that the first named.

*Units*: the first read holds one partition's keys in memory, about 60 bytes and the key for each row, and never more than
``newest.KEYS_BYTES_MAX`` of keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from firn.client.cursor import Piece
from firn.errors import InvariantBroken
from firn_spark.connection import Connection
from firn_spark.fetch import Link, Range, read
from firn_spark.jobs import tasks
from firn_spark.newest import Newest, in_passes

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("partition", "offset", "timestamp", "key", "value", "tag", "headers")


def live_rows(connection: Connection, part: Range) -> "Iterator[RecordBatch]":
    """The records of one partition's map, in the order of their offsets. ``part`` names a snapshot.

    Errors: those of ``fetch.read``; InvariantBroken when the snapshot has changed under the reader.
    """
    import pyarrow as pa

    with Link(connection) as link:
        wanted = keys_of(link, part).live
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


@dataclass(frozen=True, slots=True)
class Keys:
    """Of the keys of a slice of a partition: ``records`` rows, ``keys`` different keys, the offsets that are ``live``."""

    records: int
    keys: int
    live: NDArray[np.int64]


def keys_of(link: Link, part: Range, *, slice: int = 0, slices: int = 1) -> Keys:
    """What a part's keys are; ``live``: ascending, the newest row of every key that is no tombstone.

    Errors: those of ``fetch.read``.
    """
    asked = replace(part, projection="keys")
    deleted: list[NDArray[np.int64]] = []

    def read_keys(slice: int, slices: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        newest = Newest(slice=slice, slices=slices)
        deleted.clear()
        with closing(link.pages(asked)) as pages:
            for page in pages:
                newest.add_pieces(page.pieces)
                deleted.extend(found for found in map(_tombstones, page.pieces) if len(found))
        return newest.found()

    seen, dead = in_passes(read_keys, f"{part.topic}/{part.partition}", slice=slice, slices=slices)
    gone = np.isin(seen, np.concatenate([dead, *deleted]))
    return Keys(len(seen), len(seen) - len(dead), seen[~gone])


def _tombstones(piece: Piece) -> NDArray[np.int64]:
    columns = piece.batch.columns
    found: NDArray[np.int64] = columns.offsets[columns.tombstones]
    return found


def _numbers(batch: "RecordBatch", name: str) -> NDArray[np.int64]:
    found: NDArray[np.int64] = batch.column(name).to_numpy()
    return found
