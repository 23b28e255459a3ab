"""``step(state, event, now) -> (state, actions)``: the replication rules of one node, without I/O.

What is decided where: who may do what, ``rules``; being master, ``mastership`` and ``changes``; being standby,
``standby``; becoming master, ``election``. Here: which event goes to whom, what every node does whatever its
role, and what a newer record or a higher epoch means. Role changes: ``state.ROLE_CHANGES``.
"""

from collections.abc import Callable
from typing import Any

from firn.errors import FirnError, LimitExceeded, NotEnoughInSync, NotMaster, Unavailable
from firn_node.replication import election, mastership, standby
from firn_node.replication.events import (
    Action,
    Arriving,
    DataLossAccepted,
    Dispatched,
    Durable,
    Event,
    LeaveAsked,
    LogCut,
    LogDamaged,
    MetaStored,
    Outcome,
    Rebuild,
    Rebuilt,
    Received,
    RecordRead,
    Released,
    RemovalAsked,
    StateLoaded,
    SwapAnswered,
    SwitchoverAsked,
    SwitchoverEnded,
    Tick,
    TopicsChanged,
    Written,
)
from firn_node.replication.invariants import check_state
from firn_node.replication.messages import (
    Answer,
    Ask,
    Committed,
    Fence,
    Frame,
    Hello,
    Leave,
    Refusal,
    Report,
    Welcome,
)
from firn_node.replication.record import GroupRecord
from firn_node.replication.rules import RULES, Rules
from firn_node.replication.state import (
    NEVER,
    NO_EPOCH,
    Following,
    Me,
    Phase,
    Role,
    Startup,
    State,
    Timing,
)
from firn_node.replication.turn import Turn

OPEN_WRITES_MAX = 65_536

BLANK, STANDBY, CANDIDATE = Role.BLANK, Role.STANDBY, Role.CANDIDATE
MASTER, RESIGNING = Role.MASTER, Role.RESIGNING
FOLLOWERS = (BLANK, STANDBY, CANDIDATE)
MASTERS = (MASTER, RESIGNING)


def start(
    me: Me, startup: Startup, timing: Timing, now: float, rules: Rules = RULES
) -> tuple[State, tuple[Action, ...]]:
    """The state of a process that has just opened its data folder, and its first orders."""
    meta = startup.meta
    state = State(
        me=me,
        timing=timing,
        role=STANDBY if meta.is_rebuilt else BLANK,
        epoch=max(meta.epoch, startup.log.last_epoch),
        wanted=meta,
        stored=meta,
        log=startup.log,
        committed=startup.committed,
        dispatching=startup.committed,
        dispatched=startup.committed,
        largest_min_in_sync=startup.largest_min_in_sync,
        has_interval=startup.has_interval,
        old_process_is_dead=startup.old_process_is_dead,
        boot_id=startup.boot_id,
        started_at=now,
    )
    turn = Turn(state, now, rules)
    boot_id = startup.boot_id if startup.old_process_is_dead else meta.boot_id
    turn.want(is_unclean=rules.starts_unclean(startup), boot_id=boot_id, starts=meta.starts + 1)
    turn.read_record()
    check_state(turn.state)
    return turn.state, tuple(turn.actions)


def step(state: State, event: Event, now: float, rules: Rules = RULES) -> tuple[State, tuple[Action, ...]]:
    """What the node knows and orders after an event. *Errors*: InvariantBroken: a bug; stop this process."""
    if state.role is Role.STOPPED:
        return state, ()
    turn = Turn(state, now, rules)
    if type(event) is Received:
        receive(turn, event)
    else:
        for handle in EVENTS[type(event)].get(state.role, ()):
            handle(turn, event)
    check_state(turn.state)
    return turn.state, tuple(turn.actions)


# What clients may be told, now. Asked by the driver between two steps, changes nothing.


def write_refusal(state: State, now: float, min_in_sync: int, rules: Rules = RULES) -> FirnError | None:
    """Why a write may not be appended; None: it may, if that happens before the next event."""
    mastery, record = state.mastery, state.record
    if state.role is RESIGNING:
        return Unavailable("the master is handing over")
    if state.role is not MASTER or mastery is None or record is None:
        return NotMaster("this node is not the master of the group", address=master_address(state, now))
    if not rules.has_lease(state, now):
        return no_lease()
    if not mastery.is_loaded or mastery.start is None:
        return Unavailable("the new master is reading its log")
    if rules.in_sync_size(state) < min_in_sync:
        return NotEnoughInSync(f"{len(record.in_sync)} replicas are in sync, {min_in_sync} are asked for")
    if len(mastery.writes) >= OPEN_WRITES_MAX:
        return LimitExceeded(f"{OPEN_WRITES_MAX} writes wait for replicas")
    return None


def no_lease() -> FirnError:
    """What clients are told meanwhile: another node may be master by now, which this one need not be able to hear."""
    return NotMaster("the master could not renew its lease; another node may be master by now", address=None)


def may_read(state: State, now: float, rules: Rules = RULES) -> bool:
    """Whether an answer to a read may leave now; asked when the read arrives and again when it is answered."""
    return rules.may_read(state, now)


def master_address(state: State, now: float) -> str | None:
    """Where clients should go; None while nobody is known to act: there is no master, or nothing is heard of it.

    A client that is sent to a master that is gone waits there for an answer that nobody gives, and misses the next one.
    """
    record = state.record
    if record is None or record.master is None:
        return None
    if record.master.log_id == state.me.log_id:
        if state.mastery is None:
            return None
    else:
        following, heard_at = state.following, NEVER
        has_answered = following is not None and following.phase is not Phase.ASKED
        if following is not None and has_answered and following.master == record.master.log_id:
            heard_at = following.heard_at
        if now - max(heard_at, state.record_at) > state.timing.named_for:
            return None
    member = record.members.get(record.master.log_id)
    return member.address if member is not None else None


# Whatever the role.


def on_tick(turn: Turn, event: Tick) -> None:
    state, timing = turn.state, turn.state.timing
    if state.ticked_at != NEVER and turn.now - state.ticked_at > 4 * timing.tick:
        turn.update(resumed_at=turn.now)
    turn.update(ticked_at=turn.now)
    if state.role not in MASTERS and turn.now - state.read_at >= timing.read_every:
        turn.read_record()
    mastership.ask_again_to_be_nobody(turn)


def on_record_read(turn: Turn, event: RecordRead) -> None:
    """A consistent read that shows less than was known: the coordinator went back to an older record."""
    record, at_least = event.record, event.at_least
    if at_least is not None and (record.version if record is not None else 0) < at_least:
        found = f"version {record.version}" if record is not None else "none"
        turn.stop(f"the group record was of version {at_least} or newer, the coordinator shows {found}")
    elif record is not None:
        learn(turn, record)
    elif at_least is not None and turn.log.is_empty:
        election.maybe_create(turn)
    elif at_least is not None:
        turn.stop("this data folder has a log, and the coordinator has no record of its group")


def on_swap_answered(turn: Turn, event: SwapAnswered) -> None:
    if event.outcome is Outcome.APPLIED:
        turn.update(is_asking=False)
        learn(turn, event.new)
        return
    turn.forget_answer()
    if turn.state.candidacy is not None:
        election.give_up(turn)
    turn.read_record()


def learn(turn: Turn, record: GroupRecord) -> None:
    """A newer version of the record: it settles what was asked for, and decides who is what."""
    state, known = turn.state, turn.state.record
    if record.group_id != state.me.group_id:
        turn.stop(f"the coordinator shows a record of group {record.group_id}, this is {state.me.group_id}")
        return
    if known is None:
        if record.version < state.stored.version:
            return
    elif not turn.rules.shows_life(known, record):
        return
    sent_at = min((asked.sent_at for asked in state.asked if asked.new == record), default=NEVER)
    turn.update(record=record, record_at=turn.now, asked=(), is_asking=False)
    _follow_record(turn, record, sent_at)
    if known is None or known.epoch != record.epoch or known.in_sync != record.in_sync:
        turn.want(version=record.version)
    if turn.rules.settles_old_process(turn.state, record):
        turn.want(boot_id=turn.state.boot_id)


def _follow_record(turn: Turn, record: GroupRecord, sent_at: float) -> None:
    state = turn.state
    if state.mastery is not None:
        if record.epoch == state.mastery.epoch and record.master == state.me.as_master:
            turn.update_mastery(lease_sent_at=max(state.mastery.lease_sent_at, sent_at))
            mastership.commit(turn)
            return
        mastership.step_down(turn, "another master, or none, by the record")
    if record.master is not None and record.master.log_id != state.me.log_id:
        turn.update(waits_until=NEVER, resigned_to_shrink=False)
    if record.epoch > state.epoch:
        turn.update(epoch=record.epoch)
    if turn.state.candidacy is not None and not turn.rules.may_act(turn.state):
        election.give_up(turn)
    if turn.rules.may_act(turn.state):
        _take_over(turn, sent_at)
        return
    turn.update(asked_epoch=NO_EPOCH)
    mastership.ask_again_to_be_nobody(turn)
    following = turn.state.following
    if following is None or _is_another_mastership(record, following):
        turn.update(following=None)
        standby.seek(turn)


def _is_another_mastership(record: GroupRecord, following: Following) -> bool:
    """Another master, or the same one in a later epoch: it has lost what it knew of this node."""
    master = record.master.log_id if record.master is not None else None
    return record.epoch > following.epoch or (record.epoch == following.epoch and master != following.master)


def _take_over(turn: Turn, sent_at: float) -> None:
    record = turn.state.record
    if record is not None and not turn.state.is_cutting:
        mastership.take_over(turn, record, sent_at)


def on_meta_stored(turn: Turn, event: MetaStored) -> None:
    turn.update(stored=event.meta, is_storing=False)
    turn.store_wanted()
    election.answer_fence(turn)
    if turn.state.mastery is not None:
        mastership.begin_epoch(turn)
        return
    if turn.state.role is BLANK and event.meta.is_rebuilt:
        turn.change_role("rebuilt")
    standby.cut_log(turn)


def on_written(turn: Turn, event: Written) -> None:
    history = standby.with_epochs(turn.log.history, event.starts)
    turn.update_log(written=event.end, history=history)


def on_durable(turn: Turn, event: Durable) -> None:
    log = turn.log
    if turn.rules.proves_durable(log, event.cuts):
        turn.update_log(durable=max(log.durable, min(event.end, log.written)))


def on_log_cut(turn: Turn, event: LogCut) -> None:
    standby.on_log_cut(turn, event)
    if turn.rules.may_act(turn.state):
        _take_over(turn, NEVER)


def on_released(turn: Turn, event: Released) -> None:
    turn.update_log(start=max(turn.log.start, event.start))


def on_dispatched(turn: Turn, event: Dispatched) -> None:
    turn.update(dispatched=max(turn.state.dispatched, event.position))


def on_topics_changed(turn: Turn, event: TopicsChanged) -> None:
    turn.update(largest_min_in_sync=event.largest_min_in_sync, has_interval=event.has_interval)


def on_log_damaged(turn: Turn, event: LogDamaged) -> None:
    """Leave ``in_sync`` and start again under a new log_id."""
    record, following = turn.state.record, turn.state.following
    if turn.state.mastery is not None and record is not None:
        mastership.resign(turn, record, successor=None, to_shrink=False)
    elif following is not None:
        header = turn.header(following.handshake, following.epoch)
        turn.send(following.master, Leave(header, event.reason))
    turn.stop(event.reason)
    turn.do(Rebuild(event.reason))


def refuse_switchover(turn: Turn, event: SwitchoverAsked) -> None:
    turn.do(SwitchoverEnded("this node is not the master of the group, or is handing over already"))


def refuse_data_loss(turn: Turn, event: DataLossAccepted) -> None:
    turn.do(SwitchoverEnded(f"a {turn.state.role.value} node cannot be made master by accepted data loss"))


# Messages.


def receive(turn: Turn, event: Received) -> None:
    """Drop what is of another group; let a higher epoch depose; refuse a lower one; then by the table."""
    message = event.message
    header = message.header
    if header.group_id != turn.state.me.group_id or header.log_id == turn.state.me.log_id:
        return
    if turn.rules.is_deposing(turn.state, header):
        observe_epoch(turn, event)
    if type(message) in FROM_MASTER and turn.rules.is_refused(turn.state, header):
        if type(message) is not Frame:
            turn.send(header.log_id, Refusal(turn.header(header.handshake), "a higher epoch is known"))
        return
    for handle in MESSAGES[type(message)].get(turn.state.role, ()):
        handle(turn, message)


def observe_epoch(turn: Turn, event: Received) -> None:
    """Someone has seen a higher epoch: what was done in a lower one is over."""
    turn.update(epoch=event.message.header.epoch)
    if turn.state.mastery is not None:
        mastership.step_down(turn, "a higher epoch is known")
    following = turn.state.following
    if following is not None and not (
        type(event.message) is Welcome and following.handshake == event.message.header.handshake
    ):
        turn.update(following=None)
    turn.read_record()


FROM_MASTER = (Welcome, Frame, Committed)

Handlers = dict[Role, tuple[Callable[[Turn, Any], None], ...]]


def _for(roles: tuple[Role, ...], *handlers: Callable[[Turn, Any], None]) -> Handlers:
    return {role: handlers for role in roles}


def _only_turn(handle: Callable[[Turn], None]) -> Callable[[Turn, Any], None]:
    return lambda turn, _: handle(turn)


ALL = (*FOLLOWERS, *MASTERS)
_commit = _only_turn(mastership.commit)
_hand_over = _only_turn(mastership.hand_over)

# The transition table: what each event, and each message, means in each role; nothing where a role is absent.
EVENTS: dict[type, Handlers] = {
    Tick: {
        BLANK: (on_tick, _only_turn(standby.on_tick)),
        STANDBY: (on_tick, _only_turn(standby.on_tick), _only_turn(election.maybe_stand)),
        CANDIDATE: (on_tick, _only_turn(standby.on_tick), _only_turn(election.decide)),
        **_for(MASTERS, on_tick, _only_turn(mastership.on_tick)),
    },
    Arriving: _for(FOLLOWERS, standby.on_arriving),
    RecordRead: _for(FOLLOWERS, on_record_read, _only_turn(election.stand_at_once))
    | _for(MASTERS, on_record_read),
    SwapAnswered: _for(ALL, on_swap_answered),
    MetaStored: _for(ALL, on_meta_stored),
    Written: _for(FOLLOWERS, on_written, standby.on_written)
    | _for(MASTERS, on_written, mastership.on_written),
    Durable: _for(FOLLOWERS, on_durable, standby.on_durable)
    | _for((MASTER,), on_durable, _commit)
    | _for((RESIGNING,), on_durable, _commit, _hand_over),
    LogCut: _for(FOLLOWERS, on_log_cut),
    Released: _for(ALL, on_released),
    Dispatched: _for(ALL, on_dispatched),
    StateLoaded: _for(MASTERS, mastership.on_state_loaded),
    TopicsChanged: _for(ALL, on_topics_changed),
    Rebuilt: _for((BLANK,), standby.on_rebuilt),
    LogDamaged: _for(ALL, on_log_damaged),
    SwitchoverAsked: _for((MASTER,), mastership.on_switchover_asked)
    | _for((*FOLLOWERS, RESIGNING), refuse_switchover),
    DataLossAccepted: _for((STANDBY, CANDIDATE), election.on_data_loss_accepted)
    | _for((BLANK, *MASTERS), refuse_data_loss),
    LeaveAsked: _for((BLANK, STANDBY), standby.on_leave_asked)
    | _for((CANDIDATE,), standby.on_leave_asked, _only_turn(election.withdraw)),
    RemovalAsked: _for(MASTERS, mastership.on_removal_asked),
}
MESSAGES: dict[type, Handlers] = {
    Hello: _for(MASTERS, mastership.on_hello) | _for(FOLLOWERS, mastership.refuse),
    Welcome: _for(FOLLOWERS, standby.on_welcome),
    Refusal: _for(FOLLOWERS, standby.on_refusal),
    Frame: _for(FOLLOWERS, standby.on_frame),
    Committed: _for(FOLLOWERS, standby.on_committed),
    Report: _for((MASTER,), mastership.on_report) | _for((RESIGNING,), mastership.on_report, _hand_over),
    Leave: _for(MASTERS, mastership.on_leave),
    Ask: _for(ALL, election.on_ask),
    Answer: _for((CANDIDATE,), election.on_answer),
    Fence: _for(ALL, election.on_fence),
}
