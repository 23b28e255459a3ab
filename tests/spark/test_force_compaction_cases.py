"""Forced compactions by Spark of topics at the edge: nothing in them, one key, ten million, an index that is wrong."""

import asyncio

import numpy as np
import pytest
from engine_kit import run
from pyspark.sql import SparkSession

from firn.client.blocking import Client
from firn_spark import force_compaction
from firn_spark.connection import Connection
from firn_spark.counting import KeyCount, count_keys
from firn_spark.force_compaction import Document
from server.serving import real

QUIET = {"minDirtyRatio": 1.0, "deleteRetention": "0s"}  # never compacted because it is due
MANY = 10_000_000


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([], {}),
        ([(b"a", b"1"), (b"b", b"2"), (b"a", None), (b"b", None)], {}),
        ([(b"only", b"%d" % n) for n in range(500)], {b"only": b"499"}),
    ],
    ids=["empty", "all deleted", "one key"],
)
def test_a_topic_with_hardly_a_key_is_compacted(
    rows: list[tuple[bytes, bytes | None]],
    left: dict[bytes, bytes],
    spark: SparkSession,
    connection: Connection,
    client: Client,
    topic: str,
) -> None:
    client.create_topic(topic, partitions=2, compaction=QUIET)
    with client.producer(topic) as producer:
        for key, value in rows:
            producer.send(key, value, partition=1)
    plan = force_compaction.compact(spark, connection, topic)
    assert [row["state"] for row in plan["partitions"]] == ["done", "done"]
    assert [row["compared"] for row in plan["partitions"]] == [0, len(rows)]
    assert [(r.key, r.value) for r in client.reader(topic, until_end=True)] == list(left.items())


def test_a_partition_that_its_broker_compacts_while_the_plan_is_out_is_done_all_the_same(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, compaction=QUIET)
    with client.producer(topic) as producer:
        producer.send_many([b"k%d" % (n % 50) for n in range(1000)], [b"%d" % n for n in range(1000)])
    compacted: list[Document] = []

    def watch(plan: Document) -> None:
        if not compacted:
            client.put(topic, b"k3", b"behind the plan")
            compacted.append(client.compact(topic, force=True, wait=True))

    plan = force_compaction.compact(spark, connection, topic, watch=watch)
    (row,) = plan["partitions"]
    assert (row["state"], row["disagreements"]) == ("done", [])
    assert row["plan_end"] == 1000
    assert row["compared"] <= 50, "what its broker has masked is not compared"
    found = {r.key: r.value for r in client.reader(topic, until_end=True)}
    assert found == {b"k%d" % n: b"%d" % (950 + n) for n in range(50)} | {b"k3": b"behind the plan"}


def test_a_key_index_that_takes_two_keys_for_one_is_a_disagreement_and_nothing_is_changed(
    spark: SparkSession,
) -> None:
    async def story() -> None:
        async with real(compaction=QUIET) as served:
            kit = served.kit
            await kit.put("t", [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
            log = kit.broker.partitions.get(kit.broker.topic("t"), 0).log
            fingerprints = np.array([7, 7, 9], np.uint64)  # of a and b the same
            words = np.array([5 << 32 | row << 1 for row in range(3)], np.uint64)
            log.seal(0, 3, [(fingerprints, words)], bytes=500, max_append_ms=1)
            generation = log.manifest.generation
            connection = Connection(bootstrap=served.address)
            plan = await asyncio.to_thread(force_compaction.compact, spark, connection, "t")
            (row,) = plan["partitions"]
            assert (row["state"], row["disagreements"]) == ("disagreement", [0])
            assert "disagreement" in (force_compaction.report_of(plan, 1.0).failure or "")
            assert log.manifest.generation == generation
            assert await kit.map("t") == {b"a": b"1", b"b": b"2", b"c": b"3"}

    run(story(), seconds=300)


@pytest.mark.slow
def test_ten_million_keys_of_which_some_have_two_records(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    again = MANY // 10
    client.create_topic(topic, partitions=4, compaction=QUIET)
    numbers = np.concatenate([np.arange(MANY), np.arange(again)])
    with client.producer(topic) as producer:
        for at in range(0, len(numbers), 100_000):
            keys = numbers[at : at + 100_000].astype("S8").tolist()
            producer.send_many(keys, [b""] * len(keys))
    plan = force_compaction.compact(spark, connection, topic)
    assert [row["state"] for row in plan["partitions"]] == ["done"] * 4
    assert sum(row["dead"] for row in plan["partitions"]) == again
    assert sum(row["compared"] for row in plan["partitions"]) == len(numbers)
    assert count_keys(spark, connection, topic) == KeyCount(MANY, MANY, MANY)
    client.delete_topic(topic)
