"""Being master: taking over, answering standbys, committing, keeping the record and the lease, handing over.

The order of a takeover: 1. the record names this process (``take_over``), 2. the epoch is durable
(``begin_epoch``), 3. the epoch-start record is in the log (``on_written``), 4. standbys are welcomed, 5. the
epoch-start record is committed: reads, and writes once the log is read to its end.
"""

from dataclasses import replace

from firn.types import Position
from firn_node.replication.changes import plan_change
from firn_node.replication.events import (
    Acknowledge,
    AppendEpochStart,
    EndRequests,
    LoadState,
    RemovalAsked,
    StartStream,
    StateLoaded,
    StopStream,
    StopStreams,
    SwitchoverAsked,
    SwitchoverEnded,
    Written,
)
from firn_node.replication.messages import Committed, Hello, Leave, Refusal, Report, Welcome
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.state import (
    NEVER,
    NO_EPOCH,
    Greeting,
    Heard,
    Mark,
    Mastery,
    Resignation,
    Resigned,
    Role,
)
from firn_node.replication.turn import Turn

# Taking over and stepping down.


def take_over(turn: Turn, record: GroupRecord, lease_sent_at: float) -> None:
    """The record names this process in an epoch that it asked for."""
    state = turn.state
    mastery = Mastery(
        epoch=record.epoch, since=turn.now, lease_sent_at=lease_sent_at,
        welcomed={}, streaming={}, caught_up_at={}, greeted={}, awaited={}, leaving={},
        may_shrink_below=state.resigned_to_shrink,
    )  # fmt: skip
    turn.change_role("elected")
    turn.update(
        mastery=mastery, epoch=record.epoch, following=None, candidacy=None, asked_epoch=NO_EPOCH,
        waits_until=NEVER, resigned_to_shrink=False,
    )  # fmt: skip
    turn.want(epoch=record.epoch, version=record.version, is_rebuilt=True, is_unclean=False)
    turn.do(LoadState(record.epoch))
    begin_epoch(turn)


def begin_epoch(turn: Turn) -> None:
    """The epoch-start record, once the epoch is durable and no cut is open."""
    mastery = turn.mastery
    if mastery.start is None and turn.rules.is_stored(turn.state, mastery.epoch):
        turn.do(AppendEpochStart(mastery.epoch))


def _begin_or_leave(turn: Turn) -> None:
    """The disk took no epoch-start record: try again, and let another one be master when that lasts."""
    record = turn.state.record
    if record is not None and turn.now - turn.mastery.since >= turn.state.timing.lease_ttl:
        resign(turn, record, successor=None, to_shrink=False)
    else:
        begin_epoch(turn)


def step_down(turn: Turn, reason: str) -> None:
    """For this epoch, for good: what is open ends with an unknown outcome."""
    turn.change_role("steps down")
    turn.update(mastery=None, asked_epoch=NO_EPOCH)
    turn.do(StopStreams())
    turn.do(EndRequests(reason))


# The log grows; positions move.


def on_written(turn: Turn, event: Written) -> None:
    mastery = turn.mastery
    if mastery.start is None and event.starts and event.starts[-1].epoch == mastery.epoch:
        turn.update_mastery(start=event.starts[-1].start, start_end=event.end)
    if event.writes:
        turn.update_mastery(writes=(*mastery.writes, *event.writes))
    commit(turn)


def commit(turn: Turn) -> None:
    """Move the committed position as far as the counted set allows, and settle what it covers."""
    if turn.mastery.start is None:
        return
    if turn.state.has_interval:
        acknowledged = turn.rules.acknowledged(turn.state, turn.now)
        if acknowledged > turn.mastery.acknowledged:
            turn.update_mastery(acknowledged=acknowledged)
    position = min(turn.rules.committed(turn.state, turn.now), turn.log.written)
    if position > turn.state.committed:
        turn.update(committed=position)
        _tell_committed(turn)
    turn.dispatch()
    settle(turn)


def settle(turn: Turn) -> None:
    """Acknowledge the open writes that are safe, while the lease and the size of ``in_sync`` allow it."""
    state, mastery = turn.state, turn.mastery
    if not mastery.writes or not turn.rules.has_lease(state, turn.now):
        return
    size = turn.rules.in_sync_size(state)
    done = tuple(
        write.ticket
        for write in mastery.writes
        if write.min_in_sync <= size
        and write.end
        <= (max(state.committed, mastery.acknowledged) if write.is_interval else state.committed)
    )
    if done:
        gone = frozenset(done)
        turn.update_mastery(writes=tuple(write for write in mastery.writes if write.ticket not in gone))
        turn.do(Acknowledge(done))


def on_state_loaded(turn: Turn, event: StateLoaded) -> None:
    if event.epoch == turn.mastery.epoch:
        turn.update_mastery(is_loaded=True)


# Standbys.


def on_hello(turn: Turn, hello: Hello) -> None:
    """Tell a standby where its log leaves this one; it streams from there once it reports."""
    state, mastery, handshake = turn.state, turn.mastery, hello.header.handshake
    log_id = hello.header.log_id
    if handshake is None or log_id in mastery.removing or not turn.rules.may_welcome(state):
        refuse(turn, hello)
        return
    newest = mastery.welcomed.get(log_id)
    if newest is not None and turn.rules.is_overtaken(handshake, newest):
        return
    turn.update_mastery(greeted={**mastery.greeted, log_id: Greeting(hello.member, turn.now)})
    cut = turn.rules.cut_point(state, hello)
    heard = state.heard.get(log_id)
    if cut is not None and heard is not None and heard.epoch == mastery.epoch:
        if cut < heard.durable:
            turn.update_mastery(leaving={**turn.mastery.leaving, log_id: heard.handshake})
        turn.hear(log_id, replace(heard, written=Position(min(heard.written, cut))))
    turn.update_mastery(welcomed={**turn.mastery.welcomed, log_id: handshake})
    if log_id in mastery.streaming:
        turn.update_mastery(streaming={k: h for k, h in mastery.streaming.items() if k != log_id})
        turn.do(StopStream(log_id))
    header = turn.header(handshake, mastery.epoch)
    forced_epoch = state.record.forced_epoch if state.record is not None else NO_EPOCH
    turn.send(log_id, Welcome(header, cut, state.log.written, forced_epoch))


def on_report(turn: Turn, report: Report) -> None:
    mastery, handshake, log_id = turn.mastery, report.header.handshake, report.header.log_id
    if report.header.epoch != mastery.epoch or handshake is None:
        return
    if mastery.welcomed.get(log_id) != handshake or mastery.leaving.get(log_id) == handshake:
        return
    written, durable = report.written, report.durable
    before = turn.state.heard.get(log_id)
    if before is not None and before.epoch == mastery.epoch and before.handshake == handshake:
        written, durable = max(written, before.written), max(durable, before.durable)
    heard = Heard(mastery.epoch, handshake, written, durable, report.is_rebuilt, turn.now)
    turn.hear(log_id, heard)
    _note_catch_up(turn, log_id, heard)
    if mastery.streaming.get(log_id) != handshake:
        turn.update_mastery(streaming={**mastery.streaming, log_id: handshake})
        turn.do(StartStream(log_id, mastery.epoch, handshake, report.written))
    commit(turn)
    record = turn.state.record
    if record is None or log_id not in record.in_sync or turn.mastery.leaving:
        keep_record(turn)


def _note_catch_up(turn: Turn, log_id: LogId, heard: Heard) -> None:
    """When it had everything, and whether it is so close that commits wait for it to join."""
    mastery, timing, record = turn.mastery, turn.state.timing, turn.state.record
    if heard.durable >= turn.log.written:
        caught_up_at = turn.now
    else:
        before = mastery.caught_up_at.get(log_id, mastery.since)
        caught_up_at = max((m.at for m in mastery.marks if m.end <= heard.durable), default=before)
        caught_up_at = max(caught_up_at, before)
    turn.update_mastery(caught_up_at={**mastery.caught_up_at, log_id: caught_up_at})
    if log_id in mastery.leaving and (
        heard.durable >= turn.log.written or (record is not None and log_id not in record.in_sync)
    ):
        turn.update_mastery(leaving={k: h for k, h in mastery.leaving.items() if k != log_id})
    if record is None or log_id in record.in_sync or log_id in mastery.removing:
        return
    is_close = heard.is_rebuilt and turn.now - caught_up_at <= timing.awaits_within
    if is_close and turn.now - mastery.awaited.get(log_id, NEVER) > timing.awaits_again_after:
        turn.update_mastery(awaited={**mastery.awaited, log_id: turn.now})


def mark(turn: Turn) -> None:
    """Note where the log ends now; older marks than matter go."""
    mastery, oldest = turn.mastery, turn.now - turn.state.timing.replica_max_lag - turn.state.timing.tick
    kept = tuple(each for each in mastery.marks if each.at >= oldest)
    turn.update_mastery(marks=(*kept, Mark(turn.now, turn.log.written)))


def on_leave(turn: Turn, leave: Leave) -> None:
    """What it said before counts no more; when it is back it says Hello, and joins as any."""
    log_id, handshake = leave.header.log_id, leave.header.handshake
    mastery = turn.mastery
    if leave.header.epoch != mastery.epoch or handshake is None:
        return
    newest = mastery.welcomed.get(log_id, handshake)
    if newest != handshake and turn.rules.is_overtaken(handshake, newest):
        return
    awaited = {k: at for k, at in mastery.awaited.items() if k != log_id}
    turn.update_mastery(leaving={**mastery.leaving, log_id: handshake}, awaited=awaited)
    keep_record(turn)


def on_removal_asked(turn: Turn, event: RemovalAsked) -> None:
    if event.is_withdrawn:
        turn.update_mastery(removing=turn.mastery.removing - {event.log_id})
    elif event.log_id != turn.state.me.log_id:
        turn.update_mastery(removing=turn.mastery.removing | {event.log_id})
        keep_record(turn)


def refuse(turn: Turn, hello: Hello) -> None:
    """Not the master, as far as this node knows, or not yet ready."""
    turn.send(hello.header.log_id, Refusal(turn.header(hello.header.handshake), "not the acting master"))


def _tell_committed(turn: Turn) -> None:
    mastery = turn.mastery
    for log_id, handshake in mastery.welcomed.items():
        header = turn.header(handshake, mastery.epoch)
        turn.send(log_id, Committed(header, turn.state.committed, turn.log.written))
    turn.update_mastery(beat_at=turn.now)


# Time, the record, handing over.


def on_tick(turn: Turn) -> None:
    if turn.mastery.start is None and turn.rules.is_stored(turn.state, turn.mastery.epoch):
        _begin_or_leave(turn)
        if turn.state.mastery is None:
            return
    if (
        turn.mastery.start is not None
        and turn.now - turn.mastery.beat_at >= turn.state.timing.heartbeat_every
    ):
        _tell_committed(turn)
    mark(turn)
    commit(turn)
    if turn.state.role is Role.RESIGNING:
        hand_over(turn)
    if turn.state.mastery is not None:
        keep_record(turn)


def keep_record(turn: Turn) -> None:
    """Ask for the next version: a change that is due, a renewal, or, before a shrink too far, nobody as master."""
    state, timing, record = turn.state, turn.state.timing, turn.state.record
    if record is None or (state.is_asking and turn.now - state.asked_at < timing.swap_timeout):
        return
    if state.is_asking:
        turn.forget_answer()
    plan = plan_change(state, record, turn.mastery, turn.now, turn.rules)
    since = turn.now - state.asked_at
    if plan.resigns and state.role is Role.MASTER:
        resign(turn, record, successor=None, to_shrink=True)
    elif since >= timing.renew_every or (plan.is_change and since >= timing.tick):
        turn.ask(plan.new)


def on_switchover_asked(turn: Turn, event: SwitchoverAsked) -> None:
    """Stop first; the record changes once the successor has everything."""
    record = turn.state.record
    if record is None or event.to not in record.in_sync or event.to == turn.state.me.log_id:
        turn.do(SwitchoverEnded(f"{_name_of(record, event.to)} is not an in-sync standby"))
        return
    turn.update_mastery(resignation=Resignation(turn.now, event.to), awaited={})
    if turn.rules.stops_to_resign():
        turn.change_role("resigns")
        hand_over(turn)
    else:
        resign(turn, record, successor=event.to, to_shrink=False)


def hand_over(turn: Turn) -> None:
    """Resign as soon as the successor has the whole log; be master again when it does not get there."""
    state, mastery, record = turn.state, turn.mastery, turn.state.record
    handing = mastery.resignation
    if handing is None or record is None:
        return
    heard = state.heard.get(handing.successor)
    has_all = (
        handing.successor in record.in_sync
        and heard is not None
        and heard.epoch == mastery.epoch
        and heard.durable >= state.log.written
    )
    if has_all and state.committed >= state.log.written:
        resign(turn, record, successor=handing.successor, to_shrink=False)
    elif turn.now - handing.since >= state.timing.lease_ttl:
        turn.change_role("stays")
        turn.update_mastery(resignation=None)
        turn.do(SwitchoverEnded(f"{_name_of(record, handing.successor)} did not catch up"))


def _name_of(record: GroupRecord | None, log_id: LogId) -> str:
    member = record.members.get(log_id) if record is not None else None
    return member.node if member is not None else log_id


def resign(turn: Turn, record: GroupRecord, *, successor: LogId | None, to_shrink: bool) -> None:
    """Ask to be nobody, having stopped: the request may be applied at any later time, or lost to an own renewal."""
    if turn.rules.stops_to_resign():
        step_down(turn, "resigned")
        turn.update(
            waits_until=turn.now + turn.state.timing.lease_ttl,
            resigned=Resigned(record.epoch, successor),
            resigned_to_shrink=to_shrink,
        )
    _ask_to_be_nobody(turn, record, successor)


def ask_again_to_be_nobody(turn: Turn) -> None:
    """As long as the record shows this process as the master that it no longer is."""
    state, resigned, record = turn.state, turn.state.resigned, turn.state.record
    if resigned is None or record is None:
        return
    if record.epoch != resigned.epoch or record.master != state.me.as_master:
        turn.update(resigned=None)
    elif not state.is_asking or turn.now - state.asked_at >= state.timing.swap_timeout:
        _ask_to_be_nobody(turn, record, resigned.successor)


def _ask_to_be_nobody(turn: Turn, record: GroupRecord, successor: LogId | None) -> None:
    known = successor if successor in record.in_sync else None
    turn.ask(replace(turn.rules.renewed(record), master=None, successor=known, version=record.version + 1))
