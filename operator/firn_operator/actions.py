"""What a plan says, done: one method an action, each safe to be done twice, or by two operators.

What stops a pod, gives up a volume or changes a master is asked of ``guard`` right before, on the group record and the
pods as the API server has them in that moment. A refusal is a sentence for status, no error: the next pass plans anew.
"""

import base64
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from firn.errors import Conflict, FirnError, Forbidden, Invalid, Unavailable
from firn_operator import steps as planned
from firn_operator.brokers import Brokers, way_to
from firn_operator.events import Events
from firn_operator.guard import GroupView, best_successor, has_record, may_discard, may_stop, record_of
from firn_operator.kube import CLAIM, KINDS, LEASE, POD, SECRET, Kind, Kube, Obj, name_of, namespace_of
from firn_operator.names import (
    STAGE,
    ca_name,
    claim_name,
    cluster_labels,
    group_labels,
    pod_labels,
)  # fmt: skip
from firn_operator.objects import owner_of
from firn_operator.observe import ClusterState, GroupState, cluster_of, pod_state
from firn_operator.queue import Interrupted
from firn_operator.secrets import Secrets
from firn_operator.spec import min_in_sync_of
from firn_operator.volumes import Volumes

_log = logging.getLogger(__name__)
Note = Callable[[Obj], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    blocked: list[str] = field(default_factory=list)  # what could not be done now, and why
    failed: list[tuple[str, str]] = field(default_factory=list)  # what will not work before somebody mends it
    is_stale: bool = False  # something had changed meanwhile: look again at once


class Actions:
    """Does what plans say, and tells the cache what came of it."""

    def __init__(
        self, kube: Kube, brokers: Brokers, note: Note, secrets: Secrets, events: Events, volumes: Volumes
    ) -> None:
        """``note``: told of every object as a write left it."""
        self._kube = kube
        self._brokers = brokers
        self._note_object = note
        self._secrets = secrets
        self._events = events
        self._volumes = volumes

    async def run(
        self, actions: Iterable[planned.Action], namespace: str, state: ClusterState | None
    ) -> Outcome:
        """Do them in order; without the place of its record nothing more of a group is made, and a resource is let go
        only when all before was done.

        Errors: Unavailable ends the pass, which begins anew later; Interrupted, when some of them were done. What could
        not be done now, or is refused, does not count: it would be tried again at once, for ever.
        """
        outcome, done = Outcome(), 0
        for action in actions:
            put_off = len(outcome.blocked) + len(outcome.failed)
            if isinstance(action, planned.Finalize) and (outcome.is_stale or outcome.failed):
                outcome.is_stale = True
                continue
            try:
                await self._run(action, namespace, state, outcome)
            except Conflict as error:
                _log.info("%s: %s", action.why, error.message)
                outcome.is_stale = True
            except (Invalid, Forbidden) as error:
                _log.warning("%s: %s", action.why, error.message)
                outcome.failed.append(_refused(action, error))
            except Unavailable as error:
                if not done:
                    raise
                raise Interrupted(error.message) from error
            else:
                done += len(outcome.blocked) + len(outcome.failed) == put_off
                continue
            if isinstance(action, planned.MakeLease):
                break  # a BrokerGroup says that its Lease was made
            if isinstance(action, planned.WriteSecret) and (outcome.is_stale or _is_ca(action, state)):
                break  # what follows may be signed by, or trust, a CA that was not stored
        return outcome

    async def _run(
        self, action: planned.Action, namespace: str, state: ClusterState | None, outcome: Outcome
    ) -> None:
        match action:
            case planned.Apply(body, _, is_new):
                if is_new and await self._is_taken(body):
                    why = f"{body['kind']} {body['metadata']['name']} is there and not the operator's"
                    outcome.failed.append(("NameTaken", f"{why}; rename it, or the cluster"))
                    return
                await self._apply(body)
            case planned.MakeLease(body):
                await self._kube.create(LEASE, namespace, body)
            case planned.Delete(kind, name, _, uid, orphan):
                await self._kube.delete(
                    kind, namespace if kind.is_namespaced else "", name, uid=uid, orphan=orphan
                )
                self._secrets.forget_binding(name)
            case planned.Finalize(kind, name, finalizers, version):
                await self._patch(
                    kind, namespace, name, {"finalizers": list(finalizers), "resourceVersion": version}
                )
            case planned.GrowClaim(name, size):
                spec = {"resources": {"requests": {"storage": size}}}
                await self._note(await self._kube.patch(CLAIM, namespace, name, {"spec": spec}))
            case planned.WriteSecret() if state is not None:
                await self._write_secret(action, state)
            case planned.Shrink() if state is not None:
                await self._shrink(action, state, outcome)
            case planned.StopPod() if state is not None:
                await self._stop(action, state, outcome)
            case planned.SwitchOver() if state is not None:
                await self._switch_over(action, state, outcome)
            case planned.DiscardVolume() if state is not None:
                await self._discard(action, state, outcome)
        _log.info("%s: %s", type(action).__name__, action.why)

    async def _note(self, obj: Obj | None) -> None:
        if obj is not None:
            await self._note_object(obj)

    async def _is_taken(self, body: Obj) -> bool:
        """Whether an object of this name is there that does not belong to the cluster."""
        there = await self._kube.get(KINDS[body["kind"]], namespace_of(body), name_of(body))
        return there is not None and cluster_of(there) != cluster_of(body)

    async def _apply(self, body: Obj) -> None:
        applied = await self._kube.apply(KINDS[body["kind"]], namespace_of(body), body)
        await self._note(applied)
        if applied is not None and body["kind"] == "ClusterRoleBinding":
            self._secrets.note_binding(applied)

    async def _patch(self, kind: Kind, namespace: str, name: str, meta: Obj) -> None:
        await self._note(await self._kube.patch(kind, namespace, name, {"metadata": meta}))

    async def _write_secret(self, action: planned.WriteSecret, state: ClusterState) -> None:
        write, spec = action.write, state.spec
        labels = cluster_labels(spec.name) if write.group is None else group_labels(spec.name, write.group)
        meta: Obj = {"name": write.name, "labels": labels, "annotations": {STAGE: write.stage}}
        body: Obj = {"data": {name: base64.b64encode(value).decode() for name, value in write.data.items()}}
        if write.version is None:
            meta |= {"namespace": spec.namespace, "ownerReferences": [owner_of(spec)]}
            head = {"apiVersion": SECRET.api_version, "kind": SECRET.kind, "type": "Opaque"}
            made = await self._kube.create(SECRET, spec.namespace, {**head, "metadata": meta, **body})
            self._secrets.note(made)
            return
        meta["resourceVersion"] = write.version
        self._secrets.forget(spec.namespace, write.name)
        changed = await self._kube.patch(SECRET, spec.namespace, write.name, {"metadata": meta, **body})
        if changed is not None:
            self._secrets.note(changed)

    # What is asked of the guard.

    async def view(self, state: ClusterState, number: int) -> GroupView:
        """A group as it is now, read consistently."""
        spec, group = state.spec, _group(state, number)
        lease = await self._kube.get(LEASE, spec.namespace, group.name)
        selector = ",".join(f"{label}={value}" for label, value in pod_labels(spec.name, number).items())
        pods = [pod_state(pod) for pod in await self._kube.list(POD, spec.namespace, selector=selector)]
        needed = max((min_in_sync_of(topic, spec.replicas) for topic in state.topics), default=1)
        views = {pod.name: pod.view for pod in pods}
        is_own = lease is not None and cluster_of(lease) == spec.name
        return GroupView(group.name, spec.replicas, needed, record_of(lease), views, has_lease=is_own)

    async def _stop(self, action: planned.StopPod, state: ClusterState, outcome: Outcome) -> None:
        verdict = may_stop(action.pod, await self.view(state, action.group))
        if not verdict.may:
            outcome.blocked.append(f"{action.pod} is not stopped now: {verdict.why}")
            return
        if not await self._end_pod(state, action):
            outcome.blocked.append(
                f"{action.pod} is not stopped now: the disruption budget of its group allows none"
            )
            return
        await self._events.post(state.resource, "PodRestarted", action.why)

    async def _end_pod(self, state: ClusterState, action: planned.StopPod) -> bool:
        """A pod that is ready goes by an eviction, which counts those that others evict; whether it was let go."""
        group = _group(state, action.group)
        if any(pod.name == action.pod and pod.is_ready for pod in group.pods):
            return await self._kube.evict(state.spec.namespace, action.pod, action.uid)
        await self._kube.delete(POD, state.spec.namespace, action.pod, uid=action.uid)
        return True

    async def _shrink(self, action: planned.Shrink, state: ClusterState, outcome: Outcome) -> None:
        view = await self.view(state, action.group)
        named = set(action.leaving) & (view.record.members if view.record else set())
        if named or not has_record(view):
            outcome.blocked.append(
                f"the record of {view.name} still names {', '.join(sorted(named)) or 'somebody'}"
            )
            return
        await self._apply(action.body)
        await self._events.post(state.resource, "ScaledDown", action.why)

    async def _switch_over(self, action: planned.SwitchOver, state: ClusterState, outcome: Outcome) -> None:
        group = _group(state, action.group)
        view = await self.view(state, action.group)
        to = best_successor(view, action.among)
        if to is None:
            outcome.blocked.append(f"nobody of {', '.join(action.among)} can take {view.name} over now")
            return
        try:
            await self._brokers.switch_over(way_to(state, group), action.group, to)
        except FirnError as error:
            outcome.blocked.append(f"{view.name} was not handed over to {to}: {error.message}")
            return
        await self._events.post(
            state.resource, "SwitchedOver", f"{action.why}: {to} is master of {view.name}"
        )

    async def _discard(self, action: planned.DiscardVolume, state: ClusterState, outcome: Outcome) -> None:
        view = await self.view(state, action.group)
        verdict = may_discard(action.pod, view)
        if not verdict.may:
            outcome.blocked.append(f"the volume of {action.pod} is not given up now: {verdict.why}")
            return
        namespace = state.spec.namespace
        claim = await self._kube.get(CLAIM, namespace, claim_name(action.pod))
        if claim is None or not await self._volumes.why_lost(claim, view.pods.get(action.pod)):
            outcome.blocked.append(f"the volume of {action.pod} is not given up: it is there again")
            return
        # The claim first: it ends when its pod does, and the pod that comes then makes a new one.
        await self._kube.delete(CLAIM, namespace, claim_name(action.pod), uid=action.claim_uid)
        await self._kube.delete(POD, namespace, action.pod, uid=action.uid)
        await self._events.post(state.resource, "VolumeGivenUp", action.why, is_warning=True)


def _is_ca(action: planned.WriteSecret, state: ClusterState | None) -> bool:
    return state is not None and action.write.name == ca_name(state.spec.name)


def _refused(action: planned.Action, error: FirnError) -> tuple[str, str]:
    """Reason and sentence of what the API server does not take."""
    if isinstance(action, planned.GrowClaim):
        advice = "its StorageClass needs allowVolumeExpansion; else wish for the size that it has"
        return "StorageCannotGrow", f"{action.why}: {error.message}; {advice}"
    return "Refused", f"{action.why}: {error.message}"


def _group(state: ClusterState, number: int) -> GroupState:
    return next(group for group in state.groups if group.number == number)
