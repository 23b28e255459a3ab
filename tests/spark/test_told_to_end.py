"""A forced compaction by Spark that is interrupted or told to end says so by its exit code, and the next one goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from pyspark.sql import SparkSession

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark import force_compaction
from firn_spark.connection import Connection
from firn_spark.jobs import command
from firn_spark.jobs.report import Report


def fill(client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=3, compaction={"minDirtyRatio": 1.0})
    with client.producer(topic) as producer:
        producer.send_many([b"k%d" % (n % 40) for n in range(2000)], [b"%d" % n for n in range(2000)])


def goes_on(spark: SparkSession, connection: Connection, topic: str, ids: list[str]) -> None:
    plan = force_compaction.compact(spark, connection, topic, run="of another driver")
    assert plan["ids"] == ids
    assert [row["state"] for row in plan["partitions"]] == ["done"] * 3
    assert sum(row["records_after"] for row in plan["partitions"]) == 40


def test_an_interrupted_run_ends_with_130(
    spark: SparkSession, connection: Connection, broker: BrokerProcess, client: Client, topic: str
) -> None:
    fill(client, topic)
    made = command.parser("force_compaction", "as the command")
    made.add_argument("topic")
    ids: list[str] = []

    def interrupt(plan: force_compaction.Document) -> None:
        ids.extend(plan["ids"])
        signal.raise_signal(signal.SIGINT)

    def work(job: command.Job) -> Report:
        plan = force_compaction.compact(job.spark, job.connection, topic, watch=interrupt)
        return force_compaction.report_of(plan, 0.0)

    assert command.run(made, work, [topic, "--bootstrap", broker.address]) == 130
    goes_on(spark, connection, topic, ids)


class DeafSpark:
    """A session whose JVM answers what is asked of it with what was asked before."""

    def __init__(self, spark: SparkSession) -> None:
        self.sparkContext = spark.sparkContext

    def stop(self) -> None:
        raise RuntimeError("SparkSession does not exist in the JVM")


def passed_on() -> None:
    signal.raise_signal(signal.SIGTERM)


def hidden_by_another_error() -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        raise RuntimeError("an answer to something else")


@pytest.mark.parametrize("told", [passed_on, hidden_by_another_error])
def test_a_run_that_is_told_to_end_while_it_talks_to_its_jvm_ends_with_143(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str,
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], None],
) -> None:  # fmt: skip
    client.create_topic(topic)
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(command, "session", lambda title, master, conf: DeafSpark(spark))
    made = command.parser("force_compaction", "as the command")
    made.add_argument("topic")

    def work(job: command.Job) -> Report:
        told()
        raise AssertionError("it went on")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            command.run(made, work, [topic, "--bootstrap", broker.address])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


@pytest.mark.slow
def test_a_run_that_is_told_to_end_ends_with_143(
    spark: SparkSession, connection: Connection, broker: BrokerProcess, client: Client, topic: str
) -> None:
    fill(client, topic)
    arguments = ["--bootstrap", broker.address, topic, "--progress", "--slice-records", "50"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "firn_spark.force_compaction", *arguments],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert driver.stderr is not None
    with driver:
        try:
            for line in driver.stderr:
                if line.startswith("{"):  # tens of tasks before its end
                    break
            driver.terminate()
            assert driver.wait(timeout=300) == 143
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    before = client.compaction_plan(topic)
    assert before is not None
    assert before["state"] == "open"
    goes_on(spark, connection, topic, before["ids"])
