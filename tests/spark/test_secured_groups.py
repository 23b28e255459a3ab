"""Spark and a cluster as it is run: two groups of two replicas each, TLS, certificates and tokens, masters that die."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from firn_cli.calls import Running, call
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from spark_kit import frame_rows, map_of, records_of, written

from firn.client.blocking import Client
from firn_spark import force_compaction
from firn_spark.connection import Connection
from firn_spark.counting import count_keys
from firn_spark.fetch import PAGE_BYTES, Range, read

PARTITIONS = 4


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """To the cluster, by the administrator's certificate; a broker that dies is started again."""
    folder = tmp_path_factory.mktemp("groups")
    made = call("token", "reports", "--admin")
    (folder / "tokens.yaml").write_text("tokens:\n" + made.stderr.decode().split("\n", 1)[1])
    (folder / "token").write_text(made.stdout.decode().strip())
    options = ("--replicas", "2", "--groups", "2", "--tls", "--tokens", str(folder / "tokens.yaml"))
    place = ("--data", str(folder / "data"), "--listen", "127.0.0.1:0", "--restart-after", "100ms")
    with Running("up", *place, *options, "--print-ready") as cluster:
        line = cluster.line().decode()
        assert line.startswith("READY "), line + cluster.stop().stderr.decode()
        tls = folder / "data" / "tls"
        yield Connection(
            bootstrap=line.split()[1], tls_ca=str(tls / "ca.crt"), tls_cert=str(tls / "admin.crt"),
            tls_key=str(tls / "admin.key"), timeout=120,
        )  # fmt: skip
        assert cluster.stop().returncode == 0


@pytest.fixture(scope="module")
def by_token(connection: Connection) -> Connection:
    assert connection.tls_ca is not None
    token = Path(connection.tls_ca).parents[2] / "token"
    return Connection(
        bootstrap=connection.bootstrap, tls_ca=connection.tls_ca, token_file=str(token), timeout=120
    )


@pytest.fixture(scope="module")
def client(connection: Connection) -> Iterator[Client]:
    with connection.client() as found:
        yield found


def frame_of(spark: SparkSession, connection: Connection, topic: str, **options: Any) -> DataFrame:
    return spark.read.format("firn").options(**connection.options(), **options).load(topic)


def kill_masters(client: Client) -> None:
    """Of both groups, whose standbys have all that was acknowledged."""
    deadline = time.monotonic() + 90
    while True:
        rows = client.cluster_status()["brokers"]
        masters = [row for row in rows if row["role"] == "master"]
        if len(masters) == 2 and all(row["in_sync"] and row["state"] == "serving" for row in rows):
            break
        assert time.monotonic() < deadline, f"the groups are not whole: {rows}"
        time.sleep(0.05)
    for row in masters:
        os.kill(row["pid"], signal.SIGKILL)


@pytest.mark.parametrize("shown", ["certificate", "token"])
def test_a_topic_of_two_groups_is_read_written_and_counted_by_a_certificate_and_by_a_token(
    shown: str, spark: SparkSession, connection: Connection, by_token: Connection, client: Client, topic: str
) -> None:
    written(client, topic, 51, records=1000, partitions=PARTITIONS)
    chosen = connection if shown == "certificate" else by_token
    expected = records_of(client, topic)
    assert {row[0] for row in expected} == set(range(PARTITIONS))
    assert frame_rows(frame_of(spark, chosen, topic)) == expected
    assert frame_rows(frame_of(spark, chosen, topic, view="raw")) == records_of(client, topic, view="raw")
    looked_up = frame_of(spark, chosen, topic).where("key IN (X'6B37', X'6B38')")
    assert map_of(frame_rows(looked_up)).items() <= map_of(expected).items()
    assert count_keys(spark, chosen, topic).live == len(map_of(expected))
    copy = f"{topic}-copy"
    client.create_topic(copy, partitions=PARTITIONS)
    frame = frame_of(spark, chosen, topic)
    frame.write.format("firn").options(**chosen.options()).mode("append").save(copy)
    assert map_of(records_of(client, copy)) == map_of(expected)


def test_who_shows_nothing_is_refused_and_who_speaks_no_tls_is_not_answered(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=PARTITIONS)
    stranger = Connection(bootstrap=connection.bootstrap, tls_ca=connection.tls_ca, timeout=10)
    with pytest.raises(PySparkException, match="who are you"):
        frame_of(spark, stranger, topic).collect()
    with pytest.raises(PySparkException, match="the connection broke"):
        frame_of(spark, Connection(bootstrap=connection.bootstrap, timeout=2), topic).collect()


def test_a_forced_compaction_of_two_groups_is_carried_out_in_both(
    spark: SparkSession, by_token: Connection, client: Client, topic: str
) -> None:
    written(client, topic, 52, records=1000, partitions=PARTITIONS)
    expected = map_of(records_of(client, topic))
    plan = force_compaction.compact(spark, by_token, topic)
    assert len(plan["ids"]) == 2
    assert [row["state"] for row in plan["partitions"]] == ["done"] * PARTITIONS
    assert map_of(records_of(client, topic)) == expected
    assert sum(row["records_after"] for row in plan["partitions"]) >= len(expected)


def test_a_raw_read_goes_on_at_new_masters_and_has_every_row_once(
    connection: Connection, client: Client, topic: str
) -> None:
    """More is read than is fetched ahead, so that the masters are gone in the middle of it."""
    client.create_topic(topic, partitions=2)
    value, count = bytes(1 << 20), 6 * PAGE_BYTES >> 20
    with client.producer(topic) as producer:
        for n in range(count):
            for partition in range(2):
                producer.send(b"%d" % n, value, partition=partition)
    description = client.describe(topic)
    for partition in range(2):
        whole = Range(
            topic=topic, topic_id=description["topic_id"], partition=partition, start=0, end=count, view="raw"
        )
        with closing(read(connection, [whole])) as batches:
            found = next(batches).column("offset").to_pylist()
            if not partition:
                kill_masters(client)
            for batch in batches:
                found += batch.column("offset").to_pylist()
        assert found == list(range(count))


def test_a_query_planned_under_masters_that_die_has_all_rows_of_the_raw_view_and_names_a_lost_snapshot(
    spark: SparkSession, connection: Connection, client: Client, topic: str
) -> None:
    written(client, topic, 53, records=600, partitions=PARTITIONS)
    expected = records_of(client, topic, view="raw")
    raw, compacted = (frame_of(spark, connection, topic, view=view) for view in ("raw", "compacted"))
    for frame in (raw, compacted):
        assert len(frame.collect()) > 0  # plans; a second time the same is read
    kill_masters(client)
    assert sorted((row.partition, row.offset) for row in raw.collect()) == [row[:2] for row in expected]
    with pytest.raises(PySparkException, match="SnapshotExpired"):
        compacted.collect()
    assert map_of(frame_rows(frame_of(spark, connection, topic))) == map_of(expected)


@pytest.mark.parametrize("view", ["raw", "compacted"])
def test_a_stream_goes_on_at_new_masters(
    view: str, spark: SparkSession, connection: Connection, client: Client, topic: str, tmp_path: Path
) -> None:
    written(client, topic, 54, records=600, partitions=PARTITIONS)
    expected = records_of(client, topic, view="raw")
    found: dict[int, Any] = {}

    def take(frame: DataFrame, number: int) -> None:
        found[number] = frame_rows(frame)
        if number == 0:
            kill_masters(client)

    given = {**connection.options(), "view": view, "maxRecordsPerTrigger": "200"}
    query = (
        spark.readStream.format("firn")
        .options(**given)
        .load(topic)
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination(600)
        assert not query.isActive
    finally:
        query.stop()
    assert len(found) > 1
    rows = sorted((row for batch in found.values() for row in batch), key=lambda row: row[:2])
    if view == "raw":
        assert rows == expected
    assert map_of(rows) == map_of(expected)
