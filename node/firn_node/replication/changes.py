"""What an acting master wants the record to say next: a pure plan.

A member leaves ``in_sync`` before it leaves the members; whoever joins is a member first. Every swap is also a
renewal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from firn_node.replication.record import GroupRecord, LogId, Member
from firn_node.replication.rules import Rules
from firn_node.replication.state import NEVER, Mastery, State


@dataclass(frozen=True, slots=True)
class Plan:
    """``new``: the record to ask for. ``resigns``: first give others the chance to take over (rule 14)."""

    new: GroupRecord
    is_change: bool
    resigns: bool = False


def plan_change(state: State, record: GroupRecord, mastery: Mastery, now: float, rules: Rules) -> Plan:
    """The next version of the record, as its acting master wants it."""
    leaves = _leaving(state, record, mastery, now, rules)
    joins = _joining(state, record, mastery, now, rules)
    in_sync = (record.in_sync - leaves) | joins
    members = _members(state, record, mastery, in_sync)
    new = replace(rules.renewed(record), in_sync=in_sync, members=members)
    is_change = in_sync != record.in_sync or members != record.members
    if is_change:
        new = replace(new, version=record.version + 1)
    least = state.largest_min_in_sync
    resigns = len(in_sync) < least <= len(record.in_sync) and not mastery.may_shrink_below
    return Plan(new, is_change, resigns)


def _leaving(
    state: State, record: GroupRecord, mastery: Mastery, now: float, rules: Rules
) -> frozenset[LogId]:
    others = record.in_sync - {state.me.log_id}
    gone = mastery.leaving.keys() | mastery.removing
    return frozenset(log_id for log_id in others if log_id in gone or rules.is_lagging(state, log_id, now))


def _joining(
    state: State, record: GroupRecord, mastery: Mastery, now: float, rules: Rules
) -> frozenset[LogId]:
    """Who would leave at once does not join: what a silent replica reported last may still be all that there is."""
    others = record.members.keys() - record.in_sync - mastery.leaving.keys() - mastery.removing
    return frozenset(
        log_id
        for log_id in others
        if (heard := state.heard.get(log_id)) is not None
        and rules.may_join(state, heard)
        and not rules.is_lagging(state, log_id, now)
    )


def _members(
    state: State, record: GroupRecord, mastery: Mastery, in_sync: frozenset[LogId]
) -> Mapping[LogId, Member]:
    """The members, with who said Hello, without who was removed or came back under another log_id."""
    greeted = {k: greeting.member for k, greeting in mastery.greeted.items() if k not in mastery.removing}
    members = {**record.members, **greeted}
    heard_at = {log_id: _heard_at(state, mastery, log_id) for log_id in members}
    newest = {
        node: max(heard_at[log_id] for log_id, member in members.items() if member.node == node)
        for node in {member.node for member in members.values()}
    }
    return {
        log_id: member
        for log_id, member in members.items()
        if log_id in record.in_sync | in_sync
        or (log_id not in mastery.removing and heard_at[log_id] == newest[member.node])
    }


def _heard_at(state: State, mastery: Mastery, log_id: LogId) -> float:
    """When a replica was last heard of in this epoch."""
    heard, greeting = state.heard.get(log_id), mastery.greeted.get(log_id)
    reported_at = heard.at if heard is not None and heard.epoch == mastery.epoch else NEVER
    return max(reported_at, greeting.at if greeting is not None else NEVER)
