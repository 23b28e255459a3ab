"""The chart rendered by Helm. ``python -m chart_kit`` writes the golden renders anew; look at the difference."""

import subprocess
from pathlib import Path
from typing import Any

import yaml
from cluster.tools import tool

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
GOLDEN = ROOT / "tests/chart/golden"
KUBERNETES = "1.34.2"

EVERYTHING: dict[str, Any] = {
    "image": {
        "registry": "registry.example/team",
        "pullSecrets": ["pull"],
        "node": {"repository": "firn-node", "digest": f"sha256:{'0' * 64}"},
    },
    "operator": {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "data"},
    },
    "cluster": {"create": True, "name": "main", "spec": {"replicas": 3, "storage": {"size": "10Gi"}}},
    "topics": {"flights": {"partitions": 4}, "quotes": None, "own": {"clusterRef": {"name": "other"}}},
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "runbookBase": "https://wiki.example/firn/runbooks"},
        "dashboards": {"enabled": True},
    },
}
RENDERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "two-namespaces": {"operator": {"namespaces": ["shop", "news"]}, "cluster": {"create": True}},
}


def run(*arguments: str, values: dict[str, Any] | None = None) -> "subprocess.CompletedProcess[str]":
    """One run of Helm, of the version that the tests' clusters have."""
    given = yaml.safe_dump(values or {})
    return subprocess.run(
        [str(tool("helm")), *arguments, "--values", "-"],
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def render(values: dict[str, Any], *, release: str = "firn", namespace: str = "shop") -> str:
    """All objects, hooks and tests included."""
    done = run(
        "template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES, values=values
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def pod_specs(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The pods of a render, each with what it belongs to."""
    found = []
    for item in objects(text):
        if item["kind"] == "Pod":
            found.append((f"Pod {item['metadata']['name']}", item["spec"]))
        elif item["kind"] in ("Deployment", "Job"):
            found.append((f"{item['kind']} {item['metadata']['name']}", item["spec"]["template"]["spec"]))
    return found


def without_definitions(text: str) -> str:
    """The documents that are no CustomResourceDefinition: those are held to crds/ by themselves."""
    parts = text.split("\n---\n")
    return "\n---\n".join(part for part in parts if "kind: CustomResourceDefinition" not in part)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, values in RENDERS.items():
        (GOLDEN / f"{name}.yaml").write_text(without_definitions(render(values)))
