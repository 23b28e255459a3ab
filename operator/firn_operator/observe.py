"""What is there, read from caches that the watches feed: the input of the plan, as values.

The cache holds the newest version of each object that a watch, a list or an answer to a write has shown. An older
version never takes the place of a newer one: an answer to a write may overtake the watch, and events may be reordered.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from firn_operator.guard import PodView
from firn_operator.kube import (
    CLAIM,
    CLUSTER,
    GROUP,
    KINDS,
    NODE,
    POD,
    STATEFUL_SET,
    TOPIC,
    Kind,
    Obj,
    name_of,
    namespace_of,
)  # fmt: skip
from firn_operator.names import (
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    LABEL_GROUP,
    group_name,
    ordinal_of,
)
from firn_operator.spec import ClusterSpec, TopicWish, parse_cluster, parse_topic

DRAIN_TAINTS = ("NoSchedule", "NoExecute")


def version_of(obj: Obj) -> int:
    """Resource versions are opaque by contract and increasing numbers in every API server there is; else 0."""
    text = str(obj.get("metadata", {}).get("resourceVersion", ""))
    return int(text) if text.isascii() and text.isdigit() else 0


class Cache:
    """Objects by kind, namespace and name."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], Obj]] = {}
        # Versions of objects that are gone: an event that comes late must not bring them back.
        self._gone: dict[str, int] = {}
        self._wishes: dict[tuple[str, str], tuple[Obj, TopicWish]] = {}

    def put(self, obj: Obj) -> bool:
        """Note an object; False when a newer version, or the same, is known."""
        kind = self._objects.setdefault(str(obj["kind"]), {})
        key = (namespace_of(obj), name_of(obj))
        old, version = kind.get(key), version_of(obj)
        if self._gone.get(str(obj["metadata"].get("uid", "")), -1) >= version > 0:
            return False
        same = old is not None and old["metadata"].get("uid") == obj["metadata"].get("uid")
        if same and old is not None and version_of(old) >= version > 0:
            return False
        kind[key] = trimmed(obj)
        return True

    def drop(self, obj: Obj) -> bool:
        """Note that an object is gone; False when another one has taken its name."""
        self._gone[str(obj["metadata"].get("uid", ""))] = version_of(obj)
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        kind = self._objects.get(str(obj["kind"]), {})
        key = (namespace_of(obj), name_of(obj))
        old = kind.get(key)
        if old is None or old["metadata"].get("uid") != obj["metadata"].get("uid"):
            return False
        del kind[key]
        if obj["kind"] == TOPIC.kind:
            self._wishes.pop(key, None)
        return True

    def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        return self._objects.get(kind.kind, {}).get((namespace, name))

    def all(self, kind: Kind, namespace: str | None = None) -> Iterator[Obj]:
        for (space, _), obj in self._objects.get(kind.kind, {}).items():
            if namespace is None or space == namespace:
                yield obj

    def topics_of(self, namespace: str, cluster: str) -> Iterator[TopicWish]:
        """The topics that live in a cluster; each version is parsed once, because a thousand concern every pass of it."""
        for key, obj in self._objects.get(TOPIC.kind, {}).items():
            if key[0] != namespace:
                continue
            known = self._wishes.get(key)
            if known is None or known[0] is not obj:
                known = self._wishes[key] = (obj, parse_topic(obj))
            if known[1].cluster == cluster:
                yield known[1]

    def count(self) -> int:
        return sum(len(kind) for kind in self._objects.values())


GONE_MAX = 4096


def trimmed(obj: Obj) -> Obj:
    """The object without what nothing here reads: a node is kilobytes of images, managed fields half of anything."""
    meta = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    if obj["kind"] == NODE.kind:
        spec = {name: obj.get("spec", {}).get(name) for name in ("unschedulable", "taints")}
        meta = {name: meta.get(name) for name in ("name", "uid", "resourceVersion")}
        return {"kind": NODE.kind, "apiVersion": "v1", "metadata": meta, "spec": spec}
    return {**obj, "metadata": meta}


@dataclass(frozen=True, slots=True)
class PodState:
    name: str
    ordinal: int
    uid: str
    node: str
    is_ready: bool
    is_running: bool
    is_leaving: bool
    revision: str
    trouble: str  # why it does not run, in the words of Kubernetes
    unready_since: str  # empty: it is ready

    @property
    def view(self) -> PodView:
        return PodView(self.name, self.is_ready, self.is_running, self.is_leaving)


def pod_state(pod: Obj) -> PodState:
    meta, status = pod["metadata"], pod.get("status") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    containers = [each for each in status.get("containerStatuses") or () if each.get("name") == "broker"]
    state: Mapping[str, Any] = (containers[0].get("state") or {}) if containers else {}
    waiting = state.get("waiting") or state.get("terminated") or {}
    trouble = " ".join(str(waiting[name]) for name in ("reason", "message") if waiting.get(name))
    scheduled, ready = conditions.get("PodScheduled") or {}, conditions.get("Ready") or {}
    is_ready = ready.get("status") == "True"
    if scheduled.get("status") == "False":
        trouble = f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}"
    return PodState(
        name=name_of(pod), ordinal=ordinal_of(name_of(pod)), uid=str(meta.get("uid", "")),
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        is_ready=is_ready,
        is_running="running" in state,
        is_leaving="deletionTimestamp" in meta,
        revision=str((meta.get("labels") or {}).get("controller-revision-hash", "")),
        trouble=trouble[:512],
        unready_since="" if is_ready else str(ready.get("lastTransitionTime") or meta.get("creationTimestamp", "")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupState:
    number: int
    name: str
    resource: Obj | None = field(hash=False)
    stateful_set: Obj | None = field(hash=False)
    pods: tuple[PodState, ...]
    claims: Mapping[str, Obj] = field(hash=False)  # by name
    has_lease: bool | None  # None: not looked, because the group is there and so the Lease was made
    has_foreign_lease: bool = False  # one of its name is there, and is somebody else's
    record_trouble: str = ""  # what is wrong with its record, of a group that has one

    @property
    def status(self) -> Mapping[str, Any]:
        return (self.resource or {}).get("status") or {}

    @property
    def master(self) -> str | None:
        """By the copy of the record: for people and for plans, never for a decision."""
        found = self.status.get("currentMaster")
        return str(found) if found else None

    @property
    def in_sync(self) -> frozenset[str]:
        return frozenset(str(node) for node in self.status.get("inSync") or ())

    @property
    def members(self) -> frozenset[str]:
        """Those that the record names: a pod that is being rebuilt reports itself before it does."""
        members = self.status.get("members") or ()
        return frozenset(str(each["node"]) for each in members if each.get("logId"))

    @property
    def revision(self) -> str:
        return str(((self.stateful_set or {}).get("status") or {}).get("updateRevision") or "")


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Everything of one cluster, in one moment."""

    spec: ClusterSpec
    resource: Obj = field(hash=False)
    groups: tuple[GroupState, ...]
    topics: tuple[TopicWish, ...]
    owned: Mapping[tuple[str, str], Obj] = field(hash=False)  # by kind and name
    secrets: Mapping[str, Obj] = field(hash=False)  # by name
    draining: frozenset[str]  # names of nodes that are cordoned, or tainted against pods like these
    lost: Mapping[str, str] = field(hash=False)  # claims whose volume is gone for good, and why
    foreign: tuple[str, ...] = ()  # Secrets of the cluster's names that are somebody else's


def is_draining(node: Obj, tolerations: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Whether pods with these tolerations are to leave a node, or come to it no more.

    Taints by which Kubernetes says that a node has trouble are left out: brokers see to that by themselves.
    """
    spec = node.get("spec") or {}
    taints = [
        taint for taint in spec.get("taints") or ()
        if taint.get("effect") in DRAIN_TAINTS and not str(taint.get("key", "")).startswith("node.kubernetes.io/")
    ]  # fmt: skip
    return bool(spec.get("unschedulable")) or any(
        not any(_tolerates(each, taint) for each in tolerations) for taint in taints
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator") == "Exists":
        return not key or key == taint.get("key")
    return key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


OWNED_NAMES = (
    "Service",
    "ConfigMap",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "PodDisruptionBudget",
    "NetworkPolicy",
)


def observe_cluster(
    cache: Cache, namespace: str, name: str, *, secrets: Mapping[str, Obj], leases: Mapping[str, str | None],
    bindings: Mapping[str, Obj], lost: Mapping[str, str], foreign: tuple[str, ...] = (),
    records: Mapping[str, str] = MappingProxyType({}),
) -> ClusterState | None:  # fmt: skip
    """The state of a cluster; None when there is no such resource.

    ``leases``: by group name, of groups without a BrokerGroup: the cluster that their Lease is of, None without one;
    ``bindings``: ClusterRoleBindings;
    ``lost``: claims whose volume is gone for good, and why; ``foreign``: Secrets of its names that are not its own;
    ``records``: by group name what is wrong with its record.
    """
    resource = cache.get(CLUSTER, namespace, name)
    if resource is None:
        return None
    spec = parse_cluster(resource)
    mine = [
        obj for kind in (STATEFUL_SET, POD, CLAIM, GROUP) for obj in cache.all(kind, namespace)
        if cluster_of(obj) == name
    ]  # fmt: skip
    numbers = sorted(
        {*range(spec.groups), *(number for obj in mine if (number := group_of(obj)) is not None)}
    )
    owned = {
        (kind, name_of(obj)): obj
        for kind in OWNED_NAMES for obj in cache.all(_kind(kind), namespace) if cluster_of(obj) == name
    }  # fmt: skip
    owned |= {("ClusterRoleBinding", each): obj for each, obj in bindings.items()}
    tolerations = spec.scheduling.get("tolerations") or ()
    return ClusterState(
        spec, resource, tuple(_group(mine, name, number, leases, records) for number in numbers),
        tuple(cache.topics_of(namespace, name)), owned, secrets,
        frozenset(name_of(node) for node in cache.all(NODE) if is_draining(node, tolerations)),
        lost, foreign,
    )  # fmt: skip


def cluster_of(obj: Obj) -> str | None:
    return (obj["metadata"].get("labels") or {}).get(LABEL_CLUSTER)


def group_of(obj: Obj) -> int | None:
    number = str((obj["metadata"].get("labels") or {}).get(LABEL_GROUP, ""))
    return int(number) if number.isascii() and number.isdigit() else None


def _kind(name: str) -> Kind:
    return KINDS[name]


def _group(
    mine: list[Obj], cluster: str, number: int, leases: Mapping[str, str | None], records: Mapping[str, str]
) -> GroupState:
    name = group_name(cluster, number)
    of_group = [obj for obj in mine if group_of(obj) == number]
    sets = [obj for obj in of_group if obj["kind"] == "StatefulSet" and name_of(obj) == name]
    groups = [obj for obj in of_group if obj["kind"] == "BrokerGroup" and name_of(obj) == name]
    pods = [
        pod_state(obj) for obj in of_group
        if obj["kind"] == "Pod" and obj["metadata"]["labels"].get(LABEL_COMPONENT) == "broker"
    ]  # fmt: skip
    lease = leases.get(name)
    return GroupState(
        number, name, groups[0] if groups else None, sets[0] if sets else None,
        tuple(sorted(pods, key=lambda pod: pod.ordinal)),
        {name_of(obj): obj for obj in of_group if obj["kind"] == "PersistentVolumeClaim"},
        lease is not None if name in leases else None, lease not in (None, cluster), records.get(name, ""),
    )  # fmt: skip
