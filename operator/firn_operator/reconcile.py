"""One pass for one key: observe, plan, act, say how it is.

A pass reads all that it needs, does what its plan says, and writes a status when it says something new. It keeps
nothing: what it must not forget is in the resources. The next pass comes with the next change, or when this one said so.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from firn_operator.actions import Actions, Note, Outcome
from firn_operator.brokers import Brokers
from firn_operator.clusterstatus import cluster_conditions
from firn_operator.conditions import DEGRADED, READY, Condition, differs, find, is_true, render
from firn_operator.events import Events
from firn_operator.guard import GroupView
from firn_operator.kube import (
    CLAIM,
    CLUSTER,
    GROUP,
    LEASE,
    TOPIC,
    Kind,
    Kube,
    Obj,
    name_of,
    namespace_of,
)
from firn_operator.names import (
    CLUSTER_NAME_MAX,
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    admin_name,
    ca_name,
    claim_name,
    group_labels,
    group_name,
    pod_name,
    reviewer_name,
    tls_name,
)  # fmt: skip
from firn_operator.observe import Cache, ClusterState, GroupState, cluster_of, observe_cluster
from firn_operator.plan import plan_cluster
from firn_operator.records import record_troubles
from firn_operator.runs import Compactions
from firn_operator.schedules import Schedules
from firn_operator.secrets import Secrets
from firn_operator.spec import ClusterSpec, parse_cluster, parse_topic
from firn_operator.steps import Action, Plan
from firn_operator.topics import TopicState, groups_of, plan_topic
from firn_operator.volumes import Volumes

_log = logging.getLogger(__name__)

BLOCKED_AGAIN_S = 2.0  # after something could not be done now: a failover, a pod on its way out
STALE_AGAIN_S = 0.2
FAILED_AGAIN_S = 30.0  # what somebody must mend may be mended where no watch shows it


What = Literal["cluster", "topic", "compaction"]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What a pass is about."""

    what: What
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.what} {self.namespace}/{self.name}"


class Reconciler:
    """``note``: told of every object as a write left it; ``default_image``: of clusters that name none; ``spark_image``: of
    runs of Spark; ``sees_nodes``: the operator may watch nodes.
    """

    def __init__(
        self, kube: Kube, brokers: Brokers, cache: Cache, *, note: Note, default_image: str, spark_image: str,
        sees_nodes: bool, now: Callable[[], datetime], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._kube = kube
        self.cache = cache
        self._default_image = default_image
        self._now = now
        self._note = note
        self._brokers = brokers
        self._secrets = Secrets(kube, clock)
        self._events = Events(kube)
        self._volumes = Volumes(kube, cache, now, sees_nodes=sees_nodes)
        self._actions = Actions(kube, brokers, note, self._secrets, self._events, self._volumes)
        self._compactions = Compactions(
            kube, brokers, cache, self._events, self, self._act, spark_image=spark_image, now=now
        )
        self._schedules = Schedules(kube, cache, self._events, now)

    async def _act(self, actions: list[Action], namespace: str) -> Outcome:
        return await self._actions.run(actions, namespace, None)

    async def work(self, key: Key) -> float | None:
        """One pass; seconds until the next one without a cause, None: never."""
        if key.what == "cluster":
            return await self._cluster(key)
        if key.what == "topic":
            return await self._topic(key)
        return await self._compactions.work(key.namespace, key.name)

    # Clusters.

    async def observe(self, namespace: str, name: str) -> ClusterState | None:
        """The state of a cluster, from the cache and from what no watch shows."""
        resource = self.cache.get(CLUSTER, namespace, name)
        if resource is None or len(name) > CLUSTER_NAME_MAX:
            return None
        spec = parse_cluster(resource)
        secrets: dict[str, Obj] = {}
        bindings: Mapping[str, Obj] = {}
        if not spec.is_insecure and not spec.id.is_deleting:
            names = [
                ca_name(name),
                admin_name(name),
                *(tls_name(group_name(name, each)) for each in range(spec.groups)),
            ]
            secrets = await self._secrets.read(namespace, names)
            bindings = await self._secrets.bindings([reviewer_name(namespace, name)])
        foreign = tuple(each for each, secret in sorted(secrets.items()) if cluster_of(secret) != name)
        if spec.id.is_deleting and not spec.is_insecure:
            bindings = await self._secrets.bindings([reviewer_name(namespace, name)])
        leases = await (self._leases_left(spec) if spec.id.is_deleting else self._leases(spec))
        lost = {} if spec.id.is_deleting else await self._volumes.lost(namespace, name)
        records = {} if spec.id.is_deleting else await record_troubles(self._kube, self.cache, spec)
        return observe_cluster(
            self.cache,
            namespace,
            name,
            secrets=secrets,
            leases=leases,
            bindings=bindings,
            lost=lost,
            foreign=foreign,
            records=records,
        )

    async def _leases_left(self, spec: ClusterSpec) -> dict[str, str | None]:
        """Of a cluster that takes its records along: whose the Leases of its groups are."""
        if spec.keeps_volumes:
            return {}
        names = [group_name(spec.name, number) for number in range(spec.groups)]
        leases = [await self._kube.get(LEASE, spec.namespace, name) for name in names]
        return {
            name: None if lease is None else cluster_of(lease) or ""
            for name, lease in zip(names, leases, strict=True)
        }

    async def _leases(self, spec: ClusterSpec) -> dict[str, str | None]:
        """Of groups that have no BrokerGroup: whose their Lease is; their claims are put into the cache.

        Also claims without labels count, which somebody restored or bound by hand: they are looked up by name.
        """
        found: dict[str, str | None] = {}
        for number in range(spec.groups):
            group = group_name(spec.name, number)
            if self.cache.get(GROUP, spec.namespace, group) is not None:
                continue
            lease = await self._kube.get(LEASE, spec.namespace, group)
            found[group] = None if lease is None else cluster_of(lease) or ""
            for ordinal in range(spec.replicas):
                claim = await self._kube.get(CLAIM, spec.namespace, claim_name(pod_name(group, ordinal)))
                if claim is not None:
                    labels = {**(claim["metadata"].get("labels") or {}), **group_labels(spec.name, number)}
                    self.cache.put({**claim, "metadata": {**claim["metadata"], "labels": labels}})
        return found

    def plan_of(self, state: ClusterState) -> Plan:
        return plan_cluster(state, default_image=self._default_image, now=self._now())

    async def view(self, state: ClusterState, group: int) -> GroupView:
        """A group as the guard sees it now."""
        return await self._actions.view(state, group)

    async def _cluster(self, key: Key) -> float | None:
        state = await self.observe(key.namespace, key.name)
        if state is None:
            return None
        plan = self.plan_of(state)
        outcome = await self._actions.run(plan.actions, key.namespace, state)
        if outcome.is_stale:
            self._secrets.forget_all(key.namespace)
        plan.troubles[:0] = outcome.failed  # what somebody must mend comes first
        if not state.spec.id.is_deleting or plan.waits:
            for group in state.groups:
                await self._group_status(state, group, plan)
            await self._cluster_status(state, plan, outcome)
        return _again(plan.look_again, outcome)

    async def _cluster_status(self, state: ClusterState, plan: Plan, outcome: Outcome) -> None:
        spec = state.spec
        groups = [group for group in state.groups if group.number < spec.groups]
        counts = [len(group.in_sync) for group in groups]
        status: Obj = {
            "observedGeneration": spec.id.generation,
            "phase": plan.phase,
            "replicas": max((len(group.pods) for group in groups), default=0),
            "selector": f"{LABEL_CLUSTER}={spec.name},{LABEL_COMPONENT}=broker",
            "inSync": f"{min(counts, default=0)}/{plan.replicas}",
            "groups": [_group_row(group, plan) for group in groups],
        }
        await self.say(CLUSTER, state.resource, status, cluster_conditions(state, plan, outcome.blocked))

    async def _group_status(self, state: ClusterState, group: GroupState, plan: Plan) -> None:
        resource = self.cache.get(GROUP, state.spec.namespace, group.name)
        if resource is None or group.number >= state.spec.groups:
            return
        ready = sum(pod.is_ready for pod in group.pods)
        status: Obj = {
            "observedGeneration": int(resource["metadata"].get("generation", 1)),
            "replicas": len(group.pods),
            "readyReplicas": ready,
            "targetMaster": plan.targets.get(group.number),
        }
        await self.say(GROUP, resource, status, _group_conditions(group, ready, plan))

    # Topics.

    async def _topic(self, key: Key) -> float | None:
        resource = self.cache.get(TOPIC, key.namespace, key.name)
        if resource is None:
            return None
        cluster = parse_topic(resource).cluster
        groups = groups_of(list(self.cache.all(GROUP, key.namespace)), cluster)
        state = TopicState(resource, self.cache.get(CLUSTER, key.namespace, cluster), groups)
        plan = plan_topic(state, now=self._now())
        outcome = await self._actions.run(plan.actions, key.namespace, None)
        current = self.cache.get(TOPIC, key.namespace, key.name)
        if plan.status is not None and current is not None and not outcome.is_stale:
            conditions = plan.conditions
            if outcome.failed:
                refused = Condition(DEGRADED, True, *outcome.failed[0])
                conditions = [each for each in conditions if each.type != DEGRADED] + [refused]
            schedule = await self._schedules.work(current)
            if schedule.trouble and not any(each.type == DEGRADED and each.state for each in conditions):
                said = Condition(DEGRADED, True, *schedule.trouble)
                conditions = [each for each in conditions if each.type != DEGRADED] + [said]
            await self.say(TOPIC, current, {**plan.status, "schedule": schedule.status}, conditions)
            plan.look_again = min(filter(None, (plan.look_again, schedule.look_again)), default=None)
        return _again(plan.look_again, outcome)

    # Status.

    async def say(self, kind: Kind, resource: Obj, status: Obj, conditions: list[Condition]) -> None:
        """Write a status when it says something new, and an Event for what a person would want to know."""
        generation = int(resource["metadata"].get("generation", 1))
        now = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        wanted: Obj = {**status, "conditions": render(conditions, resource, generation=generation, now=now)}
        if not differs(resource, wanted):
            return
        said = {name: value for name, value in wanted.items() if value is not None}
        meta = {"name": name_of(resource), "namespace": namespace_of(resource)}
        body: Obj = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "status": said}
        stored = await self._kube.apply(kind, namespace_of(resource), body, sub="status")
        if stored is not None:
            await self._note(stored)
            await self._tell(kind, resource, conditions)

    async def _tell(self, kind: Kind, resource: Obj, conditions: list[Condition]) -> None:
        if kind is GROUP:
            return
        for condition in conditions:
            old = find(resource, condition.type)
            if (
                condition.type == READY
                and condition.state
                and kind is CLUSTER
                and not is_true(resource, READY)
            ):
                await self._events.post(resource, "Ready", condition.message)
            elif condition.type == READY and not condition.state and is_true(resource, READY):
                await self._events.post(resource, "NotReady", condition.message, is_warning=True)
            elif condition.type == DEGRADED and condition.state and not _said(old, condition):
                await self._events.post(resource, condition.reason, condition.message, is_warning=True)


def _said(old: Obj | None, condition: Condition) -> bool:
    return old is not None and (old.get("status"), old.get("reason")) == (condition.status, condition.reason)


def _group_row(group: GroupState, plan: Plan) -> Obj:
    row: Obj = {
        "group": group.number, "currentMaster": group.master, "targetMaster": plan.targets.get(group.number),
        "inSync": len(group.in_sync), "readyReplicas": sum(pod.is_ready for pod in group.pods),
    }  # fmt: skip
    return {name: value for name, value in row.items() if value is not None}


def _group_conditions(group: GroupState, ready: int, plan: Plan) -> list[Condition]:
    if group.master is None:
        return [Condition(READY, False, "NoMaster", "the group has no master: its partitions take no writes")]
    if ready < plan.replicas:
        return [
            Condition(READY, False, "ReplicasNotReady", f"{ready} of {plan.replicas} replicas are in sync")
        ]
    return [Condition(READY, True, "Ready", f"{group.master} is master, all replicas are in sync")]


def _again(look_again: timedelta | None, outcome: Outcome) -> float | None:
    pauses = [look_again.total_seconds()] if look_again is not None else []
    if outcome.is_stale:
        pauses.append(STALE_AGAIN_S)
    if outcome.blocked:
        pauses.append(BLOCKED_AGAIN_S)
    if outcome.failed:
        pauses.append(FAILED_AGAIN_S)
    return min(pauses, default=None)
