"""Spark on real nodes: forced compactions whose driver and executors are pods, which are killed; the other jobs as Jobs."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import images
from cluster.api import ApiError, Json
from cluster.client import WholeCluster
from cluster.fixtures import breakable
from shop_kit import TOPIC, Shop, ensure_installed

from firn_operator.names import LABEL_RUN
from firn_operator.sparkruns import run_base

pytestmark = pytest.mark.cluster

PARTITIONS, KEYS, ROUNDS = 24, 20_000, 10  # enough partitions for a kill to fall between two slices
QUOTES = {
    "partitions": PARTITIONS,
    "compaction": {"minDirtyRatio": 1},
}  # nothing is compacted before it is asked for
GROUP = "/apis/firn.dev/v1alpha1/namespaces"
SPARK = {"runner": "job", "executors": 2, "cores": 1, "memory": "1Gi"}
SECONDS = 400.0  # for drivers and executors that begin on a busy machine


@pytest.fixture(scope="module")
def shop(nodes: WholeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A topic whose keys were written several times over, and some of them deleted at the end."""
    ensure_installed(nodes)
    nodes.load(images.archive(images.SPARK))
    with nodes.namespace("spark") as space:
        shop = Shop(nodes, space, Path(tmp_path_factory.mktemp("credentials")))
        shop.apply(replicas=2, lease_ttl="10s", topic=QUOTES)
        shop.until_ready()
        shop.until_in_sync(2)
        asyncio.run(_fill(shop))
        yield shop


async def _fill(shop: Shop) -> None:
    async with shop.client() as client, client.producer(TOPIC) as producer:
        for number in range(ROUNDS):
            for key in range(KEYS):
                producer.send(str(key).encode(), f"{number}-{key}".encode())
            await producer.flush()
        for key in range(0, KEYS, 7):
            producer.send(str(key).encode(), None)


def expected() -> dict[bytes, bytes]:
    return {str(key).encode(): f"{ROUNDS - 1}-{key}".encode() for key in range(KEYS) if key % 7}


class Asked:
    """A ForceCompaction, from outside."""

    def __init__(self, shop: Shop, name: str, **spec: Any) -> None:
        self.shop, self.name = shop, name
        self.path = f"{GROUP}/{shop.space}/forcecompactions"
        body = {"topicRef": {"name": TOPIC}, **spec}
        meta = {"name": name}
        head = {"apiVersion": "firn.dev/v1alpha1", "kind": "ForceCompaction"}
        made = shop.cluster.api.post(self.path, {**head, "metadata": meta, "spec": body})
        self.uid = str(made["metadata"]["uid"])
        self.selector = f"{LABEL_RUN}={run_base(name, self.uid)}"

    def status(self) -> Json:
        found: Json = self.shop.cluster.api.get(f"{self.path}/{self.name}").get("status", {})
        return found

    def until_ended(self) -> Json:
        def ended() -> Json | None:
            status = self.status()
            return status if status.get("completionTime") else None

        status: Json = self.shop.cluster.until(ended, f"{self.name} has ended", seconds=SECONDS)
        return status

    def pods(self, *, role: str = "") -> list[Json]:
        """Of this run: driver and executors, or those of a role of Spark's."""
        selector = self.selector + (f",spark-role={role}" if role else "")
        found: list[Json] = self.shop.cluster.api.get(
            f"/api/v1/namespaces/{self.shop.space}/pods", labelSelector=selector
        )["items"]
        return found

    def told(self) -> str:
        """What the drivers said."""
        drivers = f"{self.selector},!spark-role"
        return self.shop.cluster.kubectl("logs", "-n", self.shop.space, "-l", drivers, "--tail=-1")


def running(pods: list[Json]) -> list[Json]:
    return [
        pod
        for pod in pods
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]


def test_a_run_whose_executor_is_killed_in_the_middle_ends_with_what_the_brokers_keep(shop: Shop) -> None:
    asked = Asked(shop, "by-spark", engine="spark", spark=SPARK)
    shop.cluster.until(
        lambda: len(running(asked.pods(role="executor"))) == 2, "two executors", seconds=SECONDS
    )
    missing = asyncio.run(_killed_in_the_middle(shop, running(asked.pods(role="executor"))[0]))
    assert missing > 0, "all slices had come before the executor was dead: fill the topic with more"
    status = asked.until_ended()
    assert status["phase"] == "Succeeded", f"{status}\n{asked.told()}"
    assert (status["engine"], status["runner"]) == ("spark", "job")
    assert [row["state"] for row in status["partitions"]] == ["done"] * PARTITIONS
    assert sum(row["recordsBefore"] for row in status["partitions"]) >= KEYS * ROUNDS
    assert asyncio.run(_table(shop)) == expected()
    again = Asked(shop, "by-brokers", engine="broker").until_ended()
    kept = [row["recordsAfter"] for row in status["partitions"]]
    assert [row["recordsAfter"] for row in again["partitions"]] == kept, (
        "the brokers find nothing that Spark left"
    )
    audited = Printed(shop, "audit", TOPIC, "--output", "json").until_ended()
    assert (audited["differences"], audited["keys"]) == (0, len(expected()))


async def _killed_in_the_middle(shop: Shop, executor: Json) -> int:
    """SIGKILL to an executor once a slice has come; how many had not when it was dead."""
    node = breakable(shop.cluster).node(executor["spec"]["nodeName"])
    async with asyncio.timeout(SECONDS), shop.client() as client:
        while not _slices(plan := await client.compaction_plan(TOPIC), "uploaded"):
            assert plan is None or plan["state"] == "open", (
                "all slices had come at once: fill the topic with more"
            )
        assert node.kill_pod(executor["metadata"]["uid"]), "nothing ran in the executor's pod"
        return _slices(await client.compaction_plan(TOPIC), "missing")


def _slices(plan: Json | None, state: str) -> int:
    """Of an open plan."""
    rows = plan["partitions"] if plan is not None and plan["state"] == "open" else []
    return sum(len(row[state]) for row in rows)


def test_jobs_that_were_printed_run_in_pods(shop: Shop) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "snapshots"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    shop.cluster.apply(claim, namespace=shop.space)
    for topic in ("loaded", "copied"):
        shop.apply_topic(topic, partitions=2)
    on_volume = ("--volume", "snapshots")
    taken = Printed(shop, "snapshot", TOPIC, "/data/quotes", "-o", "json", *on_volume)
    copied = Printed(shop, "copy", TOPIC, "copied", "--checkpoint", "/data/copy", "--cut-over", *on_volume)
    assert taken.until_ended()["records"] == len(expected())
    assert (
        Printed(shop, "load", "/data/quotes", "loaded", "-o", "json", *on_volume).until_ended()["job"]
        == "load"
    )
    copied.until_done()
    for topic in ("loaded", "copied"):
        assert asyncio.run(_table(shop, topic)) == expected(), topic


class Printed:
    """A job as ``--print-job`` prints it, made by kubectl."""

    def __init__(self, shop: Shop, *words: str) -> None:
        self.shop = shop
        printed = shop.cluster.run(
            [
                *(sys.executable, "-m", f"firn_spark.{words[0]}", *words[1:]),
                *("--print-job", "--image", images.SPARK.reference(), "--cluster", shop.name),
            ]
        )
        made = shop.cluster.kubectl("create", "-n", shop.space, "-f", "-", "-o", "name", input=printed)
        self.name = made.strip()

    def until_done(self) -> str:
        """What its pod printed."""

        path = f"/apis/batch/v1/namespaces/{self.shop.space}/jobs/{self.name.partition('/')[2]}"

        def ended() -> set[str]:
            conditions = self.shop.cluster.api.get(path).get("status", {}).get("conditions", [])
            return {told["type"] for told in conditions if told["status"] == "True"} & {"Complete", "Failed"}

        found = self.shop.cluster.until(ended, f"{self.name} has ended", seconds=SECONDS)
        told = self.shop.cluster.kubectl("logs", "-n", self.shop.space, self.name, "--tail=-1")
        assert found == {"Complete"}, told
        return told

    def until_ended(self) -> Json:
        """Its report."""
        [line] = [line for line in self.until_done().splitlines() if line.startswith('{"job":')]
        found: Json = json.loads(line)
        return found


def test_a_run_whose_driver_is_alone_and_killed_is_ended_by_a_second_pod_with_the_plan_of_the_first(
    shop: Shop,
) -> None:
    epoch = shop.epoch()
    asked = Asked(shop, "in-one-pod", engine="spark", spark={"runner": "local", "memory": "1Gi"})
    [driver] = shop.cluster.until(lambda: running(asked.pods()), "the driver", seconds=SECONDS)
    killed = asyncio.run(_killed_with_a_plan(shop, asked, driver))
    assert _slices(killed, "missing") > 0, "all slices had come before the driver was dead"
    status = asked.until_ended()
    assert (status["phase"], status["runner"]) == ("Succeeded", "local"), f"{status}\n{asked.told()}"
    assert asked.pods(role="executor") == []
    shop.cluster.until(lambda: phases(asked) == ["Failed", "Succeeded"], "two drivers have ended")
    assert [row["state"] for row in status["partitions"]] == ["done"] * PARTITIONS
    ended = asyncio.run(_plan(shop))
    assert ended["run"] == asked.uid
    assert ended["ids"] == killed["ids"] or shop.epoch() != epoch, "it began anew"
    assert asyncio.run(_table(shop)) == expected()


def phases(asked: Asked) -> list[str]:
    return sorted(str(pod["status"]["phase"]) for pod in asked.pods())


async def _killed_with_a_plan(shop: Shop, asked: Asked, driver: Json) -> Json:
    """SIGKILL to a driver once its run has a plan: the plan, when the driver was dead."""
    node = breakable(shop.cluster).node(driver["spec"]["nodeName"])
    async with asyncio.timeout(SECONDS), shop.client() as client:
        while (plan := await client.compaction_plan(TOPIC)) is None or plan["run"] != asked.uid:
            await asyncio.sleep(0.02)
        assert node.kill_pod(driver["metadata"]["uid"]), "nothing ran in the driver's pod"
        return await client.compaction_plan(TOPIC) or {}


async def _plan(shop: Shop) -> Json:
    async with shop.client() as client:
        return await client.compaction_plan(TOPIC) or {}


def test_a_run_that_is_deleted_ends_its_pods_and_leaves_the_topic_as_it_was(shop: Shop) -> None:
    asked = Asked(shop, "given-up", engine="spark", spark=SPARK)
    shop.cluster.until(lambda: running(asked.pods(role="executor")), "an executor", seconds=SECONDS)
    shop.cluster.api.delete(f"{asked.path}/{asked.name}")
    shop.cluster.until(lambda: not _is_there(shop, f"{asked.path}/{asked.name}"), "the run is gone")
    shop.cluster.until(lambda: not asked.pods(), "its pods are gone")
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{shop.space}/rolebindings"
    selector = {"labelSelector": asked.selector}
    shop.cluster.until(
        lambda: not shop.cluster.api.get(bindings, **selector)["items"], "its driver's rights are gone"
    )
    assert asyncio.run(_table(shop)) == expected()


def test_a_schedule_makes_a_run_of_its_own(shop: Shop) -> None:
    path = f"{GROUP}/{shop.space}/compactedtopics/{TOPIC}"
    schedule = {"schedule": "* * * * *", "engine": "broker"}
    shop.cluster.api.patch(path, {"spec": {"forceCompaction": schedule}})
    try:
        selector = {"labelSelector": "firn.dev/scheduled=true"}

        def done() -> list[Json]:
            runs = shop.cluster.api.get(f"{GROUP}/{shop.space}/forcecompactions", **selector)["items"]
            return [run for run in runs if run.get("status", {}).get("phase") == "Succeeded"]

        [run, *_] = shop.cluster.until(done, "a run of the schedule", seconds=180)
    finally:
        shop.cluster.api.patch(path, {"spec": {"forceCompaction": None}})
    assert run["metadata"]["name"].startswith(f"{TOPIC}-")


def _is_there(shop: Shop, path: str) -> bool:
    try:
        shop.cluster.api.get(path)
    except ApiError:
        return False
    return True


async def _table(shop: Shop, topic: str = TOPIC) -> dict[bytes, bytes]:
    async with shop.client() as client:
        table = await client.table(topic)
        await table.caught_up()
        return dict(table)
