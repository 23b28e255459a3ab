"""``python -m firn_spark.erase TOPIC --where SQL``: delete every key whose live record a condition finds.

The condition is asked of the map as of one pinned snapshot: columns partition, offset, timestamp, key, value, tag,
headers. Each tombstone is written with ``if_offset`` of the record that was seen: a key that was written to meanwhile
keeps its newer record, and is reported as changed. Then the topic is compacted by force, which takes the old values
out of the compacted view's files; the tombstones stay readable for ``deleteRetention`` from then on, so that readers
who were away learn of them. The raw view keeps what was written until ``retention`` lets go of it.

*Effects*: may be run again: what is deleted already is found no more.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from firn.cli.times import time_text
from firn.client import Client
from firn.client.producer import wall_ms
from firn.errors import Conflict
from firn.partitioner import partition_of
from firn.units import duration_ms
from firn_spark.__main__ import run_by_name
from firn_spark.connection import Connection
from firn_spark.jobs import command, sql, tasks
from firn_spark.jobs.livemap import live_frame
from firn_spark.jobs.pins import pinned
from firn_spark.jobs.report import KEYS_SHOWN, Report, keys_text

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, Row, SparkSession

Counts = dict[str, dict[int, int]]  # outcome -> partition -> number
Keys = dict[str, list[bytes]]  # outcome -> the first of its keys
ERASED, GONE, CHANGED, MATCHED = "erased", "gone", "changed", "matched"
_AT_ONCE = 256  # compare-and-sets of a task under way: enough to share an fdatasync


@dataclass(frozen=True, slots=True)
class Erased:
    """What became of the keys that the condition found.

    ``erased``: by a tombstone of this run; ``gone``: deleted already when its turn came; ``changed``: written to since
    the snapshot, and left alone; ``matched``: of a dry run.
    """

    topic: str
    is_dry: bool
    counts: Counts
    keys: Keys
    compaction: dict[str, Any] | None
    tombstones_until_ms: int | None
    raw_retention: str

    def total(self, outcome: str) -> int:
        return sum(self.counts.get(outcome, {}).values())


def erase(
    spark: "SparkSession", connection: Connection, topic: str, condition: str, *, dry_run: bool = False
) -> Erased:
    """Delete the keys whose live record satisfies ``condition``; ``dry_run``: only count them.

    Errors: Invalid for a condition that is none.
    """
    with connection.client() as client:
        spec = client.describe(topic)["spec"]
        retention = f"{spec['retention']['time']}, {spec['retention']['size']}"
        with found_keys(spark, connection, topic, condition) as found:
            counts, keys = found.counted() if dry_run else found.erased()
        # Changed ones count too: a task that was tried again takes its own tombstone for another's record.
        if dry_run or not counts:
            return Erased(topic, dry_run, counts, keys, None, None, retention)
        compaction = client.compact(topic, force=True, wait=True)
    until = wall_ms() + duration_ms(spec["compaction"]["deleteRetention"])
    return Erased(topic, dry_run, counts, keys, compaction, until, retention)


@contextmanager
def found_keys(
    spark: "SparkSession", connection: Connection, topic: str, condition: str
) -> "Iterator[FoundKeys]":
    """The keys that the condition finds, as of now: what is written from here on changes none of them.

    Errors: Invalid for a condition that is none.
    """
    with pinned(connection, topic) as pin:
        live = live_frame(spark, connection, pin.ranges())
        with sql.given_as(f"--where {condition!r}"):
            frame = live.where(condition).select("partition", "offset", "key")
        yield FoundKeys(frame, connection, topic, len(pin.ends))


@dataclass(frozen=True, slots=True)
class FoundKeys:
    """Partition, offset and key of each record that a condition has found, as long as its snapshot is pinned."""

    frame: "DataFrame"
    connection: Connection
    topic: str
    partitions: int

    def counted(self) -> tuple[Counts, Keys]:
        """How many there are."""
        return _added(self.frame.mapInArrow(_count, _OUTCOMES).collect())

    def erased(self) -> tuple[Counts, Keys]:
        """What became of each. *Effects*: tombstones, acknowledged."""
        work = partial(_erase, self.connection, self.topic, self.partitions)
        return _added(self.frame.mapInArrow(work, _OUTCOMES).collect())


_OUTCOMES = "partition int, outcome string, count long, keys array<binary>"


def _added(rows: "list[Row]") -> tuple[Counts, Keys]:
    counts: Counts = {}
    keys: Keys = {}
    for row in rows:
        of = counts.setdefault(row["outcome"], {})
        of[row["partition"]] = of.get(row["partition"], 0) + row["count"]
        shown = keys.setdefault(row["outcome"], [])
        shown += map(bytes, row["keys"][: KEYS_SHOWN - len(shown)])
    return counts, keys


def _count(batches: "Iterator[RecordBatch]") -> "Iterator[RecordBatch]":
    for batch in batches:
        partitions, keys = batch.column("partition").to_pylist(), batch.column("key").to_pylist()
        yield _outcomes([(p, MATCHED, key) for p, key in zip(partitions, keys, strict=True)])


def _erase(
    connection: Connection, topic: str, partitions: int, batches: "Iterator[RecordBatch]"
) -> "Iterator[RecordBatch]":
    """In a task: a tombstone for each row, unless its key has another record by now."""
    for batch in batches:
        rows = list(
            zip(*(batch.column(name).to_pylist() for name in ("partition", "offset", "key")), strict=True)
        )
        yield _outcomes(asyncio.run(_erase_rows(connection, topic, partitions, rows)))


async def _erase_rows(
    connection: Connection, topic: str, partitions: int, rows: list[tuple[int, int, bytes]]
) -> list[tuple[int, str, bytes]]:
    async with Client(
        connection.bootstrap, timeout=connection.timeout, tls_ca=connection.tls_ca, tls_cert=connection.tls_cert,
        tls_key=connection.tls_key, token_file=connection.token_file,
    ) as client:  # fmt: skip
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(partition: int, offset: int, key: bytes) -> tuple[int, str, bytes]:
            async with room:
                return partition, await _erase_key(client, topic, partitions, partition, offset, key), key

        return await asyncio.gather(*(one(*row) for row in rows))


async def _erase_key(
    client: Client, topic: str, partitions: int, partition: int, offset: int, key: bytes
) -> str:
    try:
        await client.delete(topic, key, if_offset=offset, partition=partition)
    except Conflict:
        # Deleted by somebody else, or by an attempt of this task whose answer was lost.
        if partition == partition_of(key, partitions) and await client.get(topic, key) is None:
            return GONE
        return CHANGED
    return ERASED


def _outcomes(rows: list[tuple[int, str, bytes]]) -> "RecordBatch":
    import pyarrow as pa

    keys: dict[tuple[int, str], list[bytes]] = {}
    for partition, outcome, key in rows:
        keys.setdefault((partition, outcome), []).append(key)
    schema = pa.schema(
        [
            ("partition", pa.int32()),
            ("outcome", pa.string()),
            ("count", pa.int64()),
            ("keys", pa.list_(pa.binary())),
        ]
    )
    found = [(p, outcome, len(of), of[:KEYS_SHOWN]) for (p, outcome), of in sorted(keys.items())]
    return tasks.rows(schema, found)


def report_of(found: Erased, condition: str) -> Report:
    """As a table and as JSON."""
    outcomes = (MATCHED,) if found.is_dry else (ERASED, GONE, CHANGED)
    partitions = sorted({p for of in found.counts.values() for p in of})
    rows = [(p, *(found.counts.get(outcome, {}).get(p, 0) for outcome in outcomes)) for p in partitions]
    document: dict[str, Any] = {
        "job": "erase", "topic": found.topic, "where": condition, "dry_run": found.is_dry,
        **{outcome: found.total(outcome) for outcome in outcomes},
        "partitions": [dict(zip(("partition", *outcomes), row, strict=True)) for row in rows],
        "first": {outcome: [key.hex() for key in found.keys.get(outcome, [])] for outcome in outcomes},
        "compaction": found.compaction, "tombstones_until_ms": found.tombstones_until_ms,
        "raw_retention": found.raw_retention,
    }  # fmt: skip
    columns = [("PARTITION", "r"), *((outcome.upper(), "r") for outcome in outcomes)]
    return Report(document, columns, rows, _sentences(found, outcomes), _failure(found))


def _sentences(found: Erased, outcomes: Sequence[str]) -> list[str]:
    told = []
    for outcome in outcomes:
        total = found.total(outcome)
        keys = f": {keys_text(found.keys[outcome], total)}" if total else ""
        told.append(f"{outcome}: {total:,}{keys}")
    if found.is_dry:
        told.append("dry run: nothing was written")
    if found.total(CHANGED):
        told.append(
            "changed keys have a newer record, which was left alone: run again to ask the condition of it"
        )
    if found.compaction is not None and found.tombstones_until_ms is not None:
        told.append(
            f"the tombstones stay readable until {time_text(found.tombstones_until_ms)} (deleteRetention); the raw view "
            f"shows the erased values until its retention ({found.raw_retention}) lets go of them"
        )
        kept = sum(p.get("records_kept_by_min_lag", 0) for p in found.compaction["partitions"])
        if kept:
            told.append(
                f"minLag kept {kept:,} records out of the compaction: what they replace goes with a later one"
            )
    return told


def _failure(found: Erased) -> str | None:
    if found.compaction is None:
        return None
    failed = [p for p in found.compaction["partitions"] if p["state"] in ("failed", "cancelled")]
    if not failed:
        return None
    return (
        f"the tombstones are written, but partition {failed[0]['partition']} of {found.topic} was not compacted: "
        f"{failed[0].get('reason') or failed[0]['state']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    made = command.parser("erase", "Delete every key whose live record a SQL condition finds.")
    made.add_argument("topic", type=command.topic_name)
    made.add_argument(
        "--where", required=True, metavar="SQL",
        help="asked of partition, offset, timestamp, key, value, tag, headers; keys and values are binary: "
        "CAST(key AS STRING) LIKE 'customer-17-%%'",
    )  # fmt: skip
    made.add_argument("--dry-run", action="store_true", help="only count what would be erased")

    def work(job: command.Job) -> Report:
        asked = job.asked
        return report_of(
            erase(job.spark, job.connection, asked.topic, asked.where, dry_run=asked.dry_run), asked.where
        )

    return command.run(made, work, arguments)


if __name__ == "__main__":
    sys.exit(run_by_name("erase"))
