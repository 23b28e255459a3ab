"""Leases of snapshots that were handed to the driver's keeper."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client as Socket
from typing import Any

import pytest

from firn.client.blocking import Client
from firn.errors import SnapshotExpired, Unavailable
from firn_spark import keeper as keeper_module
from firn_spark.connection import Connection
from firn_spark.fetch import Link, read
from firn_spark.filters import Wanted
from firn_spark.keeper import ENVIRONMENT, Jobs, Keeper, hand_over
from firn_spark.options import read_options
from firn_spark.planning import Lease, Plan, plan


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


@pytest.fixture
def planned(client: Client, connection: Connection, topic: str) -> Plan:
    client.create_topic(topic, partitions=1)
    client.put(topic, b"k", b"v")
    found = plan(read_options({**connection.options(), "topic": topic}), Wanted())
    assert found.lease is not None
    return found


def is_held(connection: Connection, planned: Plan) -> bool:
    try:
        return sum(batch.num_rows for batch in read(connection, planned.tasks[0])) == 1
    except SnapshotExpired:
        return False


def busy() -> frozenset[int]:
    """One job runs all the time."""
    return frozenset({1})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Hold = Callable[..., Keeper]


@pytest.fixture
def hold(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """A keeper that holds the plan's lease."""
    made: list[Keeper] = []

    def start(active_jobs: Jobs, **options: Any) -> Keeper:
        found = Keeper(active_jobs, poll_s=0.005, **options)
        made.append(found)
        monkeypatch.setenv(ENVIRONMENT, found.environment[ENVIRONMENT])
        assert planned.lease is not None
        hand_over(planned.lease)
        until(lambda: len(found.held) == 1)
        return found

    yield start
    for keeper in made:
        keeper.close()


class Polls:
    """What a keeper asks, and how often it has."""

    def __init__(self, answer: Jobs) -> None:
        self._answer = answer
        self._count = 0

    def __call__(self) -> frozenset[int] | None:
        self._count += 1
        return self._answer()

    def pass_by(self) -> None:
        """Returns when the keeper has looked at everything at least once since the call."""
        wanted = self._count + 3
        until(lambda: self._count >= wanted)


def test_a_lease_that_no_task_has_come_to_is_held_while_jobs_run_and_then_given_back(
    connection: Connection, planned: Plan, hold: Hold
) -> None:
    clock, active = Clock(), [busy()]
    polls = Polls(lambda: active[0])
    keeper = hold(polls, idle_s=100, renew_s=1e9, clock=clock)
    clock.now = 1000.0  # a job ran all the time
    polls.pass_by()
    assert len(keeper.held) == 1
    active[0] = frozenset()
    polls.pass_by()
    clock.now = 1099.0
    polls.pass_by()
    assert len(keeper.held) == 1
    clock.now = 1101.0
    until(lambda: not keeper.held)
    until(lambda: not is_held(connection, planned))


def test_a_lease_that_tasks_have_read_is_given_back_although_later_jobs_run(
    connection: Connection, planned: Plan, hold: Hold
) -> None:
    clock, number = Clock(), [0]
    polls = Polls(lambda: frozenset({number[0]}))
    keeper = hold(polls, idle_s=100, renew_s=40, clock=clock)
    for now in (90.0, 180.0, 270.0):  # tasks read it, now and then
        assert is_held(connection, planned)
        clock.now = now
        polls.pass_by()
        assert len(keeper.held) == 1
        polls.pass_by()
        number[0] += 1
        polls.pass_by()
    clock.now = 371.0
    until(lambda: not keeper.held)
    until(lambda: not is_held(connection, planned))


def test_a_lease_is_held_as_long_as_a_job_that_has_read_it_computes(
    connection: Connection, planned: Plan, hold: Hold
) -> None:
    clock, active = Clock(), [busy()]
    polls = Polls(lambda: active[0])
    keeper = hold(polls, idle_s=100, renew_s=40, clock=clock)
    assert is_held(connection, planned)
    clock.now = 90.0
    polls.pass_by()
    polls.pass_by()
    active[0] = frozenset({1, 2})
    clock.now = 1000.0  # none of its tasks has come again
    polls.pass_by()
    assert len(keeper.held) == 1
    assert is_held(connection, planned), "an executor is lost, and its part is read again"
    clock.now = 2000.0
    polls.pass_by()
    polls.pass_by()
    assert len(keeper.held) == 1
    active[0] = frozenset({3})
    polls.pass_by()
    clock.now = 2101.0
    until(lambda: not keeper.held)
    until(lambda: not is_held(connection, planned))


def test_an_answer_that_is_lost_is_not_taken_for_a_task_that_came(
    connection: Connection, planned: Plan, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lost = Clock(), [True]
    polls, ask = Polls(busy), keeper_module._ask

    async def answer(link: Link, method: str, lease: Lease) -> list[dict[str, Any]]:
        found = await ask(link, method, lease)
        if method == "PUT" and lost:
            lost.clear()
            raise Unavailable("the answer did not come")
        return found

    monkeypatch.setattr(keeper_module, "_ask", answer)
    keeper = hold(polls, idle_s=100, renew_s=40, clock=clock)
    for now in (50.0, 100.0, 300.0):  # its tasks wait behind other jobs
        clock.now = now
        polls.pass_by()
    assert not lost
    assert len(keeper.held) == 1
    assert is_held(connection, planned)


def test_a_topic_that_was_made_anew_in_other_groups_does_not_end_the_keeper(
    connection: Connection, planned: Plan, hold: Hold, topic: str
) -> None:
    both_are_held = threading.Event()

    def active_jobs() -> frozenset[int]:
        assert both_are_held.wait(60)
        return busy()

    polls = Polls(active_jobs)
    keeper = hold(polls, renew_s=0)
    assert planned.lease is not None
    hand_over(Lease(topic, f"{planned.lease.id},00", planned.lease.options))
    until(lambda: len(keeper.held) == 2)
    both_are_held.set()
    until(lambda: keeper.held == [planned.lease.id])
    polls.pass_by()


def test_a_driver_that_cannot_be_asked_for_a_moment_keeps_its_leases(
    connection: Connection, planned: Plan, hold: Hold
) -> None:
    clock, broken = Clock(), [True]

    def active_jobs() -> frozenset[int]:
        if broken[0]:
            raise ConnectionResetError("as Py4J does")
        return busy()

    polls = Polls(active_jobs)
    keeper = hold(polls, lost_s=60, clock=clock)
    clock.now = 59.0
    polls.pass_by()
    broken[0] = False
    polls.pass_by()
    clock.now = 118.0
    polls.pass_by()
    broken[0] = True
    clock.now = 177.0
    polls.pass_by()
    assert len(keeper.held) == 1
    assert is_held(connection, planned)
    clock.now = 179.0  # a minute since it answered
    until(lambda: not is_held(connection, planned))
    assert not keeper.held


def test_the_end_of_the_session_gives_everything_back(
    connection: Connection, planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: list[frozenset[int] | None] = [frozenset()]
    keeper = Keeper(lambda: state[0], poll_s=0.005)
    monkeypatch.setenv(ENVIRONMENT, keeper.environment[ENVIRONMENT])
    assert planned.lease is not None
    hand_over(planned.lease)
    until(lambda: len(keeper.held) == 1)
    state[0] = None
    until(lambda: not is_held(connection, planned))
    path = keeper.environment[ENVIRONMENT].rpartition(":")[0]
    until(lambda: not os.path.exists(path))


def test_a_snapshot_that_is_gone_is_let_go(
    client: Client, planned: Plan, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(busy, poll_s=0.005, renew_s=0)
    monkeypatch.setenv(ENVIRONMENT, keeper.environment[ENVIRONMENT])
    assert planned.lease is not None
    hand_over(planned.lease)
    until(lambda: len(keeper.held) == 1)
    client.delete_topic(topic)
    until(lambda: not keeper.held)
    keeper.close()


def test_a_stranger_is_not_listened_to_and_does_no_harm(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(busy, poll_s=0.005)
    path = keeper.environment[ENVIRONMENT].rpartition(":")[0]
    with pytest.raises(Exception, match="digest sent was rejected"):
        Socket(path, family="AF_UNIX", authkey=b"guessed")
    monkeypatch.setenv(ENVIRONMENT, keeper.environment[ENVIRONMENT])
    assert planned.lease is not None
    hand_over(planned.lease)
    until(lambda: len(keeper.held) == 1)
    keeper.close()


def test_without_a_keeper_a_plan_goes_on(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert planned.lease is not None
    hand_over(planned.lease)
    monkeypatch.setenv(ENVIRONMENT, "/there/is/none:00")
    hand_over(planned.lease)


def test_a_broker_that_does_not_answer_is_asked_once_for_all_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = Keeper(busy, poll_s=0.005)
    monkeypatch.setenv(ENVIRONMENT, keeper.environment[ENVIRONMENT])
    with socket.create_server(("127.0.0.1", 0), backlog=100) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        for number in range(50):
            hand_over(Lease("t", str(number), {"bootstrap": address}))
        until(lambda: len(keeper.held) == 50)
        keeper.close()
        mute.setblocking(False)
        asked = 0
        with suppress(BlockingIOError):
            while True:
                mute.accept()[0].close()
                asked += 1
    assert 1 <= asked < 5


def test_a_broker_that_does_not_answer_keeps_the_leases_of_others_not_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_are_held = threading.Event()

    def active_jobs() -> frozenset[int]:
        assert all_are_held.wait(60)
        return busy()

    # At one moment all the time: a look that began before a lease came has it in its round as well.
    keeper = Keeper(active_jobs, poll_s=0.005, renew_s=0, clock=Clock())
    monkeypatch.setenv(ENVIRONMENT, keeper.environment[ENVIRONMENT])
    with ExitStack() as stack:
        brokers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        for number, broker in enumerate(brokers):
            broker.settimeout(60)
            bootstrap = f"127.0.0.1:{broker.getsockname()[1]}"
            hand_over(Lease("t", str(number), {"bootstrap": bootstrap, "timeout": "600"}))
        until(lambda: len(keeper.held) == 3)
        all_are_held.set()
        # None is answered before all are asked.
        asked = [stack.enter_context(broker.accept()[0]) for broker in brokers]
        for connection in asked:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        until(lambda: not keeper.held)
    keeper.close()
