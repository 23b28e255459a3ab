"""Forced compactions by Spark on real nodes: driver and executors as pods, one killed, a run that is deleted, a schedule."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import images
from cluster.api import ApiError, Json
from cluster.bare import BareCluster
from cluster.client import WholeCluster
from shop_kit import TOPIC, Shop, ensure_installed

from firn_operator.names import LABEL_RUN
from firn_operator.sparkruns import run_base

pytestmark = pytest.mark.cluster

PARTITIONS, KEYS, ROUNDS = 4, 20_000, 10
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
        self.selector = f"{LABEL_RUN}={run_base(name, made['metadata']['uid'])}"

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
    assert isinstance(shop.cluster, BareCluster)
    asked = Asked(shop, "by-spark", engine="spark", spark=SPARK)
    shop.cluster.until(
        lambda: len(running(asked.pods(role="executor"))) == 2, "two executors", seconds=SECONDS
    )
    victim = running(asked.pods(role="executor"))[0]
    shop.cluster.node(victim["spec"]["nodeName"]).kill_pod(victim["metadata"]["uid"])
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


def test_a_run_that_is_deleted_ends_its_pods_and_leaves_the_topic_as_it_was(shop: Shop) -> None:
    asked = Asked(shop, "given-up", engine="spark", spark=SPARK)
    shop.cluster.until(lambda: running(asked.pods(role="executor")), "an executor", seconds=SECONDS)
    shop.cluster.api.delete(f"{asked.path}/{asked.name}")
    shop.cluster.until(lambda: not _is_there(shop, f"{asked.path}/{asked.name}"), "the run is gone")
    shop.cluster.until(lambda: not asked.pods(), "its pods are gone")
    accounts = shop.cluster.api.get(f"/api/v1/namespaces/{shop.space}/serviceaccounts")["items"]
    assert [
        each["metadata"]["name"] for each in accounts if each["metadata"]["name"].startswith("firn-")
    ] == []
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


async def _table(shop: Shop) -> dict[bytes, bytes]:
    async with shop.client() as client:
        table = await client.table(TOPIC)
        await table.caught_up()
        return dict(table)
