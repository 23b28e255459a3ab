"""What people wish of a cluster by annotations: pause, resume, hibernate, wake, restart, fence, unfence.

The operator acts on them (``docs/kubernetes.md``); here they are set, and nothing else. Names of nodes are checked
against the cluster before anything is written.
"""

from datetime import UTC, datetime
from typing import Any

from firn.cli.kube.access import Found, find
from firn.cli.kube.finding import broker_pods, group_of, is_set, of_kind
from firn.cli.kube.kubectl import Kubectl
from firn.cli.running import Failure, needed_place

PREFIX = "firn.dev/"
CLUSTERS, GROUPS = "brokerclusters.firn.dev", "brokergroups.firn.dev"


def cluster_at_hand(name: str | None) -> tuple[Kubectl, Found]:
    """Where kubectl goes, and the cluster of the argument, of --cluster, or the only one."""
    place = needed_place()
    kubectl = Kubectl(place.context, place.namespace)
    return kubectl, find(kubectl, name or place.cluster)


def annotate(kubectl: Kubectl, kind: str, item: Any, annotation: str, value: str | None) -> None:
    """Set an annotation, or take it off."""
    change = f"{PREFIX}{annotation}-" if value is None else f"{PREFIX}{annotation}={value}"
    meta = item["metadata"]
    there = Kubectl(kubectl.context, meta["namespace"])
    there.run("annotate", kind, meta["name"], "--overwrite", change)


def switch(name: str | None, annotation: str, is_on: bool) -> tuple[Found, bool]:
    """Set or take off a "true"; whether that changed anything."""
    kubectl, found = cluster_at_hand(name)
    if is_set(found.cluster, annotation) == is_on:
        return found, False
    annotate(kubectl, CLUSTERS, found.cluster, annotation, "true" if is_on else None)
    return found, True


def restart(name: str | None) -> tuple[Found, str]:
    """Ask for one roll of all pods; the time that it goes by."""
    kubectl, found = cluster_at_hand(name)
    if is_set(found.cluster, "paused"):
        raise Failure(
            f"cluster {found.name} is paused: the operator would not restart it; `firn resume` first"
        )
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    annotate(kubectl, CLUSTERS, found.cluster, "restart", at)
    return found, at


def fence(node: str, is_on: bool) -> tuple[str, list[str]]:
    """Fence a node, or end it; its group and the ordinals that are fenced now.

    Errors: Failure for a node that no group of the cluster has.
    """
    kubectl, found = cluster_at_hand(None)
    group_name, ordinal = group_of(node), node.rpartition("-")[2]
    group = next((g for g in found.groups() if g["metadata"]["name"] == group_name), None)
    replicas = 0 if group is None else int((group.get("spec") or {}).get("replicas", 0))
    if group is None or not ordinal.isdigit() or int(ordinal) >= replicas:
        nodes = [pod["metadata"]["name"] for pod in broker_pods(of_kind(found.objects, "Pod"), found.cluster)]
        raise Failure(f"{node} is no node of cluster {found.name}; there are: {', '.join(nodes) or 'none'}")
    annotations = group["metadata"].get("annotations") or {}
    fenced = {text for text in annotations.get(f"{PREFIX}fenced", "").split(",") if text}
    wished = fenced | {ordinal} if is_on else fenced - {ordinal}
    ordinals = sorted(wished, key=int)
    if wished != fenced:
        annotate(kubectl, GROUPS, group, "fenced", ",".join(ordinals) or None)
    return group_name, ordinals
