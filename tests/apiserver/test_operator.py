"""The operator as a process against a real API server: a thousand topics at once, rest, a restart (drill 30)."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import processes
from cluster.api import Api, ApiError
from cluster.apiserver import ApiServer

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).parents[2]
TOPICS = 1000
MEMORY_MAX = 200 << 20
HEAD = {"apiVersion": "firn.dev/v1alpha1"}
FIRN = "/apis/firn.dev/v1alpha1"
Obj = dict[str, Any]


@pytest.fixture(scope="module")
def kinds(apiserver: ApiServer) -> None:
    """Our kinds are served, and the chart's roles are there."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        apiserver.apply(path)
        name = yaml.safe_load(path.read_text())["metadata"]["name"]
        apiserver.until_served(name)
    rules = [{"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}]
    role(apiserver, "firn-broker", rules)
    role(
        apiserver,
        "firn-operator",
        yaml.safe_load((ROOT / "operator/firn_operator/rights.yaml").read_text())["rules"],
    )


@pytest.fixture
def space(apiserver: ApiServer, kinds: None) -> Iterator[str]:
    with apiserver.namespace() as name:
        yield name


def role(apiserver: ApiServer, name: str, rules: list[Obj]) -> None:
    body = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": rules,
    }
    apiserver.apply(body)


def account(apiserver: ApiServer, space: str) -> Path:
    """A kubeconfig of the operator's ServiceAccount, which has its rights and no others."""
    config = apiserver.account(space, "firn-operator")
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": f"op-{space}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "firn-operator"},
        "subjects": [{"kind": "ServiceAccount", "name": "firn-operator", "namespace": space}],
    }  # fmt: skip
    apiserver.apply(binding)
    return config


@contextlib.contextmanager
def operator(config: Path, space: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ, "KUBECONFIG": str(config), "POD_NAMESPACE": space, "POD_NAME": "operator",
        "FIRN_BROKER_IMAGE": "firn:1", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "firn_operator",
        "run",
        "--namespaces",
        space,
        "--port",
        str(processes.free_ports(1)[0]),
    ]
    with (
        log.open("ab") as file,
        subprocess.Popen(command, env=environment, stderr=file, stdout=file) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


class Brokers(threading.Thread):
    """What a master of group 0 would write: the record's copy, and of each topic that it has it."""

    def __init__(self, api: Api, space: str) -> None:
        super().__init__(daemon=True)
        self._api, self._space = api, space
        self._stop_asked = threading.Event()
        self._told: set[tuple[str, int]] = set()

    def run(self) -> None:
        while not self._stop_asked.wait(0.2):
            with contextlib.suppress(ApiError, OSError):
                self._report()

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()

    def _report(self) -> None:
        root = f"{FIRN}/namespaces/{self._space}"
        nodes = [f"main-0-{number}" for number in range(3)]
        status = {"epoch": 1, "version": 3, "currentMaster": nodes[0], "inSync": nodes, "members": [
            {"node": node, "logId": node} for node in nodes
        ]}  # fmt: skip
        if ("", 0) not in self._told:
            self._apply(f"{root}/brokergroups", "BrokerGroup", "main-0", status)
            self._told.add(("", 0))
        topics = self._api.get(f"{root}/compactedtopics", limit="2000")["items"]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._take_over, topics))

    def _take_over(self, topic: Obj) -> None:
        meta = topic["metadata"]
        key = (meta["uid"], meta["generation"])
        if key in self._told or self._stop_asked.is_set():
            return
        condition = {
            "type": "Applied", "status": "True", "reason": "Created", "message": "", "observedGeneration": key[1],
            "lastTransitionTime": meta["creationTimestamp"],
        }  # fmt: skip
        where = f"{FIRN}/namespaces/{self._space}/compactedtopics"
        self._apply(where, "CompactedTopic", meta["name"], {"conditions": [condition]})
        self._told.add(key)

    def _apply(self, where: str, kind: str, name: str, status: Obj) -> None:
        body = {"apiVersion": "firn.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "status": status}
        self._api.patch(f"{where}/{name}/status", body, "apply", fieldManager="firn-broker", force="true")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ready(api: Api, space: str) -> int:
    topics = api.get(f"{FIRN}/namespaces/{space}/compactedtopics", limit="2000")["items"]
    return sum(
        any(
            each["type"] == "Ready" and each["status"] == "True"
            for each in (topic.get("status") or {}).get("conditions", [])
        )
        for topic in topics
    )


def test_a_thousand_topics_become_ready_and_nothing_is_written_after_that(
    apiserver: ApiServer, space: str, tmp_path: Path
) -> None:
    api, config, log = apiserver.api, account(apiserver, space), tmp_path / "operator.log"
    root = f"{FIRN}/namespaces/{space}"
    api.post(
        f"{root}/brokerclusters", {**HEAD, "kind": "BrokerCluster", "metadata": {"name": "main"}, "spec": {}}
    )
    brokers = Brokers(Api.of(apiserver.kubeconfig), space)
    brokers.start()
    try:
        with operator(config, space, log) as process:
            apiserver.until(
                lambda: exists(api, f"/apis/apps/v1/namespaces/{space}/statefulsets/main-0"),
                "the cluster is made",
            )
            mark, began = apiserver.audit.mark(), time.monotonic()
            with ThreadPoolExecutor(8) as pool:
                for _ in pool.map(
                    lambda number: api.post(f"{root}/compactedtopics", topic(f"t{number}")), range(TOPICS)
                ):
                    pass
            apiserver.until(lambda: ready(api, space) == TOPICS, "all topics are ready", seconds=300)
            print(f"all ready after {time.monotonic() - began:.0f} s, {cpu_s(process.pid):.1f} s of CPU")
            mine = writes(apiserver, space, mark)
            per_topic = Counter(each.name for each in mine if each.resource.startswith("compactedtopics"))
            assert max(per_topic.values()) <= 3, (
                "its finalizer, that it is ready, and that the brokers are late"
            )
            settle(apiserver, space)
            assert peak_bytes(process.pid) <= MEMORY_MAX
            mark = apiserver.audit.mark()
        assert writes(apiserver, space, mark) == []
        with operator(config, space, log) as process:
            apiserver.until(lambda: log.read_bytes().count(b" leads") == 2, "the next operator leads")
            settle(apiserver, space)
            assert peak_bytes(process.pid) <= MEMORY_MAX
        assert [(each.verb, each.resource, each.name) for each in writes(apiserver, space, mark)] == []
        refused = [each for each in asked(apiserver, space) if each.code == 403]
        assert refused == []
    finally:
        brokers.stop()


def test_fields_that_others_own_stay_and_cost_no_writes_and_its_own_are_taken_back_once(
    apiserver: ApiServer, space: str, tmp_path: Path
) -> None:
    """Drill 32."""
    api, config = apiserver.api, account(apiserver, space)
    core, firn = f"/api/v1/namespaces/{space}", f"{FIRN}/namespaces/{space}"
    sets = f"/apis/apps/v1/namespaces/{space}/statefulsets"
    budget = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/main-0"
    api.post(
        f"{firn}/brokerclusters", {**HEAD, "kind": "BrokerCluster", "metadata": {"name": "main"}, "spec": {}}
    )
    api.post(f"{firn}/compactedtopics", topic("quotes"))
    brokers = Brokers(Api.of(apiserver.kubeconfig), space)
    brokers.start()

    def theirs(path: str, kind: str, version: str, **fields: Obj) -> None:
        name = path.rpartition("/")[2]
        meta = {"name": name, "labels": {"team": "trade"}, **fields.pop("metadata", {})}
        body = {"apiVersion": version, "kind": kind, "metadata": meta, **fields}
        api.patch(path, body, "apply", fieldManager="somebody", force="true")

    try:
        with operator(config, space, tmp_path / "operator.log"):
            apiserver.until(lambda: ready(api, space) == 1, "the topic is ready")
            settle(apiserver, space)
            mark = apiserver.audit.mark()
            theirs(f"{core}/configmaps/main-config", "ConfigMap", "v1", data={"theirs": "1"})
            theirs(f"{core}/services/main-bootstrap", "Service", "v1", spec={"sessionAffinity": "ClientIP"})
            theirs(f"{sets}/main-0", "StatefulSet", "apps/v1", spec={"minReadySeconds": 7})
            theirs(f"{firn}/brokerclusters/main", "BrokerCluster", "firn.dev/v1alpha1", spec={"replicas": 3})
            theirs(f"{firn}/compactedtopics/quotes", "CompactedTopic", "firn.dev/v1alpha1")
            settle(apiserver, space)
            assert writes(apiserver, space, mark) == []
            assert api.get(f"{core}/configmaps/main-config")["data"]["theirs"] == "1"
            assert api.get(f"{sets}/main-0")["spec"]["minReadySeconds"] == 7
            mark = apiserver.audit.mark()
            theirs(budget, "PodDisruptionBudget", "policy/v1", spec={"maxUnavailable": 2})
            apiserver.until(lambda: api.get(budget)["spec"]["maxUnavailable"] == 1, "it is taken back")
            settle(apiserver, space)
            assert [each.resource for each in writes(apiserver, space, mark)] == ["poddisruptionbudgets"]
    finally:
        brokers.stop()


def topic(name: str) -> Obj:
    spec = {"clusterRef": {"name": "main"}}
    return {
        "apiVersion": "firn.dev/v1alpha1",
        "kind": "CompactedTopic",
        "metadata": {"name": name},
        "spec": spec,
    }


def asked(apiserver: ApiServer, space: str, mark: int = 0) -> list[Any]:
    who = f"system:serviceaccount:{space}:firn-operator"
    return [each for each in apiserver.audit.since(mark) if each.user == who]


def writes(apiserver: ApiServer, space: str, mark: int) -> list[Any]:
    """The operator's writes, but for its own Lease."""
    return [each for each in asked(apiserver, space, mark) if each.is_write and each.name != "firn-operator"]


def settle(apiserver: ApiServer, space: str) -> None:
    """Return when the operator has renewed its Lease three times and written nothing else meanwhile."""
    mark = apiserver.audit.mark()

    def is_quiet() -> bool:
        nonlocal mark
        if writes(apiserver, space, mark):
            mark = apiserver.audit.mark()
            return False
        renewed = [
            each for each in asked(apiserver, space, mark) if each.name == "firn-operator" and each.is_write
        ]
        return len(renewed) >= 3

    apiserver.until(is_quiet, "the operator rests", seconds=200)


def exists(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True
