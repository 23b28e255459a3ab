"""Broker processes as pods start them, with an API server that they find by a kubeconfig.

Each pod has a port of its own on loopback instead of an address of its own, and no TLS.
"""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from firn_cli.calls import Ended, Running
from group_kit import free_port
from kube_kit import FakeKubernetes

from firn.client import Client
from firn_node.kubernetes.api import Object

NAMESPACE, CLUSTER = "shop", "main"
FIRN = f"/apis/firn.dev/v1alpha1/namespaces/{NAMESPACE}"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
SECONDS_MAX = 90.0


def kubeconfig(folder: Path, url: str) -> Path:
    """A file with which ``kubernetes.aio`` finds a plain API server."""
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


def probe(address: str, path: str) -> tuple[int, str]:
    """Status and body of the health port; 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


@dataclass
class Pod:
    """One replica over many processes."""

    folder: Path
    kubeconfig: Path
    ordinal: int
    group: int = 0
    groups: int = 1
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    lease_ttl: str = "1500ms"
    port: int = field(default_factory=free_port)
    health_port: int = field(default_factory=free_port)
    running: Running | None = None

    @property
    def name(self) -> str:
        return f"{CLUSTER}-{self.group}-{self.ordinal}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.running = Running(
            "up", "--print-ready", *self.options, KUBECONFIG=str(self.kubeconfig), POD_NAME=self.name,
            POD_NAMESPACE=NAMESPACE, FIRN_DATA=str(self.folder / self.name), FIRN_LISTEN=self.address,
            FIRN_HEALTH_LISTEN=f"127.0.0.1:{self.health_port}", FIRN_ADVERTISE=self.address, FIRN_NODE=self.name,
            FIRN_COORDINATOR="kubernetes", FIRN_CLUSTER=CLUSTER, FIRN_GROUP=str(self.group),
            FIRN_GROUPS=str(self.groups), FIRN_LEASE_TTL=self.lease_ttl, **self.environment,
        )  # fmt: skip

    async def probe(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(probe, f"127.0.0.1:{self.health_port}", path)

    async def until_ready(self) -> None:
        await until(self._is_ready, f"{self.name} is ready")

    async def _is_ready(self) -> bool:
        assert self.running is not None
        if self.running.process.poll() is not None:
            raise AssertionError(f"{self.name} has ended: {self.running.end()}")
        return (await self.probe("/readyz"))[0] == 200

    async def stop(self, number: int = 15) -> Ended:
        assert self.running is not None
        ended = await asyncio.to_thread(self.running.stop, number)
        self.running = None
        return ended


async def until(holds: Callable[[], Any], what: str) -> None:
    """``holds``: gives a truth, or an awaitable of one."""
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS_MAX
    while True:
        found = holds()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert loop.time() < end, f"never happened: {what}"
        await asyncio.sleep(0.05)


@dataclass
class Group:
    server: FakeKubernetes
    pods: list[Pod]

    @property
    def addresses(self) -> str:
        return ",".join(pod.address for pod in self.pods)

    def client(self) -> Client:
        return Client(self.addresses, timeout=60)

    def lease(self, group: int = 0) -> Object:
        found = self.server.get(f"{LEASES}/{CLUSTER}-{group}")
        assert found is not None
        return found

    def record(self, group: int = 0) -> Object | None:
        text = self.lease(group)["metadata"].get("annotations", {}).get("firn.dev/group-record")
        found: Object | None = json.loads(text) if text else None
        return found

    @property
    def master(self) -> Pod:
        holder = self.lease()["spec"]["holderIdentity"]
        [found] = [pod for pod in self.pods if pod.name == holder]
        return found

    async def until_ready(self) -> None:
        for pod in self.pods:
            await pod.until_ready()


def put_lease(server: FakeKubernetes, group: int = 0) -> None:
    server.put(
        f"{LEASES}/{CLUSTER}-{group}", {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {}}
    )


def put_group(server: FakeKubernetes, *, replicas: int, group: int = 0, groups: int = 1) -> None:
    """A BrokerGroup and its Lease, as the operator makes them."""
    put_lease(server, group)
    spec = {"clusterRef": {"name": CLUSTER}, "group": group, "groups": groups, "replicas": replicas}
    document = {"apiVersion": "firn.dev/v1alpha1", "kind": "BrokerGroup", "spec": spec, "status": {}}
    server.put(f"{FIRN}/brokergroups/{CLUSTER}-{group}", document)


@contextlib.asynccontextmanager
async def pods(
    folder: Path, server: FakeKubernetes, replicas: int = 3, **changes: Any
) -> AsyncIterator[Group]:
    """The pods of group 0, started; what still runs at the end is killed."""
    config = kubeconfig(folder, server.url)
    made = [Pod(folder, config, ordinal, **changes) for ordinal in range(replicas)]
    try:
        for pod in made:
            pod.start()
        yield Group(server, made)
    finally:
        for pod in made:
            if pod.running is not None:
                pod.running.process.kill()
                await asyncio.to_thread(pod.running.end)
