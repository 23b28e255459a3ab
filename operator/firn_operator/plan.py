"""What is to be done next for a cluster: a pure function of what is there, each action with one sentence why.

A pass plans everything that may be done at once; what must wait for something else is a sentence in ``waits`` and
is planned by a later pass, when that something has shown itself. Nothing is remembered between passes.

Order, in which a later step waits for an earlier one of the same group:

1. what the pods need: the place of the record, certificates, accounts, Services, settings;
2. the StatefulSet, whose pods come up by themselves; fewer pods only when the record no longer names them;
3. a master on a node that is being drained hands over;
4. a volume that is lost is given up;
5. pods that are not as wished restart, one at a time in the whole cluster: broken ones, standbys, the old master last.

Steps 2 (fewer), 3, 4 and 5 are asked of ``guard`` again when they are done, on what is true in that moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from firn_operator import objects
from firn_operator.certificates import SecretWrite, parse_time, plan_certificates
from firn_operator.conditions import DEGRADED, PROGRESSING, READY, Condition
from firn_operator.kube import (
    CLAIM,
    CLUSTER,
    CLUSTER_ROLE_BINDING,
    GROUP,
    LEASE,
    STATEFUL_SET,
    Kind,
    Obj,
    name_of,
)
from firn_operator.names import CLUSTER_FINALIZER, ca_name, claim_name, group_name, pod_name, reviewer_name
from firn_operator.observe import ClusterState, GroupState, PodState
from firn_operator.same import is_applied, quantity
from firn_operator.spec import ClusterSpec, min_in_sync_of

STUCK_AFTER = timedelta(minutes=5)  # a pod that is not ready by then is called stuck


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring an object into being, or back to what it is to be."""

    body: Obj = field(hash=False)
    why: str
    is_new: bool = False  # none is known: one of this name that is there is somebody else's


@dataclass(frozen=True, slots=True)
class MakeLease:
    """The place of a group's record, which must not be there yet."""

    body: Obj = field(hash=False)
    why: str


@dataclass(frozen=True, slots=True)
class WriteSecret:
    write: SecretWrite
    why: str


@dataclass(frozen=True, slots=True)
class Delete:
    kind: Kind
    name: str
    why: str
    uid: str | None = None
    orphan: bool = False


@dataclass(frozen=True, slots=True)
class Finalize:
    """Set the finalizers of a resource."""

    kind: Kind
    name: str
    finalizers: tuple[str, ...]
    version: str
    why: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """Run fewer pods of a group, once its record names none of those that go."""

    group: int
    leaving: tuple[str, ...]
    body: Obj = field(hash=False)
    why: str


@dataclass(frozen=True, slots=True)
class StopPod:
    """Stop a pod, which its StatefulSet makes anew as it is wished now."""

    group: int
    pod: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class SwitchOver:
    """Ask a group's master to hand over to the first of ``among`` that can."""

    group: int
    among: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class GrowClaim:
    name: str
    size: str
    why: str


@dataclass(frozen=True, slots=True)
class DiscardVolume:
    """Give up the volume of a pod that cannot run without it; its replica is rebuilt from the master."""

    group: int
    pod: str
    uid: str
    claim_uid: str
    why: str


Action = (
    Apply | MakeLease | WriteSecret | Delete | Finalize | Shrink | StopPod | SwitchOver | GrowClaim | DiscardVolume
)  # fmt: skip


@dataclass(slots=True)
class Plan:
    actions: list[Action] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    troubles: list[tuple[str, str]] = field(default_factory=list)  # reason and sentence
    targets: dict[int, str] = field(default_factory=dict)  # the master that is wished, by group
    replicas: int = 0  # of each group, as is safe now
    phase: str = "Running"
    look_again: timedelta | None = None

    def again_in(self, wait: timedelta) -> None:
        self.look_again = wait if self.look_again is None else min(wait, self.look_again)


def plan_cluster(state: ClusterState, *, default_image: str, now: datetime) -> Plan:
    """The next steps of a cluster."""
    spec = state.spec
    if spec.id.is_deleting:
        return _plan_deletion(state)
    plan = Plan(replicas=spec.replicas)
    if spec.is_paused:
        plan.phase = "Paused"
        plan.waits.append("the annotation firn.dev/paused is set: nothing is changed")
        return plan
    if CLUSTER_FINALIZER not in spec.id.finalizers:
        finalizers = (*spec.id.finalizers, CLUSTER_FINALIZER)
        plan.actions.append(Finalize(
            CLUSTER, spec.name, finalizers, spec.id.resource_version, "the cluster's end is the operator's to arrange"
        ))  # fmt: skip
    plan.replicas = _safe_replicas(state, plan)
    image = spec.image or default_image
    if not image:
        plan.troubles.append(
            ("NoImage", "neither spec.image nor the operator's default names an image of the broker")
        )
    safe = replace(spec, replicas=plan.replicas)
    _plan_shared(state, safe, plan, now)
    for group in state.groups:
        if group.number < spec.groups and image:
            _plan_group(state, safe, group, image, plan)
    _plan_pods(state, safe, plan, now)
    if spec.is_hibernating:
        plan.phase = "Hibernating"
    return plan


def _safe_replicas(state: ClusterState, plan: Plan) -> int:
    """As many replicas as are wished, or as there are where fewer would stop writes."""
    wished = state.spec.replicas
    current = max((_wished(group) for group in state.groups), default=0)
    if wished >= current:
        return wished
    asking = [topic for topic in state.topics if min_in_sync_of(topic, current) > wished]
    if not asking:
        return wished
    topic = max(asking, key=lambda each: min_in_sync_of(each, current))
    plan.troubles.append((
        "ScaleBelowMinInSync",
        f"{wished} replicas are wished, and topic {topic.id.name} asks for {min_in_sync_of(topic, current)} in sync: "
        f"its writes would stop; set its durability.minInSync to {wished} or less first",
    ))  # fmt: skip
    return current


def _wished(group: GroupState) -> int:
    return int(((group.resource or {}).get("spec") or {}).get("replicas", 0))


def _plan_shared(state: ClusterState, spec: ClusterSpec, plan: Plan, now: datetime) -> None:
    """Certificates, and the objects of the cluster as a whole."""
    trust = None
    if state.foreign:
        plan.troubles.append(
            (
                "NameTaken",
                f"the Secrets {', '.join(state.foreign)} are not the operator's; rename these, or the cluster",
            )
        )
    elif not spec.is_insecure:
        published = state.owned.get(("ConfigMap", ca_name(spec.name)))
        shown = str(((published or {}).get("data") or {}).get("ca.crt", "")) or None
        pods = {
            group.number: max(spec.replicas, _running(group))
            for group in state.groups
            if group.number < spec.groups
        }
        certificates = plan_certificates(spec, pods, state.secrets, shown, now)
        plan.actions += [WriteSecret(write, write.why) for write in certificates.writes]
        trust = certificates.trust
        plan.again_in(certificates.look_again)
    for wanted in objects.cluster_objects(spec, trust):
        _apply(state.owned.get((wanted["kind"], name_of(wanted))), wanted, plan)


def _apply(live: Obj | None, wanted: Obj, plan: Plan) -> bool:
    """Plan to apply an object that is not there or says something else; whether that was needed."""
    if is_applied(live, wanted):
        return False
    what = f"{wanted['kind']} {name_of(wanted)}"
    why = f"{what} is missing" if live is None else f"{what} is not as it is to be"
    plan.actions.append(Apply(wanted, why, is_new=live is None))
    return True


def _running(group: GroupState) -> int:
    """How many pods a group's StatefulSet runs."""
    return int(((group.stateful_set or {}).get("spec") or {}).get("replicas", 0))


def _plan_group(state: ClusterState, spec: ClusterSpec, group: GroupState, image: str, plan: Plan) -> None:
    if group.has_foreign_lease:
        plan.troubles.append(
            ("NameTaken", f"the Lease {group.name} is not the operator's; rename it, or the cluster")
        )
        return
    if group.resource is None and not group.has_lease:
        if group.claims:
            plan.troubles.append((
                "RecordLost",
                f"{group.name} has volumes ({', '.join(sorted(group.claims))}) and no Lease with its record: "
                f"a new record beside old logs could lose data; restore the Lease {group.name}, or delete the claims",
            ))  # fmt: skip
            return
        plan.actions.append(
            MakeLease(objects.empty_lease(spec, group.number), f"{group.name} needs a place for its record")
        )
    _apply(group.resource, objects.broker_group(spec, group.number), plan)
    pods = 0 if spec.is_hibernating else max(spec.replicas, _running(group))
    storage = _storage(group)
    if storage is not None and quantity(storage) != quantity(spec.storage_size):
        if not _plan_growth(spec, group, plan):
            spec = replace(
                spec, storage_size=storage
            )  # the StatefulSet as it is, until the claims have grown
        else:
            return
    for wanted in objects.group_objects(spec, group.number, image=image, pods=pods):
        live = state.owned.get((wanted["kind"], name_of(wanted)))
        _apply(group.stateful_set if wanted["kind"] == "StatefulSet" else live, wanted, plan)
    if not spec.is_hibernating and _running(group) > spec.replicas:
        _plan_shrink(spec, group, image, plan)


def _storage(group: GroupState) -> str | None:
    templates = ((group.stateful_set or {}).get("spec") or {}).get("volumeClaimTemplates") or ()
    return str(templates[0]["spec"]["resources"]["requests"]["storage"]) if templates else None


def _plan_growth(spec: ClusterSpec, group: GroupState, plan: Plan) -> bool:
    """Grow the claims, then make the StatefulSet anew around its pods; whether that last step is planned."""
    wished = quantity(spec.storage_size)
    small = [
        name for name, claim in sorted(group.claims.items())
        if wished is not None and (have := quantity(_requested(claim))) is not None and have < wished
    ]  # fmt: skip
    for name in small:
        plan.actions.append(GrowClaim(name, spec.storage_size, f"{name} is to have {spec.storage_size}"))
    if small or group.stateful_set is None:
        return False
    meta = group.stateful_set["metadata"]
    if "deletionTimestamp" in meta:
        plan.waits.append(f"StatefulSet {group.name} is made anew around its pods")
        return True
    plan.actions.append(Delete(
        STATEFUL_SET, group.name, f"new volumes of {group.name} change their size only with a new StatefulSet",
        uid=str(meta.get("uid", "")), orphan=True,
    ))  # fmt: skip
    return True


def _requested(claim: Obj) -> str:
    return str((((claim.get("spec") or {}).get("resources") or {}).get("requests") or {}).get("storage", ""))


def _plan_shrink(spec: ClusterSpec, group: GroupState, image: str, plan: Plan) -> None:
    leaving = tuple(
        pod_name(group_name(spec.name, group.number), each) for each in range(spec.replicas, _running(group))
    )
    plan.phase = "Scaling"
    named = group.members & set(leaving)
    if group.master in leaving:
        _plan_switch(
            group, [pod for pod in group.pods if pod.name not in leaving], "it is to leave the group", plan
        )
    elif named:
        plan.waits.append(f"{', '.join(sorted(named))} leaves the record of {group.name} before its pod goes")
    else:
        body = objects.group_objects(spec, group.number, image=image, pods=spec.replicas)[-1]
        plan.actions.append(Shrink(
            group.number, leaving, body, f"{group.name} is to have {spec.replicas} replicas, and its record names no others"
        ))  # fmt: skip


# Pods.


def _plan_pods(state: ClusterState, spec: ClusterSpec, plan: Plan, now: datetime) -> None:
    if spec.is_hibernating:
        return
    restarting = False
    for group in state.groups:
        if group.number >= spec.groups or group.stateful_set is None:
            continue
        if _plan_drain(state, group, plan) or _plan_lost(state, group, plan) or restarting:
            continue
        restarting = _plan_restart(state, spec, group, plan, now)


def _plan_drain(state: ClusterState, group: GroupState, plan: Plan) -> bool:
    """A master on a node that is being drained hands over before its pod is evicted."""
    master = next((pod for pod in group.pods if pod.name == group.master), None)
    if master is None or master.node not in state.draining or len(group.pods) < 2:
        return False
    staying = [pod for pod in group.pods if pod.node not in state.draining]
    return _plan_switch(group, staying, f"its node {master.node} is being drained", plan)


def _plan_switch(group: GroupState, to: Sequence[PodState], why: str, plan: Plan) -> bool:
    able = tuple(
        pod.name for pod in to if pod.name in group.in_sync and pod.is_ready and pod.name != group.master
    )
    if not able:
        plan.waits.append(
            f"{group.master} should hand over, because {why}, and no other replica of {group.name} can"
        )
        return False
    plan.targets[group.number] = able[0]
    plan.actions.append(SwitchOver(group.number, able, f"{group.master} hands over, because {why}"))
    return True


def _plan_lost(state: ClusterState, group: GroupState, plan: Plan) -> bool:
    """Give up one volume that is lost, if there is one."""
    for pod in group.pods:
        claim = group.claims.get(claim_name(pod.name))
        if claim is None or pod.is_leaving or pod.is_running:
            continue
        # A claim that is going already waits for its pod: somebody ended between the two.
        why = (
            "its claim is being deleted"
            if "deletionTimestamp" in claim["metadata"]
            else state.lost.get(name_of(claim))
        )
        if why:
            plan.actions.append(DiscardVolume(
                group.number, pod.name, pod.uid, str(claim["metadata"].get("uid", "")),
                f"the volume of {pod.name} is lost ({why}): it is rebuilt from the master of {group.name}",
            ))  # fmt: skip
            return True
    return False


def _plan_restart(
    state: ClusterState, spec: ClusterSpec, group: GroupState, plan: Plan, now: datetime
) -> bool:
    """The next pod of a group to restart; whether the group is at it, so that others wait."""
    stateful_set = group.stateful_set or {}
    if not group.revision or _is_behind(stateful_set) or any(
        isinstance(action, Apply) and action.body["kind"] == "StatefulSet" and name_of(action.body) == group.name
        for action in plan.actions
    ):  # fmt: skip
        return False
    outdated = [pod for pod in group.pods if pod.revision != group.revision and not pod.is_leaving]
    _report_stuck(group, plan, now)
    if not outdated:
        return False
    plan.phase = "Rolling"
    broken = [pod for pod in outdated if not pod.is_running and not pod.is_ready]
    if broken:
        _plan_stop(group, broken[-1], "it does not run, and is not as it is wished", plan)
        return True
    standbys = [pod for pod in outdated if pod.name != group.master]
    # Those that nothing rests on come first: what is wrong with them may be what the change mends.
    weak = [pod for pod in standbys if group.status and pod.name not in group.in_sync]
    if weak:
        _plan_stop(group, weak[-1], "it is not as it is wished, and not in sync", plan)
        return True
    if waits := _unsettled(spec, group, outdated):
        plan.waits.append(waits)
        return True
    if standbys:
        _plan_stop(group, standbys[-1], "it is not as it is wished", plan)
    elif len(group.pods) == 1:
        _plan_stop(group, outdated[0], "it is not as it is wished, and the only replica", plan)
    else:
        renewed = [pod for pod in group.pods if pod.revision == group.revision]
        staying = [pod for pod in renewed if pod.node not in state.draining]
        _plan_switch(group, staying or renewed, "it is the last that is not as it is wished", plan)
    return True


def _is_behind(stateful_set: Obj) -> bool:
    """Whether the StatefulSet's controller has yet to see the newest spec: its revision is an older one's."""
    seen = int((stateful_set.get("status") or {}).get("observedGeneration", 0))
    return seen < int(stateful_set["metadata"].get("generation", 0))


def _plan_stop(group: GroupState, pod: PodState, why: str, plan: Plan) -> None:
    plan.actions.append(StopPod(group.number, pod.name, pod.uid, f"{pod.name} restarts: {why}"))


def _unsettled(spec: ClusterSpec, group: GroupState, outdated: Sequence[PodState]) -> str:
    """What a restart of the next pod waits for; empty: nothing."""
    if len(group.pods) < min(spec.replicas, _running(group)) or any(pod.is_leaving for pod in group.pods):
        return f"a pod of {group.name} comes back before the next one restarts"
    late = [pod for pod in group.pods if not pod.is_ready and pod not in outdated]
    if late:
        trouble = f": {late[0].trouble}" if late[0].trouble else ""
        return f"{late[0].name} has restarted and is not ready, so no other one restarts{trouble}"
    if group.status and group.master is None:
        return f"{group.name} has no master at the moment"
    behind = sorted(pod.name for pod in group.pods if group.status and pod.name not in group.in_sync)
    if behind:
        return f"{', '.join(behind)} catches up before the next one restarts"
    return ""


def _report_stuck(group: GroupState, plan: Plan, now: datetime) -> None:
    for pod in group.pods:
        if pod.is_ready or pod.is_leaving or not pod.created:
            continue
        age = now - parse_time(pod.created)
        if age >= STUCK_AFTER:
            plan.troubles.append(
                ("PodStuck", f"{pod.name} is not ready{': ' + pod.trouble if pod.trouble else ''}")
            )
        else:
            plan.again_in(STUCK_AFTER - age + timedelta(seconds=1))


# The end of a cluster.


def _plan_deletion(state: ClusterState) -> Plan:
    """StatefulSets, pods, then volumes and records by policy, then the resource itself."""
    spec = state.spec
    plan = Plan(replicas=spec.replicas, phase="Deleting")
    if CLUSTER_FINALIZER not in spec.id.finalizers:
        return plan
    sets = [group for group in state.groups if group.stateful_set is not None]
    for group in sets:
        if group.stateful_set is not None and "deletionTimestamp" not in group.stateful_set["metadata"]:
            plan.actions.append(Delete(STATEFUL_SET, group.name, "the cluster is being deleted"))
    pods = [pod.name for group in state.groups for pod in group.pods]
    if sets or pods:
        plan.waits.append(f"{', '.join(pods) or 'the StatefulSets'} end before anything else goes")
        return plan
    if not spec.keeps_volumes:
        claims = [claim for group in state.groups for claim in sorted(group.claims)]
        if claims:
            plan.actions += [Delete(CLAIM, claim, "storage.deletionPolicy is Delete") for claim in claims]
            plan.waits.append("the volumes go before the records that describe them")
            return plan
        plan.actions += [
            Delete(LEASE, group.name, "its record goes with the volumes") for group in state.groups
        ]
    plan.actions += [
        Delete(GROUP, group.name, "the cluster is being deleted")
        for group in state.groups
        if group.resource is not None
    ]
    if not spec.is_insecure:
        name = reviewer_name(spec.namespace, spec.name)
        plan.actions.append(Delete(CLUSTER_ROLE_BINDING, name, "the cluster is being deleted"))
    left = tuple(each for each in spec.id.finalizers if each != CLUSTER_FINALIZER)
    plan.actions.append(
        Finalize(CLUSTER, spec.name, left, spec.id.resource_version, "nothing of the cluster is left to end")
    )
    return plan


# What people see.


def cluster_conditions(state: ClusterState, plan: Plan, blocked: Sequence[str]) -> list[Condition]:
    """Ready, Progressing and Degraded of a cluster; ``blocked``: what could not be done now, and why."""
    return [_ready(state, plan), _progressing(plan, blocked), _degraded(plan)]


def _ready(state: ClusterState, plan: Plan) -> Condition:
    if state.spec.id.is_deleting:
        return Condition(READY, False, "Deleting", "the cluster is being deleted")
    if state.spec.is_hibernating:
        return Condition(
            READY,
            False,
            "Hibernating",
            "the annotation firn.dev/hibernate is set: no pods run, volumes are kept",
        )
    for group in state.groups:
        if group.number >= state.spec.groups:
            continue
        if group.resource is None or group.stateful_set is None:
            return Condition(READY, False, "Creating", f"{group.name} is being made")
        if group.master is None:
            return Condition(
                READY, False, "NoMaster", f"{group.name} has no master: its partitions take no writes"
            )
        ready = sum(pod.is_ready for pod in group.pods)
        if ready < plan.replicas:
            return Condition(
                READY,
                False,
                "ReplicasNotReady",
                f"{ready} of {plan.replicas} replicas of {group.name} are in sync",
            )
    return Condition(READY, True, "Ready", "every group has a master and all of its replicas in sync")


def _progressing(plan: Plan, blocked: Sequence[str]) -> Condition:
    """What takes longer than this pass: an object that was applied is as it is to be."""
    lasting = [
        action.why
        for action in plan.actions
        if not isinstance(action, Apply | WriteSecret | Finalize | MakeLease)
    ]
    said = [*blocked, *plan.waits, *lasting]
    if said:
        reason = plan.phase if plan.phase != "Running" else "Reconciling"
        return Condition(PROGRESSING, True, reason, "; ".join(said[:4]))
    return Condition(PROGRESSING, False, "Settled", "everything is as it is wished")


def _degraded(plan: Plan) -> Condition:
    if plan.troubles:
        return Condition(
            DEGRADED, True, plan.troubles[0][0], "; ".join(sentence for _, sentence in plan.troubles)
        )
    return Condition(DEGRADED, False, "AsExpected", "nothing is wrong")
