"""What changes in the cluster, brought to the cache, and from there to the keys that it concerns.

Two sources feed it: watch events, and a *sweep* that lists everything. Watches alone are not enough: an object that goes
while a watch is broken is told of by nobody, and a watch may be silent without being broken. So the sweep comes first at
the start, and again every few minutes.
"""

from collections.abc import Iterator

from firn_operator.kube import (
    CLUSTER,
    COMPACTION,
    GROUP,
    NODE,
    OWNED,
    POD,
    TOPIC,
    WATCHED,
    Kind,
    Kube,
    Obj,
    name_of,
    namespace_of,
)  # fmt: skip
from firn_operator.names import SELECTOR
from firn_operator.observe import Cache, cluster_of, trimmed
from firn_operator.queue import WorkQueue
from firn_operator.reconcile import Key, What
from firn_operator.spec import parse_topic

KEYED: dict[Kind, What] = {CLUSTER: "cluster", TOPIC: "topic", COMPACTION: "compaction"}


def _facts(obj: Obj | None) -> object:
    """What others than the object's own key go by."""
    if obj is None:
        return None
    meta, status = obj["metadata"], obj.get("status") or {}
    if obj["kind"] == GROUP.kind:
        return meta.get("generation"), status.get("currentMaster"), status.get("inSync")
    if obj["kind"] == TOPIC.kind:
        return meta.get("generation"), "deletionTimestamp" in meta, status.get("minInSync")
    if obj["kind"] == CLUSTER.kind:
        return meta.get("generation"), "deletionTimestamp" in meta
    return None


class Feed:
    def __init__(self, cache: Cache, queue: WorkQueue[Key]) -> None:
        self._cache = cache
        self._queue = queue
        self.events = 0

    async def event(self, obj: Obj, *, is_gone: bool = False) -> None:
        """Note one object as a watch showed it, and look at what it concerns."""
        self.events += 1
        old = self._cached(obj)
        changed = self._cache.drop(obj) if is_gone else self._cache.put(obj)
        if changed:
            for key in set(self._keys(obj, old, is_gone=is_gone)):
                await self._queue.add(key)

    def _cached(self, obj: Obj) -> Obj | None:
        kind = Kind(str(obj["apiVersion"]), str(obj["kind"]), "")
        return self._cache.get(kind, namespace_of(obj), name_of(obj))

    def _keys(self, obj: Obj, old: Obj | None, *, is_gone: bool) -> Iterator[Key]:
        kind, namespace, name = obj["kind"], namespace_of(obj), name_of(obj)
        told = is_gone or old is None or _facts(old) != _facts(obj)
        if kind == TOPIC.kind:
            yield Key("topic", namespace, name)
            if told:
                yield Key("cluster", namespace, parse_topic(obj).cluster)
        elif kind == CLUSTER.kind:
            yield Key("cluster", namespace, name)
            if told:
                yield from self._topics_of(namespace, name)
        elif kind == COMPACTION.kind:
            yield Key("compaction", namespace, name)
        elif kind == NODE.kind:
            if is_gone or old is None or trimmed(old)["spec"] != trimmed(obj)["spec"]:
                yield from self._clusters_on(name)
        elif (cluster := cluster_of(obj)) is not None:
            yield Key("cluster", namespace, cluster)
            if kind == GROUP.kind and told:
                yield from self._topics_of(namespace, cluster)

    def _topics_of(self, namespace: str, cluster: str) -> Iterator[Key]:
        for topic in self._cache.topics_of(namespace, cluster):
            yield Key("topic", namespace, topic.id.name)

    def _clusters_on(self, node: str) -> Iterator[Key]:
        for pod in self._cache.all(POD):
            # A pod without a node may wait for one that is no more.
            if (pod.get("spec") or {}).get("nodeName") in (node, None) and (cluster := cluster_of(pod)):
                yield Key("cluster", namespace_of(pod), cluster)

    async def sweep(self, kube: Kube, *, sees_nodes: bool) -> None:
        """List everything, and take over what differs. Errors: as those of ``list``."""
        for kind in (*WATCHED, *OWNED, *((NODE,) if sees_nodes else ())):
            selector = SELECTOR if kind in OWNED else ""
            before = {(namespace_of(obj), name_of(obj)): obj for obj in self._cache.all(kind)}
            found = await kube.list(kind, None, selector=selector)
            for obj in found:
                await self.event(obj)
            # A list is consistent: what was known before it and is not in it is gone, or is not the operator's any more.
            there = {(namespace_of(obj), name_of(obj)) for obj in found}
            for key, obj in before.items():
                if key not in there:
                    await self.event(obj, is_gone=True)

    async def look_at_everything(self) -> None:
        """Enqueue every resource: after a start."""
        for kind, what in KEYED.items():
            for obj in list(self._cache.all(kind)):
                await self._queue.add(Key(what, namespace_of(obj), name_of(obj)))
