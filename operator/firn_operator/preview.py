"""``python -m firn_operator plan``: what would be done now for each cluster, what it would restart, and whether it may.

Nothing is changed. A cluster that is paused is shown as if it were not: pause, edit, look at the plan, resume.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from firn_operator.guard import best_successor, may_discard, may_stop
from firn_operator.kube import CLUSTER, Obj, name_of, namespace_of
from firn_operator.names import PAUSED
from firn_operator.observe import Cache, ClusterState, GroupState
from firn_operator.reconcile import Reconciler
from firn_operator.same import covers
from firn_operator.steps import Action, Apply, DiscardVolume, Plan, StopPod, SwitchOver


async def plan_lines(cache: Cache, reconciler: Reconciler) -> list[str]:
    """The plan of every cluster that is known, as lines for a person."""
    lines: list[str] = []
    for obj in sorted(cache.all(CLUSTER), key=lambda each: (namespace_of(each), name_of(each))):
        state = await reconciler.observe(namespace_of(obj), name_of(obj))
        if state is not None:
            head = f"{namespace_of(obj)}/{name_of(obj)}"
            lines += [f"{head}: {line}" for line in await _lines(reconciler, state)]
    return lines


async def _lines(reconciler: Reconciler, state: ClusterState) -> list[str]:
    lines = []
    if state.spec.is_paused:
        lines.append("paused: nothing of this is done before it is resumed")
        state = _resumed(state)
    plan = reconciler.plan_of(state)
    for action in plan.actions:
        verdict = await _verdict(reconciler, state, action)
        lines.append(f"{type(action).__name__}: {action.why}{f' ({verdict})' if verdict else ''}")
    lines += [f"restarts: {line}" for group in state.groups for line in restarts(group, plan)]
    lines += [f"waits: {why}" for why in plan.waits]
    lines += [f"{reason}: {sentence}" for reason, sentence in plan.troubles]
    return lines or ["nothing to do"]


def _resumed(state: ClusterState) -> ClusterState:
    kept: Mapping[str, str] = {k: v for k, v in state.spec.id.annotations.items() if k != PAUSED}
    return replace(state, spec=replace(state.spec, id=replace(state.spec.id, annotations=kept)))


async def _verdict(reconciler: Reconciler, state: ClusterState, action: Action) -> str:
    """What the guard says of an action now; empty: it is not asked."""
    match action:
        case StopPod():
            verdict = may_stop(action.pod, await reconciler.view(state, action.group))
        case DiscardVolume():
            verdict = may_discard(action.pod, await reconciler.view(state, action.group))
        case SwitchOver():
            to = best_successor(await reconciler.view(state, action.group), action.among)
            return f"now: to {to}" if to else "not now: nobody can take over"
        case _:
            return ""
    return f"{'now' if verdict.may else 'not now'}: {verdict.why}"


def restarts(group: GroupState, plan: Plan) -> Iterator[str]:
    """Which pods of a group are to restart, in their order: standbys from the last one down, the old master at the end."""
    new = [
        action.body for action in plan.actions
        if isinstance(action, Apply) and action.body["kind"] == "StatefulSet" and name_of(action.body) == group.name
    ]  # fmt: skip
    if (
        new
        and group.stateful_set is not None
        and not covers(_template(group.stateful_set), _template(new[0]))
    ):
        due = list(group.pods)
    else:
        due = [pod for pod in group.pods if group.revision and pod.revision != group.revision]
    order = sorted(due, key=lambda pod: (pod.name == group.master, -pod.ordinal))
    if order:
        last = ", after a switchover" if order[-1].name == group.master and len(group.pods) > 1 else ""
        yield f"{', then '.join(pod.name for pod in order)}{last}"


def _template(stateful_set: Obj) -> Obj:
    found: Obj = stateful_set["spec"]["template"]
    return found
