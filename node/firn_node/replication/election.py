"""Standing for election: when, after asking whom, and who goes first. Also forced by a person.

Safety rests on the compare-and-set and on who may stand (``rules``); asking the others only spares the group
a worse master, and gives an unclean node the proof that all others are unclean too.
"""

from dataclasses import replace

from firn.types import Epoch
from firn_node.replication.events import DataLossAccepted, SwitchoverEnded
from firn_node.replication.messages import Answer, Ask, Fence, Header
from firn_node.replication.record import NO_VERSION, GroupRecord, LogId
from firn_node.replication.state import Candidacy, Role
from firn_node.replication.turn import Turn


def maybe_stand(turn: Turn) -> None:
    """Become a candidate, if the rules allow it, and ask the others."""
    state, record = turn.state, turn.state.record
    if record is None or state.is_leaving or not turn.rules.may_stand(state, turn.now):
        return
    turn.change_role("stands")
    name = turn.name_handshake()
    turn.update(candidacy=Candidacy(name, turn.now, False, {}))
    for log_id in sorted(record.members.keys() - {state.me.log_id}):
        turn.send(log_id, Ask(turn.header(name), record.version))
    decide(turn)


def stand_at_once(turn: Turn) -> None:
    """Nobody is master: the next tick need not be waited for."""
    record = turn.state.record
    if record is not None and record.master is None:
        maybe_stand(turn)


def withdraw(turn: Turn) -> None:
    """This process is about to stop: what it has not asked for yet it does not ask for."""
    candidacy = turn.state.candidacy
    if candidacy is not None and not candidacy.has_asked:
        give_up(turn)


def on_data_loss_accepted(turn: Turn, event: DataLossAccepted) -> None:
    """Fence all that can be reached below the epoch to come, then stand whatever the others hold."""
    state, record = turn.state, turn.state.record
    if record is None or state.is_cutting or (state.candidacy is not None and state.candidacy.has_asked):
        turn.do(SwitchoverEnded("the record is not known, or an election is open; try again"))
        return
    if state.candidacy is not None:
        give_up(turn)
    turn.change_role("forced")
    name, epoch = turn.name_handshake(), Epoch(record.epoch + 1)
    turn.update(candidacy=Candidacy(name, turn.now, True, {}), following=None)
    for log_id in sorted(record.members.keys() - {state.me.log_id}):
        turn.send(log_id, Fence(turn.header(name, epoch), record.version))


def on_ask(turn: Turn, ask: Ask) -> None:
    answer(turn, ask.header)


def answer(turn: Turn, asked: Header) -> None:
    """Tell a candidate what this node would stand with, under the name of its question."""
    state, record = turn.state, turn.state.record
    may_stand = (
        state.role in (Role.STANDBY, Role.CANDIDATE)
        and not state.wanted.is_unclean
        and not state.is_leaving
        and record is not None
        and state.me.log_id in record.in_sync
        and turn.now >= state.waits_until
    )
    found = Answer(
        turn.header(asked.handshake), turn.known_version, state.log.last_epoch,
        state.log.written, state.wanted.is_unclean, may_stand,
    )  # fmt: skip
    turn.send(asked.log_id, found)


def on_fence(turn: Turn, fence: Fence) -> None:
    """The answer waits until the epoch is durable: from then on nothing is reported below it."""
    turn.update(fenced_by=fence.header, waits_until=turn.now + 2 * turn.state.timing.lease_ttl)
    turn.want(epoch=turn.state.epoch)
    answer_fence(turn)


def answer_fence(turn: Turn) -> None:
    to = turn.state.fenced_by
    if to is not None and turn.state.stored.epoch >= turn.state.epoch:
        turn.update(fenced_by=None)
        answer(turn, to)


def on_answer(turn: Turn, message: Answer) -> None:
    candidacy, record = turn.state.candidacy, turn.state.record
    if candidacy is None or record is None or candidacy.has_asked:
        return
    if message.version > record.version:
        give_up(turn)
        turn.read_record()
        return
    if not turn.rules.answers(candidacy, message):
        return
    answers = {**candidacy.answers, message.header.log_id: message}
    turn.update(candidacy=replace(candidacy, answers=answers))
    decide(turn)


def decide(turn: Turn) -> None:
    """Ask for the mastership, wait for others to answer or to go first, or give up."""
    state, record, candidacy = turn.state, turn.state.record, turn.state.candidacy
    if candidacy is None or record is None:
        return
    waited, timing = turn.now - candidacy.since, state.timing
    if candidacy.has_asked:
        if waited >= timing.lease_ttl:
            give_up(turn)
        return
    others: set[LogId] = set(record.in_sync - {state.me.log_id})
    if waited < timing.answers_within and not others <= candidacy.answers.keys():
        return
    if candidacy.is_forced:
        if turn.rules.is_silent(state, turn.now):
            _ask_to_be_master(turn, record, Epoch(record.epoch + 1))
        elif waited >= 2 * timing.lease_ttl:
            give_up(turn)
            turn.do(SwitchoverEnded("the group has a master that renews its lease"))
        return
    if not turn.rules.holds_all(state, candidacy.answers.values()):
        give_up(turn)
        return
    has_better = any(turn.rules.goes_first(state, answer) for answer in candidacy.answers.values())
    is_not_successor = record.successor is not None and record.successor != state.me.log_id
    if (has_better or is_not_successor) and waited < timing.answers_within + timing.defers_for:
        return
    _ask_to_be_master(turn, record, None)


def _ask_to_be_master(turn: Turn, record: GroupRecord, forced_epoch: Epoch | None) -> None:
    """{epoch + 1, itself, in_sync less another old master}; by force, itself alone."""
    state, candidacy = turn.state, turn.state.candidacy
    me = state.me.log_id
    if candidacy is None:
        return
    old = record.master.log_id if record.master is not None else me
    in_sync = record.in_sync - {old} | {me} if forced_epoch is None else frozenset({me})
    members = {**record.members, me: state.me.member}
    epoch = Epoch(record.epoch + 1)
    turn.update(candidacy=replace(candidacy, has_asked=True), asked_epoch=epoch, resigned=None)
    turn.ask(
        replace(
            record, version=record.version + 1, epoch=epoch, master=state.me.as_master, successor=None,
            in_sync=frozenset(in_sync), members=members,
            forced_epoch=record.forced_epoch if forced_epoch is None else forced_epoch,
        )
    )  # fmt: skip


def give_up(turn: Turn) -> None:
    turn.change_role("gives up")
    turn.update(candidacy=None)


def maybe_create(turn: Turn) -> None:
    """A node with an empty log that has never seen a record makes the first one; lower ordinals go first.

    A read that found none may be answered after the record was learned in another way.
    """
    state = turn.state
    never_seen = state.record is None and state.stored.version == NO_VERSION
    is_new = never_seen and state.log.is_empty and state.stored.epoch == 0
    wait = state.me.member.ordinal * state.timing.defers_for
    if not is_new or state.role is not Role.BLANK or state.is_asking or turn.now - state.started_at < wait:
        return
    me = state.me
    turn.update(asked_epoch=Epoch(1))
    turn.ask(
        GroupRecord(
            group_id=me.group_id, version=1, epoch=Epoch(1), renewals=0, master=me.as_master,
            in_sync=frozenset({me.log_id}), members={me.log_id: me.member},
        )
    )  # fmt: skip
