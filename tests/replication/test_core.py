"""The core of one node, step by step: what it orders, refuses, and when it stops."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from firn.errors import InvariantBroken, NotMaster
from firn.types import Epoch, Position
from firn_node.replication import core
from firn_node.replication import events as ev
from firn_node.replication.changes import plan_change
from firn_node.replication.messages import (
    Answer,
    Ask,
    Committed,
    EpochStart,
    Fence,
    Handshake,
    Header,
    Hello,
    Leave,
    Message,
    Refusal,
    Report,
    Welcome,
)
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member
from firn_node.replication.rules import RULES
from firn_node.replication.state import LogView, Me, Meta, Role, Startup, State, Timing
from firn_node.replication.turn import Turn

GROUP = GroupId("orders-0")
A, B = LogId("a"), LogId("b")
MEMBERS = {A: Member("n0", "n0:1", 0), B: Member("n1", "n1:1", 1)}
ME = Me(GROUP, B, Incarnation("b1"), MEMBERS[B])
RECORD = GroupRecord(
    GROUP, version=5, epoch=Epoch(2), renewals=3, master=Master(A, Incarnation("a1")),
    in_sync=frozenset({A, B}), members=MEMBERS,
)  # fmt: skip
LOG = LogView(
    start=Position(0),
    written=Position(10),
    durable=Position(10),
    history=(EpochStart(Epoch(1), Position(0)),),
)
STANDBY = Startup(meta=Meta(epoch=Epoch(1), version=4, is_rebuilt=True), log=LOG)
TIMING = Timing()


def started(startup: Startup = STANDBY, me: Me = ME) -> State:
    """A process that has stored that it was started."""
    state, ordered = core.start(me, startup, TIMING, 0.0)
    state, _ = core.step(state, stored(list(ordered)), 0.0)
    return state


def steps(state: State, *events: ev.Event, now: float = 0.0) -> tuple[State, list[ev.Action]]:
    """The state after some events, and all that was ordered."""
    ordered: list[ev.Action] = []
    for event in events:
        state, actions = core.step(state, event, now)
        ordered += actions
    return state, ordered


def of(kind: type, ordered: list[ev.Action]) -> list[Any]:
    """The actions, or the messages sent, of a kind."""
    messages = [action.message for action in ordered if isinstance(action, ev.Send)]
    return [each for each in [*ordered, *messages] if isinstance(each, kind)]


def greeted() -> tuple[State, Handshake]:
    """A standby that has said Hello to the master, and has nothing left to store."""
    state, ordered = steps(started(), ev.RecordRead(RECORD))
    (hello,) = of(Hello, ordered)
    assert hello.header.handshake is not None
    state, _ = steps(state, stored(ordered))
    return state, hello.header.handshake


def welcome(handshake: Handshake, cut: int | None, *, forced_epoch: int = 0, epoch: int = 2) -> ev.Received:
    header = Header(GROUP, Epoch(epoch), A, handshake)
    position = None if cut is None else Position(cut)
    return ev.Received(Welcome(header, position, Position(20), Epoch(forced_epoch)))


def stored(ordered: list[ev.Action]) -> ev.MetaStored:
    """The answer to the last order to store."""
    return ev.MetaStored(of(ev.StoreMeta, ordered)[-1].meta)


def all_stored(state: State, ordered: list[ev.Action], now: float = 0.0) -> tuple[State, list[ev.Action]]:
    """Every order to store carried out, and those that follow; all that was ordered, from the first on."""
    carried_out = 0
    while len(stores := of(ev.StoreMeta, ordered)) > carried_out:
        state, more = steps(state, ev.MetaStored(stores[carried_out].meta), now=now)
        carried_out, ordered = carried_out + 1, [*ordered, *more]
    return state, ordered


def test_every_event_and_every_message_has_its_row_in_the_transition_table() -> None:
    assert set(core.EVENTS) == set(get_args(ev.Event)) - {ev.Received}
    assert set(core.MESSAGES) == set(get_args(Message))


def test_a_role_change_that_the_table_does_not_list_is_a_bug() -> None:
    turn = Turn(started(), 0.0, RULES)
    with pytest.raises(InvariantBroken, match="resigns"):
        turn.change_role("resigns")


def test_a_copy_of_a_state_has_no_other_fields() -> None:
    with pytest.raises(TypeError, match="rolle"):
        started().but(rolle=Role.MASTER)


# The record.


def test_a_consistent_read_of_an_older_record_stops_the_node() -> None:
    state, ordered = steps(started(), ev.RecordRead(replace(RECORD, version=3), at_least=4))
    assert state.role is Role.STOPPED
    assert "version 4" in of(ev.Stop, ordered)[0].reason


def test_an_older_record_from_a_cache_is_ignored() -> None:
    state, ordered = steps(started(), ev.RecordRead(replace(RECORD, version=3)))
    assert state.record is None
    assert not ordered


def test_a_node_with_a_log_that_finds_no_record_stops() -> None:
    state, ordered = steps(started(), ev.RecordRead(None, at_least=0))
    assert state.role is Role.STOPPED
    assert of(ev.Stop, ordered)


def test_a_node_that_finds_the_record_of_another_group_stops() -> None:
    other = replace(RECORD, group_id=GroupId("payments-0"))
    assert steps(started(), ev.RecordRead(other))[0].role is Role.STOPPED


def test_a_node_with_an_empty_log_makes_the_first_record_and_is_its_master() -> None:
    me = replace(ME, member=MEMBERS[A])
    state = started(Startup(Meta(), LogView()), me)
    state, ordered = steps(state, ev.RecordRead(None, at_least=0))
    (swap,) = of(ev.CompareAndSet, ordered)
    assert (swap.expected, swap.new.version, swap.new.epoch) == (0, 1, 1)
    state, ordered = steps(state, ev.SwapAnswered(swap.new, ev.Outcome.APPLIED))
    assert state.role is Role.MASTER
    assert not of(ev.AppendEpochStart, ordered), "the epoch is not durable yet"
    state, ordered = steps(state, stored(ordered))
    assert of(ev.AppendEpochStart, ordered) == [ev.AppendEpochStart(Epoch(1))]


def elected_first() -> tuple[State, list[ev.Action]]:
    """The master of an empty log, its epoch durable; what was ordered with that."""
    state = started(Startup(Meta(), LogView()), replace(ME, member=MEMBERS[A]))
    state, ordered = steps(state, ev.RecordRead(None, at_least=0))
    (swap,) = of(ev.CompareAndSet, ordered)
    state, ordered = steps(state, ev.SwapAnswered(swap.new, ev.Outcome.APPLIED))
    return steps(state, stored(ordered))


def test_an_epoch_start_that_a_full_disk_did_not_take_is_ordered_again_until_it_is_written() -> None:
    state, ordered = elected_first()
    assert of(ev.AppendEpochStart, ordered) == [ev.AppendEpochStart(Epoch(1))]
    state, ordered = steps(state, ev.Tick(), now=0.1)
    assert of(ev.AppendEpochStart, ordered) == [ev.AppendEpochStart(Epoch(1))]
    start = EpochStart(Epoch(1), Position(0))
    state, _ = steps(state, ev.Written(Position(100), starts=(start,)), now=0.1)
    state, ordered = steps(state, ev.Tick(), now=0.2)
    assert state.role is Role.MASTER
    assert not of(ev.AppendEpochStart, ordered)


def test_a_master_that_cannot_begin_its_epoch_for_a_lease_gives_way() -> None:
    state, _ = elected_first()
    state, ordered = steps(state, ev.Tick(), now=state.timing.lease_ttl)
    assert state.role is Role.STANDBY
    assert not of(ev.AppendEpochStart, ordered)
    assert [swap.new.master for swap in of(ev.CompareAndSet, ordered)] == [None]


def test_on_a_slow_disk_only_the_newest_facts_wait_to_be_stored() -> None:
    state, first = steps(started(), ev.RecordRead(RECORD))
    (storing,) = of(ev.StoreMeta, first)
    changes = [replace(RECORD, version=6 + n, epoch=Epoch(3 + n)) for n in range(20)]
    state, ordered = steps(state, *(ev.RecordRead(record) for record in changes))
    assert not of(ev.StoreMeta, ordered), "one is under way"
    state, ordered = steps(state, ev.MetaStored(storing.meta))
    (newest,) = of(ev.StoreMeta, ordered)
    assert newest.meta.version == 25
    state, ordered = steps(state, ev.MetaStored(newest.meta))
    assert not of(ev.StoreMeta, ordered)


def test_a_process_does_not_act_in_an_epoch_that_its_predecessor_asked_for() -> None:
    mine = replace(RECORD, master=Master(B, Incarnation("b0")))
    state, _ = steps(started(), ev.RecordRead(mine))
    assert state.role is Role.STANDBY


# The handshake.


def test_a_standby_cuts_once_the_epoch_is_durable_and_follows_once_the_cut_is() -> None:
    state, handshake = greeted()
    state, ordered = steps(state, welcome(handshake, 6))
    assert not of(ev.CutLog, ordered)
    state, ordered = steps(state, stored(ordered))
    assert of(ev.CutLog, ordered) == [ev.CutLog(Position(6))]
    assert not of(Report, ordered)
    state, ordered = steps(state, ev.LogCut(Position(6)))
    (report,) = of(Report, ordered)
    assert (report.written, report.durable, report.header.epoch) == (6, 6, 2)


def test_a_master_that_restarted_and_was_elected_again_is_greeted_at_once() -> None:
    state, handshake = greeted()
    state, ordered = steps(state, welcome(handshake, 10))
    state, _ = steps(state, stored(ordered))
    again = replace(RECORD, version=6, epoch=Epoch(3), master=Master(A, Incarnation("a2")))
    state, ordered = steps(state, ev.RecordRead(again))
    (hello,) = of(Hello, ordered)
    assert hello.header.epoch == 3
    state, ordered = steps(state, ev.RecordRead(replace(again, version=7)))
    assert not of(Hello, ordered), "a renewal is no reason"


def test_a_sync_that_began_before_the_cut_reports_nothing() -> None:
    state, handshake = greeted()
    state, ordered = steps(state, welcome(handshake, 6))
    state, _ = steps(state, stored(ordered), ev.LogCut(Position(6)), ev.Written(Position(10)))
    state, _ = steps(state, ev.Durable(Position(10), cuts=0))
    assert state.log.durable == 6
    state, _ = steps(state, ev.Durable(Position(10), cuts=1))
    assert state.log.durable == 10


def test_the_committed_position_is_not_taken_before_the_cut() -> None:
    state, handshake = greeted()
    committed = ev.Received(Committed(Header(GROUP, Epoch(2), A, handshake), Position(10), Position(20)))
    state, ordered = steps(state, committed, welcome(handshake, 6), committed)
    assert state.committed == 0
    state, _ = steps(state, stored(ordered), ev.LogCut(Position(6)), committed)
    assert state.committed == 6


def test_a_standby_had_everything_when_the_end_was_told_that_is_durable_now() -> None:
    state, handshake = greeted()
    state, ordered = steps(state, welcome(handshake, 10))
    state, _ = steps(state, stored(ordered))
    header = Header(GROUP, Epoch(2), A, handshake)

    def told(end: int) -> ev.Received:
        return ev.Received(Committed(header, Position(10), Position(end)))

    state, _ = steps(state, told(20), now=1.0)
    state, _ = steps(state, ev.Written(Position(20)), told(30), now=2.0)
    assert state.following is not None
    assert (state.following.end, state.following.caught_up_at) == (30, float("-inf"))
    state, _ = steps(state, ev.Durable(Position(20), cuts=0), now=3.0)
    assert state.following is not None
    assert state.following.caught_up_at == 1.0


def following(least_in_sync: int) -> State:
    """A standby that follows its master, in a group of two in sync."""
    state, handshake = greeted()
    state, ordered = steps(state, ev.TopicsChanged(least_in_sync), welcome(handshake, 10))
    state, _ = steps(state, stored(ordered))
    return state


def test_a_standby_that_is_about_to_stop_tells_its_master_and_follows_and_stands_no_more() -> None:
    state, ordered = steps(following(1), ev.LeaveAsked())
    assert len(of(Leave, ordered)) == 1
    assert state.following is None
    state, ordered = steps(state, ev.Tick(), now=100.0)
    assert not of(Hello, ordered)
    assert state.role is Role.STANDBY  # the record has been silent for long
    stands, _ = steps(following(1), ev.Tick(), now=100.0)
    assert stands.role is Role.CANDIDATE


def test_a_standby_that_the_group_cannot_spare_goes_on_following_until_it_stops() -> None:
    state, ordered = steps(following(2), ev.LeaveAsked())
    assert not of(Leave, ordered)
    assert state.following is not None


def test_a_candidate_that_is_about_to_stop_asks_for_nothing_more() -> None:
    state, _ = greeted()
    state, ordered = steps(state, ev.Tick(), now=9.0)
    assert state.role is Role.CANDIDATE
    state, ordered = steps(state, ev.LeaveAsked(), ev.Tick(), now=9.0 + TIMING.lease_ttl)
    assert state.role is Role.STANDBY
    assert not of(ev.CompareAndSet, ordered)


def test_a_cut_below_the_committed_position_without_accepted_loss_is_a_bug() -> None:
    state, handshake = greeted()
    state = state.but(committed=Position(8))
    state, ordered = steps(state, welcome(handshake, 6))
    assert of(ev.Stop, ordered)[0].is_bug
    assert not of(ev.CutLog, ordered)


def test_a_cut_below_the_committed_position_by_accepted_loss_keeps_the_tail_and_rebuilds() -> None:
    state, handshake = greeted()
    state = state.but(committed=Position(8))
    state, ordered = steps(state, welcome(handshake, 6, forced_epoch=2))
    assert not of(ev.Stop, ordered)[0].is_bug
    assert of(ev.Rebuild, ordered)[0].keeps_tail


def test_a_blank_node_that_began_past_a_new_masters_log_starts_anew() -> None:
    blank = Startup(Meta(), LogView())
    state, seen = steps(started(blank), ev.RecordRead(RECORD))
    state, _ = steps(state, stored(seen))
    handshake = of(Hello, seen)[0].header.handshake
    state, ordered = steps(state, welcome(handshake, 16))
    state, _ = steps(state, stored(ordered))
    state, _ = steps(
        state, ev.Received(Committed(Header(GROUP, Epoch(2), A, handshake), Position(16), Position(16)))
    )
    assert state.committed == 16
    state, ordered = steps(state, ev.Tick(), now=10.0)
    _, ordered = steps(state, welcome(of(Hello, ordered)[0].header.handshake, 8), now=10.0)
    assert not of(ev.Stop, ordered)[0].is_bug
    assert [each.keeps_tail for each in of(ev.Rebuild, ordered)] == [False]


def test_a_standby_without_an_epoch_in_common_is_rebuilt() -> None:
    state, handshake = greeted()
    state, ordered = steps(state, welcome(handshake, None))
    assert of(ev.Rebuild, ordered)
    assert state.role is Role.STOPPED


def test_an_empty_log_begins_anew_under_a_master_whose_log_begins_earlier() -> None:
    blank = Startup(Meta(), LogView())
    state, seen = steps(started(blank), ev.RecordRead(RECORD))
    state, _ = steps(state, stored(seen))
    state, ordered = steps(state, welcome(of(Hello, seen)[0].header.handshake, 16))
    state, ordered = steps(state, stored(ordered))
    assert of(ev.BeginLog, ordered) == [ev.BeginLog(Position(16))]
    state, ordered = steps(state, ev.Tick(), now=10.0)
    state, ordered = steps(state, welcome(of(Hello, ordered)[0].header.handshake, 8), now=10.0)
    assert of(ev.BeginLog, ordered) == [ev.BeginLog(Position(8))]
    assert not of(ev.CutLog, ordered)
    assert (state.log.start, state.log.written) == (8, 8)


def test_a_lower_epoch_is_refused_with_the_one_that_is_known() -> None:
    state, handshake = greeted()
    state, ordered = steps(state, welcome(handshake, 6, epoch=1))
    (refusal,) = [each.message for each in of(ev.Send, ordered)]
    assert refusal.header.epoch == 2
    assert state.following is not None
    assert state.following.phase.value == "asked"


def test_a_message_of_another_group_is_dropped() -> None:
    state, handshake = greeted()
    header = Header(GroupId("payments-0"), Epoch(9), A, handshake)
    after, ordered = steps(state, ev.Received(Welcome(header, Position(6), Position(20), Epoch(0))))
    assert after == state
    assert not ordered


# The master.


def acting() -> State:
    """A master of epoch 1, alone in its group, with a lease from second 0 on."""
    me = replace(ME, member=MEMBERS[A])
    state = started(Startup(Meta(), LogView()), me)
    state, ordered = steps(state, ev.RecordRead(None, at_least=0))
    state, ordered = steps(state, ev.SwapAnswered(of(ev.CompareAndSet, ordered)[0].new, ev.Outcome.APPLIED))
    state, _ = steps(
        state,
        stored(ordered),
        ev.Written(Position(1), (EpochStart(Epoch(1), Position(0)),)),
        ev.StateLoaded(Epoch(1)),
    )
    return state


def test_a_standby_refuses_writes_and_names_the_master() -> None:
    state, _ = greeted()
    refused = core.write_refusal(state, 0.0, 1)
    assert isinstance(refused, NotMaster)
    assert refused.details["address"] == "n0:1"


def test_a_standby_names_no_master_of_which_it_hears_no_more() -> None:
    state, _ = greeted()
    for now, is_named in ((TIMING.named_for, True), (TIMING.named_for + 0.001, False)):
        refused = core.write_refusal(state, now, 1)
        assert isinstance(refused, NotMaster)
        assert (refused.details["address"] is not None) is is_named
    renewed = replace(RECORD, version=RECORD.version + 1, renewals=RECORD.renewals + 1)
    state, _ = steps(state, ev.RecordRead(renewed), now=10.0)
    assert core.master_address(state, 10.0 + TIMING.named_for) == "n0:1"


def test_writes_and_reads_end_with_two_thirds_of_the_lease() -> None:
    state, _ = steps(acting(), ev.Durable(Position(1), 0), ev.Dispatched(Position(1)))
    just_before, just_after = TIMING.lease - 0.01, TIMING.lease + 0.01
    assert core.write_refusal(state, just_before, 1) is None
    assert core.may_read(state, just_before)
    assert isinstance(core.write_refusal(state, just_after, 1), NotMaster)
    assert not core.may_read(state, just_after)


def test_a_new_master_reads_nothing_before_its_epoch_start_is_committed_and_dispatched() -> None:
    state = acting()
    assert not core.may_read(state, 0.0)
    state, _ = steps(state, ev.Durable(Position(1), 0))
    assert not core.may_read(state, 0.0)
    state, _ = steps(state, ev.Dispatched(Position(1)))
    assert core.may_read(state, 0.0)


def test_a_swap_without_an_answer_counts_until_a_newer_version_is_read() -> None:
    state = acting()
    assert state.record is not None
    asked = replace(
        state.record, version=2, in_sync=frozenset({A, B}), members={**state.record.members, A: MEMBERS[A]}
    )
    turn = Turn(state, 0.0, RULES)
    turn.ask(asked)
    state, _ = steps(turn.state, ev.SwapAnswered(asked, ev.Outcome.UNKNOWN))
    assert RULES.counted(state) == {A, B}
    state, _ = steps(
        state, ev.SwapAnswered(asked, ev.Outcome.CONFLICT), ev.RecordRead(state.record, at_least=1)
    )
    assert RULES.counted(state) == {A, B}
    newer = replace(state.record, version=2, renewals=1) if state.record is not None else asked
    state, _ = steps(state, ev.RecordRead(newer))
    assert RULES.counted(state) == {B}


def test_a_stopped_node_takes_no_further_step() -> None:
    state, _ = steps(started(), ev.RecordRead(None, at_least=0))
    higher = Committed(Header(GROUP, Epoch(9), A), Position(1), Position(1))
    assert steps(state, ev.RecordRead(RECORD), ev.Received(higher), ev.Tick(), now=9.0) == (state, [])


def test_a_master_that_stepped_down_does_not_act_in_that_epoch_again() -> None:
    state = acting()
    deposed = Committed(Header(GROUP, Epoch(2), A), Position(1), Position(1))
    state, _ = steps(state, ev.Received(deposed))
    assert state.role is Role.STANDBY
    assert state.record is not None
    state, _ = steps(state, ev.RecordRead(replace(state.record, version=2, renewals=1)))
    assert state.role is Role.STANDBY


def test_who_was_elected_below_an_epoch_that_it_has_heard_of_does_not_act() -> None:
    alone = replace(RECORD, in_sync=frozenset({A, B}), master=None)
    state, ordered = steps(started(), ev.RecordRead(alone), ev.Tick())
    assert state.role is Role.CANDIDATE
    state, ordered = steps(state, ev.Tick(), now=5.0)
    (swap,) = of(ev.CompareAndSet, ordered)
    assert swap.new.epoch == 3
    higher = Committed(Header(GROUP, Epoch(9), A), Position(1), Position(1))
    state, ordered = steps(state, ev.Received(higher), ev.SwapAnswered(swap.new, ev.Outcome.APPLIED), now=5.0)
    assert state.role is Role.STANDBY
    assert state.epoch == 9
    assert not of(ev.AppendEpochStart, ordered)


def test_a_late_answer_that_there_is_no_record_makes_none_once_one_is_known() -> None:
    blank = started(Startup(meta=Meta(), log=LogView()))
    state, _ = steps(blank, ev.RecordRead(replace(RECORD, version=1, epoch=Epoch(1))), now=9.0)
    state, ordered = steps(replace(state, stored=Meta()), ev.RecordRead(None, at_least=0), now=9.1)
    assert of(ev.CompareAndSet, ordered) == []
    _, ordered = steps(blank, ev.RecordRead(None, at_least=0), now=9.1)
    assert len(of(ev.CompareAndSet, ordered)) == 1


# Elections that need more than the record.


def unclean_candidate(record: GroupRecord) -> tuple[State, Handshake]:
    """A standby that may have lost something, and asks the others; the name of its questions."""
    startup = replace(STANDBY, meta=replace(STANDBY.meta, is_unclean=True))
    state, _ = steps(started(startup), ev.RecordRead(record))
    return standing_again(state, now=9.0)


def standing_again(state: State, *, now: float) -> tuple[State, Handshake]:
    state, ordered = steps(state, ev.Tick(), now=now)
    assert state.role is Role.CANDIDATE
    (ask,) = of(Ask, ordered)
    assert ask.header.handshake is not None
    return state, ask.header.handshake


def unclean_answer(name: Handshake | None) -> ev.Received:
    header = Header(GROUP, RECORD.epoch, A, name)
    return ev.Received(
        Answer(header, RECORD.version, Epoch(1), Position(5), is_unclean=True, may_stand=False)
    )


def test_an_unclean_node_stands_once_all_in_sync_answer_that_they_are_unclean_too() -> None:
    state, name = unclean_candidate(RECORD)
    _, ordered = steps(state, unclean_answer(name), now=9.0)
    assert of(ev.CompareAndSet, ordered)[0].new.master == ME.as_master


def test_an_unclean_node_does_not_stand_on_a_late_answer_to_its_earlier_candidacy() -> None:
    state, earlier = unclean_candidate(RECORD)
    state, _ = steps(state, ev.RecordRead(replace(RECORD, version=6)), now=9.1)
    assert state.role is Role.STANDBY
    state, now_asked = standing_again(state, now=19.0)
    assert now_asked != earlier
    _, ordered = steps(state, unclean_answer(earlier), now=19.0)
    assert not of(ev.CompareAndSet, ordered)


@pytest.mark.parametrize("asks", [Ask, Fence])
def test_an_answer_carries_the_name_of_its_question(asks: type[Ask] | type[Fence]) -> None:
    name = Handshake(Incarnation("a1"), 7)
    state, ordered = steps(started(), ev.RecordRead(RECORD))
    state, ordered = all_stored(
        *steps(state, ev.Received(asks(Header(GROUP, Epoch(3), A, name), 5)), stored(ordered))
    )
    (answer,) = of(Answer, ordered)
    assert answer.header.handshake == name


def test_others_follow_a_master_by_accepted_data_loss_once_its_log_is_durable() -> None:
    log = replace(LOG, durable=Position(6))
    state, _ = all_stored(*steps(started(replace(STANDBY, log=log)), ev.RecordRead(RECORD)))
    state, _ = steps(state, ev.DataLossAccepted("a person"), now=9.0)
    state, ordered = steps(state, ev.Tick(), now=10.0)
    (swap,) = of(ev.CompareAndSet, ordered)
    assert swap.new.forced_epoch == 3
    state, ordered = steps(state, ev.SwapAnswered(swap.new, ev.Outcome.APPLIED), now=10.0)
    began = ev.Written(Position(11), (EpochStart(Epoch(3), Position(10)),))
    state, _ = steps(state, stored(ordered), began, now=10.0)
    hello = Hello(
        Header(GROUP, Epoch(2), A, Handshake(Incarnation("a1"), 1)), MEMBERS[A], LOG.history,
        Position(10), Position(0), is_rebuilt=True,
    )  # fmt: skip
    _, ordered = steps(state, ev.Received(hello), now=10.0)
    assert of(Refusal, ordered)
    assert not of(Welcome, ordered)
    _, ordered = steps(state, ev.Durable(Position(10), 0), ev.Received(hello), now=10.0)
    assert [welcome.cut for welcome in of(Welcome, ordered)] == [10]


def test_a_second_process_of_a_moved_folder_takes_no_boot_of_its_own_for_the_death_of_the_first() -> None:
    """The volume came from another machine, where the master may live on with its lease."""
    mine = replace(RECORD, master=Master(B, Incarnation("b0")))
    moved = replace(
        STANDBY, meta=replace(STANDBY.meta, boot_id="there"), boot_id="here", old_process_is_dead=False
    )
    state, ordered = all_stored(*steps(started(moved), ev.RecordRead(mine)))
    assert {store.meta.boot_id for store in of(ev.StoreMeta, ordered)} == {"there"}
    assert state.stored.boot_id == "there"
    elsewhere = replace(mine, version=6, epoch=Epoch(3), master=Master(A, Incarnation("a1")))
    state, ordered = all_stored(*steps(state, ev.RecordRead(elsewhere)))
    assert state.stored.boot_id == "here"


def hello_of(incarnation: str, number: int, start: int) -> ev.Received:
    header = Header(GROUP, Epoch(1), A, Handshake(Incarnation(incarnation), number, start))
    return ev.Received(Hello(header, MEMBERS[A], LOG.history, Position(1), Position(0), is_rebuilt=True))


def test_a_hello_of_an_older_process_does_not_take_the_place_of_a_newer_one() -> None:
    """It was under way for long, or the volume has moved and the older process lives on."""
    state, ordered = steps(replace(acting(), me=ME), hello_of("a1", 9, 3), hello_of("a2", 1, 4))
    assert len(of(Welcome, ordered)) == 2
    _, ordered = steps(state, hello_of("a1", 10, 3))
    assert not of(Welcome, ordered)
    _, ordered = steps(state, hello_of("a2", 2, 4))
    assert len(of(Welcome, ordered)) == 1


def test_each_start_of_a_folder_is_counted() -> None:
    state, ordered = core.start(ME, replace(STANDBY, meta=replace(STANDBY.meta, starts=6)), TIMING, 0.0)
    assert of(ev.StoreMeta, list(ordered))[0].meta.starts == 7
    _, ordered = core.step(state, ev.RecordRead(RECORD), 0.0)
    assert of(Hello, list(ordered))[0].header.handshake.start == 7


def test_a_standby_stands_as_soon_as_it_reads_that_nobody_is_master() -> None:
    state, _ = greeted()
    state, ordered = steps(state, ev.RecordRead(replace(RECORD, version=6, master=None, successor=B)))
    assert state.role is Role.CANDIDATE
    assert of(Ask, ordered)
    state, _ = steps(greeted()[0], ev.RecordRead(replace(RECORD, version=6)))
    assert state.role is Role.STANDBY


# The members.


def with_a_standby(state: State) -> tuple[State, Handshake]:
    """A master that another replica follows, in sync; the name of their handshake."""
    handshake = Handshake(Incarnation("a1"), 1, 1)
    state, ordered = steps(
        state,
        ev.Durable(Position(1), cuts=0),
        hello_of("a1", 1, 1),
        report_of(handshake, 1),
        ev.Tick(),
        now=1.0,
    )
    state, ordered = steps(state, applied(ordered), report_of(handshake, 1), ev.Tick(), now=2.0)
    state, _ = steps(state, applied(ordered), now=2.0)
    assert state.record is not None
    assert state.record.in_sync == {A, B}
    return state, handshake


def report_of(handshake: Handshake, end: int) -> ev.Received:
    header = Header(GROUP, Epoch(1), A, handshake)
    return ev.Received(Report(header, Position(end), Position(end), is_rebuilt=True))


def leave_of(handshake: Handshake) -> ev.Received:
    return ev.Received(Leave(Header(GROUP, Epoch(1), A, handshake), "it is about to stop"))


def test_a_master_that_hands_over_resigns_with_the_report_that_its_successor_has_everything() -> None:
    state, handshake = with_a_standby(acting())
    state, ordered = steps(
        state, ev.Written(Position(9)), ev.Durable(Position(9), cuts=0), ev.SwitchoverAsked(A), now=2.0
    )
    assert not of(ev.CompareAndSet, ordered)
    state, ordered = steps(state, report_of(handshake, 9), now=2.1)
    (asked,) = of(ev.CompareAndSet, ordered)
    assert (asked.new.master, asked.new.successor) == (None, A)
    assert state.role is Role.STANDBY


def test_a_master_that_hands_over_resigns_once_its_own_log_is_durable_too() -> None:
    state, handshake = with_a_standby(acting())
    state, ordered = steps(
        state, ev.Written(Position(9)), ev.SwitchoverAsked(A), report_of(handshake, 9), now=2.0
    )
    assert not of(ev.CompareAndSet, ordered)
    state, ordered = steps(state, ev.Durable(Position(9), cuts=0), now=2.1)
    assert of(ev.CompareAndSet, ordered)[0].new.successor == A


def test_what_a_replica_reported_before_it_left_does_not_take_it_in_again() -> None:
    state, handshake = with_a_standby(acting())
    state, ordered = steps(state, leave_of(handshake), ev.Tick(), now=2.5)
    state, ordered = steps(state, applied(ordered), report_of(handshake, 1), ev.Tick(), now=3.0)
    assert state.record is not None
    assert state.record.in_sync == {B}
    assert all(each.new.in_sync == {B} for each in of(ev.CompareAndSet, ordered))


def test_a_word_of_leaving_that_comes_after_the_next_hello_is_too_late() -> None:
    state, handshake = with_a_standby(acting())
    state, ordered = steps(state, hello_of("a2", 1, 2), leave_of(handshake), ev.Tick(), now=2.5)
    assert all(each.new.in_sync == {A, B} for each in of(ev.CompareAndSet, ordered))
    assert RULES.counted(state) == {A, B}


def applied(ordered: list[ev.Action]) -> ev.SwapAnswered:
    """The coordinator's answer to the last request."""
    return ev.SwapAnswered(of(ev.CompareAndSet, ordered)[-1].new, ev.Outcome.APPLIED)


def test_a_replica_that_came_back_under_another_log_id_stays_a_member_until_it_reports() -> None:
    me = replace(ME, member=MEMBERS[A])
    state = started(Startup(Meta(), LogView()), me)
    state, ordered = steps(state, ev.RecordRead(None, at_least=0))
    state, ordered = steps(state, applied(ordered))
    start = ev.Written(Position(1), (EpochStart(Epoch(1), Position(0)),))
    state, _ = steps(state, stored(ordered), start, ev.Durable(Position(1), cuts=0))
    node = Member("n2", "n2:1", 2)

    def header(log_id: str) -> Header:
        return Header(GROUP, Epoch(1), LogId(log_id), Handshake(Incarnation(f"{log_id}/1"), 1))

    def greeting(log_id: str) -> ev.Received:
        return ev.Received(Hello(header(log_id), node, (), Position(0), Position(0), is_rebuilt=False))

    old = ev.Received(Report(header("old"), Position(1), Position(1), is_rebuilt=True))
    state, ordered = steps(state, greeting("old"), old, ev.Tick(), now=1.0)
    state, ordered = steps(state, applied(ordered), old, ev.Tick(), now=2.0)
    state, _ = steps(state, applied(ordered), now=2.0)
    assert state.record is not None
    assert state.record.in_sync == {ME.log_id, "old"}
    leave = ev.Received(Leave(header("old"), "its log is damaged"))
    state, ordered = steps(state, greeting("new"), leave, now=3.0)
    state, ordered = steps(state, applied(ordered), ev.Tick(), now=3.5)
    state, ordered = steps(state, applied(ordered), ev.Tick(), now=4.0)
    assert set(of(ev.CompareAndSet, ordered)[-1].new.members) == {ME.log_id, "new"}


def test_a_replica_that_fell_silent_does_not_join_again_on_its_last_report() -> None:
    """While nothing is written that report goes on to hold all that is committed: it left and joined in turn."""
    handshake = Handshake(Incarnation("a1"), 1, 1)
    report = Report(Header(GROUP, Epoch(1), A, handshake), Position(1), Position(1), is_rebuilt=True)
    state, _ = steps(acting(), hello_of("a1", 1, 1), ev.Received(report))
    mastery, record = state.mastery, state.record
    assert mastery is not None
    assert record is not None
    known = replace(record, members={**record.members, A: MEMBERS[A]})

    def in_sync_at(now: float) -> frozenset[LogId]:
        return plan_change(state, known, mastery, now, RULES).new.in_sync

    assert in_sync_at(TIMING.replica_max_lag - 0.1) == {A, B}
    assert in_sync_at(TIMING.replica_max_lag + 0.1) == {B}
