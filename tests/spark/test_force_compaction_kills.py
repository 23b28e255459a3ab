"""A forced compaction by Spark of which somebody is killed at one step after the other: it still ends right."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import driver_child
import pytest
from driver_child import MOMENTS, SLICE_RECORDS, held
from pyspark.sql import SparkSession

from firn.client.blocking import Client
from firn.client.cursor import Page
from firn.errors import Unavailable
from firn_node.demo.process import BrokerProcess
from firn_node.ports import free_ports
from firn_spark import fetch, force_compaction, mapping
from firn_spark.connection import Connection
from firn_spark.fetch import Range
from firn_spark.mapping import Mapped, Slice

QUIET = {"minDirtyRatio": 1.0, "deleteRetention": "0s"}
PARTITIONS = 3
SLICES = 2 * PARTITIONS
KEYS = 40
RECORDS = 2000
EXPECTED = {b"k%d" % (n % KEYS): b"%d" % n for n in range(RECORDS)}
SECONDS_MAX = 300
PATIENT = 120  # seconds a client asks again: longer than a broker takes to come back


def fill(client: Client, topic: str) -> None:
    """Several batches in each partition, which is of two slices of ``SLICE_RECORDS``."""
    client.create_topic(topic, partitions=PARTITIONS, compaction=QUIET)
    with client.producer(topic, batch_bytes=1 << 10) as producer:
        producer.send_many([b"k%d" % (n % KEYS) for n in range(RECORDS)], [b"%d" % n for n in range(RECORDS)])


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left(client: Client, topic: str) -> dict[bytes, bytes]:
    return {record.key: record.value for record in client.reader(topic, until_end=True)}


def check(client: Client, topic: str, plan: force_compaction.Document) -> None:
    assert [row["state"] for row in plan["partitions"]] == ["done"] * PARTITIONS
    assert sum(row["records_after"] for row in plan["partitions"]) == KEYS
    assert [row["disagreements"] for row in plan["partitions"]] == [[]] * PARTITIONS
    assert left(client, topic) == EXPECTED


def allow(folder: Path, *names: str) -> None:
    """What tasks may upload from now on: ``driver_child.held``."""
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize("step", ["before", "between two pages", "read", "half uploaded", "uploaded"])
def test_an_executor_that_is_killed_at_any_step_of_its_task(
    spark: SparkSession, connection: Connection, client: Client, topic: str, tmp_path: Path, step: str
) -> None:
    def task(asked: Slice) -> Mapped:
        mark = tmp_path / str(asked.partition)
        if mark.exists():
            return mapping.map_slice(asked)

        def die(*ignored: object, at: str = step, **more: object) -> None:
            mark.write_text(at)
            os.kill(os.getpid(), signal.SIGKILL)

        def pages(self: fetch.Link, whole: Range) -> Iterator[Page]:
            for page in all_pages(self, whole):
                yield page
                if page.next_offset < whole.end:
                    die()

        def upload(target: object, topic: str, plan: str, *, data: bytes, **more: object) -> None:
            path = f"/v1/topics/{topic}/compaction/plan/{plan}"
            half = HTTPConnection(str(asked.connection.bootstrap))
            half.putrequest("PUT", f"{path}/partitions/{asked.partition}/slices/{asked.slice}")
            half.putheader("Content-Length", str(len(data)))
            half.endheaders(data[: len(data) // 2])
            die()

        # What is changed here is this worker's, which does no other task.
        if step == "before":
            die()
        elif step == "between two pages":
            fetch.PAGE_BYTES = 1
            all_pages, fetch.Link.pages = fetch.Link.pages, pages
        elif step == "read":
            mapping.encode = die
        elif step == "half uploaded":
            mapping.plans.upload_statement = upload
        mapping.map_slice(asked)
        die(at="uploaded")
        raise AssertionError("it is dead")

    fill(client, topic)
    plan = force_compaction.compact(spark, connection, topic, task=task)
    assert [mark.read_text() for mark in tmp_path.iterdir()] == [step] * PARTITIONS, "each task was killed"
    check(client, topic, plan)


STEPS = (  # of a broker, and whose upload is allowed from its life on that ends there
    ("plan.stored", ()),  # made
    ("plan.statement_synced", ("0",)),
    ("plan.statement_named", ()),
    ("compact.segments_synced", ()),
    ("swap.manifest_renamed", ()),
    ("plan.stored", ()),  # the result of partition 0, alone
    ("plan.statements_gone", ("1",)),
    ("plan.told", ("2",)),  # all have ended
)


@contextmanager
def dying(data: Path, address: str, folder: Path) -> Iterator[list[int]]:
    """A broker that is killed at each of ``STEPS`` and started again: how it ended so far."""
    command = [sys.executable, "-m", "firn_node", "up", "--data", str(data), "--listen", address]
    codes: list[int] = []
    alive: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()

    def live() -> None:
        for step, names in (*STEPS, ("", ())):
            if is_over.is_set():
                return
            allow(folder, *names)
            with subprocess.Popen(command, env={**os.environ, "FIRN_FAILPOINT": step}) as process:
                alive.append(process)
                codes.append(process.wait())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield codes
    finally:
        is_over.set()
        while thread.is_alive():
            for process in alive[-1:]:
                process.terminate()
                process.wait()
            thread.join(1)


@pytest.mark.slow
def test_a_broker_that_is_killed_at_one_step_after_the_other_carries_one_plan_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    connection = Connection(bootstrap=address, timeout=PATIENT)
    ids: list[str] = []
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    with dying(tmp_path / "data", address, allowed) as codes, connection.client() as client:
        fill(client, "t")
        plan = force_compaction.compact(
            spark, connection, "t", slice_records=SLICE_RECORDS, task=held(allowed),
            watch=lambda plan: ids.extend(plan["ids"]),
        )  # fmt: skip
        assert codes == [-signal.SIGKILL] * len(STEPS)
        assert len(set(ids)) == 1
        assert sum(row["slices"] for row in plan["partitions"]) == SLICES
        check(client, "t", plan)
    assert codes[-1] == 0


def test_a_broker_that_is_killed_and_loses_the_plan_is_given_a_new_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    broker = BrokerProcess(tmp_path / "data", "--listen", address)
    broker.start()
    try:
        ids: list[str] = []

        def watch(plan: force_compaction.Document) -> None:
            ids.extend(plan["ids"])
            if len(ids) == 1:
                broker.kill()
                shutil.rmtree(tmp_path / "data/plans")  # as at a new master, which has no such file
                broker.start()

        connection = Connection(bootstrap=address)
        with connection.client() as client:
            fill(client, "t")
            plan = force_compaction.compact(spark, connection, "t", watch=watch)
            assert len(set(ids)) == 2
            check(client, "t", plan)
    finally:
        broker.stop()


def run_killed_driver(address: str, topic: str, run: str, folder: Path, moment: str) -> None:
    """A driver, from its start until it is killed at a moment of its plan."""
    command = [sys.executable, driver_child.__file__, address, topic, run, str(folder), moment]
    with subprocess.Popen(command, start_new_session=True) as driver:
        try:
            assert driver.wait(SECONDS_MAX) == -signal.SIGKILL, f"the moment never came: {moment}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)


@pytest.mark.slow
def test_drivers_that_are_killed_at_one_moment_after_the_other_leave_their_plan_to_the_next_one(
    spark: SparkSession,
    connection: Connection,
    broker: BrokerProcess,
    client: Client,
    topic: str,
    tmp_path: Path,
) -> None:
    fill(client, topic)
    found: list[force_compaction.Document] = []

    def kill(moment: str, *names: str) -> force_compaction.Document:
        allow(tmp_path, *names)
        run_killed_driver(broker.address, topic, "of-tonight", tmp_path, moment)
        plan = client.compaction_plan(topic)
        assert plan is not None
        assert MOMENTS[moment](plan)
        found.append(plan)
        return plan

    assert kill("open")["state"] == "open"
    uploaded = [row["uploaded"] for row in kill("a slice is uploaded", "0-0")["partitions"]]
    assert uploaded == [[0], [], []]
    states = [row["state"] for row in kill("a partition is done", "0")["partitions"]]
    assert states == ["done", "waiting", "waiting"]
    kill("all is uploaded", "1", "2")  # the rest needs no driver
    until(lambda: (client.compaction_plan(topic) or {})["state"] == "done")
    done = kill("done")
    plan = force_compaction.compact(spark, connection, topic, run="of-tonight")
    assert [each["ids"] for each in found] == [plan["ids"]] * len(MOMENTS)
    assert plan["partitions"] == done["partitions"], "it is reported, and not done again"
    check(client, topic, plan)


MASTERS = (("open", ()), ("a slice is uploaded", ("0-0",)), ("a partition is done", ("0",)))


@pytest.mark.slow
def test_masters_that_are_killed_at_one_moment_after_the_other_cost_new_plans_and_every_replica_compacts(
    spark: SparkSession, tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    # Who was killed is back only after the lease has ended: the other one is master by then.
    cluster = BrokerProcess(tmp_path / "data", "--replicas", "2", "--restart-after", "4s")
    cluster.start()
    try:
        connection = Connection(bootstrap=cluster.address, timeout=PATIENT)
        with connection.client() as client:
            fill(client, "t")
            ids: list[str] = []
            coming = list(MASTERS)

            def watch(plan: force_compaction.Document) -> None:
                ids.extend(plan["ids"])
                if coming and MOMENTS[coming[0][0]](plan):
                    kill_master(client)
                    coming.pop(0)
                    allow(allowed, *(coming[0][1] if coming else ("1", "2")))

            plan = force_compaction.compact(
                spark, connection, "t", slice_records=SLICE_RECORDS, task=held(allowed), watch=watch
            )
            assert not coming
            assert len(set(ids)) > 1, "a new master has no such plan"
            check(client, "t", plan)
            until(lambda: records_of_replicas(client) == [KEYS, KEYS])
            assert left(client, "t") == EXPECTED
    finally:
        cluster.stop()


def kill_master(client: Client) -> None:
    """Once its group is whole: whoever takes over has all that was acknowledged."""
    masters: list[dict[str, Any]] = []

    def is_whole() -> bool:
        rows = client.cluster_status()["brokers"]
        masters[:] = (row for row in rows if row["role"] == "master")
        are_serving = [row["in_sync"] and row["state"] == "serving" for row in rows]
        return are_serving == [True, True] and len(masters) == 1

    until(is_whole)
    os.kill(masters[0]["pid"], signal.SIGKILL)


def records_of_replicas(client: Client) -> list[int]:
    """How many records each replica that answers, and knows the topic t, has left of it, compacted or dirty."""
    found = []
    for row in client.cluster_status()["brokers"]:
        with suppress(Unavailable), Connection(bootstrap=row["address"]).client() as one:
            for topic in one.status()["topics"]:
                if topic["name"] == "t":
                    found.append(sum(part["live_records"] for part in topic["partitions"]))
    return found
