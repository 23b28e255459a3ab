"""The guard, over random states of a group: what it allows never takes the last good replica away."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn_operator.guard import (
    UNREADABLE,
    GroupView,
    PodView,
    RecordView,
    best_successor,
    may_discard,
    may_stop,
    may_take_over,
    record_of,
)  # fmt: skip
from firn_operator.names import RECORD

NODES = [f"g-{number}" for number in range(5)]


@st.composite
def groups(draw: st.DrawFn) -> GroupView:
    replicas = draw(st.integers(1, 5))
    members = frozenset(draw(st.sets(st.sampled_from(NODES), min_size=1)))
    in_sync = frozenset(draw(st.sets(st.sampled_from(sorted(members)), min_size=1)))
    master = draw(st.one_of(st.none(), st.sampled_from(sorted(in_sync))))
    record = draw(st.sampled_from([RecordView(3, 9, master, in_sync, members), None, UNREADABLE]))
    pods = {}
    for name in draw(st.sets(st.sampled_from(NODES))):
        running = draw(st.booleans())
        pods[name] = PodView(name, running and draw(st.booleans()), running, draw(st.booleans()))
    return GroupView("g", replicas, draw(st.integers(1, 5)), record, pods)


def serving(group: GroupView) -> set[str]:
    assert group.record is not None
    return {n for n in group.record.in_sync if (p := group.pods.get(n)) and p.is_ready and not p.is_leaving}


@given(groups(), st.sampled_from(NODES))
@settings(max_examples=600, deadline=None)
def test_what_may_be_stopped_never_takes_writes_or_records_away(group: GroupView, node: str) -> None:
    verdict = may_stop(node, group)
    pod, record = group.pods.get(node), group.record
    if not verdict.may or pod is None or not pod.is_running or record is None or node not in record.members:
        return
    if group.replicas == 1 and record.members == {node}:
        return
    assert record.is_known
    assert record.master is not None
    assert record.master != node
    if node not in record.in_sync:
        return
    staying = serving(group) - {node}
    assert staying, "another replica is in sync, runs and stays"
    assert len(staying) >= min(group.min_in_sync, group.replicas - 1)
    assert (record.members | group.pods.keys()) - {node} <= staying, "never two away at once"


@given(groups())
@settings(max_examples=300, deadline=None)
def test_at_most_one_pod_of_a_group_at_rest_may_be_stopped_before_it_is_looked_at_again(
    group: GroupView,
) -> None:
    if group.record is None or not group.record.is_known or group.replicas == 1:
        return
    for node in NODES:
        pod = group.pods.get(node)
        if (
            pod is None
            or not pod.is_running
            or node not in group.record.in_sync
            or not may_stop(node, group).may
        ):
            continue
        stopped = {**group.pods, node: PodView(node, False, pod.is_running, True)}
        after = GroupView(group.name, group.replicas, group.min_in_sync, group.record, stopped)
        for other in group.record.in_sync - {node}:
            if (running := after.pods.get(other)) and running.is_running:
                assert not may_stop(other, after).may


@given(groups(), st.sampled_from(NODES))
@settings(max_examples=300, deadline=None)
def test_only_a_ready_replica_in_sync_may_take_over(group: GroupView, node: str) -> None:
    if may_take_over(node, group).may:
        assert node in serving(group)
        assert group.record is not None
        assert node != group.record.master
    chosen = best_successor(group, NODES)
    assert chosen is None or may_take_over(chosen, group).may


@given(groups(), st.sampled_from(NODES))
@settings(max_examples=300, deadline=None)
def test_a_volume_is_given_up_only_while_the_master_serves_elsewhere(group: GroupView, node: str) -> None:
    if not may_discard(node, group).may:
        return
    assert group.record is not None
    assert group.record.master is not None
    assert group.record.master in serving(group) - {node}
    assert not (group.pods.get(node) and group.pods[node].is_running)


def view(record: RecordView | None, **ready: bool) -> GroupView:
    pods = {f"g-{name[1:]}": PodView(f"g-{name[1:]}", is_ready, True) for name, is_ready in ready.items()}
    return GroupView("g", len(pods), 2, record, pods)


ALL = frozenset(NODES[:3])
WHOLE = RecordView(1, 5, "g-0", ALL, ALL)


@pytest.mark.parametrize(
    ("node", "group", "may", "why"),
    [
        ("g-1", view(WHOLE, n0=True, n1=True, n2=True), True, "g-0, g-2 of g stay in sync"),
        ("g-0", view(WHOLE, n0=True, n1=True, n2=True), False, "g-0 is the master of g: it must hand over first"),
        ("g-1", view(WHOLE, n0=True, n1=True, n2=False), False, "g-2 of g is away: never two at once"),
        ("g-1", view(RecordView(1, 5, None, ALL, ALL), n0=True, n1=True, n2=True), False, "g has no master at the moment"),
        ("g-1", view(UNREADABLE, n0=True, n1=True), False, "the record of g cannot be read: a person must look"),
        ("g-1", view(RecordView(1, 5, "g-0", ALL - {"g-1"}, ALL), n0=True, n1=False, n2=True), True,
         "g-1 is not in sync: nothing rests on it"),
        ("g-4", view(WHOLE, n0=True, n4=True), True, "g-4 is no member of g"),
    ],
)  # fmt: skip
def test_a_verdict_is_a_sentence(node: str, group: GroupView, may: bool, why: str) -> None:
    verdict = may_stop(node, group)
    assert (verdict.may, verdict.why) == (may, why)


def test_topics_that_ask_for_every_replica_do_not_stop_restarts_for_ever() -> None:
    group = view(WHOLE, n0=True, n1=True, n2=True)
    assert may_stop("g-2", GroupView(group.name, 3, 3, group.record, group.pods)).may


def test_a_record_is_read_as_the_brokers_write_it() -> None:
    from firn.types import Epoch
    from firn_node.replication.record import GroupId, GroupRecord, LogId, Master, Member
    from firn_node.replication.record import Incarnation as Born

    members = {LogId("a"): Member("g-0", "h:1", 0), LogId("b"): Member("g-1", "h:2", 1)}
    record = GroupRecord(
        GroupId("0"),
        7,
        Epoch(3),
        12,
        Master(LogId("b"), Born("x")),
        frozenset({LogId("a"), LogId("b")}),
        members,
    )
    lease = {"metadata": {"annotations": {RECORD: json.dumps(record.to_document())}}}
    assert record_of(lease) == RecordView(3, 7, "g-1", frozenset({"g-0", "g-1"}), frozenset({"g-0", "g-1"}))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"members": {}, "master": null}'])
def test_a_record_that_cannot_be_read_is_not_taken_for_none(text: str) -> None:
    assert record_of({"metadata": {"annotations": {RECORD: text}}}) == UNREADABLE
    assert record_of({"metadata": {}}) is None
