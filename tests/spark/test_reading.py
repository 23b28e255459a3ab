"""Batch reads by ``format("firn")``: real sessions, real brokers."""

import json
import os
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from spark_kit import frame_rows, map_of, records_of, written

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark.columns import arrow_schema
from firn_spark.connection import Connection
from firn_spark.schema import spark_schema
from firn_spark.session import PUSHDOWN, keeper

SEEDS = [11, 12]


class Read:
    """``read(topic, view="raw")``: a DataFrame."""

    def __init__(self, spark: SparkSession, connection: Connection) -> None:
        self._spark = spark
        self._connection = connection

    def __call__(self, topic: str, **options: Any) -> DataFrame:
        given = {**self._connection.options(), **options}
        return self._spark.read.format("firn").options(**given).load(topic)


@pytest.fixture(scope="session")
def read(spark: SparkSession, connection: Connection) -> Read:
    return Read(spark, connection)


@pytest.mark.parametrize("projection", ["records", "keys"])
def test_the_announced_schema_is_that_of_the_record_batches(projection: Any) -> None:
    assert to_arrow_schema(spark_schema(projection), timezone="UTC").equals(arrow_schema(projection))


@pytest.mark.parametrize("seed", SEEDS)
def test_both_views_have_the_rows_that_the_client_reads(
    seed: int, client: Client, read: Read, topic: str
) -> None:
    written(client, topic, seed, partitions=3)
    assert frame_rows(read(topic, view="raw")) == records_of(client, topic, view="raw")
    compacted = frame_rows(read(topic))
    assert compacted == records_of(client, topic)
    assert map_of(compacted) == map_of(records_of(client, topic, view="raw"))
    sliced = read(topic, maxBytesPerTask="9000")
    assert sliced.rdd.getNumPartitions() > 6
    assert frame_rows(sliced) == compacted


def test_a_raw_read_of_a_compacted_topic_is_cut_by_the_bytes_of_the_raw_view(
    client: Client, read: Read, topic: str
) -> None:
    client.create_topic(topic)
    with client.producer(topic) as producer:
        producer.send_many([b"k"] * 1000, [bytes([n % 256]) * 100 for n in range(1000)])
    client.compact(topic, force=True, wait=True, timeout=60)
    raw = read(topic, view="raw", maxBytesPerTask="20000")
    assert raw.rdd.getNumPartitions() >= 5
    assert frame_rows(raw) == records_of(client, topic, view="raw")
    assert read(topic, maxBytesPerTask="20000").rdd.getNumPartitions() == 1


def test_the_keys_projection_has_a_row_for_every_record_and_no_value(
    client: Client, read: Read, topic: str
) -> None:
    written(client, topic, 13)
    found = read(topic, projection="keys").select("offset", "key", "tombstone", "tag", "partition").collect()
    expected = records_of(client, topic)
    assert sorted((r.partition, r.offset, bytes(r.key), r.tombstone, r.tag) for r in found) == [
        (p, offset, key, value is None, tag) for p, offset, _, key, value, tag, _ in expected
    ]


def test_an_empty_topic_has_no_row_and_many_small_partitions_one_task(
    client: Client, read: Read, topic: str
) -> None:
    client.create_topic(topic, partitions=8)
    assert read(topic).count() == 0
    with client.producer(topic) as producer:
        for n in range(8):
            producer.send(b"k", b"%d" % n, partition=n)
    frame = read(topic, partitionsPerTask="8")
    assert frame.rdd.getNumPartitions() == 1
    assert len(frame_rows(frame)) == 8


def test_a_topic_of_tombstones_has_a_row_without_a_value_for_each(
    client: Client, read: Read, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    with client.producer(topic) as producer:
        for n in range(50):
            producer.send(b"k%d" % n, None)
    assert read(topic).where("value IS NULL").count() == 50
    assert map_of(frame_rows(read(topic))) == {}


def test_large_keys_and_values_come_whole(client: Client, read: Read, topic: str) -> None:
    client.create_topic(topic, partitions=1)
    rows = {b"": b"", b"k" * (64 << 10): b"v", b"large": b"x" * (10 << 20), b"null": None}
    for key, value in rows.items():
        client.put(topic, key, value)
    found = {row[3]: row[4] for row in frame_rows(read(topic))}
    assert found == rows


def test_offsets_bound_a_raw_read(client: Client, read: Read, topic: str) -> None:
    written(client, topic, 14, records=400)
    every = records_of(client, topic, view="raw")
    options = {
        "startingOffsets": json.dumps({"0": 20, "1": "earliest"}),
        "endingOffsets": json.dumps({"0": 90}),
    }
    found = frame_rows(read(topic, view="raw", **options))
    assert found == [row for row in every if row[0] == 1 or 20 <= row[1] < 90]


def test_a_named_snapshot_is_read_as_it_was(client: Client, read: Read, topic: str) -> None:
    written(client, topic, 15, records=400)
    with client.snapshot(topic) as snapshot:
        expected = records_of(client, topic)
        for n in range(200):
            client.put(topic, b"k%d" % n, b"newer")
        client.compact(topic, force=True, wait=True, timeout=60)
        frame = read(topic, snapshot=snapshot.id)
        assert frame_rows(frame) == expected
    assert map_of(frame_rows(read(topic)))[b"k7"] == b"newer"


def test_a_read_is_of_one_state_while_the_topic_is_written_and_compacted(
    client: Client, read: Read, topic: str
) -> None:
    written(client, topic, 16, records=400)
    expected = records_of(client, topic)
    frame = read(topic)
    frame.explain()  # plans, and so opens the snapshot
    assert frame_rows_of_plan(frame) == len(expected)
    with client.producer(topic) as producer:
        for n in range(200):
            producer.send(b"k%d" % n, None)
    client.compact(topic, force=True, wait=True, timeout=60)
    assert frame_rows_of_plan(frame) == len(expected)


def test_the_snapshot_of_a_query_is_held_by_the_drivers_keeper(
    client: Client, spark: SparkSession, read: Read, topic: str
) -> None:
    written(client, topic, 22, records=100)
    found = keeper(spark)
    assert found is not None
    before = set(found.held)
    read(topic).collect()
    deadline = time.monotonic() + 60
    while not set(found.held) - before:
        assert time.monotonic() < deadline, "the planner has handed nothing over"
        time.sleep(0.05)


def test_the_source_is_known_without_a_call(
    client: Client, spark: SparkSession, connection: Connection, topic: str
) -> None:
    written(client, topic, 23, records=100)
    other = spark.newSession()
    frame = other.read.format("firn").options(**connection.options(), view="raw").load(topic)
    assert frame.count() == 100
    assert frame.where("offset < 3").count() <= 6


def bytes_sent(broker: BrokerProcess) -> int:
    """By the broker's own count."""
    with urllib.request.urlopen(f"http://{broker.address}/metrics") as answer:
        found = re.search(r"^firn_server_sent_bytes_total (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def frame_rows_of_plan(frame: DataFrame) -> int:
    """The rows of a DataFrame's own plan, made once, where an action on a frame derived from it would plan anew."""
    return len(frame.collect())


@pytest.fixture(scope="session")
def whole(client: Client, spark: SparkSession, read: Read) -> dict[str, DataFrame]:
    """The rows of a topic in Spark's memory, by view: conditions on these are Spark's alone."""
    written(client, "filtered", 17, partitions=3)
    schema = spark_schema("records")
    views = ("raw", "compacted")
    return {view: spark.createDataFrame(read("filtered", view=view).toArrow(), schema) for view in views}


@pytest.mark.usefixtures("whole")
class TestFilters:
    """What is pushed down leaves the same rows, and reads less."""

    @pytest.mark.parametrize(
        "condition",
        [
            "offset >= 30 AND offset < 70",
            "partition = 1",
            "partition IN (0, 2) AND offset > 100",
            "timestamp >= timestamp_millis(500000000000)",
            "timestamp < timestamp_millis(500000000000) AND offset <= 90",
            "key = X'6B37' AND offset > 10",
            "key IN (X'6B37', X'6B38', X'00')",
            "offset = 3 OR offset = 5",
            "tag = 'red' AND partition <=> 0",
        ],
    )
    @pytest.mark.parametrize("view", ["raw", "compacted"])
    def test_rows_are_those_that_spark_finds_in_the_whole(
        self, condition: str, view: str, whole: dict[str, DataFrame], read: Read
    ) -> None:
        pushed = frame_rows(read("filtered", view=view).where(condition))
        plain = frame_rows(whole[view].where(condition))
        if view == "compacted" and "key" in condition:  # looked up: the newest records alone
            assert map_of(pushed) == map_of(plain)
            assert len(pushed) == len({row[3] for row in pushed})
        else:
            assert pushed == plain

    def test_a_session_without_push_down_filters_as_well(self, spark: SparkSession, read: Read) -> None:
        pushed = frame_rows(read("filtered", view="raw").where("offset < 30"))
        spark.conf.set(PUSHDOWN, "false")
        try:
            assert frame_rows(read("filtered", view="raw").where("offset < 30")) == pushed
        finally:
            spark.conf.set(PUSHDOWN, "true")

    def test_a_bounded_offset_asks_for_less_and_a_partition_for_nothing_of_the_others(
        self, client: Client, read: Read, topic: str
    ) -> None:
        written(client, topic, 18, records=600, partitions=3)
        assert read(topic, view="raw").where("partition = 1").rdd.getNumPartitions() == 1
        assert read(topic, view="raw").where("offset < 0").count() == 0
        assert read(topic, view="raw").rdd.getNumPartitions() == 3

    def test_the_broker_sends_what_the_conditions_leave_and_not_the_rest(
        self, client: Client, broker: BrokerProcess, read: Read, topic: str
    ) -> None:
        client.create_topic(topic, partitions=3)
        for at in range(0, 600, 30):
            with client.producer(topic) as producer:
                for n in range(at, at + 30):
                    producer.send(b"k%d" % n, bytes(10_000), timestamp=n * 1000)
        end = client.describe(topic)["partitions"][1]["latest"]
        found = []
        for view, condition in (
            ("compacted", "true"),
            ("compacted", f"partition = 1 AND offset >= {end - 20}"),
            ("compacted", "key = X'6B37'"),
            ("raw", "timestamp >= timestamp_millis(570000)"),
        ):
            before = bytes_sent(broker)
            rows = read(topic, view=view).where(condition).count()
            found.append((rows, bytes_sent(broker) - before))
        rows, sent = zip(*found, strict=True)
        assert rows == (600, 20, 1, 30)
        assert sent[0] >= 6_000_000
        assert sent[1] < sent[0] // 10, "whole batches, and nothing of other partitions"
        assert sent[2] < sent[0] // 100
        assert sent[3] < sent[0] // 10, "from the first batch on that may be as new"

    def test_a_key_is_looked_up_instead_of_read(self, client: Client, read: Read, topic: str) -> None:
        client.create_topic(topic, partitions=1)
        for n in range(3):
            client.put(topic, b"k", b"%d" % n)
        client.put(topic, b"gone", b"v")
        client.delete(topic, b"gone")
        found = frame_rows(read(topic).where("key = X'6B'"))
        assert [row[1:2] + row[3:5] for row in found] == [(2, b"k", b"2")]
        assert frame_rows(read(topic).where("key = X'676F6E65'")) == []
        assert read(topic, projection="keys").where("key = X'6B'").count() == 1
        assert len(frame_rows(read(topic, view="raw").where("key = X'6B'"))) == 3


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"startingOffset": "4"}, "option startingoffset: unknown"),
            ({"view": "row"}, "expected compacted or raw"),
            ({"startingOffsets": "soon"}, "expected earliest, latest, or JSON"),
            ({"startingOffsets": '{"9": 1}', "view": "raw"}, "partition 9: the topic has 2"),
            ({"startingOffsets": '{"0": 99}', "view": "raw"}, "offset 99 is past the end"),
            ({"snapshot": "0123456789abcdef"}, "0123456789abcdef"),
            ({"token": "secret"}, "tokenFile"),
            ({"partitionsPerTask": "0"}, "whole number from 1"),
            ({"bootstrap": "127.0.0.1:1", "timeout": "1"}, "127.0.0.1:1"),
            ({"bootstrap": "nowhere"}, "expected HOST:PORT"),
            ({"tlsCa": "/there/is/none.pem"}, "none.pem"),
        ],
    )
    def test_what_cannot_be_read_is_said_in_a_sentence(
        self, options: dict[str, str], words: str, client: Client, read: Read
    ) -> None:
        topic = "errors"
        if not any(found["name"] == topic for found in client.topics()):
            client.create_topic(topic, partitions=2)
        with pytest.raises(PySparkException) as raised:
            read(topic, **options).collect()
        assert words in str(raised.value)

    def test_a_topic_that_is_not_there_is_named(self, read: Read) -> None:
        with pytest.raises(PySparkException, match="'never'"):
            read("never").collect()

    def test_a_schema_of_ones_own_is_refused(
        self, spark: SparkSession, connection: Connection, topic: str
    ) -> None:
        frame = spark.read.format("firn").options(**connection.options()).schema("key STRING").load(topic)
        with pytest.raises(PySparkException, match="schema is given"):
            frame.collect()

    def test_a_lost_snapshot_fails_the_query_by_name(self, client: Client, read: Read, topic: str) -> None:
        written(client, topic, 19, records=100)
        with client.snapshot(topic) as snapshot:
            frame = read(topic, snapshot=snapshot.id)
            frame.explain()
        with pytest.raises(PySparkException, match="SnapshotExpired"):
            frame.collect()

    def test_a_topic_deleted_under_a_query_is_named(self, client: Client, read: Read, topic: str) -> None:
        written(client, topic, 20, records=100)
        frame = read(topic, view="raw")
        frame.explain()
        client.delete_topic(topic)
        with pytest.raises(PySparkException, match="UnknownTopic"):
            frame.collect()


def test_a_task_that_is_tried_again_gives_its_rows_once(
    client: Client, read: Read, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 21, records=400)
    marks = str(tmp_path)

    def fail_once(batches: Any) -> Any:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        mark = os.path.join(marks, str(task.partitionId()))
        yield from batches
        if not os.path.exists(mark):
            open(mark, "w").close()
            raise RuntimeError("once")

    frame = read(topic)
    found = frame.select("partition", "offset").mapInArrow(fail_once, "partition int, offset long").collect()
    assert sorted((r[0], r[1]) for r in found) == [row[:2] for row in records_of(client, topic)]
    assert sorted(os.listdir(marks)) == ["0", "1"]
