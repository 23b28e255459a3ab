"""A forced compaction by Spark of which somebody is killed in the middle: it still ends right."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark import force_compaction
from firn_spark.connection import Connection
from firn_spark.mapping import Mapped, Slice

QUIET = {"minDirtyRatio": 1.0, "deleteRetention": "0s"}
KEYS = 40


def fill(client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=3, compaction=QUIET)
    with client.producer(topic) as producer:
        producer.send_many([b"k%d" % (n % KEYS) for n in range(2000)], [b"%d" % n for n in range(2000)])


def left(client: Client, topic: str) -> dict[bytes, bytes]:
    return {record.key: record.value for record in client.reader(topic, until_end=True)}


EXPECTED = {b"k%d" % (n % KEYS): b"%d" % n for n in range(2000)}


def check(client: Client, topic: str, plan: force_compaction.Document) -> None:
    assert [row["state"] for row in plan["partitions"]] == ["done"] * 3
    assert sum(row["records_after"] for row in plan["partitions"]) == KEYS
    assert left(client, topic) == EXPECTED


@pytest.mark.parametrize("step", ["before", "after"])
def test_an_executor_that_is_killed_before_or_after_its_upload(
    spark: SparkSession, connection: Connection, client: Client, topic: str, tmp_path: Path, step: str
) -> None:
    folder = str(tmp_path)

    def task(asked: Slice) -> Mapped:  # runs in a worker, which has none of this module's names
        import os
        import signal
        from pathlib import Path

        from firn_spark.mapping import map_slice

        mark = Path(folder) / str(asked.partition)
        is_first = not mark.exists()
        mark.touch()
        if is_first and step == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = map_slice(asked)
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    fill(client, topic)
    plan = force_compaction.compact(spark, connection, topic, task=task)
    assert len(list(tmp_path.iterdir())) == 3, "each task was killed once"
    check(client, topic, plan)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_broker_that_is_killed_goes_on_with_the_plan_or_is_given_a_new_one(
    spark: SparkSession, tmp_path: Path, is_lost: bool
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    broker = BrokerProcess(tmp_path / "data", "--listen", address)
    broker.start()
    try:
        ids: list[str] = []

        def watch(plan: force_compaction.Document) -> None:
            ids.extend(plan["ids"])
            if len(ids) == 1:
                broker.kill()
                if is_lost:  # as at a new master, which has no such file
                    shutil.rmtree(tmp_path / "data/plans")
                broker.start()

        connection = Connection(bootstrap=address)
        with connection.client() as client:
            fill(client, "t")
            plan = force_compaction.compact(spark, connection, "t", watch=watch)
            assert len(set(ids)) == (2 if is_lost else 1)
            check(client, "t", plan)
    finally:
        broker.stop()


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_its_plan_to_the_next_one(
    spark: SparkSession, connection: Connection, broker: BrokerProcess, client: Client, topic: str
) -> None:
    fill(client, topic)
    command = [
        sys.executable,
        "-m",
        "firn_spark.force_compaction",
        "--bootstrap",
        broker.address,
        topic,
        "--progress",
    ]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stderr is not None
    for line in driver.stderr:
        if line.startswith("{"):
            break
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    driver.stderr.close()
    before = client.compaction_plan(topic)
    assert before is not None
    plan = force_compaction.compact(spark, connection, topic, run="of another driver")
    assert plan["ids"] == before["ids"] or before["state"] == "done"
    check(client, topic, plan)


@pytest.mark.slow
def test_a_master_that_is_killed_in_the_middle_costs_a_new_plan_and_every_replica_compacts(
    spark: SparkSession, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    cluster = BrokerProcess(
        tmp_path / "data", "--listen", f"127.0.0.1:{first}", "--replicas", "3", "--restart-after", "0s"
    )
    cluster.start()
    try:
        connection = Connection(bootstrap=cluster.address, timeout=60)
        with connection.client() as client:
            fill(client, "t")
            ids: list[str] = []

            def watch(plan: force_compaction.Document) -> None:
                ids.extend(plan["ids"])
                if len(ids) == 1:
                    (master,) = (row for row in client.cluster_status()["brokers"] if row["role"] == "master")
                    os.kill(master["pid"], signal.SIGKILL)

            plan = force_compaction.compact(spark, connection, "t", watch=watch)
            assert len(set(ids)) == 2, "a new master has no such plan"
            check(client, "t", plan)
    finally:
        cluster.stop()
