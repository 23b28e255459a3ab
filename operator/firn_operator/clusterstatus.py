"""What people see of a cluster: the conditions that its state and its plan add up to."""

from collections.abc import Sequence

from firn_operator.conditions import DEGRADED, PROGRESSING, READY, Condition
from firn_operator.observe import ClusterState
from firn_operator.steps import Apply, Finalize, MakeLease, Plan, WriteSecret


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
