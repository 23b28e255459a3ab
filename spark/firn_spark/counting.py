"""How many keys a topic has, counted inside the tasks: no key and no row comes to the JVM.

A task reads the keys of one slice of a partition and counts by their real bytes (``firn_spark.newest``). Through
``groupBy("key")`` the same rows take ten times as long, because each of them travels into the JVM and through a shuffle.
"""

from collections.abc import Sequence
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

    ``slice_records``: a partition with more offsets is counted by several tasks, each a part of its keys.
    Errors: UnknownTopic; those of the tasks, in Spark's own words.
    """
    with pinned(connection, topic) as pin:
        return counted(spark, connection, pin.ranges(), slice_records=slice_records)


def counted(
    spark: "SparkSession",
    connection: Connection,
    parts: Sequence[Range],
    *,
    slice_records: int = SLICE_RECORDS,
) -> KeyCount:
    """The same of the rows of any ranges, one a partition. Errors: those of the tasks, in Spark's own words."""
    items = [
        (part, number, slices)
        for part in parts
        if part.start < part.end
        for slices in [-(-(part.end - part.start) // slice_records)]
        for number in range(slices)
    ]
    if not items:
        return KeyCount(0, 0, 0)
    tasks = spark.sparkContext.parallelize(items, len(items))
    found = tasks.map(partial(_of_task, connection)).collect()
    return KeyCount(*(sum(column) for column in zip(*found, strict=True)))


def _of_task(connection: Connection, item: tuple[Range, int, int]) -> tuple[int, int, int]:
    part, number, slices = item
    with Link(connection) as link:
        found = keys_of(link, part, slice=number, slices=slices)
    return found.records, found.keys, len(found.live)
