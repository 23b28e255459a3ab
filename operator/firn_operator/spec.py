"""What users wish, parsed once at the edge: resources as values, so that nothing behind here reads dictionaries.

The API server has checked and defaulted the resources by their schemas (``crds/``). What is read here is read leniently
all the same: an object that was stored before a schema changed must not stop the operator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firn.topicspec import default_min_in_sync
from firn_operator.kube import Obj, name_of, namespace_of
from firn_operator.names import HIBERNATE, PAUSED, RESTART

DEFAULT_REPLICAS = 3
DEFAULT_HISTORY = 3  # runs of a schedule that have ended, kept
DEFAULT_STORAGE = "20Gi"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which object this is: what owner references and status writes need."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    is_deleting: bool
    finalizers: tuple[str, ...]
    annotations: Mapping[str, str] = field(hash=False)


def identity_of(obj: Obj) -> Identity:
    meta = obj["metadata"]
    return Identity(
        namespace_of(obj), name_of(obj), str(meta.get("uid", "")), int(meta.get("generation", 1)),
        str(meta.get("resourceVersion", "")), "deletionTimestamp" in meta, tuple(meta.get("finalizers") or ()),
        dict(meta.get("annotations") or {}),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A BrokerCluster."""

    id: Identity
    groups: int
    replicas: int
    image: str  # empty: the operator's default
    pull_policy: str
    pull_secrets: tuple[str, ...]
    storage_size: str
    storage_class: str | None
    keeps_volumes: bool
    resources: Mapping[str, Any] = field(hash=False)
    config: Mapping[str, Any] = field(hash=False)
    is_insecure: bool
    has_network_policy: bool
    scheduling: Mapping[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def namespace(self) -> str:
        return self.id.namespace

    @property
    def is_paused(self) -> bool:
        return self.id.annotations.get(PAUSED) == "true"

    @property
    def is_hibernating(self) -> bool:
        return self.id.annotations.get(HIBERNATE) == "true"

    @property
    def restart(self) -> str:
        return self.id.annotations.get(RESTART, "")


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def parse_cluster(obj: Obj) -> ClusterSpec:
    spec = _mapping(obj.get("spec"))
    storage, security = _mapping(spec.get("storage")), _mapping(spec.get("security"))
    return ClusterSpec(
        id=identity_of(obj),
        groups=_whole(spec.get("groups"), 1),
        replicas=_whole(spec.get("replicas"), DEFAULT_REPLICAS),
        image=str(spec.get("image", "")),
        pull_policy=str(spec.get("imagePullPolicy", "IfNotPresent")),
        pull_secrets=tuple(str(each.get("name", "")) for each in spec.get("imagePullSecrets") or ()),
        storage_size=str(storage.get("size", DEFAULT_STORAGE)),
        storage_class=storage.get("className"),
        keeps_volumes=storage.get("deletionPolicy", "Retain") == "Retain",
        resources=_mapping(spec.get("resources")),
        config=_mapping(spec.get("config")),
        is_insecure=bool(security.get("insecure", False)),
        has_network_policy=bool(security.get("networkPolicy", True)),
        scheduling=_mapping(spec.get("scheduling")),
    )


@dataclass(frozen=True, slots=True)
class ForcedWish:
    """``spec.forceCompaction`` of a topic."""

    schedule: str | None
    history_limit: int
    run: Mapping[str, Any] = field(hash=False)  # engine and spark, as a ForceCompaction has them


def _parse_forced(value: Mapping[str, Any]) -> ForcedWish:
    limit = _whole(value.get("historyLimit"), DEFAULT_HISTORY)
    run = {name: value[name] for name in ("engine", "spark") if name in value}
    return ForcedWish(value.get("schedule"), limit, run)


@dataclass(frozen=True, slots=True)
class TopicWish:
    """A CompactedTopic, as far as it is the operator's."""

    id: Identity
    cluster: str
    has_own_cluster: bool  # made for it, because it names none
    brokers: Mapping[str, Any] = field(hash=False)  # what that cluster is to be
    min_in_sync: int | None
    min_in_sync_in_force: int | None  # as the brokers report it
    keeps_records: bool
    forced: "ForcedWish"


def parse_topic(obj: Obj) -> TopicWish:
    spec = _mapping(obj.get("spec"))
    reference = spec.get("clusterRef")
    least, in_force = (
        _mapping(spec.get("durability")).get("minInSync"),
        _mapping(obj.get("status")).get("minInSync"),
    )
    return TopicWish(
        id=identity_of(obj),
        cluster=name_of(obj) if reference is None else str(_mapping(reference).get("name", "")),
        has_own_cluster=reference is None,
        brokers=_mapping(spec.get("brokers")),
        min_in_sync=least if isinstance(least, int) else None,
        min_in_sync_in_force=in_force if isinstance(in_force, int) else None,
        keeps_records=spec.get("deletionPolicy", "Delete") == "Retain",
        forced=_parse_forced(_mapping(spec.get("forceCompaction"))),
    )


def min_in_sync_of(topic: TopicWish, replicas: int) -> int:
    """What is in force for a topic in a cluster of so many replicas a group: a topic keeps what it was made with."""
    for known in (topic.min_in_sync, topic.min_in_sync_in_force):
        if known is not None:
            return known
    return default_min_in_sync(replicas)


def own_cluster_of(topic: TopicWish) -> Obj:
    """The spec of the BrokerCluster that a topic without ``clusterRef`` gets."""
    brokers = topic.brokers
    kept = "Retain" if topic.keeps_records else "Delete"
    return {
        "groups": brokers.get("groups", 1),
        "replicas": brokers.get("replicas", DEFAULT_REPLICAS),
        "storage": {**(brokers.get("storage") or {}), "deletionPolicy": kept},
    }
