"""Releases of the chart on a real API server: what stays, what goes, and what its objects are allowed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_kit import CHART, pod_specs, render
from cluster.apiserver import ApiServer
from cluster.tools import tool

pytestmark = pytest.mark.apiserver

DEFINITIONS = {
    "brokerclusters.firn.dev",
    "brokergroups.firn.dev",
    "compactedtopics.firn.dev",
    "forcecompactions.firn.dev",
}
TOPIC = {
    "apiVersion": "firn.dev/v1alpha1",
    "kind": "CompactedTopic",
    "metadata": {"name": "flights"},
    "spec": {},
}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """An API server of these tests alone: definitions belong to the whole of one, and a release wants to own them."""
    with ApiServer.start() as found:
        yield found


@pytest.fixture
def space(server: ApiServer) -> Iterator[str]:
    with server.namespace() as name:
        yield name
        helm(server, name, "uninstall", "firn", "--ignore-not-found", "--wait")
        if found := definitions(server):
            server.until_served(*found)  # one that is deleted before may be gone only minutes later
            server.kubectl("delete", "crd", *found)
        server.kubectl("delete", "clusterrole", "firn-broker", "firn-spark", "--ignore-not-found")


def helm(server: ApiServer, space: str, *arguments: str) -> str:
    return server.run([str(tool("helm")), "--namespace", space, *arguments])


def definitions(server: ApiServer) -> set[str]:
    names = server.kubectl("get", "crd", "-o", "name").split()
    return {name.partition("/")[2] for name in names} & DEFINITIONS


def test_a_release_is_installed_upgraded_rolled_back_and_taken_away_and_topics_stay(
    server: ApiServer, space: str
) -> None:
    text = helm(server, space, "install", "firn", str(CHART))
    assert "kubectl firn" in text
    assert definitions(server) == DEFINITIONS
    server.until_served(*DEFINITIONS)
    server.apply(TOPIC, namespace=space)
    uid = server.kubectl("get", "ct", "flights", "-n", space, "-o", "jsonpath={.metadata.uid}")

    helm(server, space, "upgrade", "firn", str(CHART), "--set", "operator.replicas=3")
    assert (
        server.kubectl("get", "deploy", "firn-operator", "-n", space, "-o", "jsonpath={.spec.replicas}")
        == "3"
    )
    helm(server, space, "rollback", "firn", "1")
    assert (
        server.kubectl("get", "deploy", "firn-operator", "-n", space, "-o", "jsonpath={.spec.replicas}")
        == "2"
    )

    helm(server, space, "uninstall", "firn")
    assert definitions(server) == DEFINITIONS
    assert server.kubectl("get", "ct", "flights", "-n", space, "-o", "jsonpath={.metadata.uid}") == uid
    left = server.kubectl("get", "deploy,sa,role,rolebinding,pdb,netpol", "-n", space, "-o", "name").split()
    assert [name for name in left if "firn" in name] == []
    assert "firn-operator" not in server.kubectl("get", "clusterrole,clusterrolebinding", "-o", "name")
    # Clusters that stay go on asking whose a token is.
    assert server.kubectl("get", "clusterrole", "firn-broker", "-o", "name")

    helm(server, space, "install", "firn", str(CHART))
    assert server.kubectl("get", "ct", "flights", "-n", space, "-o", "jsonpath={.metadata.uid}") == uid


def test_every_pod_of_the_chart_is_admitted_where_only_restricted_ones_are(
    server: ApiServer, space: str
) -> None:
    specs = pod_specs(render({"cluster": {"create": True}}, namespace=space))
    assert len(specs) == 3
    for where, spec in specs:
        del spec["serviceAccountName"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one", "namespace": space},
            "spec": spec,
        }
        done = server.attempt(
            [str(tool("kubectl")), "create", "--dry-run=server", "-f", "-"], input=json.dumps(pod)
        )
        assert done.returncode == 0, f"{where}: {done.stderr}"
        assert "Warning" not in done.stderr, where
        spec["securityContext"] = {}
        done = server.attempt(
            [str(tool("kubectl")), "create", "--dry-run=server", "-f", "-"], input=json.dumps(pod)
        )
        assert "violates PodSecurity" in done.stderr, "the namespace enforces nothing"


def test_the_operators_account_may_what_its_rules_say_and_no_more(server: ApiServer, space: str) -> None:
    helm(server, space, "install", "firn", str(CHART))

    def may(verb: str, resource: str, *more: str) -> bool:
        who = f"--as=system:serviceaccount:{space}:firn-operator"
        asked = [str(tool("kubectl")), "auth", "can-i", verb, resource, "-n", space, who, *more]
        return server.attempt(asked).stdout.strip() == "yes"

    for allowed in (
        ("compactedtopics.firn.dev", "--subresource=status"),
        ("leases.coordination.k8s.io/firn-operator",),
    ):
        server.until(lambda what=allowed: may("patch", *what), f"the API server has learnt of {allowed}")
    assert not may("list", "secrets")
    assert not may("create", "pods", "--subresource=exec")
    assert not may("create", "clusterroles.rbac.authorization.k8s.io")


def test_what_the_values_wish_for_is_applied_with_the_rights_of_its_job(
    server: ApiServer, space: str, tmp_path: Path
) -> None:
    """The Job's pod cannot run without nodes: its command runs here, as its ServiceAccount."""
    values = tmp_path / "values.yaml"
    wished: dict[str, Any] = {
        "cluster": {"create": True, "spec": {"replicas": 1}},
        "topics": {"flights": {"partitions": 4}},
    }
    values.write_text(yaml.safe_dump(wished))
    helm(server, space, "install", "firn", str(CHART), "--no-hooks", "-f", str(values))
    server.until_served(*DEFINITIONS)
    found = json.loads(server.kubectl("get", "configmap", "firn-resources", "-n", space, "-o", "json"))
    resources = tmp_path / "resources.yaml"
    resources.write_text(found["data"]["resources.yaml"])

    def apply() -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"KUBECONFIG": str(server.account(space, "firn-resources"))}
        command = [sys.executable, "-m", "firn_operator.apply", "--namespace", space, str(resources)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    done = apply()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "BrokerCluster main: applied\nCompactedTopic flights: applied\n"
    topic = json.loads(server.kubectl("get", "ct", "flights", "-n", space, "-o", "json"))
    assert (topic["spec"]["partitions"], topic["spec"]["clusterRef"]) == (4, {"name": "main"})

    resources.write_text(resources.read_text().replace("partitions: 4", "partitons: 4"))
    refused = apply()
    assert refused.returncode == 1
    assert "CompactedTopic flights: the API server answered" in refused.stderr
    assert "partitons" in refused.stderr


def test_two_releases_that_look_after_different_namespaces_share_the_definitions(
    server: ApiServer, space: str
) -> None:
    helm(server, space, "install", "firn", str(CHART), "--set", f"operator.namespaces={{{space}}}")
    with server.namespace() as other:
        more = [
            "--set",
            f"operator.namespaces={{{other}}}",
            "--set",
            "crds.install=false",
            "--set",
            "rbac.brokerRole=false",
        ]
        helm(server, other, "install", "second", str(CHART), *more)
        helm(server, other, "uninstall", "second")
    assert definitions(server) == DEFINITIONS
    assert "firn-broker" in server.kubectl("get", "clusterrole", "-o", "name")


def test_the_notes_name_commands_that_work(server: ApiServer, space: str) -> None:
    text = helm(server, space, "install", "firn", str(CHART))
    server.until_served(*DEFINITIONS)
    lines = [line.strip() for line in text.partition("Next:")[2].splitlines() if line.strip()]
    assert len(lines) == 3
    done = server.attempt(["bash", "-c", lines[0]])
    assert done.returncode == 0, done.stderr
    assert (
        server.kubectl("get", "ct", "flights", "-n", space, "-o", "name").strip()
        == "compactedtopic.firn.dev/flights"
    )
    assert lines[1].startswith("kubectl wait ")
    assert lines[2] == f"kubectl firn --namespace {space} status"


def test_kubectl_firn_finds_and_changes_the_resources_of_a_real_api_server(
    server: ApiServer, space: str
) -> None:
    from support.firn_cli.calls import call

    helm(server, space, "install", "firn", str(CHART))
    server.until_served(*DEFINITIONS)
    cluster = {
        "apiVersion": "firn.dev/v1alpha1",
        "kind": "BrokerCluster",
        "metadata": {"name": "main"},
        "spec": {},
    }
    server.apply(cluster, namespace=space)
    environment = {
        "KUBECONFIG": str(server.kubeconfig), "PATH": f"{tool('kubectl').parent}:{os.environ['PATH']}",
    }  # fmt: skip
    text = call("status", "-n", space, **environment).stdout.decode()
    assert text.startswith(f"cluster {space}/main has no word from the operator yet\n"), text
    assert "no broker of cluster main" in text
    call("pause", "-n", space, **environment)
    kept = json.loads(server.kubectl("get", "bc", "main", "-n", space, "-o", "json"))
    assert kept["metadata"]["annotations"]["firn.dev/paused"] == "true"
    call("resume", "-n", space, **environment)
    kept = json.loads(server.kubectl("get", "bc", "main", "-n", space, "-o", "json"))
    assert "firn.dev/paused" not in kept["metadata"].get("annotations", {})
    ended = call("topics", "list", "-n", "nowhere", code=1, **environment)
    assert b"there is no BrokerCluster in namespace nowhere" in ended.stderr
