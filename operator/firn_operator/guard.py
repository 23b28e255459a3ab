"""May this node stop, may that one take over: the one place that says so.

Rolls, drains, scale-down, lost volumes and switchovers ask here, right before they act, with the group record and the
pods as the API server has them in that moment (``GET`` and ``LIST``, never a cache): what a plan was made from may be old.

Invariants, of every state in which ``may_stop`` says yes to a node that runs:

- it is not the master, unless the group has one replica;
- another node of the group is in sync, runs and is ready, unless the group has one replica;
- no other member of the group is away: never two at once;
- what stays in sync is enough for the topics' ``minInSync``, unless these ask for every replica of the group.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from firn_operator.kube import Obj
from firn_operator.names import RECORD


@dataclass(frozen=True, slots=True)
class RecordView:
    """What the operator needs of a group record: nodes by name."""

    epoch: int
    version: int
    master: str | None
    in_sync: frozenset[str]
    members: frozenset[str]
    is_known: bool = True  # False: there is something that cannot be read


UNREADABLE = RecordView(0, 0, None, frozenset(), frozenset(), is_known=False)


def record_of(lease: Obj | None) -> RecordView | None:
    """The record in a Lease; None when there is none yet."""
    text = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(RECORD)
    if text is None:
        return None
    try:
        document = json.loads(text)
        nodes = {log_id: str(member["node"]) for log_id, member in document["members"].items()}
        master = document["master"]
        return RecordView(
            int(document["epoch"]), int(document["version"]),
            nodes.get(master["log_id"]) if master else None,
            frozenset(nodes[log_id] for log_id in document["in_sync"]), frozenset(nodes.values()),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return UNREADABLE


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of a group, as the guard sees it."""

    name: str
    is_ready: bool
    is_running: bool  # its container runs, whether ready or not
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class GroupView:
    """Everything that a decision about a group is made from, read consistently."""

    name: str
    replicas: int  # as wished
    min_in_sync: int  # the largest of the group's topics
    record: RecordView | None
    pods: Mapping[str, PodView]
    has_lease: bool = True  # False: the record is lost with its place, which is never so in a new group


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it may be done now, and why not: one sentence for log, status and test."""

    may: bool
    why: str
    is_master: bool = False  # refused because it must hand over first


def may_stop(node: str, group: GroupView) -> Verdict:
    """Whether the pod of ``node`` may be stopped now."""
    pod, record = group.pods.get(node), group.record
    if pod is None:
        return Verdict(True, f"{node} does not run")
    if pod.is_leaving:
        return Verdict(False, f"{node} is on its way out already")
    if not has_record(group):
        return Verdict(False, f"the record of {group.name} cannot be read: a person must look")
    if record is None or node not in record.members:
        return Verdict(True, f"{node} is no member of {group.name}")
    if not pod.is_running and record.master != node:
        return Verdict(True, f"{node} does not run")
    if group.replicas == 1 and record.members == {node}:
        return Verdict(True, f"{node} is the only replica: the group is away while it restarts")
    if record.master is None:
        return Verdict(False, f"{group.name} has no master at the moment")
    if record.master == node:
        return Verdict(
            False, f"{node} is the master of {group.name}: it must hand over first", is_master=True
        )
    if node not in record.in_sync:
        return Verdict(True, f"{node} is not in sync: nothing rests on it")
    if away := _away(node, group, record):
        return Verdict(False, f"{_listed(away)} of {group.name} is away: never two at once")
    staying = _serving(group, record) - {node}
    if not staying:
        return Verdict(False, f"no other replica of {group.name} is in sync")
    needed = min(group.min_in_sync, group.replicas - 1)
    if len(staying) < needed:
        return Verdict(False, f"{len(staying)} of {group.name} would stay in sync, topics ask for {needed}")
    return Verdict(True, f"{_listed(staying)} of {group.name} stay in sync")


def has_record(group: GroupView) -> bool:
    """Whether it is known what the record says, or that there is none yet."""
    return group.has_lease and (group.record is None or group.record.is_known)


def may_take_over(node: str, group: GroupView) -> Verdict:
    """Whether the master may be asked to hand over to ``node`` now."""
    record = group.record
    if record is None or not record.is_known or record.master is None:
        return Verdict(False, f"{group.name} has no master that could hand over")
    if record.master == node:
        return Verdict(False, f"{node} is the master of {group.name} already")
    if node not in _serving(group, record):
        return Verdict(False, f"{node} is not in sync and ready")
    return Verdict(True, f"{node} is in sync")


def may_discard(node: str, group: GroupView) -> Verdict:
    """Whether the volume of ``node``, which cannot run without it, may be given up for a new, empty one."""
    pod, record = group.pods.get(node), group.record
    if record is None or not record.is_known:
        return Verdict(False, f"the record of {group.name} cannot be read: a person must look")
    if pod is not None and (pod.is_running or pod.is_ready):
        return Verdict(False, f"{node} runs: its volume is there")
    if record.master is None or record.master == node:
        return Verdict(False, f"{group.name} has no other master that {node} could be rebuilt from")
    others = _serving(group, record) - {node}
    if record.master not in others:
        return Verdict(False, f"the master of {group.name} is not ready")
    return Verdict(True, f"{_listed(others)} of {group.name} have what {node} had")


def best_successor(group: GroupView, among: Collection[str]) -> str | None:
    """Of ``among`` the node with the lowest number that may take over."""
    able = [node for node in sorted(among) if may_take_over(node, group).may]
    return able[0] if able else None


def _serving(group: GroupView, record: RecordView) -> frozenset[str]:
    """Nodes that are in sync by the record, and whose pods are ready and stay."""
    return frozenset(
        name for name in record.in_sync
        if (pod := group.pods.get(name)) is not None and pod.is_ready and not pod.is_leaving
    )  # fmt: skip


def _away(node: str, group: GroupView, record: RecordView) -> list[str]:
    """Other members that are not in service: of the record, and pods that are yet to join it."""
    return sorted((record.members | group.pods.keys()) - {node} - _serving(group, record))


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
