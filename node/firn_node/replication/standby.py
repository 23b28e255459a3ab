"""Being standby: finding the master, the handshake, the stream, what is committed.

The order of a handshake: 1. ``Hello`` with the own history, 2. ``Welcome`` says where to cut, 3. the master's
epoch is durable, 4. the log is cut, durably, 5. ``Report``: the stream starts there. Only then are frames and
the committed position taken.
"""

from firn.types import Position
from firn_node.replication.events import (
    Arriving,
    BeginLog,
    CutLog,
    Durable,
    LeaveAsked,
    LogCut,
    Rebuild,
    Rebuilt,
    WriteFrame,
    Written,
)
from firn_node.replication.messages import (
    Committed,
    Frame,
    Hello,
    History,
    Leave,
    Refusal,
    Report,
    Welcome,
)
from firn_node.replication.record import LogId
from firn_node.replication.state import Following, Mark, Phase, Role
from firn_node.replication.turn import Turn


def on_tick(turn: Turn) -> None:
    following, timing = turn.state.following, turn.state.timing
    if following is None:
        seek(turn)
        return
    if turn.state.is_cutting or following.phase is Phase.STORING:
        return
    silence = timing.asks_again_after if following.phase is Phase.ASKED else timing.silent_after
    is_stalled = turn.now - following.progress_at >= timing.stalls_after
    if turn.now - following.heard_at >= silence or is_stalled:
        turn.update(following=None)
        seek(turn)
    elif following.phase is Phase.FOLLOWING and turn.now - following.reported_at >= timing.heartbeat_every:
        report(turn)


def seek(turn: Turn) -> None:
    """Say Hello to the master that the record names."""
    state, record = turn.state, turn.state.record
    if record is None or record.master is None or state.is_cutting or state.is_leaving:
        return
    if record.master.log_id != state.me.log_id and not turn.rules.is_refused(
        state, turn.header(epoch=record.epoch)
    ):
        say_hello(turn, record.master.log_id)


def say_hello(turn: Turn, master: LogId) -> None:
    """Open a handshake: what was received before no longer counts."""
    handshake = turn.name_handshake()
    state, log = turn.state, turn.log
    turn.update(
        following=Following(
            master=master, epoch=state.epoch, handshake=handshake, phase=Phase.ASKED, cut=log.written,
            whole=log.written, heard_at=turn.now, progress_at=turn.now,
        ),
    )  # fmt: skip
    turn.send(
        master,
        Hello(
            turn.header(handshake), state.me.member, log.history, log.written, state.committed,
            state.stored.is_rebuilt,
        ),
    )  # fmt: skip


def on_welcome(turn: Turn, welcome: Welcome) -> None:
    following = turn.state.following
    if (
        following is None
        or following.phase is not Phase.ASKED
        or following.handshake != welcome.header.handshake
    ):
        return
    cut = welcome.cut
    if cut is None:
        _rebuild(turn, "no epoch in common with the master, or what is missing is gone from its log")
        return
    if cut < turn.state.committed:
        _judge_lost_records(turn, welcome, cut)
        return
    turn.update(epoch=welcome.header.epoch)
    turn.update_following(
        epoch=welcome.header.epoch, phase=Phase.STORING, cut=cut, whole=welcome.end,
        heard_at=turn.now, progress_at=turn.now,
    )  # fmt: skip
    turn.want(epoch=welcome.header.epoch)
    cut_log(turn)


def _judge_lost_records(turn: Turn, welcome: Welcome, cut: Position) -> None:
    """The master lacks what is known to be committed: only a person may have wanted that, or nothing of it is in
    this log yet: a blank node began where an earlier master's log did, and the new one's begins before that."""
    if welcome.forced_epoch > turn.state.log.last_epoch:
        _rebuild(turn, f"records from position {cut} on were given up by accepted data loss", keeps_tail=True)
    elif turn.log.is_empty:
        _rebuild(turn, f"the new master's log begins at {cut}, the rebuild began at {turn.log.start}")
    else:
        turn.stop(
            f"master {welcome.header.log_id} of epoch {welcome.header.epoch} asks to cut to {cut}, "
            f"below the committed position {turn.state.committed}",
            is_bug=True,
        )


def _rebuild(turn: Turn, reason: str, *, keeps_tail: bool = False) -> None:
    turn.stop(reason)
    turn.do(Rebuild(reason, keeps_tail))


def cut_log(turn: Turn) -> None:
    """Once the master's epoch is durable: cut, or follow at once when there is nothing to cut."""
    following = turn.state.following
    if following is None or following.phase is not Phase.STORING:
        return
    if not turn.rules.is_stored(turn.state, following.epoch):
        return
    if turn.log.is_empty:
        _begin_log(turn, following.cut)
        _follow(turn)
    elif following.cut < turn.log.written:
        turn.update(is_cutting=True)
        turn.update_following(phase=Phase.CUTTING)
        turn.do(CutLog(following.cut))
    else:
        _follow(turn)


def _begin_log(turn: Turn, start: Position) -> None:
    """An empty log begins where the master's does, wherever an earlier master's began."""
    if start != turn.log.written:
        turn.update_log(start=start, written=start, durable=start)
        turn.do(BeginLog(start))


def on_log_cut(turn: Turn, event: LogCut) -> None:
    log = turn.log
    turn.update(is_cutting=False)
    turn.update_log(
        written=event.end,
        durable=Position(min(log.durable, event.end)),
        history=tuple(entry for entry in log.history if entry.start < event.end),
        cuts=log.cuts + 1,
    )
    following = turn.state.following
    if following is not None and following.phase is Phase.CUTTING:
        _follow(turn)


def _follow(turn: Turn) -> None:
    turn.update_following(phase=Phase.FOLLOWING, progress_at=turn.now, heard_at=turn.now)
    note_whole(turn)
    report(turn)


def report(turn: Turn) -> None:
    following, log = turn.following, turn.log
    header = turn.header(following.handshake, following.epoch)
    turn.update_following(reported_at=turn.now)
    turn.send(following.master, Report(header, log.written, log.durable, turn.state.stored.is_rebuilt))


def on_frame(turn: Turn, frame: Frame) -> None:
    """Write what continues the log; a gap means that the stream has lost something: ask anew."""
    following = turn.state.following
    if (
        following is None
        or following.phase is not Phase.FOLLOWING
        or following.handshake != frame.header.handshake
        or following.epoch != frame.header.epoch
    ):
        return
    turn.update_following(heard_at=turn.now)
    if frame.start == turn.log.written:
        turn.do(WriteFrame(frame))
    elif frame.start > turn.log.written:
        say_hello(turn, following.master)


def on_arriving(turn: Turn, event: Arriving) -> None:
    following = turn.state.following
    if following is not None and following.phase is Phase.FOLLOWING:
        turn.update_following(heard_at=turn.now, progress_at=turn.now)


def on_written(turn: Turn, event: Written) -> None:
    following = turn.state.following
    if following is not None and following.phase is Phase.FOLLOWING:
        turn.update_following(progress_at=turn.now)
        if turn.state.has_interval:
            report(turn)


def on_durable(turn: Turn, event: Durable) -> None:
    following = turn.state.following
    if following is not None and following.phase is Phase.FOLLOWING:
        note_whole(turn)
        note_catch_up(turn)
        report(turn)
    turn.dispatch()


def note_whole(turn: Turn) -> None:
    """A node that may have lost something has its master's whole log: nothing is missing any more."""
    if turn.state.wanted.is_unclean and turn.log.durable >= turn.following.whole:
        turn.want(is_unclean=False)


def on_leave_asked(turn: Turn, event: LeaveAsked) -> None:
    """Out of ``in_sync``, where the master can spare this node: its writes then wait for nobody who is not there."""
    state, following, record = turn.state, turn.state.following, turn.state.record
    turn.update(is_leaving=True)
    if following is None or record is None or following.phase is not Phase.FOLLOWING:
        return
    if len(record.in_sync) > state.largest_min_in_sync:
        turn.send(
            following.master, Leave(turn.header(following.handshake, following.epoch), "it is about to stop")
        )
        turn.update(following=None)


def note_catch_up(turn: Turn) -> None:
    """How far behind in seconds: one end of the master at a time is waited for, then the next."""
    sample = turn.following.sample
    if sample is not None and turn.log.durable >= sample.end:
        turn.update_following(sample=None, caught_up_at=sample.at)


def on_committed(turn: Turn, message: Committed) -> None:
    if not turn.rules.takes_committed(turn.state, message):
        return
    following = turn.state.following
    if following is not None:
        is_whole = turn.log.written >= message.end
        turn.update_following(
            heard_at=turn.now, progress_at=turn.now if is_whole else following.progress_at,
            end=message.end, sample=following.sample or Mark(turn.now, message.end),
        )  # fmt: skip
        note_catch_up(turn)
    position = Position(min(message.position, turn.log.written))
    if position > turn.state.committed:
        turn.update(committed=position)
        turn.dispatch()


def on_refusal(turn: Turn, refusal: Refusal) -> None:
    following = turn.state.following
    if following is not None and following.handshake == refusal.header.handshake:
        turn.update(following=None if not turn.state.is_cutting else following)
        turn.read_record()


def on_rebuilt(turn: Turn, event: Rebuilt) -> None:
    if turn.state.role is Role.BLANK:
        turn.want(is_rebuilt=True)


def with_epochs(history: History, starts: History) -> History:
    """A history that goes on with the epochs that begin in what was appended."""
    known = history[-1].epoch if history else 0
    return (*history, *(entry for entry in starts if entry.epoch > known)) if starts else history
