"""A topic in a real cluster, a namespace of its own around it, writers on it, and the check that nothing was lost.

The chart is installed once per run (`install`); each `Shop` is a `restricted` namespace in which a person has applied a
BrokerCluster and a CompactedTopic. Clients run outside of the cluster: they dial pods by their addresses where this
machine can reach those, else by forwarded ports, and check certificates against the names that brokers have among
themselves.
"""

import asyncio
import base64
import contextlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cluster import images
from cluster.api import ApiError, Json
from cluster.bare import BareCluster
from cluster.client import SECONDS_MAX, WholeCluster
from cluster.client import Client as Cluster
from cluster.fixtures import breakable
from cluster.node import Node
from cluster.tools import tool

from firn.cli.kube.forwarding import Forwards
from firn.cli.kube.kubectl import Kubectl
from firn.client import Client
from firn.errors import FirnError, Unavailable

CHART = Path(__file__).parents[2] / "helm"
SYSTEM = "firn-system"
TOPIC = "quotes"
KEYS = 64
LEASE_TTL_SECONDS = 3
# On Python 3.11 aiohttp leaves a TLS connection whose peer is unreachable to close by itself, half a minute later:
# Python tells of it when the loop has ended before.
UNREACHABLE_PEERS = "ignore::pytest.PytestUnraisableExceptionWarning"
_GROUP = "/apis/firn.dev/v1alpha1/namespaces"
_ASK = """
import http.client
asked = http.client.HTTPConnection("127.0.0.1", 7701, timeout=20)
asked.request("GET", "/readyz")
answer = asked.getresponse()
print(answer.status, answer.read().decode())
"""


def install(cluster: WholeCluster) -> None:
    """The images on every node and the chart in a namespace of its own, ready."""
    cluster.load(images.archive(images.NODE), images.archive(images.OPERATOR))
    cluster.api.post(
        "/api/v1/namespaces",
        {"metadata": {"name": SYSTEM, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
    )
    helm(cluster, "install", "firn", str(CHART), *image_values(), "--wait", "--timeout", "180s")


def ensure_installed(cluster: WholeCluster) -> None:
    """The same, by whichever test comes first."""
    try:
        cluster.api.get(f"/api/v1/namespaces/{SYSTEM}")
    except ApiError:
        install(cluster)


def helm(cluster: Cluster, *words: str) -> str:
    return cluster.run([str(tool("helm")), "--namespace", SYSTEM, *words])


def image_values(*, suffix: str = "") -> list[str]:
    """Helm's words for the images of this tree, by names that end in something more."""
    words = ["--set", "image.registry=localhost"]
    for value, image in (("operator", images.OPERATOR), ("node", images.NODE), ("spark", images.SPARK)):
        name, tag = image.reference().removeprefix("localhost/").split(":")
        words += [
            "--set",
            f"image.{value}.repository={name}",
            "--set-string",
            f"image.{value}.tag={tag}{suffix}",
        ]
    return words


@dataclass
class Shop:
    cluster: WholeCluster
    space: str
    folder: Path
    name: str = "main"

    @property
    def group(self) -> str:
        return f"{self.name}-0"

    def apply(
        self,
        *,
        replicas: int = 3,
        lease_ttl: str = f"{LEASE_TTL_SECONDS}s",
        topic: Mapping[str, Any] | None = None,
    ) -> None:
        """A cluster of one group and a topic in it."""
        brokers = _brokers(self.name, {"replicas": replicas, "config": {"leaseTtl": lease_ttl}})
        quotes = {"partitions": 2, "clusterRef": {"name": self.name}, **(topic or {})}
        items = [brokers, _object("CompactedTopic", TOPIC, quotes)]
        self.cluster.apply({"apiVersion": "v1", "kind": "List", "items": items}, namespace=self.space)

    def apply_brokers(self, **spec: Any) -> None:
        """A cluster without a topic."""
        self.cluster.apply(_brokers(self.name, spec), namespace=self.space)

    def apply_topic(self, name: str, **spec: Any) -> None:
        """A further topic, ready."""
        self.cluster.apply(
            _object("CompactedTopic", name, {"clusterRef": {"name": self.name}, **spec}), namespace=self.space
        )
        self.cluster.until(lambda: self.condition("compactedtopic", name) == "True", f"{name} is Ready")

    def until_ready(self) -> None:
        for kind, name in (("brokercluster", self.name), ("compactedtopic", TOPIC)):
            self.cluster.until(
                lambda k=kind, n=name: self.condition(k, n) == "True", f"{kind} {name} is Ready"
            )

    def condition(self, kind: str, name: str, wanted: str = "Ready") -> str:
        """``True``, ``False``, or nothing when nobody has said so about the generation that is there now."""
        found = self.cluster.api.get(f"{_GROUP}/{self.space}/{kind}s/{name}")
        for condition in found.get("status", {}).get("conditions", []):
            is_current = condition.get("observedGeneration", 0) == found["metadata"]["generation"]
            if condition["type"] == wanted and is_current:
                return str(condition["status"])
        return ""

    def patch(self, change: Json) -> None:
        """The BrokerCluster as a person changes it."""
        self.cluster.api.patch(f"{_GROUP}/{self.space}/brokerclusters/{self.name}", change)

    def patch_topic(self, change: Json) -> None:
        """The same of the topic."""
        self.cluster.api.patch(f"{_GROUP}/{self.space}/compactedtopics/{TOPIC}", change)

    def lease(self) -> Json:
        return self.cluster.api.get(
            f"/apis/coordination.k8s.io/v1/namespaces/{self.space}/leases/{self.group}"
        )

    def record(self) -> Json:
        """The group record, as the Lease has it."""
        return self.record_in(self.lease())

    @staticmethod
    def record_in(lease: Json) -> Json:
        notes = lease["metadata"].get("annotations", {})
        found: Json = json.loads(notes.get("firn.dev/group-record", "{}"))
        return found

    def master(self) -> str:
        """The pod of the master that the record names."""
        record = self.record()
        return str(record["members"][record["master"]["log_id"]]["node"]) if record.get("master") else ""

    def in_sync(self) -> list[str]:
        """Pods."""
        record = self.record()
        return sorted(record["members"][log_id]["node"] for log_id in record.get("in_sync", []))

    def members(self) -> int:
        return len(self.record()["members"])

    def epoch(self) -> int:
        return int(self.record()["epoch"])

    def told_master(self) -> str:
        """The pod that the BrokerGroup's status names, for people."""
        found = self.cluster.api.get(f"{_GROUP}/{self.space}/brokergroups/{self.group}")
        return str(found.get("status", {}).get("currentMaster", ""))

    def topic_id(self) -> str:
        found = self.cluster.api.get(f"{_GROUP}/{self.space}/compactedtopics/{TOPIC}")
        return str(found["status"]["topicId"])

    def client_pod(self, name: str) -> Json:
        """A pod that waits, with what ``firn`` needs in it to reach the brokers as the namespace's default account."""
        told = {
            "FIRN_BROKER": f"{self.name}-bootstrap.{self.space}.svc:7700",
            "FIRN_TLS_CA": "/etc/firn/ca/ca.crt",
            "FIRN_TOKEN_FILE": "/etc/firn/token/token",
        }
        token = {"serviceAccountToken": {"audience": "firn.dev", "expirationSeconds": 3600, "path": "token"}}
        container = {
            "name": "client",
            "image": images.NODE.reference(),
            "command": ["sleep", "infinity"],
            "env": [{"name": key, "value": value} for key, value in told.items()],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "ca", "mountPath": "/etc/firn/ca"},
                {"name": "token", "mountPath": "/etc/firn/token"},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
        spec = {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [
                {"name": "ca", "configMap": {"name": f"{self.name}-ca"}},
                {"name": "token", "projected": {"sources": [token]}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}

    def pod(self, name: str) -> Json:
        """*Errors*: `ApiError`, NotFound."""
        return self.cluster.api.get(f"/api/v1/namespaces/{self.space}/pods/{name}")

    def delete_pod(self, name: str, *, seconds: int | None = None) -> None:
        grace = {} if seconds is None else {"gracePeriodSeconds": seconds}
        self.cluster.api.delete(f"/api/v1/namespaces/{self.space}/pods/{name}", grace)

    def node_of(self, pod: str) -> Node:
        return breakable(self.cluster).node(self.pod(pod)["spec"]["nodeName"])

    def uid_of(self, pod: str) -> str:
        return str(self.pod(pod)["metadata"]["uid"])

    def kill_broker(self, pod: str) -> None:
        """The pod's processes die at once, without a word; the kubelet starts its container again."""
        assert self.node_of(pod).kill_pod(self.uid_of(pod)), f"nothing ran in {pod}"

    def readiness_within(self, node: Node, uid: str) -> tuple[int, str]:
        """What a broker answers when it is asked within its pod: its node may be cut off, its pod given up."""
        process = next(iter(node.processes_of(uid)))
        ask = ["nsenter", f"--target={process}", "--net", sys.executable, "-c", _ASK]
        status, _, text = self.cluster.run(ask).partition(" ")
        return int(status), text

    def make_unplaced(self, pod: str, *, minutes: int) -> None:
        """A pod for which there is no node has waited for so long already, by what its status says."""
        path = f"/api/v1/namespaces/{self.space}/pods/{pod}"

        def waits() -> Json | None:
            conditions = self.pod(pod)["status"].get("conditions", [])
            return next((each for each in conditions if _is_unplaced(each)), None)

        condition = self.cluster.until(waits, f"{pod} finds no node")
        since = datetime.now(UTC) - timedelta(minutes=minutes)
        condition["lastTransitionTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        self.cluster.api.patch(f"{path}/status", {"status": {"conditions": [condition]}}, "strategic-merge")

    def secret(self, name: str) -> Json:
        return self.cluster.api.get(f"/api/v1/namespaces/{self.space}/secrets/{name}")

    def certificate_of(self, pod: str) -> str:
        """What the broker of a pod shows to whoever connects now, in PEM."""
        return ssl.get_server_certificate((self.pod(pod)["status"]["podIP"], 7700), timeout=60)

    def pods(self) -> list[Json]:
        """Of the brokers."""
        labels = f"firn.dev/cluster={self.name},app.kubernetes.io/component=broker"
        path = f"/api/v1/namespaces/{self.space}/pods"
        found: list[Json] = self.cluster.api.get(path, labelSelector=labels)["items"]
        return found

    def made(self) -> set[str]:
        """Uids of the broker pods, ready at this moment or not."""
        return {str(pod["metadata"]["uid"]) for pod in self.pods()}

    def uids(self) -> set[str]:
        """Of the broker pods that are ready."""
        return {str(pod["metadata"]["uid"]) for pod in self.pods() if _is_ready(pod)}

    def are_all_others_than(self, before: set[str]) -> bool:
        """Whether as many pods as there were are ready, and none of those."""
        now = self.uids()
        return len(now) == len(before) and not now & before

    def volume_sizes(self) -> set[str]:
        """That the volumes of the brokers have."""
        claims = self.cluster.api.get(f"/api/v1/namespaces/{self.space}/persistentvolumeclaims")["items"]
        return {claim["status"]["capacity"]["storage"] for claim in claims}

    def images(self) -> set[str]:
        """Of the broker pods that are ready."""
        return {pod["spec"]["containers"][0]["image"] for pod in self.pods() if _is_ready(pod)}

    def until_master(self, *, other_than: str) -> str:
        """The next one."""
        found: str = self.cluster.until(
            lambda: (master := self.master()) and master != other_than and master, "another master"
        )
        return found

    def until_in_sync(self, count: int, *, seconds: float = SECONDS_MAX) -> None:
        self.cluster.until(
            lambda: len(self.in_sync()) == count, f"{count} replicas are in sync", seconds=seconds
        )

    def kubectl_firn(self, *words: str, input: str = "") -> "subprocess.CompletedProcess[str]":
        """The plugin of kubectl, as a person runs it."""
        program = "import sys; sys.argv[0] = 'kubectl-firn'; from firn.cli.main import main; main()"
        told = [sys.executable, "-c", program, *words, "--namespace", self.space]
        return self.cluster.attempt(told, input=input)

    def switch_over(self, to: str) -> None:
        """As a person does it, who asks again where a busy machine kept the new master from its lease."""
        self.cluster.until(lambda: asyncio.run(self._switched_over(to)), f"{to} is made master and stays it")

    async def _switched_over(self, to: str) -> bool:
        async with self.client() as client:
            try:
                await client.switchover(0, to=to)
            except Unavailable:
                return self.master() == to
        return True

    def client(self, *, timeout: float = 120) -> Client:
        """An administrator outside of the cluster."""
        files = self.write_credentials()
        addresses = [f"{self.group}-{i}.{self.group}.{self.space}.svc:7700" for i in range(3)]
        credentials = {"tls_ca": "ca.crt", "tls_cert": "tls.crt", "tls_key": "tls.key"}
        paths = {name: str(files / file) for name, file in credentials.items()}
        if isinstance(self.cluster, BareCluster):
            return Client(",".join(addresses), timeout=timeout, dial=self._dial, **paths)
        os.environ["KUBECONFIG"] = str(self.cluster.kubeconfig)  # for kubectl, which forwards the ports
        forwards = Forwards(Kubectl(namespace=self.space))
        return _Forwarded(forwards, ",".join(addresses), timeout=timeout, dial=forwards, **paths)

    @contextlib.contextmanager
    def load(self) -> Iterator["Load"]:
        """Writers at work until the end of the ``with``; then every acknowledged record has to be there."""
        load = Load(self)
        load.start()
        try:
            yield load
        finally:
            load.stop()
        load.check()

    async def _dial(self, address: str) -> str:
        name = address.split(".")[0]
        try:
            pod = await asyncio.to_thread(self.pod, name)
        except ApiError as error:
            raise OSError(f"no pod {name}: {error}") from error
        if not pod["status"].get("podIP"):
            raise OSError(f"pod {name} has no address yet")
        return f"{pod['status']['podIP']}:7700"

    def write_credentials(self) -> Path:
        """The administrator's, as the Secret has them now; clients that are there read them anew, as from a mounted one."""
        for name, data in self.secret(f"{self.name}-admin")["data"].items():
            (self.folder / name).write_bytes(base64.b64decode(data))
        return self.folder


@dataclass
class Load:
    """Writers that count each key up, one record at a time, and what they were told.

    A record whose fate they were not told may be there or not: the check asks for at least the newest acknowledged value
    of each key, and for no value that nobody sent.
    """

    shop: Shop
    acknowledged: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    gap_seconds: float = 0.0  # the longest time in which nothing was acknowledged, and when that was over
    resumed_at: float = 0.0
    _last: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _broken: list[BaseException] = field(default_factory=list)

    def start(self) -> None:
        """Returns once the first record is acknowledged."""
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()
        self.shop.cluster.until(lambda: self.acknowledged or self._broken, "the first record is acknowledged")

    def stop(self) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def until_more(self, count: int = 100) -> None:
        """So many more records are acknowledged."""
        wanted = self.total() + count
        self.shop.cluster.until(
            lambda: self.total() >= wanted or self._broken or self._ended.is_set(), "records are acknowledged"
        )

    def total(self) -> int:
        return sum(list(self.acknowledged.values()))

    def check(self) -> None:
        if self._broken:
            raise self._broken[0]
        table = asyncio.run(self._table())
        for key, value in self.acknowledged.items():
            found = int(table.get(str(key).encode(), b"0"))
            assert value <= found <= self.sent[key], f"key {key}: acknowledged {value}, found {found}"

    def _run(self) -> None:
        try:
            asyncio.run(self._write())
        except BaseException as error:
            self._broken.append(error)

    async def _write(self) -> None:
        async with self.shop.client() as client, asyncio.TaskGroup() as tasks:
            for first in range(4):
                tasks.create_task(self._count_up(client, range(first, KEYS, 4)))

    async def _count_up(self, client: Client, keys: range) -> None:
        value = 0
        while not self._ended.is_set():
            value += 1
            for key in keys:
                self.sent[key] = value
                if not await self._put(client, key, value):
                    break
                self.acknowledged[key] = value
                now = time.monotonic()
                if now - (self._last or now) > self.gap_seconds:
                    self.gap_seconds, self.resumed_at = now - self._last, now
                self._last = now
                if self._ended.is_set():
                    break

    async def _put(self, client: Client, key: int, value: int) -> bool:
        try:
            await client.put(TOPIC, str(key).encode(), str(value).encode())
        except FirnError as error:
            self.refused.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)
            return False
        return True

    async def _table(self) -> dict[bytes, bytes]:
        async with self.shop.client() as client:
            table = await client.table(TOPIC)
            await table.caught_up()
            return dict(table)


class _Forwarded(Client):
    """A client that ends its forwards with itself."""

    def __init__(self, forwards: Forwards, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._forwards = forwards

    async def close(self, *, flush: bool = True) -> None:
        try:
            await super().close(flush=flush)
        finally:
            await self._forwards.close()


def _is_unplaced(condition: Json) -> bool:
    return bool(condition["type"] == "PodScheduled" and condition["status"] == "False")


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(told["type"] == "Ready" and told["status"] == "True" for told in conditions)


def _brokers(name: str, spec: Mapping[str, Any]) -> Json:
    """Small enough for several on one machine."""
    small = {
        "storage": {"size": "1Gi"},
        "resources": {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
    }
    return _object("BrokerCluster", name, {**small, **spec})


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> Json:
    return {"apiVersion": "firn.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
