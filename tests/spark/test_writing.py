"""Batch and stream writes: what arrives, what is refused, and who fences whom."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from spark_kit import map_of, records_of, written

from firn.batch import Codecs
from firn.client.blocking import Client
from firn.errors import Fenced, Invalid, LimitExceeded, UnknownPartition
from firn_spark.connection import Connection
from firn_spark.cutting import parts
from firn_spark.fetch import Link
from firn_spark.sender import Sender, Writer, epoch_after, producer_id_of


@pytest.fixture(scope="session")
def options(connection: Connection) -> dict[str, str]:
    return connection.options()


def read(spark: SparkSession, options: dict[str, str], topic: str, **more: str) -> DataFrame:
    return spark.read.format("firn").options(**options, **more).load(topic)


def test_a_topic_is_copied_row_by_row(
    client: Client, spark: SparkSession, options: dict[str, str], topic: str
) -> None:
    written(client, topic, 41, partitions=3)
    client.create_topic(f"{topic}-copy", partitions=3)
    frame = read(spark, options, topic, view="raw")
    frame.write.format("firn").options(**options, topic=f"{topic}-copy").mode("append").save()
    expected = records_of(client, topic, view="raw")
    found = records_of(client, f"{topic}-copy", view="raw")
    assert [row[:1] + row[2:] for row in found] == [row[:1] + row[2:] for row in expected]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_rows_of_strings_are_placed_by_the_hash_of_their_keys(
    compression: str, client: Client, spark: SparkSession, options: dict[str, str], topic: str
) -> None:
    client.create_topic(topic, partitions=5)
    frame = spark.range(2000).selectExpr(
        "concat('k', id % 700) AS key",
        "CASE WHEN id % 7 = 0 THEN NULL ELSE repeat(string(id), 9) END AS value",
    )
    more = {"compression": compression, "batchBytes": "5000"}
    frame.coalesce(1).write.format("firn").options(**options, **more).mode("append").save(topic)
    expected = {f"k{n % 700}".encode(): None if n % 7 == 0 else str(n).encode() * 9 for n in range(2000)}
    found = client.get_many(topic, list(expected))
    assert [None if record is None else record.value for record in found] == list(expected.values())


def test_a_row_may_name_its_partition_and_have_headers(
    client: Client, spark: SparkSession, options: dict[str, str], topic: str
) -> None:
    client.create_topic(topic, partitions=4)
    frame = spark.sql(
        "SELECT 'a' AS key, X'00' AS value, 3 AS partition, map('from', 'röd') AS headers, 'red' AS tag, "
        "timestamp_millis(1500) AS timestamp UNION ALL SELECT 'b', NULL, NULL, NULL, NULL, NULL"
    )
    frame.write.format("firn").options(**options).mode("append").save(topic)
    found = {row[3]: row for row in records_of(client, topic, view="raw")}
    assert found[b"a"][0] == 3
    assert found[b"a"][2:] == (1_500_000, b"a", b"\x00", "red", {"from": "röd"})
    assert found[b"b"][4:] == (None, None, {})
    assert found[b"b"][2] > 1_600_000_000_000_000


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT 'v' AS value", "column key is missing"),
        ("SELECT 'k' AS key", "column value is missing"),
        ("SELECT 1 AS key, 'v' AS value", "column key: expected binary or string, found int"),
        ("SELECT 'k' AS key, 'v' AS value, 1 AS size", "column size"),
        ("SELECT CAST(NULL AS STRING) AS key, 'v' AS value", "key is null"),
        ("SELECT 'k' AS key, 'v' AS value, 9 AS partition", "names partition 9: the topic has 2"),
        ("SELECT repeat('k', 65537) AS key, 'v' AS value", "key of 65537 bytes"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_sentence(
    query: str, words: str, client: Client, spark: SparkSession, options: dict[str, str], topic: str
) -> None:
    client.create_topic(topic, partitions=2)
    with pytest.raises(PySparkException) as raised:
        spark.sql(query).write.format("firn").options(**options).mode("append").save(topic)
    assert words in str(raised.value)


def test_a_topic_is_never_overwritten(
    client: Client, spark: SparkSession, options: dict[str, str], topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    client.put(topic, b"k", b"v")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        spark.sql("SELECT 'k' AS key, 'w' AS value").write.format("firn").options(**options).mode(
            "overwrite"
        ).save(topic)
    found = client.get(topic, b"k")
    assert found is not None
    assert found.value == b"v"


def test_a_stream_writes_every_micro_batch_once_in_the_compacted_view_through_failures(
    client: Client, spark: SparkSession, options: dict[str, str], topic: str, tmp_path: Path
) -> None:
    written(client, topic, 42, records=600, partitions=2)
    copy = f"{topic}-copy"
    client.create_topic(copy, partitions=3)
    marks = tmp_path / "marks"
    marks.mkdir()
    checkpoint = str(tmp_path / "checkpoint")

    def fail_once(batches: Any) -> Any:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        yield from batches
        mark = marks / f"{task.getLocalProperty('streaming.sql.batchId')}-{task.partitionId()}"
        if not mark.exists():
            mark.touch()
            raise RuntimeError("after what was read was handed on")

    source = (
        spark.readStream.format("firn").options(**options, view="raw", maxRecordsPerTrigger="300").load(topic)
    )
    frame = source.select("key", "value", "timestamp", "tag").mapInArrow(
        fail_once, "key binary, value binary, timestamp timestamp, tag string"
    )
    for _ in range(2):  # the second run has nothing to do but what a restart of the last micro-batch asks for
        query = (
            frame.writeStream.format("firn")
            .options(**options, topic=copy, batchBytes="2000")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(600)
        assert not query.isActive
        commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
        commits[-1].unlink()  # as if the driver had died before it said that the last micro-batch was done
        (tmp_path / "checkpoint" / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)
    expected = records_of(client, topic, view="raw")
    found = records_of(client, copy, view="raw")
    assert len(found) > len(expected)
    assert map_of(found) == map_of(expected)
    assert len(list(marks.iterdir())) == 2 * 2  # tasks, micro-batches


def test_a_stream_into_a_topic_that_is_not_there_ends_by_its_name(
    spark: SparkSession, options: dict[str, str], client: Client, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 43, records=50)
    source = spark.readStream.format("firn").options(**options).load(topic).select("key", "value")
    query = (
        source.writeStream.format("firn")
        .options(**options, topic="never")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match="'never'"):
        query.awaitTermination(600)


def batch_of(**rows: str) -> Any:
    return pa.record_batch(
        {"key": pa.array([k.encode() for k in rows]), "value": pa.array([v.encode() for v in rows.values()])}
    )


class TestFencing:
    """Attempts of one task as they meet at the broker."""

    def write(self, connection: Connection, topic: str, writer: Writer, **rows: str) -> dict[int, int]:
        with Link(connection) as link:
            target = link.run(link.target(topic))
            sender = Sender(link, target, writer, Codecs())
            sender.send(parts(batch_of(**rows), target.partitions, batch_bytes=1 << 20, now_ms=1))
            sender.finish()
            return sender.ends

    def test_an_attempt_that_wakes_up_late_cannot_write_over_a_newer_one(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        client.create_topic(topic, partitions=1)
        id = producer_id_of("run", 0)
        with Link(connection) as link:
            target = link.run(link.target(topic))
            old = Sender(link, target, Writer(id, 7), Codecs())
            old.send(parts(batch_of(k="old"), 1, batch_bytes=1 << 20, now_ms=1))
            self.write(connection, topic, Writer(id, 8), k="new")
            with pytest.raises(Fenced, match="epoch 7 is fenced"):
                old.finish()
        found = client.get(topic, b"k")
        assert found is not None
        assert found.value == b"new"

    def test_a_restarted_micro_batch_is_written_again_whatever_number_its_attempt_has(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        client.create_topic(topic, partitions=1)
        writer = Writer(producer_id_of("query", 0), 0, micro_batch=5)
        self.write(connection, topic, writer, k="first")
        self.write(connection, topic, writer, k="second")
        self.write(connection, topic, Writer(writer.producer_id, 3, micro_batch=5), k="third")
        values = [row[4] for row in records_of(client, topic, view="raw")]
        assert values == [b"first", b"second", b"third"]

    def test_a_task_of_a_micro_batch_that_was_overtaken_is_fenced(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        client.create_topic(topic, partitions=1)
        id = producer_id_of("query", 0)
        self.write(connection, topic, Writer(id, 0, micro_batch=6), k="new")
        with pytest.raises(Fenced, match="micro-batch 5 has been overtaken by micro-batch 6"):
            self.write(connection, topic, Writer(id, 200, micro_batch=5), k="old")
        assert client.describe(topic)["partitions"][0]["latest"] == 1

    def test_tasks_are_producers_of_their_own(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        client.create_topic(topic, partitions=1)
        for task in range(3):
            self.write(
                connection, topic, Writer(producer_id_of("query", task), 0, micro_batch=9), k=str(task)
            )
        assert client.describe(topic)["partitions"][0]["latest"] == 3

    def test_many_small_batches_of_a_partition_arrive_in_order(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        client.create_topic(topic, partitions=2)
        with Link(connection) as link:
            target = link.run(link.target(topic))
            sender = Sender(link, target, Writer(1, 1), Codecs())
            for n in range(300):
                sender.send(parts(batch_of(k=str(n)), 2, batch_bytes=1, now_ms=1))
            sender.finish()
            assert sender.records == 300
        assert [row[4] for row in records_of(client, topic, view="raw")] == [
            str(n).encode() for n in range(300)
        ]


class TestEpochs:
    @pytest.mark.parametrize(
        ("known", "attempt", "expected"),
        [(0, 0, 513), (0, 4, 517), (512, 0, 513), (513, 0, 514), (600, 1, 601)],
    )
    def test_the_next_one_of_the_micro_batch_is_taken(self, known: int, attempt: int, expected: int) -> None:
        assert epoch_after(known, Writer(1, attempt, micro_batch=2)) == expected

    def test_when_none_is_left_it_is_said(self) -> None:
        with pytest.raises(LimitExceeded, match="no epoch is left"):
            epoch_after(767, Writer(1, 0, micro_batch=2))


class TestCutting:
    def test_rows_fall_into_batches_by_partition_and_size_in_their_order(self) -> None:
        keys = [b"%d" % (n % 40) for n in range(500)]
        values = [None if n % 9 == 0 else b"v%d" % n for n in range(500)]
        whole = pa.record_batch({"key": pa.array(keys), "value": pa.array(values, pa.binary())})
        found = list(parts(whole.slice(3), 3, batch_bytes=700, now_ms=9))
        assert len(found) > 20
        assert all(len(part.columns.keys) + len(part.columns.values) <= 700 for part in found)
        by_key: dict[bytes, list[bytes | None]] = {}
        for part in found:
            c = part.columns
            key_at, value_at = c.key_starts(), c.value_starts()
            for n in range(c.records):
                key = c.keys[key_at[n] : key_at[n + 1]].tobytes()
                value = None if c.value_lengths[n] < 0 else c.values[value_at[n] : value_at[n + 1]].tobytes()
                by_key.setdefault(key, []).append(value)
        expected: dict[bytes, list[bytes | None]] = {}
        for key, value in zip(keys[3:], values[3:], strict=True):
            expected.setdefault(key, []).append(value)
        assert by_key == expected

    def test_a_partition_that_is_not_there_is_refused(self) -> None:
        whole = pa.record_batch({"key": [b"k"], "value": [b"v"], "partition": pa.array([-1], pa.int32())})
        with pytest.raises(UnknownPartition, match="partition -1"):
            list(parts(whole, 2, batch_bytes=700, now_ms=9))

    def test_a_header_without_a_value_is_refused(self) -> None:
        kind = pa.map_(pa.string(), pa.string())
        whole = pa.record_batch({"key": [b"k"], "value": [b"v"], "headers": pa.array([[("a", None)]], kind)})
        with pytest.raises(Invalid, match="no value for 'a'"):
            list(parts(whole, 1, batch_bytes=700, now_ms=9))
