"""``firn report``: one archive of what a bug report needs.

The resources, what the operator made of them, events, the last lines of the logs, and what the brokers say of themselves.
Secrets are not asked for, and what looks like a credential elsewhere is taken out (``redacting``). What cannot be had is
named in ``problems.txt``: a report from a sick cluster must not fail.
"""

import io
import json
import tarfile
from datetime import UTC, datetime
from typing import Any

import yaml

from firn import __version__
from firn.cli.kube.access import ClusterClient, Found, find
from firn.cli.kube.finding import CLUSTER_LABEL, broker_pods, of_kind
from firn.cli.kube.kubectl import Kubectl
from firn.cli.kube.redacting import redacted, redacted_text
from firn.cli.kube.resources import resources_document
from firn.cli.running import Failure, KubernetesPlace, needed_place, run, sentence_of
from firn.errors import FirnError

OWN = "statefulsets,services,configmaps,poddisruptionbudgets,networkpolicies,persistentvolumeclaims,leases"
OPERATOR = "app.kubernetes.io/name=firn,app.kubernetes.io/component=operator"
STATUS_S = 15.0


class Report:
    """Files by name, in memory; what went wrong is one of them."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.problems: list[str] = []

    def add_objects(self, name: str, kubectl: Kubectl, *arguments: str) -> list[dict[str, Any]]:
        """The objects of a question, one YAML document each. *Effects*: a problem in their place when it fails."""
        try:
            items = kubectl.items(*arguments)
        except Failure as error:
            self.problems.append(f"{name}: {error}")
            return []
        self.files[name] = yaml.safe_dump_all([redacted(item) for item in items], sort_keys=False)
        return items

    def add_text(self, name: str, kubectl: Kubectl, *arguments: str) -> None:
        try:
            self.files[name] = redacted_text(kubectl.run(*arguments))
        except Failure as error:
            self.problems.append(f"{name}: {error}")

    def archive(self, folder: str, at: datetime) -> bytes:
        """A tar.gz with all files below ``folder``."""
        files = {**self.files, "problems.txt": "".join(f"{line}\n" for line in self.problems)}
        room = io.BytesIO()
        with tarfile.open(fileobj=room, mode="w:gz") as tar:
            for name, text in sorted(files.items()):
                data = text.encode()
                info = tarfile.TarInfo(f"{folder}/{name}")
                info.size, info.mtime, info.mode = len(data), int(at.timestamp()), 0o600
                tar.addfile(info, io.BytesIO(data))
        return room.getvalue()


def write_report(cluster: str | None, to: str | None, lines: int) -> tuple[str, int]:
    """The archive's path, and how many files it holds. *Errors*: Failure when there is no such cluster."""
    place = needed_place()
    kubectl = Kubectl(place.context, place.namespace)
    found = find(kubectl, cluster or place.cluster)
    at = datetime.now(UTC)
    there = Kubectl(place.context, found.cluster["metadata"]["namespace"])
    report = _collected(there, found, place, lines, at)
    folder = f"firn-report-{found.name}-{at:%Y%m%dT%H%M%SZ}"
    path = to or f"{folder}.tar.gz"
    data = report.archive(folder, at)
    with open(path, "xb") as file:
        file.write(data)
    return path, len(report.files) + 1


def _collected(kubectl: Kubectl, found: Found, place: KubernetesPlace, lines: int, at: datetime) -> Report:
    report = Report()
    report.files["version.txt"] = f"firn {__version__}\n"
    report.add_text("kubernetes.txt", kubectl, "version")
    own = [item for item in found.objects if item.get("kind") != "Pod"]
    report.files["resources.yaml"] = yaml.safe_dump_all([redacted(item) for item in own], sort_keys=False)
    summary = resources_document(found.cluster, found.objects, at)
    report.files["status.json"] = json.dumps(redacted(summary), indent=1, ensure_ascii=False)
    selector = f"{CLUSTER_LABEL}={found.name}"
    for kind in OWN.split(","):
        report.add_objects(f"objects/{kind}.yaml", kubectl, kind, "--selector", selector)
    report.add_objects("objects/pods.yaml", kubectl, "pods", "--selector", selector)
    report.add_objects("events.yaml", kubectl, "events")
    report.add_text("nodes.txt", kubectl, "get", "nodes", "--output", "wide")
    tail = f"--tail={lines}"
    for pod in broker_pods(of_kind(found.objects, "Pod"), found.cluster):
        name = pod["metadata"]["name"]
        report.add_text(f"logs/{name}.log", kubectl, "logs", name, "--all-containers", tail)
        if any(
            int(c.get("restartCount", 0)) for c in (pod.get("status") or {}).get("containerStatuses") or ()
        ):
            report.add_text(
                f"logs/{name}.before.log", kubectl, "logs", name, "--all-containers", tail, "--previous"
            )
    operators = report.add_objects(
        "operator/pods.yaml", kubectl, "pods", "--all-namespaces", "--selector", OPERATOR
    )
    for pod in operators:
        meta = pod["metadata"]
        there = Kubectl(kubectl.context, meta["namespace"])
        report.add_text(f"operator/{meta['name']}.log", there, "logs", meta["name"], tail)
    _add_broker_status(report, kubectl, found, place)
    return report


def _add_broker_status(report: Report, kubectl: Kubectl, found: Found, place: KubernetesPlace) -> None:
    async def work() -> Any:
        account = place.service_account
        async with ClusterClient(kubectl, found, timeout=STATUS_S, service_account=account) as client:
            return await client.cluster_status()

    try:
        status = run(work())
    except (Failure, FirnError) as error:
        report.problems.append(f"brokers.json: {sentence_of(error)}")
        return
    report.files["brokers.json"] = json.dumps(redacted(status), indent=1, ensure_ascii=False)
