"""``python -m firn_spark.snapshot TOPIC FOLDER``: a topic's map as Parquet, each partition as of one moment.

Each partition is read out of a pinned snapshot, however the topic is written to and compacted meanwhile; between
partitions there is no order, as in the topic itself. Tasks write files under names that nobody else has; the driver
alone lets the folder appear, whole (``jobs.folder``). A run that was interrupted leaves ``FOLDER.partial``: the same
command keeps the partitions that are whole there, and says of which moment they are.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from firn.cli.tables import bytes_text
from firn.cli.times import time_text
from firn.client.producer import wall_ms
from firn.errors import UnknownTopic
from firn_spark.__main__ import run_by_name
from firn_spark.connection import Connection
from firn_spark.fetch import Range
from firn_spark.jobs import command, folder, tasks
from firn_spark.jobs.folder import Part, Place, Snapshot
from firn_spark.jobs.livemap import live_rows
from firn_spark.jobs.pins import pinned
from firn_spark.jobs.report import Report

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Taken:
    """What a run did: the snapshot, and the partitions that an interrupted run had written before."""

    snapshot: Snapshot
    resumed: frozenset[int]


def take_snapshot(
    spark: "SparkSession", connection: Connection, topic: str, target: str, *, fresh: bool = False
) -> Taken:
    """Write the map of ``topic`` to the new folder ``target``. ``fresh``: keep nothing of an interrupted run.

    Errors: Invalid when ``target`` is there; SnapshotExpired when the pinned state was lost, as by a change of the
    master: the same call again goes on with what is whole.
    """
    folder.check_free(target)
    place = folder.partial(target)
    with connection.client() as client:
        described = client.describe(topic)
    topic_id, spec = int(described["topic_id"]), described["spec"]
    left = [] if fresh else sorted(folder.parts_in(place), key=lambda part: part.taken_ms)
    parts = {part.partition: part for part in left if part.topic_id == topic_id}
    resumed = frozenset(parts)
    system, path = place.opened()
    system.create_dir(path, recursive=True)
    with pinned(connection, topic) as pin:
        if pin.topic_id != topic_id:
            raise UnknownTopic(f"{topic} was deleted and made anew just now; run again")
        now, run = wall_ms(), uuid4().hex[:8]
        wanted = [(part, now) for part in pin.ranges() if part.partition not in parts]
        written = tasks.each(spark, wanted, partial(_write, connection, place, run), _WRITTEN)
        for row in written.collect():
            parts[row.partition] = Part(topic, topic_id, *row)
    return Taken(folder.publish(place, target, topic, spec, parts.values()), resumed)


_WRITTEN = "partition int, end long, taken_ms long, records long, file string, bytes long"


def _write(
    connection: Connection, place: Place, run: str, item: tuple[Range, int]
) -> "Iterator[RecordBatch]":
    """In a task: one partition's file."""
    import pyarrow as pa
    from pyspark import TaskContext

    part, now = item
    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    name = f"partition-{part.partition:05}-{run}-{attempt}.parquet"
    begun = Part(part.topic, part.topic_id, part.partition, part.end, now, 0, name, 0)
    done = folder.write_part(place, begun, live_rows(connection, part))
    yield tasks.rows(
        pa.schema(
            [("partition", pa.int32()), ("end", pa.int64()), ("taken_ms", pa.int64()), ("records", pa.int64()),
             ("file", pa.string()), ("bytes", pa.int64())]
        ),
        [(done.partition, done.end, done.taken_ms, done.records, done.file, done.bytes)],
    )  # fmt: skip


def report_of(taken: Taken, target: str) -> Report:
    """As a table and as JSON."""
    snapshot, records = taken.snapshot, sum(part.records for part in taken.snapshot.parts)
    sentences = [f"{records:,} records of {snapshot.topic} are in {target}"]
    if taken.resumed:
        sentences.append(
            f"of them {len(taken.resumed)} partitions were whole in {target}.partial already, each as of its own moment"
        )
    document: dict[str, Any] = {
        "job": "snapshot", "topic": snapshot.topic, "topic_id": snapshot.topic_id, "folder": target, "records": records,
        "partitions": [
            {
                "partition": p.partition, "end": p.end, "records": p.records, "bytes": p.bytes, "taken_ms": p.taken_ms,
                "file": p.file, "resumed": p.partition in taken.resumed,
            }
            for p in snapshot.parts
        ],
    }  # fmt: skip
    columns = [("PARTITION", "r"), ("END", "r"), ("RECORDS", "r"), ("PARQUET", "r"), ("AS OF", "l")]
    rows = [
        (p.partition, p.end, p.records, bytes_text(p.bytes), time_text(p.taken_ms)) for p in snapshot.parts
    ]
    return Report(document, columns, rows, sentences)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    made = command.parser("snapshot", "Write a topic's map to a new folder, as Parquet.")
    made.add_argument("topic", type=command.topic_name)
    made.add_argument("folder", help="a path, or a URI of a file system that renames folders (file:, hdfs:)")
    made.add_argument("--fresh", action="store_true", help="keep nothing that an interrupted run has left")

    def work(job: command.Job) -> Report:
        asked = job.asked
        taken = take_snapshot(job.spark, job.connection, asked.topic, asked.folder, fresh=asked.fresh)
        return report_of(taken, asked.folder)

    return command.run(made, work, arguments)


if __name__ == "__main__":
    sys.exit(run_by_name("snapshot"))
