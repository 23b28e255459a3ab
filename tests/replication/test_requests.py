"""Who waits for a change of master, and what ends that wait."""

import asyncio

import pytest

from firn.errors import Unavailable
from firn.types import Epoch
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member
from firn_node.replication.requests import Requests

A, B, C = LogId("a"), LogId("b"), LogId("c")


def record(master: LogId | None, epoch: int) -> GroupRecord:
    members = {log_id: Member(f"node-{log_id}", f"{log_id}:1") for log_id in (A, B, C)}
    named = None if master is None else Master(master, Incarnation("i"))
    return GroupRecord(GroupId("0"), 9, Epoch(epoch), 0, named, frozenset(members), members)


def test_a_switchover_ends_with_the_first_master_of_a_later_epoch_whoever_that_is() -> None:
    async def story() -> None:
        requests = Requests()
        wait = requests.begin_switchover(B, Epoch(4))
        with pytest.raises(Unavailable, match="another switchover is under way"):
            requests.begin_switchover(C, Epoch(4))
        for seen in (record(A, 4), record(None, 4)):
            requests.note_master(seen)
            assert not wait.done()
        requests.note_master(record(B, 5))
        await wait
        lost = requests.begin_switchover(A, Epoch(5))
        requests.note_master(record(C, 6))
        with pytest.raises(Unavailable, match="node-c became master instead"):
            await lost
        assert requests.successor is None

    asyncio.run(story())


def test_a_switchover_that_nobody_waits_for_any_more_makes_room_for_the_next_alone() -> None:
    async def story() -> None:
        requests = Requests()
        first = requests.begin_switchover(B, Epoch(1))
        requests.end_switchover(first)
        second = requests.begin_switchover(C, Epoch(1))
        requests.end_switchover(first)
        assert requests.successor == C
        requests.refuse_switchover("over")
        with pytest.raises(Unavailable, match="over"):
            await second

    asyncio.run(story())
