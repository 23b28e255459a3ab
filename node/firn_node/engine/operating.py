"""What people ask of a replica about its group; each is done on return, or refused in one sentence.

Who hands over to whom is chosen here, by what the master knows now; whether it happens is the group's to decide.
"""

import asyncio
import logging
from typing import Any

from firn.errors import FirnError, Invalid, Unavailable
from firn.types import Position
from firn_node.replication.driver import GroupDriver
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.state import NO_EPOCH, State

STEP_ASIDE_S = 2.0
_POLL_S = 0.01
_log = logging.getLogger(__name__)


async def switch_over(group: GroupDriver, to: str | None) -> dict[str, Any]:
    """Hand the mastership over to the node ``to``, else to the best of the in-sync standbys.

    Errors: NotMaster with the address to go to; Invalid for no member; Unavailable says why it was not done.
    """
    group.check_master()
    record = _record(group)
    successor = choose_successor(group.state, to)
    _log.warning("group %s: handing over to %s", record.group_id, record.members[successor].node)
    await group.switchover(successor)
    return _outcome(group, before=record)


async def force_mastership(group: GroupDriver, by: str) -> dict[str, Any]:
    """Make this node master, whatever others hold that it does not; ``by`` answers for it.

    Errors: Unavailable says why it was not done.
    """
    before = _record(group)
    await group.accept_data_loss(by)
    return _outcome(group, before=before)


async def step_aside(group: GroupDriver) -> None:
    """Before a planned stop: hand over, then be out of ``in_sync``, so that the group waits for nobody who is gone.

    Bounded by ``STEP_ASIDE_S``; what does not succeed is left to the others, who find out by themselves.
    """
    try:
        async with asyncio.timeout(STEP_ASIDE_S):
            while group.is_in_sync and not group.is_following:
                if group.is_master:
                    await switch_over(group, None)
                else:
                    await asyncio.sleep(
                        _POLL_S
                    )  # handing over already, or whoever comes next is not master yet
            await group.leave()
    except (FirnError, TimeoutError) as error:
        _log.info("group %s: stopping without a word: %s", group.me.group_id, error)


async def leave_to_who_can_write(group: GroupDriver) -> None:
    """Hand over, because this node's disk takes no writes; bounded by ``STEP_ASIDE_S``, and no harm when it fails."""
    try:
        async with asyncio.timeout(STEP_ASIDE_S):
            await switch_over(group, None)
    except (FirnError, TimeoutError) as error:
        _log.warning("group %s: this node stays master, and cannot write: %s", group.me.group_id, error)


def choose_successor(state: State, to: str | None) -> LogId:
    """An in-sync standby: the one named, or the one with the longest durable log, then of the lowest ordinal.

    Errors: Invalid for no member, or the master itself; Unavailable when it is not in sync, or nobody is.
    """
    record = state.record
    if record is None:
        raise Unavailable("the group record is not known yet; try again")
    if to is not None:
        return _named(state, record, to)
    standbys = record.in_sync - {state.me.log_id}
    if not standbys:
        raise Unavailable("no standby is in sync; `firn status` shows how far they are")
    return max(standbys, key=lambda log_id: (_durable(state, log_id), -record.members[log_id].ordinal))


def _named(state: State, record: GroupRecord, to: str) -> LogId:
    found = [log_id for log_id, member in record.members.items() if member.node == to]
    if not found:
        names = ", ".join(sorted({member.node for member in record.members.values()}))
        raise Invalid(f"{to} is no member of group {record.group_id}; its members are {names}")
    if state.me.log_id in found:
        raise Invalid(f"{to} is the master already")
    chosen = next((log_id for log_id in found if log_id in record.in_sync), None)
    if chosen is None:
        raise Unavailable(f"{to} is not in sync; wait until it is, or choose another one (`firn status`)")
    return chosen


def _durable(state: State, log_id: LogId) -> Position:
    heard, mastery = state.heard.get(log_id), state.mastery
    is_heard = heard is not None and mastery is not None and heard.epoch == mastery.epoch
    return heard.durable if heard is not None and is_heard else Position(0)


def _record(group: GroupDriver) -> GroupRecord:
    if group.state.record is None:
        raise Unavailable("the group record is not known yet; try again")
    return group.state.record


def _outcome(group: GroupDriver, *, before: GroupRecord) -> dict[str, Any]:
    after = _record(group)
    member = after.members[after.master.log_id] if after.master is not None else None
    old = before.members.get(before.master.log_id) if before.master is not None else None
    return {
        "group": int(after.group_id),
        "from": old.node if old is not None else None,
        "to": member.node if member is not None else None,
        "address": member.address if member is not None else None,
        "epoch": after.epoch,
        "forced": after.forced_epoch not in (NO_EPOCH, before.forced_epoch),
    }
