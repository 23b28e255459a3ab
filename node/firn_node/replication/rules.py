"""The rules that keep acknowledged records, each a small pure predicate or plan over a ``State``.

Where a rule carries a number, it is that of ``docs/replication.md``; ° marks the clauses without which a group
loses data or serves a stale read. The core asks an object of ``Rules`` and decides nothing of this itself, so
that one clause can be looked at, and in tests replaced, alone.
"""

from collections.abc import Collection
from dataclasses import replace

from firn.types import Epoch, Position
from firn_node.replication.messages import Answer, Committed, Handshake, Header, Hello, History
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.state import (
    LOG_BEGIN,
    Asked,
    Candidacy,
    Heard,
    LogView,
    Mastery,
    Phase,
    Role,
    Startup,
    State,
)


def end_of_epoch(history: History, end: Position, epoch: Epoch) -> Position:
    """Where an epoch of a log ends: where the next one starts, or the log does."""
    return next((entry.start for entry in history if entry.epoch > epoch), end)


def common_end(own: History, own_end: Position, other: History, other_end: Position) -> Position | None:
    """The lower of the two ends of the last epoch that both logs hold; None when they share none."""
    shared = {entry.epoch for entry in own} & {entry.epoch for entry in other}
    if not shared:
        return None
    last = max(shared)
    return min(end_of_epoch(own, own_end, last), end_of_epoch(other, other_end, last))


class Rules:
    """All of them, in force. No state: every answer follows from the arguments."""

    # The record (rules 1 to 4).

    def after_unknown(self, asked: tuple[Asked, ...]) -> tuple[Asked, ...]:
        """1°: what may still be applied after a time-out or a conflict: everything."""
        return asked

    def renewed(self, record: GroupRecord) -> GroupRecord:
        """Section 1°: the lease is the record: a renewal is its next version."""
        return replace(record, version=record.version + 1, renewals=record.renewals + 1)

    def shows_life(self, known: GroupRecord, read: GroupRecord) -> bool:
        """Whether what was read proves that someone has changed the record since."""
        return read.version > known.version

    def may_act(self, state: State) -> bool:
        """4°: the record names this process as master of an epoch that this process asked for."""
        record = state.record
        return (
            record is not None
            and record.master == state.me.as_master
            and record.epoch == state.asked_epoch
            and record.epoch >= state.epoch
        )

    def settles_old_process(self, state: State, record: GroupRecord) -> bool:
        """4: no earlier process of this data folder can be acting.

        Until then the folder keeps the boot id that it had: the next process would take its own boot for the proof
        that all processes before it are dead, though one lives on where the volume came from.
        """
        master = record.master
        return master is None or master.log_id != state.me.log_id or master == state.me.as_master

    # Epochs (rule 5).

    def is_deposing(self, state: State, header: Header) -> bool:
        """5: a higher epoch deposes."""
        return header.epoch > state.epoch

    def is_refused(self, state: State, header: Header) -> bool:
        """5°: a lower epoch is refused."""
        return header.epoch < state.epoch

    def is_stored(self, state: State, epoch: Epoch) -> bool:
        """5°: the epoch is durable, so that this node may append, cut or report in it."""
        return state.stored.epoch >= epoch

    def is_overtaken(self, handshake: Handshake, newest: Handshake) -> bool:
        """5: what precedes the last handshake is dropped: a Hello that arrives after a later one of its process, or of
        a later process of its folder, which may live beside it if the volume has moved."""
        if newest.incarnation == handshake.incarnation:
            return newest.number >= handshake.number
        return newest.start > handshake.start

    # Commit (rules 7 and 8).

    def counted(self, state: State) -> frozenset[LogId]:
        """7°: ``in_sync`` as known, united with every set asked for since."""
        return _known(state).in_sync.union(*(asked.new.in_sync for asked in state.asked))

    def awaited(self, state: State, now: float) -> frozenset[LogId]:
        """8: close behind, not yet in sync: counting them too stops the committed position for a moment, so that
        they reach it. Under a steady load a standby on a long link never would."""
        since, limit = _mastery(state).awaited, state.timing.awaits_for
        return frozenset(log_id for log_id, at in since.items() if now - at < limit)

    def counts(self, heard: Heard, epoch: Epoch) -> bool:
        """7°: only what was reported in this epoch."""
        return heard.epoch == epoch

    def end_of(self, heard: Heard) -> Position:
        """7°: durable ends."""
        return heard.durable

    def own_end(self, log: LogView) -> Position:
        """7°: of the master too."""
        return log.durable

    def committed(self, state: State, now: float) -> Position:
        """7: the least end over the counted set, the master's included."""
        epoch = _mastery(state).epoch
        others = (self.counted(state) | self.awaited(state, now)) - {state.me.log_id}
        ends = (self.reported(state, log_id, epoch) for log_id in others)
        return min(self.own_end(state.log), *ends) if others else self.own_end(state.log)

    def reported(self, state: State, log_id: LogId, epoch: Epoch) -> Position:
        """A replica's end, as far as it counts."""
        heard = state.heard.get(log_id)
        return self.end_of(heard) if heard is not None and self.counts(heard, epoch) else LOG_BEGIN

    def acknowledged(self, state: State, now: float) -> Position:
        """18: what is written in the whole counted set."""
        epoch = _mastery(state).epoch
        written = [state.log.written]
        for log_id in (self.counted(state) | self.awaited(state, now)) - {state.me.log_id}:
            heard = state.heard.get(log_id)
            written.append(heard.written if heard is not None and self.counts(heard, epoch) else LOG_BEGIN)
        return min(written)

    def in_sync_size(self, state: State) -> int:
        """8: the smaller, if a swap is open."""
        return min(len(_known(state).in_sync), *(len(a.new.in_sync) for a in state.asked), 1 << 30)

    def may_join(self, state: State, heard: Heard) -> bool:
        """8: a replica that may be taken into ``in_sync``."""
        return (
            self.counts(heard, _mastery(state).epoch)
            and heard.is_rebuilt
            and self.holds_committed(state, heard)
            and self.holds_epoch_start(state, heard)
            and self.holds_acknowledged(state, heard)
        )

    def holds_committed(self, state: State, heard: Heard) -> bool:
        """8°: its durable end is at or past the committed position."""
        return heard.durable >= state.committed

    def holds_epoch_start(self, state: State, heard: Heard) -> bool:
        """8°: ... and at or past the epoch start: a new master does not know how far its predecessor committed."""
        start = _mastery(state).start
        return start is not None and heard.durable >= start

    def holds_acknowledged(self, state: State, heard: Heard) -> bool:
        """19°: ... and all is written that was acknowledged before it was durable."""
        return heard.written >= _mastery(state).acknowledged

    def is_lagging(self, state: State, log_id: LogId, now: float) -> bool:
        """8: no catch-up for ``replicaMaxLag``, while this process was running."""
        mastery = _mastery(state)
        last = mastery.caught_up_at.get(log_id, mastery.since)
        return now - max(last, state.resumed_at) > state.timing.replica_max_lag

    # Election (rules 9, 14, 19).

    def may_stand(self, state: State, now: float) -> bool:
        """9: a standby may ask to be elected, if nothing is missing in its log (``holds_all``)."""
        return (
            state.role is Role.STANDBY
            and state.record is not None
            and not state.is_cutting
            and now >= state.waits_until
            and state.record.epoch >= state.epoch - 1
            and self.is_in_sync(state)
            and self.is_silent(state, now)
        )

    def is_in_sync(self, state: State) -> bool:
        """9°: its log_id is in ``in_sync``."""
        return state.me.log_id in _known(state).in_sync

    def is_silent(self, state: State, now: float) -> bool:
        """9°: this version was seen unchanged for ``leaseTtl``, or nobody can be acting under it.

        Nobody: the master resigned, or it was this data folder, whose processes are all known to be dead but this
        one, or it is this one and has stepped down.
        """
        record = _known(state)
        if now - state.record_at >= state.timing.lease_ttl:
            return True
        if record.master is None or record.master == state.me.as_master:
            return True
        return record.master.log_id == state.me.log_id and state.old_process_is_dead

    def holds_all(self, state: State, answers: Collection[Answer]) -> bool:
        """19°: nothing that was acknowledged is missing here, or all of ``in_sync`` miss something and this log
        is the longest of them."""
        if not state.wanted.is_unclean:
            return True
        others = {answer.header.log_id: answer for answer in answers}
        here = (state.log.last_epoch, state.log.written)
        return all(
            log_id in others
            and others[log_id].is_unclean
            and (others[log_id].last_epoch, others[log_id].end) <= here
            for log_id in _known(state).in_sync - {state.me.log_id}
        )

    def answers(self, candidacy: Candidacy, answer: Answer) -> bool:
        """19°: given to what was asked in this candidacy, the record being silent: who answered an earlier one that
        something is missing may have it again, and more was acknowledged since."""
        return answer.header.handshake == candidacy.name

    def goes_first(self, state: State, answer: Answer) -> bool:
        """9: a better candidate: the successor, then the longer log, then the lower ordinal."""
        record, log_id = _known(state), answer.header.log_id
        if log_id not in record.in_sync or not answer.may_stand or record.successor == state.me.log_id:
            return False
        if record.successor == log_id:
            return True
        theirs = (answer.last_epoch, answer.end, -record.members[log_id].ordinal)
        return theirs > (state.log.last_epoch, state.log.written, -state.me.member.ordinal)

    def starts_unclean(self, startup: Startup) -> bool:
        """19: another boot without a clean shutdown may have lost what was only written."""
        if startup.meta.is_unclean:
            return True
        is_same_boot = startup.boot_id == startup.meta.boot_id
        return startup.has_interval and not is_same_boot and not startup.was_shut_down

    # The acting master (rules 10, 11, 13).

    def has_lease(self, state: State, now: float) -> bool:
        """10: 2/3 of ``leaseTtl`` since the last successful renewal was sent."""
        mastery = state.mastery
        return mastery is not None and now < mastery.lease_sent_at + state.timing.lease

    def may_read(self, state: State, now: float) -> bool:
        """10°, 11°, 13°: an answer given now can miss nothing that was acknowledged or read before."""
        return (
            state.role is Role.MASTER and self.has_lease_to_read(state, now) and self.has_read_barrier(state)
        )

    def has_lease_to_read(self, state: State, now: float) -> bool:
        """10°: no reads without a lease."""
        return self.has_lease(state, now)

    def has_read_barrier(self, state: State) -> bool:
        """11°: the epoch-start record is committed and dispatched."""
        end = _mastery(state).start_end
        return end is not None and state.committed >= end and state.dispatched >= end

    def stops_to_resign(self) -> bool:
        """13°: a master that hands over stops first, whatever becomes of its request."""
        return True

    # The follower (rules 9, 15, 16, 18).

    def may_welcome(self, state: State) -> bool:
        """9: a master by accepted data loss is followed once all that precedes its epoch is durable.

        Nobody else need have it. If it were lost after others had taken the new epoch in, they would hold it for
        committed, and nobody accepted that loss.
        """
        record, mastery = _known(state), _mastery(state)
        if mastery.start is None:
            return False
        return record.forced_epoch != mastery.epoch or state.log.durable >= mastery.start

    def cut_point(self, state: State, hello: Hello) -> Position | None:
        """15°: where a standby's log leaves this one; None: it must be rebuilt."""
        log = state.log
        if not hello.history and not hello.is_rebuilt:
            return log.start
        cut = common_end(hello.history, hello.end, log.history, log.written)
        return None if cut is None or cut < log.start else cut

    def proves_durable(self, log: LogView, cuts: int) -> bool:
        """15: a sync that began before a cut reports nothing."""
        return cuts == log.cuts

    def takes_committed(self, state: State, message: Committed) -> bool:
        """16°: the committed position counts only after the handshake, the cut included."""
        following = state.following
        return (
            following is not None
            and following.phase is Phase.FOLLOWING
            and following.epoch == message.header.epoch
            and following.handshake == message.header.handshake
        )


RULES = Rules()


def _known(state: State) -> GroupRecord:
    assert state.record is not None, "asked only when the record is known"
    return state.record


def _mastery(state: State) -> Mastery:
    assert state.mastery is not None, "asked only of a master"
    return state.mastery
