"""Forced compaction by a real Spark session and a real broker: what is left is what the rule of survivors leaves."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from firn.client.blocking import Client
from firn.client.cursor import Page
from firn.survivors import survivors
from firn_node.demo.process import BrokerProcess
from firn_spark import force_compaction
from firn_spark.connection import Connection
from firn_spark.fetch import Link, Range, pages
from firn_spark.jobs import command
from firn_spark.mapping import Slice, read_slice

Row = tuple[int, bytes, bool]
QUIET = {"minDirtyRatio": 1.0, "deleteRetention": "0s"}  # never compacted because it is due


def fill(client: Client, topic: str, *, seed: int, records: int, keys: int, partitions: int = 2) -> None:
    """Random records with tombstones in several batches; the last partition stays empty."""
    seeded = random.Random(seed)
    pool = [seeded.randbytes(seeded.choice([0, 3, 8, 8, 8, 24])) for _ in range(keys - 1)] + [bytes(65_536)]
    with client.producer(topic, batch_bytes=1 << 16) as producer:
        for _ in range(records):
            value = None if seeded.random() < 0.2 else seeded.randbytes(seeded.randrange(50))
            producer.send(seeded.choice(pool), value, partition=seeded.randrange(max(partitions - 1, 1)))


def rows_of(connection: Connection, client: Client, topic: str, view: str) -> list[list[Row]]:
    """(offset, key, is_tombstone) of each partition."""
    description = client.describe(topic)
    found = []
    for row in description["partitions"]:
        whole = Range(
            topic=topic, topic_id=description["topic_id"], partition=row["partition"], start=0, end=row["latest"],
            view=view, projection="keys",  # type: ignore[arg-type]
        )  # fmt: skip
        part: list[Row] = []
        for page in pages(connection, whole):
            for piece in page.pieces:
                columns = piece.batch.columns
                kept = range(columns.records) if piece.keep is None else piece.keep.nonzero()[0]
                keys = piece.batch.key_list()
                part += [(int(columns.offsets[n]), keys[n], bool(columns.tombstones[n])) for n in kept]
        found.append(part)
    return found


@pytest.mark.parametrize(("slice_records", "retention"), [(100, "0s"), (None, "24h")])
def test_spark_and_the_broker_keep_exactly_the_same_records(
    spark: SparkSession,
    connection: Connection,
    client: Client,
    topic: str,
    slice_records: int | None,
    retention: str,
) -> None:
    chance = random.SystemRandom().randrange(1 << 32)
    print(f"seed {chance}")
    by_spark, by_broker = f"{topic}-s", f"{topic}-b"
    for name in (by_spark, by_broker):
        client.create_topic(name, partitions=3, compaction={**QUIET, "deleteRetention": retention})
    for seed in (5, chance, 6):  # over what the one before has left: sparse offsets behind a horizon
        for name in (by_spark, by_broker):
            fill(client, name, seed=seed, records=600, keys=40, partitions=3)
            client.put(name, b"large", bytes(10 << 20))
        raw = rows_of(connection, client, by_spark, "raw")
        assert raw == rows_of(connection, client, by_broker, "raw")
        before = rows_of(connection, client, by_spark, "compacted")
        plan = force_compaction.compact(spark, connection, by_spark, slice_records=slice_records)
        client.compact(by_broker, force=True, wait=True)
        left = rows_of(connection, client, by_spark, "compacted")
        assert left == rows_of(connection, client, by_broker, "compacted")
        for part, read, whole, row in zip(left, before, raw, plan["partitions"], strict=True):
            over = row["plan_end"] if retention == "0s" else 0
            assert [offset for offset, _, _ in part] == survivors(whole, tombstones_end=over)
            assert (row["state"], row["records_before"], row["records_after"]) == (
                "done",
                len(read),
                len(part),
            )
            assert row["seen"] == row["compared"] == len(read)
    again = force_compaction.compact(spark, connection, by_spark)
    assert [row["dead"] for row in again["partitions"]] == [0, 0, 0]


class CompactedMeanwhile(Link):
    """A link whose broker compacts behind the first page that a task reads."""

    def __init__(self, connection: Connection, client: Client) -> None:
        super().__init__(connection)
        self._client = client
        self.reads = 0

    def pages(self, asked: Range) -> Iterator[Page]:  # type: ignore[override]
        self.reads += 1
        with closing(super().pages(asked)) as found:
            page = next(found)
        yield page
        if self.reads == 1:
            self._client.put(asked.topic, b"k1", b"past the plan")
            self._client.compact(asked.topic, force=True, wait=True)
        if page.next_offset < asked.end:
            yield from super().pages(replace(asked, start=page.next_offset, since=page.since))


def test_a_read_that_meets_a_compaction_past_the_plan_is_begun_again(
    connection: Connection, client: Client, topic: str
) -> None:
    """Else: k1 at 0 is seen, k1 at 3, below the plan's end, is gone for one behind it, and k1 at 0 would be alive."""
    client.create_topic(topic, compaction=QUIET)
    for number, key in enumerate((b"k1", b"k2", b"k3")):
        client.put(topic, key, b"%d" % number)
    client.compact(topic, force=True, wait=True)
    client.put(topic, b"k1", b"newer")
    plan = client.open_plan(topic)
    row = plan["partitions"][0]
    asked = Slice(
        connection=connection, topic=topic, topic_id=plan["topic_id"], plan=row["plan"], partition=0, slice=0, slices=1,
        plan_end=row["plan_end"],
    )  # fmt: skip
    with CompactedMeanwhile(connection, client) as link:
        seen, dead = read_slice(link, asked)
        assert link.reads == 2
    assert (seen.tolist(), dead.tolist()) == ([1, 2], [])
    client.cancel_plan(topic)


def test_a_slice_with_more_keys_than_memory_is_read_in_passes_and_a_hot_key_takes_no_more(
    connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, compaction=QUIET)
    keys = [b"%100d" % (number % 700) for number in range(1000)] + [bytes(20_000)] * 10
    with client.producer(topic) as producer:
        producer.send_many(keys, [b""] * len(keys))
    plan = client.open_plan(topic)
    row = plan["partitions"][0]
    asked = Slice(
        connection=connection, topic=topic, topic_id=plan["topic_id"], plan=row["plan"], partition=0, slice=0, slices=1,
        plan_end=row["plan_end"], keys_bytes_max=60_000,
    )  # fmt: skip
    reads: list[Range] = []

    class Counted(Link):
        def pages(self, asked: Range) -> Iterator[Page]:  # type: ignore[override]
            reads.append(asked)
            return super().pages(asked)

    with Counted(connection) as link:
        seen, dead = read_slice(link, asked)
    last = {key: at for at, key in enumerate(keys)}
    assert seen.tolist() == list(range(1010))
    assert dead.tolist() == [at for at, key in enumerate(keys) if last[key] != at]
    assert 4 < len(reads) < 40
    client.cancel_plan(topic)


def test_a_driver_whose_plan_is_cancelled_ends(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, compaction=QUIET)
    fill(client, topic, seed=4, records=200, keys=20)
    before = rows_of(connection, client, topic, "compacted")

    def watch(plan: dict[str, object]) -> None:
        if plan["state"] == "open":
            client.cancel_plan(topic)

    with pytest.raises(force_compaction.Cancelled):
        force_compaction.compact(spark, connection, topic, watch=watch)
    assert rows_of(connection, client, topic, "compacted") == before


def test_a_run_that_is_done_is_reported_and_not_done_again(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, compaction=QUIET)
    fill(client, topic, seed=4, records=200, keys=20)
    first = force_compaction.compact(spark, connection, topic, run="of-tonight")
    client.put(topic, b"more", b"x")
    again = force_compaction.compact(spark, connection, topic, run="of-tonight")
    assert again["ids"] == first["ids"]
    assert again["partitions"] == first["partitions"]


def test_the_brokers_tell_everybody_how_far_a_run_is(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=2, compaction=QUIET)
    fill(client, topic, seed=4, records=200, keys=20, partitions=3)
    assert client.compaction_plan(topic) is None
    force_compaction.compact(spark, connection, topic)
    found = client.compaction_plan(topic)
    assert found is not None
    assert found["state"] == "done"
    assert found["progress"]["slices_total"] == found["progress"]["slices_done"] == 2
    assert found["progress"]["rows_read"] == found["progress"]["rows_total"] == 200


def test_what_cannot_be_done_is_said_in_one_sentence_before_spark_begins(
    broker: BrokerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert force_compaction.main(["--bootstrap", broker.address, "no-such-topic"]) == 1
    assert "no-such-topic" in capfd.readouterr().err
    assert force_compaction.main(["--bootstrap", "127.0.0.1:1", "--timeout", "200ms", "t"]) == command.AGAIN
    assert "127.0.0.1:1" in capfd.readouterr().err


@pytest.mark.slow
def test_firn_compact_by_spark_ends_with_the_object_of_every_engine(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    client.create_topic(topic, compaction=QUIET)
    fill(client, topic, seed=6, records=300, keys=20)
    command = [sys.executable, "-m", "firn.cli.main", "--broker", broker.address, "compact", topic]
    ended = subprocess.run([*command, "--engine", "spark", "-o", "json"], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    document = json.loads(line)
    assert (list(document), document["engine"]) == (["topic", "engine", "partitions"], "spark")
    (row,) = document["partitions"]
    assert (row["state"], row["records_before"], row["compared"]) == ("done", 300, 300)
    assert {"bytes_read", "bytes_written", "tombstones_dropped", "rounds", "seconds"} <= set(row)
    chosen = subprocess.run(
        [*command, "--engine", "auto", "--force", "--wait"], capture_output=True, check=True
    )
    assert b"engine broker: the topic has" in chosen.stderr
