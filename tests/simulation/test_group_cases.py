"""What a group does in single cases: a whole simulated group, one fault at a time, nothing left to chance.

Every step of every node is checked by the invariants, so a case only has to say what must come of it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from firn_sim.checkers import Violated
from firn_sim.coordinator import CoordinatorFaults
from firn_sim.faults import Profile
from firn_sim.firnlog import FirnLog
from firn_sim.group import Group
from firn_sim.network import NetworkFaults
from firn_sim.node import Options, SimNode
from firn_sim.replicalog import ReplicaLog
from firn_sim.stopping import OrderlyStop

from firn.errors import NotEnoughInSync, NotMaster
from firn_node.replication import core
from firn_node.replication import events as ev
from firn_node.replication.messages import Header, Hello, Refusal
from firn_node.replication.state import Role

CALM = Profile(weights={}, fault_after_change=0.0, drift=0.0, write_every=0.05, idle=0.0)
TTL = CALM.options.timing.lease_ttl


def calm(make_log: type[ReplicaLog] = ReplicaLog, **changes: Any) -> Group:
    """A group that has come up: n0 is master, all are in sync."""
    profile = replace(CALM, **changes)
    group = Group(1, profile, make_log=make_log)
    group.nodes[0].start()
    group.begin()
    group.world.run(6.0)
    assert master(group) is group.nodes[0]
    assert in_sync(group) == {"n0", "n1", "n2"}
    return group


def master(group: Group) -> SimNode | None:
    """The node that acts by the record, if it does."""
    record = group.coordinator.record
    for node in group.nodes:
        state = node.state
        if record is None or state is None or state.mastery is None:
            continue
        if record.master == state.me.as_master and record.epoch == state.mastery.epoch:
            return node
    return None


def begins(group: Group) -> int | None:
    """Where the epoch of the acting master starts."""
    node = master(group)
    return node.state.mastery.start if node is not None and node.state and node.state.mastery else None


def in_sync(group: Group) -> set[str]:
    record = group.coordinator.record
    names = {node.folder.log_id: node.name for node in group.nodes}
    return {names.get(log_id, log_id) for log_id in record.in_sync} if record is not None else set()


def members(group: Group) -> set[str]:
    record = group.coordinator.record
    return set(record.members) if record is not None else set()


def until(group: Group, holds: Callable[[], bool], within: float) -> float:
    """Seconds until something holds; fails when it does not within so many."""
    began = group.world.now
    while not holds():
        assert group.world.now - began < within, f"not within {within} s: {group.coordinator.record}"
        group.world.run(group.world.now + 0.01)
    return group.world.now - began


def acknowledges(group: Group) -> Callable[[], bool]:
    """Whether a write was acknowledged since now."""
    before = group.counts.acknowledged
    return lambda: group.counts.acknowledged > before


def isolate(group: Group, node: SimNode) -> None:
    for other in group.nodes:
        group.network.cuts |= {(node.name, other.name), (other.name, node.name)}


def test_a_killed_master_is_replaced_within_its_lease_and_two_seconds() -> None:
    group = calm()
    group.nodes[0].kill()
    group.world.run(group.world.now + 0.1)
    until(group, acknowledges(group), within=TTL + 2.0)
    assert master(group) in group.nodes[1:]


def test_a_master_paused_for_longer_than_its_lease_acknowledges_nothing_when_it_goes_on() -> None:
    group = calm()
    old = group.nodes[0]
    old.pause()
    until(group, lambda: master(group) is not old and master(group) is not None, within=TTL + 2.0)
    group.stop_clients()
    state = old.state
    assert state is not None
    assert isinstance(core.write_refusal(state, old.now, 1), NotMaster)
    assert not core.may_read(state, old.now)
    old.resume()
    until(group, lambda: old.state is not None and old.state.role is Role.STANDBY, within=2.0)
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=4 * TTL)


def test_a_pause_of_half_a_lease_elects_nobody() -> None:
    group = calm()
    group.nodes[0].pause()
    group.world.run(group.world.now + TTL / 2)
    group.nodes[0].resume()
    group.world.run(group.world.now + 2 * TTL)
    assert group.counts.elections == 1
    assert master(group) is group.nodes[0]


def test_a_master_without_the_coordinator_stops_before_another_one_acts() -> None:
    group = calm(drift=0.1)
    old = group.nodes[0]
    group.coordinator.unreachable.add(old.name)
    until(group, lambda: old.state is not None and not core.may_read(old.state, old.now), within=TTL)
    assert master(group) is old
    assert old.state is not None
    assert isinstance(core.write_refusal(old.state, old.now, 1), NotMaster)
    until(group, lambda: master(group) not in (old, None), within=TTL)


def test_a_coordinator_that_is_down_for_less_than_a_lease_changes_nothing() -> None:
    group = calm()
    group.coordinator.is_down = True
    group.world.run(group.world.now + TTL / 3)
    group.coordinator.is_down = False
    group.world.run(group.world.now + 2 * TTL)
    assert group.counts.elections == 1


def test_a_coordinator_that_went_back_to_an_older_record_stops_the_nodes() -> None:
    group = calm()
    del group.coordinator.history[-5:]
    group.world.run(group.world.now + 2.0)
    assert [node.state.role for node in group.nodes if node.state is not None] == [Role.STOPPED] * 3


def test_latency_of_200_milliseconds_elects_nobody() -> None:
    group = calm(network=NetworkFaults(delay=(0.19, 0.21)))
    group.world.run(group.world.now + 10 * TTL)
    assert group.counts.elections == 1
    assert in_sync(group) == {"n0", "n1", "n2"}


def test_a_standby_on_a_long_link_joins_under_a_steady_load() -> None:
    group = calm(network=NetworkFaults(delay=(0.1, 0.11)), write_every=0.01)
    group.nodes[2].kill()
    until(group, lambda: in_sync(group) == {"n0", "n1"}, within=2 * TTL)
    group.nodes[2].start()
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=2 * TTL)


def test_a_standby_that_was_stopped_in_order_joins_again_on_a_long_link_under_a_steady_load() -> None:
    group = calm(network=NetworkFaults(delay=(0.1, 0.11)), write_every=0.01)
    node = group.nodes[2]
    node.feed(ev.LeaveAsked())
    until(group, lambda: in_sync(group) == {"n0", "n1"}, within=0.5)
    node.shut_down()
    group.world.run(group.world.now + 0.5)
    node.start()
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=2 * TTL)


def test_a_broker_that_is_told_to_stop_hands_over_and_leaves_before_it_is_gone() -> None:
    group = calm()
    old, stopped = group.nodes[0], list[SimNode]()
    OrderlyStop(old, group.world, group.rng, stopped.append).begin()
    until(group, lambda: bool(stopped), within=1.0)
    assert in_sync(group) == {"n1", "n2"}
    assert master(group) in group.nodes[1:]
    until(group, acknowledges(group), within=0.5)
    old.start()
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=TTL)
    assert group.counts.elections == 2


def test_a_master_without_a_standby_stops_at_once_when_told_to() -> None:
    group = calm()
    for node in group.nodes[1:]:
        node.kill()
    until(group, lambda: in_sync(group) == {"n0"}, within=2 * TTL)
    stopped: list[SimNode] = []
    OrderlyStop(group.nodes[0], group.world, group.rng, stopped.append).begin()
    until(group, lambda: bool(stopped), within=0.1)


def test_two_standbys_that_stop_at_once_do_not_take_their_masters_place() -> None:
    group = calm()
    for node in group.nodes[1:]:
        OrderlyStop(node, group.world, group.rng, lambda node: None).begin()
    until(group, lambda: in_sync(group) == {"n0"}, within=1.0)
    until(group, acknowledges(group), within=0.5)
    assert master(group) is group.nodes[0]


def test_a_master_that_hands_over_stops_at_once() -> None:
    group = calm()
    old = group.nodes[0]
    old.feed(ev.SwitchoverAsked(group.nodes[2].folder.log_id))
    assert old.state is not None
    assert core.write_refusal(old.state, old.now, 1) is not None
    assert not core.may_read(old.state, old.now)


def test_twenty_switchovers_go_to_whom_they_were_meant_for_within_a_second_each() -> None:
    group = calm()
    for round in range(20):
        old, successor = group.nodes[round % 3], group.nodes[(round + 1) % 3]
        group.world.run(group.world.now + group.rng.uniform(0.5, 1.0))
        old.feed(ev.SwitchoverAsked(successor.folder.log_id))
        until(group, lambda node=successor: master(group) is node, within=1.0)
        until(group, acknowledges(group), within=0.5)
        until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=TTL)
    assert group.counts.elections == 21


def test_a_switchover_to_a_node_that_does_not_catch_up_is_given_up() -> None:
    group = calm()
    old, successor = group.nodes[0], group.nodes[2]
    successor.pause()
    group.world.run(group.world.now + 0.2)
    old.feed(ev.SwitchoverAsked(successor.folder.log_id))
    until(group, lambda: old.state is not None and old.state.role is Role.RESIGNING, within=1.0)
    until(group, lambda: old.state is not None and old.state.role is Role.MASTER, within=TTL + 1.0)
    assert group.counts.elections == 1


def test_a_write_below_min_in_sync_is_refused_before_it_is_appended() -> None:
    group = calm()
    group.nodes[1].kill()
    group.nodes[2].kill()
    until(group, lambda: in_sync(group) == {"n0"}, within=2 * TTL)
    node = group.nodes[0]
    end = node.folder.log.written
    assert node.state is not None
    assert isinstance(core.write_refusal(node.state, node.now, 2), NotEnoughInSync)
    assert not node.write([node.folder.log.entry(0, 7)], 10**9, 2, is_interval=False)
    assert node.folder.log.written == end


def test_a_master_cut_off_from_good_standbys_resigns_before_it_shrinks_too_far() -> None:
    group = calm(options=Options(largest_min_in_sync=2))
    old = group.nodes[0]
    isolate(group, old)
    until(group, lambda: master(group) not in (old, None), within=2 * TTL)
    assert in_sync(group) >= {"n1", "n2"}


def test_a_master_that_nobody_followed_shrinks_in_the_end() -> None:
    group = calm(options=Options(largest_min_in_sync=2))
    group.nodes[1].kill()
    group.nodes[2].kill()
    until(group, lambda: group.counts.resignations > 0, within=2 * TTL)
    until(group, lambda: in_sync(group) == {"n0"} and master(group) is group.nodes[0], within=4 * TTL)


def test_a_lost_disk_comes_back_as_another_replica_of_the_same_node() -> None:
    group = calm()
    old = group.nodes[2].folder.log_id
    group.nodes[2].lose_disk()
    group.world.run(group.world.now + 1.0)
    group.nodes[2].start()
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=4 * TTL)
    until(group, lambda: old not in members(group), within=2 * TTL)
    assert len(members(group)) == 3


def test_a_removed_member_leaves_in_sync_before_it_leaves_the_members() -> None:
    group = calm()
    gone = group.nodes[2].folder.log_id
    group.nodes[0].feed(ev.RemovalAsked(gone))
    version = group.coordinator.version
    until(group, lambda: gone not in members(group), within=TTL)
    between = [r for r in group.coordinator.history if r.version > version and gone in r.members]
    assert any(gone not in r.in_sync for r in between)
    group.world.run(group.world.now + 2 * TTL)
    assert gone not in members(group)


def test_a_member_whose_removal_is_withdrawn_joins_again() -> None:
    group = calm()
    gone = group.nodes[2].folder.log_id
    group.nodes[0].feed(ev.RemovalAsked(gone))
    until(group, lambda: gone not in members(group), within=TTL)
    group.nodes[0].feed(ev.RemovalAsked(gone, is_withdrawn=True))
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=4 * TTL)
    assert gone in members(group)


def test_only_accepted_data_loss_makes_a_node_outside_in_sync_master() -> None:
    group = calm()
    left = group.nodes[2]
    isolate(group, left)
    group.coordinator.unreachable.add(left.name)
    until(group, lambda: in_sync(group) == {"n0", "n1"}, within=2 * TTL)
    group.world.run(group.world.now + 1.0)
    group.nodes[0].kill()
    group.nodes[1].kill()
    group.network.cuts.clear()
    group.coordinator.unreachable.clear()
    group.world.run(group.world.now + 4 * TTL)
    assert master(group) is None
    left.feed(ev.DataLossAccepted("a person"))
    until(group, lambda: master(group) is left, within=2 * TTL)
    assert group.coordinator.record is not None
    assert group.coordinator.record.forced_epoch == group.coordinator.record.epoch
    before = {node.name: node.folder.log_id for node in group.nodes}
    group.nodes[0].start()
    group.nodes[1].start()
    until(group, lambda: in_sync(group) == {"n0", "n1", "n2"}, within=6 * TTL)
    assert left.folder.log_id == before["n2"]


def test_a_group_that_lost_power_as_a_whole_elects_the_longest_log_of_interval_writes() -> None:
    group = calm(options=Options(has_interval=True))
    for node in group.nodes:
        node.lose_power()
    group.checkers.excuse()
    longest = max(node.folder.log.written for node in group.nodes)
    for node in group.nodes:
        node.start()
    until(group, lambda: begins(group) is not None, within=2 * TTL)
    assert begins(group) == longest


def test_one_unclean_node_waits_for_the_others() -> None:
    group = calm(options=Options(has_interval=True))
    group.nodes[0].lose_power()
    group.nodes[0].start()
    until(group, lambda: master(group) in group.nodes[1:], within=TTL + 2.0)


def test_a_late_hello_of_an_earlier_handshake_does_not_silence_the_stream() -> None:
    group = calm()
    node, standby = group.nodes[0], group.nodes[1]
    state = standby.state
    assert state is not None
    assert state.following is not None
    newest = state.following.handshake
    refused = Refusal(
        Header(state.me.group_id, state.epoch, node.folder.log_id, newest), "not the acting master"
    )
    standby.feed(ev.Received(refused))
    group.world.run(group.world.now + 2.0)
    assert standby.state is not None
    assert standby.state.following is not None
    assert standby.state.following.handshake.number > newest.number
    header = Header(state.me.group_id, state.epoch, state.me.log_id, newest)
    late = Hello(header, state.me.member, state.log.history, state.log.written, state.committed, True)
    node.feed(ev.Received(late))
    committed = node.state.committed if node.state is not None else 0
    group.world.run(group.world.now + 2.0)
    assert node.state is not None
    assert node.state.committed > committed
    assert in_sync(group) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("seed", range(4))
def test_who_is_named_by_a_switchover_stays_master_while_the_coordinator_answers_within_a_fifth_of_a_lease(
    seed: int,
) -> None:
    """Slow links, disks and requests alone have nobody else elected, however often the master changes."""
    profile = replace(
        CALM,
        fault_every=2.0,
        weights={"handover": 1.0},
        network=NetworkFaults(delay=(0.001, 0.1)),
        sync=(0.005, 0.15),
        coordinator=CoordinatorFaults(late_request=0.3, late_delay=(0.05, TTL / 5)),
    )
    counts = Group(seed, profile).run_faults()
    assert counts.elections > 5
    assert counts.failovers == 0


@pytest.mark.parametrize("make_log", [ReplicaLog, FirnLog])
def test_once_quiet_all_replicas_hold_the_same_map_also_of_what_their_logs_let_go_of(
    make_log: type[ReplicaLog],
) -> None:
    group = calm(make_log)
    for node in group.nodes:
        node.release(node.folder.log.durable)
    assert all(node.folder.compacted and node.folder.log.start > 0 for node in group.nodes)
    until(group, acknowledges(group), within=2.0)
    group.check_live()
    group.nodes[1].folder.compacted[b"deleted"] = b"and back"
    with pytest.raises(Violated, match="SameView"):
        group.check_live()


def test_a_standby_shows_nobody_less_than_they_were_shown_before() -> None:
    group = calm()
    standby = group.nodes[1]
    assert group.counts.standby_reads > 0
    isolate(group, standby)
    until(group, acknowledges(group), within=5.0)
    group.world.run(group.world.now + 0.2)
    assert standby.state is not None
    here = standby.state.dispatched
    assert here < group.checkers.seen
    assert standby.read_here(group.checkers.seen) is None
    group.checkers.shown[0] = here + 1
    with pytest.raises(Violated, match="ReadFresh"):
        group.checkers.read_at_standby(standby, 0, here)


def test_a_standby_that_shows_what_was_not_committed_is_found_out() -> None:
    group = calm()
    group.stop_clients()
    group.world.run(group.world.now + 1.0)
    standby, end = group.nodes[1], group.checkers.committed.end
    group.checkers.read_at_standby(standby, 0, end)
    log = standby.folder.log
    log.cut(log.ends[log.ends.index(end) - 1])
    log.append([log.entry(1, 10**15)])
    with pytest.raises(Violated, match="CommittedPrefix"):
        group.checkers.read_at_standby(standby, 0, end)
