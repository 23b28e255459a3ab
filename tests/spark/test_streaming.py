"""Stream reads: micro-batches that are the same when they are repeated, admission, restarts from a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from spark_kit import frame_rows, map_of, records_of, written

from firn.client.blocking import Client
from firn.errors import Invalid, InvariantBroken
from firn_spark.connection import Connection
from firn_spark.options import stream_options
from firn_spark.planning import Bounds
from firn_spark.streaming import Offsets, StreamReader, admitted


class Stream:
    """``stream(topic, checkpoint, ...)`` reads what is there, in micro-batches, and gives the rows of each."""

    def __init__(self, spark: SparkSession, connection: Connection) -> None:
        self._spark = spark
        self._connection = connection

    def frame(self, topic: str, **options: Any) -> DataFrame:
        given = {**self._connection.options(), **options}
        return self._spark.readStream.format("firn").options(**given).load(topic)

    def __call__(
        self, topic: str, checkpoint: Path, *, fail_at: int | None = None, **options: Any
    ) -> dict[int, Any]:
        found: dict[int, Any] = {}

        def take(frame: DataFrame, number: int) -> None:
            found[number] = frame_rows(frame)
            if number == fail_at:
                raise RuntimeError("stopped here")

        query = (
            self.frame(topic, **options)
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination(600)
            assert not query.isActive
        except StreamingQueryException:
            assert fail_at is not None
        finally:
            query.stop()
        return found


@pytest.fixture(scope="session")
def stream(spark: SparkSession, connection: Connection) -> Stream:
    return Stream(spark, connection)


def joined(batches: dict[int, Any]) -> list[Any]:
    return sorted((row for rows in batches.values() for row in rows), key=lambda row: row[:2])


def test_a_stream_of_the_raw_view_has_every_record_once_through_restarts(
    client: Client, stream: Stream, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 31, records=600)
    first = stream(topic, tmp_path, view="raw", maxRecordsPerTrigger="250")
    assert len(first) == 3
    assert all(len(rows) <= 250 for rows in first.values())
    assert joined(first) == records_of(client, topic, view="raw")
    with client.producer(topic) as producer:
        for n in range(50):
            producer.send(b"later%d" % n, b"v")
    second = stream(topic, tmp_path, view="raw")
    assert joined(first | second) == records_of(client, topic, view="raw")


def test_a_micro_batch_that_failed_is_repeated_with_identical_rows(
    client: Client, stream: Stream, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 32, records=600)
    failed = stream(topic, tmp_path, view="raw", maxRecordsPerTrigger="250", fail_at=1)
    with client.producer(topic) as producer:
        for n in range(200):
            producer.send(b"k%d" % n, None)
    client.compact(topic, force=True, wait=True, timeout=60)
    again = stream(topic, tmp_path, view="raw")
    assert again[1] == failed[1]
    assert joined({0: failed[0]} | again) == records_of(client, topic, view="raw")


def test_a_stream_of_the_compacted_view_arrives_at_the_map_and_remembers_where_it_began(
    client: Client, stream: Stream, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 33, records=600)
    first = stream(topic, tmp_path)
    with client.producer(topic) as producer:
        for n in range(0, 200, 2):
            producer.send(b"k%d" % n, None)
    second = stream(topic, tmp_path)
    assert map_of(joined(first | second)) == map_of(records_of(client, topic, view="raw"))
    offsets = (tmp_path / "offsets" / "0").read_text()
    assert '"since"' in offsets


def test_a_topic_made_anew_ends_a_stream_by_name(
    client: Client, stream: Stream, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 34, records=100)
    stream(topic, tmp_path)
    client.delete_topic(topic)
    written(client, topic, 34, records=300)
    query = (
        stream.frame(topic)
        .writeStream.foreachBatch(lambda frame, number: None)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match="created anew"):
        query.awaitTermination(600)


@pytest.mark.parametrize("view", ["raw", "compacted"])
def test_a_topic_made_anew_under_a_running_stream_ends_it_by_name(
    view: str, client: Client, stream: Stream, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 35, records=300)
    seen: list[int] = []

    def take(frame: DataFrame, number: int) -> None:
        seen.append(frame.count())
        if number == 0:
            client.delete_topic(topic)
            written(client, topic, 35, records=600)

    query = (
        stream.frame(topic, view=view, maxRecordsPerTrigger="100")
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    with pytest.raises(StreamingQueryException, match="created anew"):
        query.awaitTermination(600)
    assert len(seen) == 1, "nothing of the new topic is taken for the old one's"


def test_a_new_master_that_has_compacted_less_lowers_what_the_stream_has_seen_of_tombstones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = StreamReader(stream_options({"topic": "t"}))
    horizons = iter([100, 40, 90])
    monkeypatch.setattr(reader, "_bounds", lambda: (7, {0: Bounds(0, 200, next(horizons))}))
    start = reader.initialOffset()
    found = [start]
    for _ in range(2):
        found.append(reader.latestOffset(found[-1], ReadAllAvailable()))
    assert [offsets["since"] for offsets in found] == [{"0": 100}, {"0": 40}, {"0": 40}]


def test_a_stream_of_the_compacted_view_is_not_read_from_replicas_that_may_be_behind() -> None:
    with pytest.raises(Invalid, match="readFrom"):
        stream_options({"topic": "t", "readFrom": "any"})
    assert stream_options({"topic": "t", "readFrom": "any", "view": "raw"}).read_from == "any"


class TestAdmission:
    def test_what_is_behind_is_shared_and_never_exceeded(self) -> None:
        found = admitted({0: 0, 1: 100, 2: 5}, {0: 1000, 1: 200, 2: 5}, 110)
        assert found[2] == 5
        assert sum(found.values()) - 105 == 110
        assert found[0] > 90

    def test_a_limit_of_one_goes_on_by_one(self) -> None:
        assert sum(admitted({0: 3, 1: 4}, {0: 9, 1: 9}, 1).values()) == 8

    def test_everything_goes_where_it_fits(self) -> None:
        assert admitted({0: 0}, {0: 9}, 9) == {0: 9}


class TestOffsets:
    def test_they_come_back_as_they_were(self) -> None:
        known = Offsets(4096, {1: 5, 0: 7, 10: 1}, {0: 3})
        assert Offsets.of(known.document()) == known
        assert list(known.document()["offsets"]) == ["0", "1", "10"]

    def test_those_of_another_source_are_refused(self) -> None:
        with pytest.raises(InvariantBroken, match="none of firn's"):
            Offsets.of({"index": 3})
