"""``firn`` against brokers in Kubernetes: through a kubectl, with forwarded ports, as the user may."""

import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl_kit import World

from firn.cli.main import hoisted
from firn_node.demo.process import BrokerProcess
from support.firn_cli.calls import Ended, call

SECONDS_MAX = 60


def meta(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "shop",
        "creationTimestamp": "2026-11-20T10:00:00Z",
        "generation": 1,
        **more,
    }


def cluster(name: str = "main", **spec: Any) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "reason": "AllInSync", "message": "all replicas are in sync"}
    return {
        "kind": "BrokerCluster",
        "metadata": meta(name),
        "spec": {"groups": 1, "replicas": 2, "security": {"insecure": True}, **spec},
        "status": {"phase": "Running", "observedGeneration": 1, "conditions": [ready]},
    }


def hibernating() -> dict[str, Any]:
    return cluster() | {"metadata": meta("main", annotations={"firn.dev/hibernate": "true"})}


def group(master: str | None = "main-0-0") -> dict[str, Any]:
    return {
        "kind": "BrokerGroup",
        "metadata": meta("main-0"),
        "spec": {"clusterRef": {"name": "main"}, "group": 0, "groups": 1, "replicas": 2},
        "status": {
            "currentMaster": master,
            "epoch": 3,
            "inSync": ["main-0-0", "main-0-1"],
            "readyReplicas": 2,
        },
    }


def pod(name: str, phase: str = "Running", **status: Any) -> dict[str, Any]:
    labels = {"firn.dev/cluster": "main", "firn.dev/group": "0", "app.kubernetes.io/component": "broker"}
    return {
        "kind": "Pod",
        "metadata": meta(name, labels=labels),
        "spec": {
            "nodeName": "node-1",
            "containers": [{"name": "broker", "env": [{"name": "A_TOKEN", "value": "s3cret"}]}],
        },
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}], **status},
    }


def topic(name: str) -> dict[str, Any]:
    conditions = [
        {"type": "Applied", "status": "False", "reason": "Refused", "message": "partitions never change"},
        {"type": "Ready", "status": "False", "reason": "NotApplied", "message": "see Applied"},
    ]
    return {
        "kind": "CompactedTopic",
        "metadata": meta(name),
        "spec": {"clusterRef": {"name": "main"}, "partitions": 4},
        "status": {"partitions": 4, "minInSync": 1, "conditions": conditions},
    }


@pytest.fixture
def world(tmp_path: Path) -> World:
    folder = tmp_path / "kubectl-folder"
    folder.mkdir()
    found = World(folder)
    found.write(objects=[cluster(), group(), pod("main-0-0"), pod("main-0-1"), topic("flights")])
    return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data", "--index", "files")
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def forwarded(world: World, broker: BrokerProcess) -> World:
    """The broker is the pod main-0-0; main-0-1 is known and cannot be forwarded to."""
    world.write(forwards={"main-0-0": int(broker.address.rpartition(":")[2])})
    return world


def said(ended: Ended) -> str:
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith("firn: ")
    return line


def test_records_go_through_a_forwarded_port_that_ends_with_the_command(forwarded: World) -> None:
    def firn(*arguments: str, input: bytes = b"") -> bytes:
        return call("--context", "kind", *arguments, input=input, **forwarded.environment).stdout

    firn("topics", "create", "forwarded", "--partitions", "2")
    assert firn("produce", "forwarded", input=b"a\t1\nb\t2\n") == b"2 records acknowledged\n"
    assert firn("consume", "forwarded", "--format", "tsv", "-n", "shop").count(b"\t") == 2
    assert firn("get", "forwarded", "a") == b"1"
    calls = forwarded.calls()
    assert all(words[:2] == ["--context", "kind"] for words in calls)
    assert any("port-forward" in words and "pod/main-0-0" in words for words in calls)
    pid = int((forwarded.folder / "forward-main-0-0.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_forward_ends_with_a_command_that_was_killed(forwarded: World) -> None:
    environment = {**os.environ, **forwarded.environment}
    command = [sys.executable, "-m", "firn_node", "--context", "kind", "consume", "killed", "--follow"]
    call("--context", "kind", "topics", "create", "killed", **forwarded.environment)
    pid_file = forwarded.folder / "forward-main-0-0.pid"
    pid_file.unlink()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        until(pid_file.exists, "no forward was started")
        until(lambda: pid_file.read_text() != "", "no process id")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not is_alive(int(pid_file.read_text())), "the forward outlived its command")


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds: Any, otherwise: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def test_kubectls_plugin_is_the_same_program_and_needs_no_option(forwarded: World) -> None:
    program = "import sys; sys.argv[0] = '/usr/bin/kubectl-firn'; from firn.cli.main import main; main()"
    environment = {**os.environ, **forwarded.environment}
    for name in [name for name in environment if name.startswith("FIRN_")]:
        del environment[name]

    def plugin(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True,
            timeout=SECONDS_MAX, check=False,
        )  # fmt: skip

    done = plugin("topics", "list", "-o", "json", "--namespace", "shop")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), list)
    assert forwarded.calls()[0][:2] == ["--namespace", "shop"]
    assert plugin("--help").stdout.startswith("Usage: kubectl firn ")


def test_status_shows_resources_and_brokers(forwarded: World) -> None:
    text = call("--context", "kind", "status", **forwarded.environment).stdout.decode()
    assert text.startswith("cluster shop/main is ready: all replicas are in sync\n")
    for row in ("main-0 ", "main-0-0", "main-0-1", "flights", "Refused: partitions never change", "BROKER"):
        assert row in text, row
    found = json.loads(call("--context", "kind", "status", "-o", "json", **forwarded.environment).stdout)
    assert {"brokers", "topics", "kubernetes"} <= set(found)
    assert found["problem"] is None
    (shown,) = found["kubernetes"]["groups"]
    assert (shown["master"], shown["epoch"], shown["in_sync"]) == ("main-0-0", 3, ["main-0-0", "main-0-1"])
    (serving,) = [broker for broker in found["brokers"] if broker["state"] == "serving"]
    (silent,) = [broker for broker in found["brokers"] if broker["state"] == "unreachable"]
    assert serving["node"] == "firn-0"
    assert silent["address"] == "main-0-1.main-0.shop.svc:7700"
    assert 'pods "main-0-1" not found' in silent["reason"]


def test_status_of_a_cluster_whose_brokers_do_not_run_shows_why(world: World) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    stuck = pod("main-0-0", "Pending", containerStatuses=[{"restartCount": 2, "state": waiting}])
    world.write(objects=[cluster(), group(None), stuck])
    done = call("--context", "kind", "status", **world.environment)
    text = done.stdout.decode()
    assert "ImagePullBackOff" in text
    assert "no such image" in text
    assert "the brokers were not asked: no broker of cluster main in namespace shop runs" in text


@pytest.mark.parametrize(
    ("objects", "options", "sentence"),
    [
        ([], [], "there is no BrokerCluster in the namespace of this context; give another one with --namespace"),
        ([], ["-n", "news"], "there is no BrokerCluster in namespace news"),
        ([cluster("a"), cluster("b")], ["-n", "shop"], "there are several BrokerClusters in namespace shop: a, b; choose"),
        ([cluster("a")], ["--cluster", "b"], "there is no BrokerCluster b in the namespace of this context; there are: a"),
        ([cluster()], [], "no broker of cluster main in namespace shop runs; see `firn status`"),
        ([hibernating()], [], "it hibernates: `firn wake` starts it"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_said_with_what_to_do(
    world: World, objects: list[dict[str, Any]], options: list[str], sentence: str
) -> None:
    world.write(objects=objects)
    assert sentence in said(
        call("--context", "kind", "topics", "list", *options, code=1, **world.environment)
    )


def test_a_cluster_without_the_definitions_is_told_how_to_install_them(world: World) -> None:
    world.write(
        refused={"get brokerclusters": 'error: the server doesn\'t have a resource type "brokerclusters"'}
    )
    assert "helm install" in said(call("--context", "kind", "topics", "list", code=1, **world.environment))


def test_without_kubectl_the_sentence_names_it(world: World, tmp_path: Path) -> None:
    ended = call("--context", "kind", "topics", "list", code=1, PATH=str(tmp_path))
    assert "kubectl is not installed" in said(ended)


def test_a_pod_that_cannot_be_forwarded_to_is_named(world: World) -> None:
    ended = call("--context", "kind", "--timeout", "5s", "topics", "list", code=1, **world.environment)
    assert 'pods "main-0-' in said(ended)


def test_who_may_not_read_the_administrators_secret_is_told_of_service_accounts(world: World) -> None:
    refusal = 'Error from server (Forbidden): secrets "main-admin" is forbidden'
    world.write(
        objects=[cluster(security={}), group(), pod("main-0-0")], refused={"get secret main-admin": refusal}
    )
    sentence = said(call("--context", "kind", "topics", "list", code=1, **world.environment))
    assert refusal in sentence
    assert "--service-account" in sentence


def test_an_address_and_a_place_in_kubernetes_are_not_both_taken(world: World) -> None:
    ended = call("--context", "kind", "--broker", "a:1", "topics", "list", code=2, **world.environment)
    assert b"--broker" in ended.stderr


def test_verbs_are_annotations_and_can_be_taken_back(world: World) -> None:
    def firn(*arguments: str) -> str:
        return call("--context", "kind", *arguments, **world.environment).stdout.decode()

    def annotations(kind: str = "BrokerCluster", name: str = "main") -> dict[str, str]:
        return dict(world.object(kind, name)["metadata"].get("annotations", {}))

    assert "paused" in firn("pause")
    assert annotations() == {"firn.dev/paused": "true"}
    assert "is paused already" in firn("pause", "main")
    refused = call("--context", "kind", "restart", code=1, **world.environment)
    assert "is paused" in said(refused)
    assert "resumed" in firn("resume")
    assert annotations() == {}
    assert "asked for at 20" in firn("restart")
    assert list(annotations()) == ["firn.dev/restart"]
    assert "firn wake" in firn("hibernate", "--yes")
    assert annotations()["firn.dev/hibernate"] == "true"
    firn("wake")
    assert "firn.dev/hibernate" not in annotations()
    assert "nobody to ask" in said(call("--context", "kind", "hibernate", code=1, **world.environment))


def test_a_report_is_one_archive_without_secrets_that_says_what_it_lacks(
    forwarded: World, tmp_path: Path
) -> None:
    token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzaG9wIn0.c2lnbmF0dXJl"
    forwarded.write(
        texts={
            "version": "Client Version: v1.34.2\n",
            "logs main-0-0": f"serving\nsent Authorization: Bearer {token}\n",
            "get nodes": "NAME\nnode-1\n",
        },
        refused={
            "logs main-0-1": "Error from server: container is waiting",
            "get events": "Error: forbidden",
        },
    )
    path = tmp_path / "report.tar.gz"
    done = call("--context", "kind", "report", "--to", str(path), **forwarded.environment)
    assert str(path).encode() in done.stdout
    with tarfile.open(path) as tar:
        files = {
            member.name.partition("/")[2]: (tar.extractfile(member) or io.BytesIO()).read().decode()
            for member in tar.getmembers()
        }
    assert {"version.txt", "resources.yaml", "status.json", "brokers.json", "objects/pods.yaml"} <= set(files)
    assert files["logs/main-0-0.log"].startswith("serving\n")
    everything = "".join(files.values())
    assert token not in everything
    assert "s3cret" not in everything
    assert "container is waiting" in files["problems.txt"]
    assert "events.yaml" in files["problems.txt"]
    kinds = [document["kind"] for document in yaml.safe_load_all(files["resources.yaml"])]
    assert kinds == ["BrokerCluster", "BrokerGroup", "CompactedTopic"]
    asked = [words for words in forwarded.calls() if "secret" in " ".join(words)]
    assert asked == []
    again = call("--context", "kind", "report", "--to", str(path), code=1, **forwarded.environment)
    assert "File exists" in said(again)


def test_credentials_lie_where_only_the_user_reads_and_go_with_the_client(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime

    from firn.cli.kube.access import cluster_client
    from firn.cli.running import KubernetesPlace
    from firn_node.clock import RealClock
    from firn_node.security.localca import make_ca, make_client

    now = datetime.fromtimestamp(RealClock().wall_ms() / 1000, UTC)
    ca = make_ca("cluster", now)
    pair = make_client(ca, "admin", now, is_admin=True)
    parts = {"ca.crt": ca.certificate_pem(), "tls.crt": pair.certificate_pem(), "tls.key": pair.key_pem()}
    secret = {name: base64.b64encode(text).decode() for name, text in parts.items()}
    world.write(
        objects=[
            cluster(security={}), group(), pod("main-0-0"),
            {"kind": "Secret", "metadata": meta("main-admin"), "data": secret},
        ]
    )  # fmt: skip
    monkeypatch.setenv("PATH", world.environment["PATH"])
    monkeypatch.setenv("FIRN_TOKEN", "of-another-broker")

    import asyncio

    async def main() -> Path:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                cluster_client(KubernetesPlace(context="kind"), timeout=5)
            )
            folder = client.folder
            assert oct(folder.stat().st_mode)[-3:] == "700"
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == parts
            assert {oct(file.stat().st_mode)[-3:] for file in folder.iterdir()} == {"600"}
        return folder

    assert not asyncio.run(main()).exists()
    assert "FIRN_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("status -n shop", "-n shop status"),
        ("topics list --context=a -o json", "--context=a topics list -o json"),
        ("restart main --namespace shop --cluster b", "--namespace shop --cluster b restart main"),
        ("up --cluster b", "up --cluster b"),
        ("get t -- --cluster", "get t -- --cluster"),
        ("status -n", "status -n"),
    ],
)
def test_the_place_may_stand_behind_the_command(given: str, taken: str) -> None:
    assert hoisted(given.split()) == taken.split()
