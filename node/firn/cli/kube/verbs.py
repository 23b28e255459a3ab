"""What people wish of a cluster by annotations: pause, resume, hibernate, wake, restart.

The operator acts on them (``docs/kubernetes.md``); here they are set, and nothing else.
"""

from datetime import UTC, datetime

from firn.cli.kube.access import Found, find
from firn.cli.kube.finding import Object, is_set
from firn.cli.kube.kubectl import Kubectl
from firn.cli.running import Failure, needed_place

PREFIX = "firn.dev/"
CLUSTERS = "brokerclusters.firn.dev"


def cluster_at_hand(name: str | None) -> tuple[Kubectl, Found]:
    """Where kubectl goes, and the cluster of the argument, of --cluster, or the only one."""
    place = needed_place()
    kubectl = Kubectl(place.context, place.namespace)
    return kubectl, find(kubectl, name or place.cluster)


def annotate(kubectl: Kubectl, cluster: Object, annotation: str, value: str | None) -> None:
    """Set an annotation, or take it off."""
    change = f"{PREFIX}{annotation}-" if value is None else f"{PREFIX}{annotation}={value}"
    meta = cluster["metadata"]
    there = Kubectl(kubectl.context, meta["namespace"])
    there.run("annotate", CLUSTERS, meta["name"], "--overwrite", change)


def switch(name: str | None, annotation: str, is_on: bool) -> tuple[Found, bool]:
    """Set or take off a "true"; whether that changed anything."""
    kubectl, found = cluster_at_hand(name)
    if is_set(found.cluster, annotation) == is_on:
        return found, False
    annotate(kubectl, found.cluster, annotation, "true" if is_on else None)
    return found, True


def restart(name: str | None) -> tuple[Found, str]:
    """Ask for one roll of all pods; the time that it goes by."""
    kubectl, found = cluster_at_hand(name)
    if is_set(found.cluster, "paused"):
        raise Failure(
            f"cluster {found.name} is paused: the operator would not restart it; `firn resume` first"
        )
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    annotate(kubectl, found.cluster, "restart", at)
    return found, at
