"""How many keys a topic has, counted inside the tasks: no key and no row comes to the JVM.

A task reads the keys of one slice of a partition and counts by their real bytes (``firn_spark.newest``). Through
``groupBy("key")`` the same rows take ten times as long, because each of them travels into the JVM and through a shuffle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from firn_spark.connection import Connection
from firn_spark.fetch import Link, Range
from firn_spark.jobs.livemap import keys_of
from firn_spark.jobs.pins import pinned

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLICE_RECORDS = 5_000_000  # as of a forced compaction: a task that keeps so many keys takes about 1 GiB


@dataclass(frozen=True, slots=True)
class KeyCount:
    """``records`` of the compacted view, ``keys`` that differ, and how many of these are ``live``: not deleted."""

    records: int
    keys: int
    live: int


def count_keys(
    spark: "SparkSession", connection: Connection, topic: str, *, slice_records: int = SLICE_RECORDS
) -> KeyCount:
    """The keys of ``topic`` now, out of a pinned snapshot. Keys are told apart by partition too, as everywhere.

    ``slice_records``: a partition with more rows is counted by several tasks, each a part of its keys.
    Errors: UnknownTopic; those of the tasks, in Spark's own words.
    """
    with pinned(connection, topic) as pin:
        return counted(spark, connection, pin.ranges(), rows=pin.rows, slice_records=slice_records)


def counted(
    spark: "SparkSession",
    connection: Connection,
    parts: Sequence[Range],
    *,
    rows: Mapping[int, int] | None = None,
    slice_records: int = SLICE_RECORDS,
) -> KeyCount:
    """The same of the rows of any ranges, one a partition. ``rows``: about how many each has; else as many as offsets.

    Errors: those of the tasks, in Spark's own words.
    """
    items = sliced(parts, rows or {}, slice_records)
    if not items:
        return KeyCount(0, 0, 0)
    tasks = spark.sparkContext.parallelize(items, len(items))
    found = tasks.map(partial(_of_task, connection)).collect()
    return KeyCount(*(sum(column) for column in zip(*found, strict=True)))


def sliced(
    parts: Sequence[Range], rows: Mapping[int, int], slice_records: int
) -> list[tuple[Range, int, int]]:
    """A part, the number of a slice, and how many there are: each slice is a task that reads all of the part."""
    found: list[tuple[Range, int, int]] = []
    for part in parts:
        offsets = part.end - part.start
        count = min(offsets, max(rows.get(part.partition, offsets), 1))
        slices = -(-count // slice_records)
        found += [(part, number, slices) for number in range(slices)]
    return found


def _of_task(connection: Connection, item: tuple[Range, int, int]) -> tuple[int, int, int]:
    part, number, slices = item
    with Link(connection) as link:
        found = keys_of(link, part, slice=number, slices=slices)
    return found.records, found.keys, len(found.live)
