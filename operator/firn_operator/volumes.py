"""Is a volume gone for good? Asked before its claim is deleted, which deletes what may still be on it.

A volume is lost when its claim says so (phase ``Lost``), or when all of this is true: its PersistentVolume can be used
on one node alone, that node is no more, and its pod has found no place for ``UNPLACED``. A volume that comes over the
network is never lost by the end of a node, and a node that is only away comes back.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from firn_operator.certificates import parse_time
from firn_operator.guard import PodView
from firn_operator.kube import CLAIM, NODE, POD, VOLUME, Kube, Obj, name_of
from firn_operator.names import claim_name
from firn_operator.observe import Cache, cluster_of, pod_state

UNPLACED = timedelta(minutes=3)  # a node that restarts registers again in less
HOSTNAME = "kubernetes.io/hostname"


class Volumes:
    def __init__(self, kube: Kube, cache: Cache, now: Callable[[], datetime], *, sees_nodes: bool) -> None:
        self._kube = kube
        self._cache = cache
        self._now = now
        self._sees_nodes = sees_nodes

    async def lost(self, namespace: str, cluster: str) -> dict[str, str]:
        """The cluster's claims whose volumes are gone, and why; asks only about pods that do not run."""
        found: dict[str, str] = {}
        for pod in list(self._cache.all(POD, namespace)):
            claim = self._cache.get(CLAIM, namespace, claim_name(name_of(pod)))
            if cluster_of(pod) != cluster or claim is None or pod_state(pod).is_running:
                continue
            if _is_lost(claim) or self._is_unplaced(pod):
                why = await self.why_lost(claim, pod_state(pod).view)
                if why:
                    found[name_of(claim)] = why
        return found

    def _is_unplaced(self, pod: Obj) -> bool:
        for condition in (pod.get("status") or {}).get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                since = condition.get("lastTransitionTime")
                return since is not None and self._now() - parse_time(str(since)) >= UNPLACED
        return False

    async def why_lost(self, claim: Obj, pod: PodView | None) -> str:
        """Why a claim's volume is gone for good, as things are now; empty: it is not known to be."""
        if pod is not None and pod.is_running:
            return ""
        if "deletionTimestamp" in claim["metadata"]:
            return "its claim is being deleted"
        if _is_lost(claim):
            return "its claim is bound to a volume that is no more"
        name = (claim.get("spec") or {}).get("volumeName")
        if not name or not self._sees_nodes:
            return ""
        volume = await self._kube.get(VOLUME, "", str(name))
        nodes = list(_nodes_of(volume or {}))
        if not nodes:
            return ""
        for node in nodes:
            # The label, not the name: a node may be called otherwise than its host.
            if await self._kube.list(NODE, None, selector=f"{HOSTNAME}={node}"):
                return ""
        return f"it was on the node {', '.join(nodes)}, which is no more"


def _is_lost(claim: Obj) -> bool:
    return (claim.get("status") or {}).get("phase") == "Lost"


def _nodes_of(volume: Mapping[str, Any]) -> Iterator[str]:
    """The hosts that a volume is bound to; none for one that may be used elsewhere."""
    required = ((volume.get("spec") or {}).get("nodeAffinity") or {}).get("required") or {}
    terms = [_hosts_of(term) for term in required.get("nodeSelectorTerms") or ()]
    if all(terms):
        for hosts in terms:
            yield from hosts


def _hosts_of(term: Mapping[str, Any]) -> list[str]:
    return [
        str(value)
        for expression in term.get("matchExpressions") or ()
        if expression.get("key") == HOSTNAME and expression.get("operator") == "In"
        for value in expression.get("values") or ()
    ]
