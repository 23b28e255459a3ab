"""What a kubelet, the kernel and the network's rules do to brokers (drills 36, 38 and 39)."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import policies
from cluster.api import Json
from cluster.bare import BareCluster
from cluster.fixtures import breakable
from cluster.tools import tool
from shop_kit import TOPIC, UNREACHABLE_PEERS, Shop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("whole"),
    pytest.mark.filterwarnings(UNREACHABLE_PEERS),
]

_KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
_LISTEN = (
    "import socket; s = socket.create_server(('', 9000)); print('ready', flush=True)\nwhile True: s.accept()"
)


@dataclass(frozen=True, slots=True)
class Stranger:
    """A pod of a namespace that the topic's access does not name."""

    bare: BareCluster
    space: str

    @classmethod
    def of(cls, bare: BareCluster, space: str, shop: Shop) -> "Stranger":
        authority = bare.api.get(f"/api/v1/namespaces/{shop.space}/configmaps/{shop.name}-ca")
        metadata = {"name": authority["metadata"]["name"]}
        bare.api.post(
            f"/api/v1/namespaces/{space}/configmaps", {"metadata": metadata, "data": authority["data"]}
        )
        bare.apply(shop.client_pod("stranger"), namespace=space)
        bare.kubectl("wait", "-n", space, "pod/stranger", "--for=condition=Ready", "--timeout=120s")
        return cls(bare, space)

    def reaches(self, address: str, port: int) -> bool:
        return self._run("python", "-c", _KNOCK, address, str(port)).returncode == 0

    def reads(self, topic: str) -> "subprocess.CompletedProcess[str]":
        return self._run("firn", "get", topic, "key")

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        inside = [str(tool("kubectl")), "exec", "-n", self.space, "stranger", "--", *command]
        return self.bare.attempt(inside)


@pytest.fixture
def bare(shop: Shop) -> BareCluster:
    return breakable(shop.cluster)


def test_a_master_that_was_given_up_while_its_kubelet_was_silent_is_replaced_and_is_none_beside_the_next(
    shop: Shop, bare: BareCluster
) -> None:
    """Its pod is deleted by force, and runs on: nobody is there to end it, and its token counts no more."""
    before = shop.master()
    node, uid = shop.node_of(before), shop.uid_of(before)
    with shop.load() as load:
        node.stop_kubelet()
        try:
            shop.delete_pod(before, seconds=0)
            shop.until_master(other_than=before)
            load.until_more()
            assert node.processes_of(uid), "the old master was to be there still"
            assert before not in shop.in_sync()
            status, why = shop.readiness_within(node, uid)
            assert status == 503, why
        finally:
            node.restart_kubelet()
        shop.until_in_sync(3)
    assert shop.uid_of(before) != uid


def test_a_broker_that_the_kernel_kills_for_memory_comes_back_and_nothing_is_lost(
    shop: Shop, bare: BareCluster
) -> None:
    before = shop.master()
    with shop.load() as load:
        shop.node_of(before).exhaust_memory(shop.uid_of(before))
        shop.until_master(other_than=before)
        load.until_more()
        shop.until_in_sync(3)

    def last_end() -> Json | None:
        [told] = shop.pod(before)["status"]["containerStatuses"]
        ended: Json | None = told["lastState"].get("terminated")
        return ended

    ended = bare.until(last_end, "its kubelet tells how it ended")
    assert ended["exitCode"] == 128 + signal.SIGKILL


@pytest.mark.slow  # three leases have to pass
def test_brokers_with_a_twentieth_of_a_core_elect_nobody_while_nothing_is_asked_of_them(
    shop: Shop, bare: BareCluster, tmp_path: Path
) -> None:
    with bare.namespace("slow") as space:
        slow = Shop(bare, space, tmp_path)
        slow.apply(lease_ttl="10s")
        slow.until_ready()
        slow.until_in_sync(3)
        for ordinal in range(3):
            pod = f"{slow.group}-{ordinal}"
            slow.node_of(pod).limit_cpu(slow.uid_of(pod), milli=50)
        epoch, version = slow.epoch(), slow.record()["version"]
        end = time.monotonic() + 30
        while time.monotonic() < end:
            record = slow.record()
            assert record["epoch"] == epoch
            assert len(record["in_sync"]) == 3
            time.sleep(0.5)
        assert record["version"] > version + 8, "the lease is renewed all the time"


def test_a_namespace_that_lets_nothing_in_by_default_lets_clients_reach_brokers_and_no_more(
    shop: Shop, bare: BareCluster
) -> None:
    """A pod of another namespace: kept from other ports by packets, from data by its account."""
    closed = {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "closed"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }  # fmt: skip
    broker = shop.master()
    address = str(shop.pod(broker)["status"]["podIP"])
    with bare.namespace("elsewhere") as elsewhere, _listening(shop, broker):
        stranger = Stranger.of(bare, elsewhere, shop)
        assert stranger.reaches(address, 9000)
        bare.apply(closed, namespace=shop.space)
        policies.enforce(bare.api, bare.nodes)
        try:
            assert not stranger.reaches(address, 9000)
            assert stranger.reaches(address, 7700)
            refused = stranger.reads(TOPIC)
            assert refused.returncode == 1
            assert "may not" in refused.stderr
            with shop.load() as load:
                standby = next(name for name in shop.in_sync() if name != broker)
                shop.switch_over(standby)
                load.until_more()
            assert load.refused == []
            shop.until_in_sync(3)
        finally:
            policies.lift(bare.nodes)
            bare.kubectl("delete", "-n", shop.space, "networkpolicy/closed")


@contextlib.contextmanager
def _listening(shop: Shop, pod: str) -> Iterator[None]:
    """Something in the pod that is no broker's business listens on port 9000."""
    process = next(iter(shop.node_of(pod).processes_of(shop.uid_of(pod))))
    within = ["nsenter", f"--target={process}", "--net", sys.executable, "-c", _LISTEN]
    with subprocess.Popen(within, stdout=subprocess.PIPE) as listener:
        try:
            assert listener.stdout
            assert listener.stdout.readline() == b"ready\n"
            yield
        finally:
            listener.kill()
