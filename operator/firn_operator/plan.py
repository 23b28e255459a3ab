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

from dataclasses import replace
from datetime import datetime, timedelta

from firn_operator import objects
from firn_operator.certificates import plan_certificates
from firn_operator.kube import (
    CLAIM,
    CLUSTER,
    CLUSTER_ROLE_BINDING,
    GROUP,
    LEASE,
    NETWORK_POLICY,
    STATEFUL_SET,
    Obj,
    name_of,
)
from firn_operator.names import CLUSTER_FINALIZER, ca_name, group_name, pod_name, reviewer_name
from firn_operator.observe import ClusterState, GroupState
from firn_operator.planpods import plan_pods, plan_switch, running
from firn_operator.same import is_applied, quantity
from firn_operator.spec import ClusterSpec, min_in_sync_of
from firn_operator.steps import Apply, Delete, Finalize, GrowClaim, MakeLease, Plan, Shrink, WriteSecret

_RESIZING = ("Resizing", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError")
RECORD_AGAIN = timedelta(seconds=30)  # no watch shows that a record is back


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
    plan_pods(state, safe, plan, now)
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
            group.number: max(spec.replicas, running(group))
            for group in state.groups
            if group.number < spec.groups
        }
        certificates = plan_certificates(spec, pods, state.secrets, shown, now)
        plan.actions += [WriteSecret(write, write.why) for write in certificates.writes]
        trust = certificates.trust
        plan.again_in(certificates.look_again)
    for wanted in objects.cluster_objects(spec, trust):
        _apply(state.owned.get((wanted["kind"], name_of(wanted))), wanted, plan)
    if not spec.has_network_policy and (NETWORK_POLICY.kind, spec.name) in state.owned:
        plan.actions.append(Delete(NETWORK_POLICY, spec.name, "security.networkPolicy is false"))


def _apply(live: Obj | None, wanted: Obj, plan: Plan) -> bool:
    """Plan to apply an object that is not there or says something else; whether that was needed."""
    if is_applied(live, wanted):
        return False
    what = f"{wanted['kind']} {name_of(wanted)}"
    why = f"{what} is missing" if live is None else f"{what} is not as it is to be"
    plan.actions.append(Apply(wanted, why, is_new=live is None))
    return True


def _plan_group(state: ClusterState, spec: ClusterSpec, group: GroupState, image: str, plan: Plan) -> None:
    if group.has_foreign_lease:
        plan.troubles.append(
            ("NameTaken", f"the Lease {group.name} is not the operator's; rename it, or the cluster")
        )
        return
    if group.record_trouble:
        plan.troubles.append((
            "RecordLost",
            f"{group.record_trouble}: nobody may be elected before a person has looked; put the Lease back from a "
            "backup, with its annotations (docs/runbooks.md, FirnRecordLost)",
        ))  # fmt: skip
        plan.again_in(RECORD_AGAIN)
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
    pods = 0 if spec.is_hibernating else max(spec.replicas, running(group))
    _report_resizing(group, plan)
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
    if not spec.is_hibernating and running(group) > spec.replicas:
        _plan_shrink(spec, group, image, plan)


def _storage(group: GroupState) -> str | None:
    templates = ((group.stateful_set or {}).get("spec") or {}).get("volumeClaimTemplates") or ()
    return str(templates[0]["spec"]["resources"]["requests"]["storage"]) if templates else None


def _plan_growth(spec: ClusterSpec, group: GroupState, plan: Plan) -> bool:
    """Grow the claims, then make the StatefulSet anew around its pods; whether that last step is planned."""
    wished, has = quantity(spec.storage_size), quantity(_storage(group))
    if wished is not None and has is not None and wished < has:
        plan.troubles.append((
            "StorageShrinks",
            f"storage.size {spec.storage_size} is wished, and the volumes of {group.name} have {_storage(group)}: volumes "
            "cannot become smaller; wish for what they have, or copy the topics into a new cluster",
        ))  # fmt: skip
        return False
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


def _report_resizing(group: GroupState, plan: Plan) -> None:
    """A volume that has more room on paper than on its disk."""
    for name, claim in sorted(group.claims.items()):
        for condition in (claim.get("status") or {}).get("conditions") or ():
            if condition.get("status") == "True" and condition.get("type") in _RESIZING:
                plan.waits.append(f"the volume of {name} grows to {_requested(claim)} ({condition['type']})")


def _requested(claim: Obj) -> str:
    return str((((claim.get("spec") or {}).get("resources") or {}).get("requests") or {}).get("storage", ""))


def _plan_shrink(spec: ClusterSpec, group: GroupState, image: str, plan: Plan) -> None:
    leaving = tuple(
        pod_name(group_name(spec.name, group.number), each) for each in range(spec.replicas, running(group))
    )
    plan.phase = "Scaling"
    named = group.members & set(leaving)
    if group.master in leaving:
        plan_switch(
            group, [pod for pod in group.pods if pod.name not in leaving], "it is to leave the group", plan
        )
    elif named:
        plan.waits.append(f"{', '.join(sorted(named))} leaves the record of {group.name} before its pod goes")
    else:
        body = objects.group_objects(spec, group.number, image=image, pods=spec.replicas)[-1]
        plan.actions.append(Shrink(
            group.number, leaving, body, f"{group.name} is to have {spec.replicas} replicas, and its record names no others"
        ))  # fmt: skip


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
            Delete(LEASE, group.name, "its record goes with the volumes")
            for group in state.groups
            if group.has_lease and not group.has_foreign_lease
        ]
    plan.actions += [
        Delete(GROUP, group.name, "the cluster is being deleted")
        for group in state.groups
        if group.resource is not None
    ]
    name = reviewer_name(spec.namespace, spec.name)
    if ("ClusterRoleBinding", name) in state.owned:
        plan.actions.append(Delete(CLUSTER_ROLE_BINDING, name, "the cluster is being deleted"))
    left = tuple(each for each in spec.id.finalizers if each != CLUSTER_FINALIZER)
    plan.actions.append(
        Finalize(CLUSTER, spec.name, left, spec.id.resource_version, "nothing of the cluster is left to end")
    )
    return plan
