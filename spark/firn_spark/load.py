"""``python -m firn_spark.load SOURCE TOPIC``: Parquet into a topic: a snapshot's folder, or anybody's files.

A topic that is not empty is refused without ``--append``: a second load puts old values over newer ones. Of a
snapshot every key has one row. Of other files the rows of a key are written in the order of ``--order-by``, by one
task; without it a key must not occur twice, because rows of one key in different tasks have no order.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firn.errors import Invalid
from firn_spark.__main__ import run_by_name
from firn_spark.connection import Connection
from firn_spark.jobs import command, folder, topics
from firn_spark.jobs.folder import Place, Snapshot
from firn_spark.jobs.report import Report, key_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TYPES = {
    "key": ("binary", "string"), "value": ("binary", "string"), "timestamp": ("timestamp",), "tag": ("string",),
    "headers": ("map<string,string>",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run did: how many records, out of which snapshot, if it was one."""

    topic: str
    records: int
    partitions: int
    snapshot: Snapshot | None


def load(
    spark: "SparkSession",
    connection: Connection,
    source: str,
    topic: str,
    *,
    append: bool = False,
    partitions: int | None = None,
    order_by: str | None = None,
) -> Loaded:
    """Write the rows of ``source`` to ``topic``; columns key, value and, where there are, timestamp, tag, headers.

    ``partitions``: make the topic, if it is not there. ``order_by``: the column that orders the rows of a key.
    Errors: Invalid for a source without keys, with a key twice and no order, or a topic that is not empty.
    """
    snapshot = folder.snapshot_at(source)
    frame, rows = _checked(spark, source, snapshot, order_by)
    with connection.client() as client:
        described = topics.ready_target(
            client,
            topic,
            partitions=partitions,
            may_append=append,
            spec=None if snapshot is None else snapshot.spec,
        )
        before = topics.latest(described)
        if frame is not None:
            frame.write.format("firn").options(**connection.options(), topic=topic).mode("append").save()
        after = topics.latest(client.describe(topic))
    if sum(after.values()) - sum(before.values()) < rows:
        raise Invalid(f"{topic} was deleted and made anew meanwhile")
    return Loaded(topic, rows, len(after), snapshot)


def _checked(
    spark: "SparkSession", source: str, snapshot: Snapshot | None, order_by: str | None
) -> "tuple[DataFrame | None, int]":
    """The rows in an order that may be written, None when there are none, and their number. Errors: Invalid."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    if snapshot is not None:
        records = sum(part.records for part in snapshot.parts)
        if not records:
            return None, 0
        return spark.read.parquet(*snapshot.files).select(*_TYPES), records
    try:
        frame = spark.read.parquet(Place(source).uri("").rstrip("/"))
    except AnalysisException as error:
        raise Invalid(f"{source}: no Parquet files: {str(error).splitlines()[0]}") from error
    types = dict(frame.dtypes)
    if "key" not in types or "value" not in types:
        raise Invalid(f"{source}: expected the columns key and value, found {', '.join(types) or 'none'}")
    for name, known in _TYPES.items():
        if name in types and types[name] not in known:
            raise Invalid(f"{source}: column {name} is {types[name]}, expected {' or '.join(known)}")
    if order_by is not None and order_by not in types:
        raise Invalid(f"{source}: no column is called {order_by!r}; there are {', '.join(types)}")
    found = frame.agg(F.count("*"), F.count("key")).collect()[0]
    if found[0] != found[1]:
        raise Invalid(f"{source}: {found[0] - found[1]:,} rows have no key")
    if order_by is None:
        twice = frame.groupBy("key").count().where("count > 1").orderBy("key").take(1)
        if twice:
            key = twice[0]["key"]
            raise Invalid(
                f"{source}: key {key_text(key if isinstance(key, bytes) else str(key).encode())} occurs "
                f"{twice[0]['count']:,} times, and nothing says which row is the newest: give --order-by COLUMN"
            )
    else:
        frame = frame.repartition("key").sortWithinPartitions(order_by)
    return frame.select(*(name for name in _TYPES if name in types)), int(found[0])


def report_of(loaded: Loaded, source: str) -> Report:
    """As a table and as JSON."""
    snapshot = loaded.snapshot
    document: dict[str, Any] = {
        "job": "load", "topic": loaded.topic, "source": source, "records": loaded.records,
        "partitions": loaded.partitions, "snapshot_of": None if snapshot is None else snapshot.topic,
    }  # fmt: skip
    of = "" if snapshot is None else f", the snapshot of {snapshot.topic},"
    sentence = (
        f"{loaded.records:,} records of {source}{of} are in {loaded.topic}, {loaded.partitions} partitions"
    )
    return Report(document, (), (), [sentence])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    made = command.parser("load", "Write Parquet files to a topic.")
    made.add_argument(
        "source", help="a folder that `snapshot` has written, or any Parquet with key and value"
    )
    made.add_argument("topic", type=command.topic_name)
    made.add_argument("--append", action="store_true", help="also to a topic that is not empty")
    made.add_argument(
        "--partitions",
        type=command.count,
        metavar="N",
        help="make the topic with so many, if it is not there",
    )
    made.add_argument(
        "--order-by", metavar="COLUMN", help="of rows with the same key the last by it is the newest"
    )

    def work(job: command.Job) -> Report:
        asked = job.asked
        loaded = load(
            job.spark, job.connection, asked.source, asked.topic,
            append=asked.append, partitions=asked.partitions, order_by=asked.order_by,
        )  # fmt: skip
        return report_of(loaded, asked.source)

    return command.run(made, work, arguments, may_be_absent=True)


if __name__ == "__main__":
    sys.exit(run_by_name("load"))
