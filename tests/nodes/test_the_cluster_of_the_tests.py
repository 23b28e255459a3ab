"""The harness's own promises about a whole cluster: names, Services, volumes, and that nothing of it stays."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import host, images
from cluster.api import Json
from cluster.bare import BareCluster
from cluster.client import CommandFailed
from cluster.network import Network
from cluster.processes import wait_until
from cluster.sweep import leftovers

pytestmark = pytest.mark.cluster
SUPPORT = Path(__file__).parents[1] / "support"
ANSWER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"
ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).status)"


def test_pods_of_all_nodes_reach_one_another_by_name_and_by_service(bare: BareCluster) -> None:
    bare.load(images.archive(images.NODE))
    with bare.namespace() as space:
        names = [node.name for node in bare.nodes]
        items = [*_services(), *map(_pod, names)]
        bare.apply({"apiVersion": "v1", "kind": "List", "items": items}, namespace=space)
        bare.kubectl("wait", "-n", space, "pod", "--all", "--for=condition=Ready", "--timeout=120s")
        for name in names:
            for url in (f"http://{names[0]}.all.{space}.svc:8000/", f"http://one.{space}:80/"):
                answered = bare.kubectl("exec", "-n", space, name, "--", "python", "-c", ASK, url)
                assert answered.strip() == "200"


def test_a_pod_that_asks_for_more_than_restricted_is_refused(bare: BareCluster) -> None:
    with bare.namespace() as space:
        pod = _pod("node1")
        del pod["spec"]["securityContext"]
        with pytest.raises(CommandFailed, match='violates PodSecurity "restricted:latest"'):
            bare.apply(pod, namespace=space)


def test_a_volume_lives_as_long_as_its_claim(bare: BareCluster) -> None:
    bare.load(images.archive(images.NODE))
    with bare.namespace() as space:
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        metadata = {"name": "kept"}
        others = set(bare.node("node2").volumes.iterdir())
        bare.apply(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim},
            namespace=space,
        )
        for turn in range(2):
            pod = _pod("node2")
            pod["spec"]["volumes"] = [{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}]
            pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "kept", "mountPath": "/kept"}]
            bare.apply(pod, namespace=space)
            bare.kubectl("wait", "-n", space, "pod/node2", "--for=condition=Ready", "--timeout=120s")
            written = bare.kubectl(
                "exec", "-n", space, "node2", "--", "sh", "-c", "ls /kept; touch /kept/file"
            )
            assert written.split() == (["file"] if turn else [])
            bare.kubectl("delete", "-n", space, "pod/node2", "--grace-period=1")
        [folder] = set(bare.node("node2").volumes.iterdir()) - others
        bare.kubectl("delete", "-n", space, "pvc/kept")
        bare.until(lambda: not folder.exists(), "the volume's folder is gone")


@pytest.mark.parametrize("ending", ["asked to end", "killed"])
def test_nothing_of_a_cluster_is_left_however_it_ended(ending: str) -> None:
    """Twice on the same slot: what the first had left would be in the way of the second."""
    host.require_namespaces()
    for _ in range(2):
        command = [sys.executable, "-m", "cluster", "up", "--nodes", "1"]
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
            assert running.stdout
            told = running.stdout.readline()
            match = re.fullmatch(r"export KUBECONFIG=(.*/slot(\d+))/admin.kubeconfig\n", told)
            assert match, told
            folder, network = Path(match[1]), Network(int(match[2]))
            assert leftovers(folder, network)
            running.send_signal(signal.SIGKILL if ending == "killed" else signal.SIGTERM)
            running.wait()
        if ending == "killed":  # files and cgroups stay until the slot is used again; what runs does not
            _wait_until_nothing_runs(folder, network)
        else:
            assert leftovers(folder, network) == []


def _wait_until_nothing_runs(folder: Path, network: Network) -> None:
    def runs() -> bool:
        return any(line.startswith(("process ", "mount ")) for line in leftovers(folder, network))

    wait_until(lambda: not runs(), "its processes have ended")


def _services() -> list[Json]:
    spec = {"clusterIP": "None", "selector": {"app": "all"}, "publishNotReadyAddresses": True}
    one = {"selector": {"app": "all"}, "ports": [{"port": 80, "targetPort": 8000}]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "all"}, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "one"}, "spec": one},
    ]


def _pod(node: str) -> Json:
    container = {
        "name": "answer",
        "image": images.NODE.reference(),
        "imagePullPolicy": "Never",
        "command": ["python", "-c", ANSWER],
        "workingDir": "/tmp",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "readinessProbe": {"httpGet": {"port": 8000, "path": "/"}, "periodSeconds": 1},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "hostname": node,
        "subdomain": "all",
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": node, "labels": {"app": "all"}},
        "spec": spec,
    }
