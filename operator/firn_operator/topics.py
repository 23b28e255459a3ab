"""What is to be done for a topic: its finalizer, a cluster of its own where it names none, and what people read of it.

The brokers make, change and delete topics by themselves (``docs/kubernetes.md``); the operator says whether that went
well, and holds a deleted resource until the records are gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from firn_operator.certificates import parse_time
from firn_operator.conditions import APPLIED, DEGRADED, PROGRESSING, READY, Condition, find, is_true
from firn_operator.kube import CLUSTER, TOPIC, Obj, name_of
from firn_operator.names import API_VERSION, TOPIC_FINALIZER, cluster_labels
from firn_operator.observe import cluster_of, group_of
from firn_operator.same import is_applied, sealed
from firn_operator.spec import TopicWish, min_in_sync_of, own_cluster_of, parse_cluster, parse_topic
from firn_operator.steps import Action, Apply, Delete, Finalize

# So long may a new topic be without a status that says it is not there yet, by the reason: one write less for each
# that the brokers take over meanwhile.
QUIET = {"Waiting": timedelta(seconds=30), "NoCluster": timedelta(seconds=5)}


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic, the cluster that it names, and that one's groups."""

    resource: Obj = field(hash=False)
    cluster: Obj | None = field(hash=False)
    groups: Sequence[Obj] = field(hash=False)

    @property
    def wish(self) -> TopicWish:
        return parse_topic(self.resource)


@dataclass(slots=True)
class TopicPlan:
    actions: list[Action] = field(default_factory=list)
    status: Obj | None = None  # None: say nothing yet
    conditions: list[Condition] = field(default_factory=list)
    look_again: timedelta | None = None


def plan_topic(state: TopicState, *, now: datetime) -> TopicPlan:
    """The next steps of a topic."""
    topic = state.wish
    if topic.id.is_deleting:
        return _plan_deletion(state, topic)
    plan = TopicPlan()
    if TOPIC_FINALIZER not in topic.id.finalizers:
        finalizers = (*topic.id.finalizers, TOPIC_FINALIZER)
        plan.actions.append(
            _finalize(topic, finalizers, "its records are deleted through the log before it goes")
        )
    if topic.has_own_cluster:
        _plan_own_cluster(state, topic, plan)
    plan.conditions = _conditions(state, topic)
    plan.status = _status(state, topic)
    ready = plan.conditions[0]
    age = now - parse_time(str(state.resource["metadata"].get("creationTimestamp") or now.isoformat()))
    quiet, said = QUIET.get(ready.reason, timedelta()), find(state.resource, READY)
    if not ready.state and age < quiet and said is None:
        plan.status, plan.look_again = None, quiet - age
    return plan


def _finalize(topic: TopicWish, finalizers: tuple[str, ...], why: str) -> Finalize:
    return Finalize(TOPIC, topic.id.name, finalizers, topic.id.resource_version, why)


def _own_cluster(topic: TopicWish) -> Obj:
    """The BrokerCluster of a topic that names none."""
    meta: Obj = {
        "name": topic.cluster, "namespace": topic.id.namespace, "labels": cluster_labels(topic.cluster),
        "ownerReferences": [
            {"apiVersion": API_VERSION, "kind": "CompactedTopic", "name": topic.id.name, "uid": topic.id.uid}
        ],
    }  # fmt: skip
    return sealed(
        {"apiVersion": API_VERSION, "kind": "BrokerCluster", "metadata": meta, "spec": own_cluster_of(topic)}
    )


def _plan_own_cluster(state: TopicState, topic: TopicWish, plan: TopicPlan) -> None:
    wanted = _own_cluster(topic)
    if state.cluster is not None and (
        not _is_own(state.cluster, topic) or "deletionTimestamp" in state.cluster["metadata"]
    ):
        return  # somebody made a cluster of this name: it is used as it is
    if not is_applied(state.cluster, wanted):
        why = f"topic {topic.id.name} names no cluster and gets one of its own"
        plan.actions.append(Apply(wanted, why, is_new=state.cluster is None))


def _is_own(cluster: Obj, topic: TopicWish) -> bool:
    """Whether a cluster was made for this topic."""
    owners = cluster["metadata"].get("ownerReferences") or ()
    return any(each.get("kind") == "CompactedTopic" and each.get("name") == topic.id.name for each in owners)


def _plan_deletion(state: TopicState, topic: TopicWish) -> TopicPlan:
    plan = TopicPlan()
    if TOPIC_FINALIZER not in topic.id.finalizers:
        return plan
    left = tuple(each for each in topic.id.finalizers if each != TOPIC_FINALIZER)
    applied = find(state.resource, APPLIED)
    own = topic.has_own_cluster and state.cluster is not None and _is_own(state.cluster, topic)
    is_going = state.cluster is not None and "deletionTimestamp" in state.cluster["metadata"]
    if own and not is_going and not is_applied(state.cluster, _own_cluster(topic)):
        # What becomes of the volumes is the cluster's to know before it goes: it is deleted by a later pass.
        plan.actions.append(
            Apply(_own_cluster(topic), "the cluster learns whether the records are to be kept")
        )
    elif own:
        plan.actions.append(
            Delete(
                CLUSTER, topic.cluster, f"it was made for the topic {topic.id.name}, which is being deleted"
            )
        )
        plan.actions.append(_finalize(topic, left, "the cluster that was made for it is being deleted"))
    elif topic.keeps_records:
        plan.actions.append(_finalize(topic, left, "deletionPolicy is Retain: the records stay"))
    elif state.cluster is None or "deletionTimestamp" in state.cluster["metadata"]:
        plan.actions.append(_finalize(topic, left, f"the cluster {topic.cluster} is gone"))
    elif applied is not None and applied.get("reason") == "Deleted":
        plan.actions.append(_finalize(topic, left, "the brokers have deleted it"))
    else:
        said = "the brokers are deleting the topic and its records"
        plan.conditions = [
            Condition(READY, False, "Deleting", said),
            Condition(PROGRESSING, True, "Deleting", said),
            Condition(DEGRADED, False, "AsExpected", "nothing is wrong"),
        ]
        plan.status = _status(state, topic)
    return plan


def _status(state: TopicState, topic: TopicWish) -> Obj:
    """What is shown beside the conditions; of compaction what the masters of all groups tell together."""
    rows = (state.resource.get("status") or {}).get("compaction") or ()
    shares = [str(row["dirtiestDirty"]) for row in rows if row.get("dirtiestDirty")]
    begun = [str(row["lastCompaction"]) for row in rows if row.get("lastCompaction")]
    return {
        "observedGeneration": topic.id.generation,
        "cluster": topic.cluster,
        "inSync": _in_sync(state),
        "dirty": max(shares, key=_number, default=None),
        "lastCompaction": max(begun, default=None),
    }


def _number(share: str) -> int:
    digits = share.rstrip("%")
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _in_sync(state: TopicState) -> str | None:
    """Of the group with the fewest replicas in sync: how many of how many."""
    counts = [
        (len((group.get("status") or {}).get("inSync") or ()), int(group["spec"]["replicas"]))
        for group in state.groups
    ]
    if not counts:
        return None
    fewest, of = min(counts)
    return f"{fewest}/{of}"


def _conditions(state: TopicState, topic: TopicWish) -> list[Condition]:
    ready, trouble = _ready(state, topic), _trouble(state, topic)
    if ready.state:
        progressing = Condition(PROGRESSING, False, "Settled", "the brokers have the topic as it is wished")
    else:
        progressing = Condition(
            PROGRESSING, not trouble, trouble[0] if trouble else ready.reason, ready.message
        )
    if trouble:
        return [ready, progressing, Condition(DEGRADED, True, *trouble)]
    for row in (state.resource.get("status") or {}).get("compaction") or ():
        if row.get("failed"):
            said = f"{row['failed']}; what was compacted before is served, and it is tried again"
            return [ready, progressing, Condition(DEGRADED, True, "CompactionFails", said)]
    return [ready, progressing, Condition(DEGRADED, False, "AsExpected", "nothing is wrong")]


def _ready(state: TopicState, topic: TopicWish) -> Condition:
    trouble = _trouble(state, topic)
    if trouble:
        return Condition(READY, False, *trouble)
    applied = find(state.resource, APPLIED)
    if applied is None or int(applied.get("observedGeneration", 0)) < topic.id.generation:
        return Condition(
            READY, False, "Waiting", f"the brokers of {topic.cluster} have yet to take the topic over"
        )
    if applied.get("status") != "True":
        return Condition(READY, False, "Waiting", str(applied.get("message") or "the brokers are at it"))
    for group in state.groups:
        if not (group.get("status") or {}).get("currentMaster"):
            return Condition(
                READY, False, "NoMaster", f"{name_of(group)} has no master: its partitions take no writes"
            )
        in_sync, needed = _counts(group, topic)
        if in_sync < needed:
            said = f"{in_sync} of {name_of(group)} are in sync, and minInSync is {needed}: writes are refused"
            return Condition(READY, False, "NotEnoughInSync", said)
    return Condition(READY, True, "Ready", "the topic takes writes")


def _counts(group: Obj, topic: TopicWish) -> tuple[int, int]:
    in_sync = len((group.get("status") or {}).get("inSync") or ())
    return in_sync, min_in_sync_of(topic, int(group["spec"]["replicas"]))


def _trouble(state: TopicState, topic: TopicWish) -> tuple[str, str] | None:
    """What only a person can mend: reason and sentence."""
    if state.cluster is None:
        if topic.has_own_cluster:
            return None
        return (
            "NoCluster",
            f"there is no BrokerCluster {topic.cluster} in {topic.id.namespace}; make it, or name another one",
        )
    replicas = parse_cluster(state.cluster).replicas
    if topic.min_in_sync is not None and topic.min_in_sync > replicas:
        said = f"minInSync is {topic.min_in_sync}, and the groups of {topic.cluster} have {replicas} replicas"
        return "MinInSyncTooHigh", f"{said}: no write could be acknowledged; lower it, or raise the replicas"
    applied = find(state.resource, APPLIED)
    if applied is not None and applied.get("reason") == "Refused":
        return "Refused", str(applied.get("message") or "the brokers refuse the topic")
    return None


def groups_of(groups: Sequence[Obj], cluster: str) -> list[Obj]:
    """The BrokerGroups of a cluster, in order."""
    mine = [group for group in groups if cluster_of(group) == cluster]
    return sorted(mine, key=lambda group: group_of(group) or 0)


__all__ = ["TopicPlan", "TopicState", "groups_of", "is_true", "plan_topic"]
