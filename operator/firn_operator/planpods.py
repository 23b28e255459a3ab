"""What is to be done next for pods that are there: hand over, be given a new volume, restart. Part of ``plan``.

At most one pod of a cluster restarts at a time, and every step is asked of ``guard`` again when it is done.
"""

from collections.abc import Sequence
from datetime import datetime

from firn_operator.kube import Obj, name_of
from firn_operator.names import claim_name
from firn_operator.observe import ClusterState, GroupState, PodState
from firn_operator.spec import ClusterSpec
from firn_operator.steps import Apply, DiscardVolume, Plan, StopPod, SwitchOver
from firn_operator.unready import report_unready


def plan_pods(state: ClusterState, spec: ClusterSpec, plan: Plan, now: datetime) -> None:
    if spec.is_hibernating:
        return
    restarting = False
    for group in state.groups:
        if group.number >= spec.groups or group.stateful_set is None:
            continue
        report_unready(group, plan, now)
        if _plan_drain(state, group, plan) or _plan_lost(state, group, plan) or restarting:
            continue
        restarting = _plan_restart(state, spec, group, plan)


def _plan_drain(state: ClusterState, group: GroupState, plan: Plan) -> bool:
    """A master on a node that is being drained hands over before its pod is evicted."""
    master = next((pod for pod in group.pods if pod.name == group.master), None)
    if master is None or master.node not in state.draining or len(group.pods) < 2:
        return False
    staying = [pod for pod in group.pods if pod.node not in state.draining]
    return plan_switch(group, staying, f"its node {master.node} is being drained", plan)


def plan_switch(group: GroupState, to: Sequence[PodState], why: str, plan: Plan) -> bool:
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


def _plan_restart(state: ClusterState, spec: ClusterSpec, group: GroupState, plan: Plan) -> bool:
    """The next pod of a group to restart; whether the group is at it, so that others wait."""
    stateful_set = group.stateful_set or {}
    if not group.revision or _is_behind(stateful_set) or any(
        isinstance(action, Apply) and action.body["kind"] == "StatefulSet" and name_of(action.body) == group.name
        for action in plan.actions
    ):  # fmt: skip
        return False
    outdated = [pod for pod in group.pods if pod.revision != group.revision and not pod.is_leaving]
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
        plan_switch(group, staying or renewed, "it is the last that is not as it is wished", plan)
    return True


def _is_behind(stateful_set: Obj) -> bool:
    """Whether the StatefulSet's controller has yet to see the newest spec: its revision is an older one's."""
    seen = int((stateful_set.get("status") or {}).get("observedGeneration", 0))
    return seen < int(stateful_set["metadata"].get("generation", 0))


def _plan_stop(group: GroupState, pod: PodState, why: str, plan: Plan) -> None:
    plan.actions.append(StopPod(group.number, pod.name, pod.uid, f"{pod.name} restarts: {why}"))


def _unsettled(spec: ClusterSpec, group: GroupState, outdated: Sequence[PodState]) -> str:
    """What a restart of the next pod waits for; empty: nothing."""
    if len(group.pods) < min(spec.replicas, running(group)) or any(pod.is_leaving for pod in group.pods):
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


def running(group: GroupState) -> int:
    """How many pods a group's StatefulSet runs."""
    return int(((group.stateful_set or {}).get("spec") or {}).get("replicas", 0))
