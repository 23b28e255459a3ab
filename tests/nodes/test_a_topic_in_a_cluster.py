"""What a person does with a topic, and what befalls its brokers, on real nodes: nothing acknowledged is lost."""

import asyncio
import json
import os
import time
from dataclasses import replace

import pytest
from cluster import images
from cluster.api import Json
from cluster.fixtures import breakable
from cluster.providers import GivenCluster
from cluster.tools import tool
from shop_kit import LEASE_TTL_SECONDS, SYSTEM, TOPIC, UNREACHABLE_PEERS, Shop
from shop_watch import AwayWatch, LeaseWatch, wall_seconds

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("whole"),
    pytest.mark.filterwarnings(UNREACHABLE_PEERS),
]


def test_an_applied_topic_takes_writes(shop: Shop) -> None:
    with shop.load() as load:
        load.until_more()
    assert load.refused == []


def test_a_pod_writes_and_reads_by_the_token_of_its_own_account(shop: Shop) -> None:
    shop.cluster.apply(shop.client_pod("reader"), namespace=shop.space)
    shop.cluster.kubectl("wait", "-n", shop.space, "pod/reader", "--for=condition=Ready", "--timeout=120s")
    shop.cluster.kubectl(
        "exec", "-i", "-n", shop.space, "reader", "--", "firn", "produce", TOPIC, input="inside\t1\n"
    )
    found = shop.cluster.kubectl("exec", "-n", shop.space, "reader", "--", "firn", "get", TOPIC, "inside")
    assert found.strip() == "1"
    told = shop.cluster.kubectl(
        "exec", "-n", shop.space, "reader", "--", "firn", "consume", TOPIC, "--format", "tsv"
    )
    assert "inside\t1" in told.splitlines()
    shop.cluster.kubectl("delete", "-n", shop.space, "pod/reader")


def test_a_cluster_that_is_only_given_is_written_to_by_forwarded_ports(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``make test-cluster KUBECONFIG=FILE``: nothing is known of it but that file."""
    monkeypatch.setenv("PATH", f"{tool('kubectl').parent}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(shop.cluster.kubeconfig))
    given = replace(shop, cluster=GivenCluster(shop.cluster.kubeconfig))
    with given.load() as load:
        load.until_more()
    assert load.refused == []


def test_kubectl_firn_shows_the_brokers_writes_reads_and_makes_another_master(shop: Shop) -> None:
    def firn(*words: str, input: str = "") -> str:
        done = shop.kubectl_firn(*words, input=input)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = json.loads(firn("status", "--output", "json"))
    assert sorted((row["node"], row["state"]) for row in shown["brokers"]) == [
        (name, "serving") for name in shop.in_sync()
    ]
    assert TOPIC in {row["name"] for row in shown["topics"]}
    assert firn("produce", TOPIC, input="outside\t2\n") == "1 records acknowledged\n"
    assert firn("get", TOPIC, "outside") == "2"
    wanted = next(name for name in shop.in_sync() if name != shop.master())

    def is_handed_over() -> bool:
        """Asked again where a busy machine kept the new master from its lease."""
        done = shop.kubectl_firn("switchover", "0", "--to", wanted)
        return done.returncode == 0 or shop.master() == wanted

    shop.cluster.until(is_handed_over, f"{wanted} is master")
    assert shop.master() == wanted


def test_a_topic_that_is_deleted_and_applied_again_is_empty(shop: Shop) -> None:
    with shop.load() as load:
        load.until_more()
    before = shop.topic_id()
    shop.cluster.kubectl("delete", "-n", shop.space, f"compactedtopic/{TOPIC}", "--timeout=120s")
    shop.apply()
    shop.until_ready()
    assert shop.topic_id() != before
    assert asyncio.run(_table(shop)) == {}


def test_a_forced_compaction_is_done_by_the_brokers_and_gone_when_its_time_is_over(shop: Shop) -> None:
    runs = f"/apis/firn.dev/v1alpha1/namespaces/{shop.space}/forcecompactions"
    spec = {"topicRef": {"name": TOPIC}, "engine": "broker"}
    head = {"apiVersion": "firn.dev/v1alpha1", "kind": "ForceCompaction", "metadata": {"name": "once"}}

    def phase() -> str:
        found = shop.cluster.api.get(f"{runs}/once").get("status", {})
        return str(found.get("phase", ""))

    with shop.load() as load:
        load.until_more()
        shop.cluster.api.post(runs, {**head, "spec": spec})
        shop.cluster.until(lambda: phase() == "Succeeded", "the run has succeeded")
        load.until_more()
    shop.cluster.api.patch(f"{runs}/once", {"spec": {"ttlSecondsAfterFinished": 1}})
    shop.cluster.until(lambda: not shop.cluster.api.get(runs)["items"], "the run is gone")


def test_the_death_of_the_masters_pod_loses_nothing(shop: Shop) -> None:
    before = shop.master()
    with shop.load() as load:
        shop.delete_pod(before, seconds=0)
        shop.until_master(other_than=before)
        load.until_more()
        shop.until_in_sync(3)
    print(f"gap {load.gap_seconds:.1f} s")


def test_a_killed_master_is_replaced_and_nothing_is_lost(shop: Shop) -> None:
    before = shop.master()
    with shop.load() as load:
        shop.kill_broker(before)
        shop.until_master(other_than=before)
        load.until_more()
        shop.until_in_sync(3)
    print(f"gap {load.gap_seconds:.1f} s")


def test_a_master_whose_node_is_cut_off_stops_is_replaced_within_15_s_and_follows_within_180(
    shop: Shop,
) -> None:
    """Drill 34, by the times that the brokers write into the Lease."""
    before = shop.master()
    node, uid = shop.node_of(before), shop.uid_of(before)
    with shop.load() as load:
        with LeaseWatch(shop) as watch:
            cut = wall_seconds()
            node.cut()
            shop.until_master(other_than=before)
            load.until_more()
        assert before not in shop.in_sync()
        status, why = shop.readiness_within(node, uid)
        assert status == 503, why
        node.heal()
        healed = time.monotonic()
        shop.until_in_sync(3, seconds=180)
    print(
        f"elected {watch.elected - cut:.1f} s after the cut, {watch.elected - watch.renewed:.1f} s after the last renewal; "
        f"gap {load.gap_seconds:.1f} s, in sync after {time.monotonic() - healed:.1f} s; the old master: {why}"
    )
    assert watch.elected - cut <= 15
    assert load.gap_seconds <= 15, "clients went on waiting for a machine that is cut off"


def test_a_replica_whose_volume_is_gone_is_rebuilt_from_its_peers(shop: Shop) -> None:
    master = shop.master()
    lost = next(name for name in shop.in_sync() if name != master)
    claims = f"/api/v1/namespaces/{shop.space}/persistentvolumeclaims"
    claim = shop.cluster.api.get(f"{claims}/data-{lost}")
    with shop.load() as load:
        shop.cluster.api.delete(f"{claims}/data-{lost}")
        shop.delete_pod(lost, seconds=0)
        shop.until_in_sync(2)
        load.until_more()
        shop.until_in_sync(3)
    again = shop.cluster.api.get(f"{claims}/data-{lost}")
    assert again["metadata"]["uid"] != claim["metadata"]["uid"]


def test_a_switchover_moves_the_master_to_the_pod_that_was_named(shop: Shop) -> None:
    before = shop.master()
    wanted = next(name for name in shop.in_sync() if name != before)
    with shop.load() as load:
        shop.switch_over(wanted)
        assert shop.master() == wanted
        load.until_more()
    assert load.refused == []
    print(f"gap {load.gap_seconds:.1f} s")


def test_a_new_image_goes_to_one_pod_after_the_other_while_writes_go_on(shop: Shop) -> None:
    newer = f"{images.NODE.reference()}-newer"
    for node in breakable(shop.cluster).nodes:
        node.tag(images.NODE.reference(), newer)
    with shop.load() as load, AwayWatch(shop) as watch:
        shop.patch({"spec": {"image": newer}})
        shop.cluster.until(lambda: shop.images() == {newer}, "every broker runs the new image", seconds=300)
        shop.until_in_sync(3)
        load.until_more()
    assert load.refused == []
    assert watch.most_away == 1
    print(f"gap {load.gap_seconds:.1f} s")


def test_replicas_become_fewer_and_more_while_writes_go_on(shop: Shop) -> None:
    with shop.load() as load:
        for replicas in (2, 3):
            shop.patch({"spec": {"replicas": replicas}})
            shop.cluster.until(lambda n=replicas: shop.members() == n, f"{replicas} replicas", seconds=300)
            shop.until_in_sync(replicas)
            load.until_more()
    assert load.refused == []


def test_a_drain_of_the_masters_node_hands_over_first_and_stops_nobody_else(shop: Shop) -> None:
    """The pod cannot come back while its volume's node is closed: writes go on with the other two, and the volume stays."""
    before = shop.master()
    node = shop.node_of(before)
    claim = shop.cluster.api.get(f"/api/v1/namespaces/{shop.space}/persistentvolumeclaims/data-{before}")
    with shop.load() as load, AwayWatch(shop) as watch, LeaseWatch(shop) as lease:
        try:
            what = ["--ignore-daemonsets", "--delete-emptydir-data", "--force"]  # pods of other tests, too
            shop.cluster.kubectl("drain", node.name, *what, "--timeout=120s")
            assert shop.master() != before
            load.until_more()
            shop.make_unplaced(before, minutes=5)
            load.until_more()
        finally:
            shop.cluster.kubectl("uncordon", node.name)
        shop.until_in_sync(3)
    assert load.refused == []
    assert watch.most_away == 1
    kept = shop.cluster.api.get(f"/api/v1/namespaces/{shop.space}/persistentvolumeclaims/data-{before}")
    assert kept["metadata"]["uid"] == claim["metadata"]["uid"]
    assert lease.elected - lease.renewed < LEASE_TTL_SECONDS, "it was replaced, and did not hand over"
    print(f"gap {load.gap_seconds:.1f} s")


def test_brokers_fail_over_while_there_is_no_operator(shop: Shop) -> None:
    deployment = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/firn-operator"
    shop.cluster.api.patch(deployment, {"spec": {"replicas": 0}})
    shop.cluster.until(lambda: not _operators(shop), "the operator is gone")
    before = shop.master()
    try:
        with shop.load() as load:
            shop.kill_broker(before)
            shop.until_master(other_than=before)
            load.until_more()
    finally:
        shop.cluster.api.patch(deployment, {"spec": {"replicas": 2}})
    shop.cluster.until(lambda: shop.told_master() == shop.master(), "what is told of the group is what it is")


async def _table(shop: Shop) -> dict[bytes, bytes]:
    async with shop.client() as client:
        table = await client.table(TOPIC)
        await table.caught_up()
        return dict(table)


def _operators(shop: Shop) -> list[Json]:
    found: list[Json] = shop.cluster.api.get(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]
    return found
