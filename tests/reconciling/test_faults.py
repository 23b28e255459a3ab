"""Drills 25 to 29: the operator ends at any request, answers are bad, two operators, old caches."""

import asyncio
import copy
from collections.abc import Callable
from random import Random

import pytest
from flows_kit import FLOWS, set_image, shape, uninterrupted
from operator_kit import (
    IMAGE,
    NAMESPACE,
    Killed,
    Request,
    World,
    new_operator,
    one_round,
    rounds,
    until_quiet,
)

from firn.errors import Conflict, FirnError, Forbidden, Invalid, Unavailable
from firn_operator.brokers import Way
from firn_operator.guard import record_of
from firn_operator.kube import CLUSTER, CONFIG_MAP, GROUP, LEASE, POD, ROLE, SECRET, SERVICE, name_of
from firn_operator.leader import ACT_S, TAKE_AFTER_S, Deposed, Fencing, Leader
from firn_operator.queue import Interrupted
from firn_operator.reconcile import Key


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_an_operator_that_ends_at_any_write_leaves_what_the_next_one_finishes(
    flow: Callable[[World], None],
) -> None:
    wanted, writes = uninterrupted(flow)
    assert writes > 5
    begun = World()
    flow(begun)
    for at in range(writes):
        world = copy.deepcopy(begun)
        killed_at(world, at)
        asyncio.run(until_quiet(world, new_operator(world)))
        assert shape(world) == wanted, f"ended before write {at}"
        assert world.most_down <= 1
        assert world.lost_writes == []


def allow(request: Request) -> None:
    """No fault."""


def killed_at(world: World, at: int) -> None:
    """Run an operator that ends before its write number ``at``, which is after the one before it."""
    count = 0

    def ask(request: Request) -> None:
        nonlocal count
        count += request.is_write
        if count == at + 1:
            raise Killed

    world.on_request = ask
    try:
        asyncio.run(until_quiet(world, new_operator(world)))
    except Killed:
        pass
    world.on_request = allow


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_conflicts_and_failing_answers_on_half_of_all_writes_converge_to_the_same(
    flow: Callable[[World], None], seed: int
) -> None:
    wanted, clean = uninterrupted(flow)
    world = World()
    flow(world)
    before, chance = len(world.requests), Random(seed)
    errors = [Conflict("changed meanwhile"), Unavailable("500"), Unavailable("429")]

    def ask(request: Request) -> None:
        if request.is_write and chance.random() < 0.5:
            raise chance.choice(errors)

    async def run() -> None:
        operator = new_operator(world)
        for _ in range(120):
            try:
                await one_round(operator)
            except FirnError:
                pass  # the queue tries again
            world.turn()

    world.on_request = ask
    asyncio.run(run())
    assert shape(world) == wanted
    assert len(world.writes(before)) <= 5 * clean + 20
    assert world.most_down <= 1
    assert world.lost_writes == []


@pytest.mark.parametrize("error", [Conflict("it is there already"), Forbidden("of that name"), Invalid("no")])
def test_of_a_ca_that_could_not_be_stored_nothing_is_made(error: FirnError) -> None:
    world = World()
    world.cluster()

    def refuse(request: Request) -> None:
        if request.is_write and (request.kind, request.name) == ("Secret", "main-ca"):
            raise error

    world.on_request = refuse
    asyncio.run(one_round(new_operator(world)))
    assert world.all(CONFIG_MAP) == []
    assert world.all(SECRET) == []
    world.on_request = allow
    asyncio.run(until_quiet(world, new_operator(world)))
    trust = world.find(CONFIG_MAP, "main-ca")
    assert trust is not None
    assert trust["data"]["ca.crt"].count("BEGIN CERTIFICATE") == 1


def test_a_pass_that_got_on_before_the_api_server_failed_is_not_put_off_for_longer_and_longer() -> None:
    world = World()
    world.cluster()
    count = 0

    def ask(request: Request) -> None:
        nonlocal count
        count += request.is_write
        if request.is_write and count % 2 == 0:
            raise Unavailable("500")

    async def run() -> None:
        operator = new_operator(world)
        await operator.sweep()
        key = Key("cluster", NAMESPACE, "main")
        for _ in range(5):
            with pytest.raises(Interrupted):
                await operator.reconciler.work(key)

    world.on_request = ask
    asyncio.run(run())


def test_what_is_refused_is_no_progress_of_a_pass_that_fails_behind_it() -> None:
    """It would be tried several times a second, for as long as the API server fails."""
    world = World()
    world.cluster()
    asyncio.run(until_quiet(world, new_operator(world)))
    world.remove(SERVICE, "main-bootstrap")
    world.remove(ROLE, "main-0")
    about = {"name": "main-bootstrap", "namespace": NAMESPACE}
    world.put({"apiVersion": "v1", "kind": "Service", "metadata": about})

    def ask(request: Request) -> None:
        if request.is_write:
            raise Unavailable("500")

    async def run() -> None:
        operator = new_operator(world)
        await operator.sweep()
        with pytest.raises(Unavailable) as raised:
            await operator.reconciler.work(Key("cluster", NAMESPACE, "main"))
        assert not isinstance(raised.value, Interrupted)

    world.on_request = ask
    asyncio.run(run())


def test_a_stale_cache_in_a_roll_stops_nobody_while_another_one_is_away() -> None:
    world = World()
    world.cluster()
    asyncio.run(rounds(world, new_operator(world), 15))
    operator = new_operator(world)
    asyncio.run(one_round(operator))
    set_image(world, "firn:2")
    for _ in range(3):
        world.turn()
    asyncio.run(operator.sweep())
    asyncio.run(operator.reconciler.work(Key("cluster", NAMESPACE, "main")))
    world.turn()
    asyncio.run(operator.sweep())  # what the cache shows from now on: everybody ready, nothing restarted yet
    asyncio.run(operator.reconciler.work(Key("cluster", NAMESPACE, "main")))
    stopped = [name_of(pod) for pod in world.all(POD) if "deletionTimestamp" in pod["metadata"]]
    assert stopped == ["main-0-2"]
    for _ in range(2):
        world.turn()
    asyncio.run(operator.reconciler.work(Key("cluster", NAMESPACE, "main")))
    assert [name_of(pod) for pod in world.all(POD) if "deletionTimestamp" in pod["metadata"]] == []
    assert world.images() == [IMAGE, IMAGE, "firn:2"]


def test_a_failover_that_the_cache_does_not_show_is_seen_by_the_guard() -> None:
    world = World()
    world.cluster()
    asyncio.run(rounds(world, new_operator(world), 15))
    set_image(world, "firn:2")
    for _ in range(2):
        world.turn()
    world.brokers_report = False
    record = world.records["main-0"]
    record.master, record.epoch, record.version = "main-0-2", record.epoch + 1, record.version + 1
    world._write_record("main-0")
    operator = new_operator(world)
    before = len(world.requests)
    for _ in range(4):
        asyncio.run(one_round(operator))
        world.turn()
    lease = world.find(LEASE, "main-0")
    view = record_of(lease)
    assert view is not None
    assert view.master == "main-0-2"
    assert [each for each in world.writes(before) if (each.verb, each.name) == ("delete", "main-0-2")] == []
    assert "must hand over first" in world.condition(CLUSTER, "main", "Progressing")["message"]


def test_the_brokers_fail_over_alone_and_the_operator_reports_it() -> None:
    world = World()
    world.cluster()
    asyncio.run(rounds(world, new_operator(world), 15))
    world.end(POD, "main-0-0")
    for _ in range(3):
        world.turn()
    group = world.find(GROUP, "main-0")
    assert group is not None
    assert group["status"]["currentMaster"] == "main-0-1"
    before = len(world.requests)
    asyncio.run(rounds(world, new_operator(world), 10))
    cluster = world.find(CLUSTER, "main")
    assert cluster is not None
    assert cluster["status"]["groups"][0]["currentMaster"] == "main-0-1"
    assert all(each.verb == "apply-status" or each.kind == "Event" for each in world.writes(before))


# Two operators.


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def leaders(world: World) -> tuple[Leader, Leader, Time, Time]:
    first, second = Time(), Time()
    return (
        Leader(world, NAMESPACE, "firn-operator", "a", clock=first, randomness=Random(0)),
        Leader(world, NAMESPACE, "firn-operator", "b", clock=second, randomness=Random(1)),
        first,
        second,
    )


def test_one_of_two_operators_leads_and_the_other_one_when_it_is_silent_for_long_enough() -> None:
    a, b, _, time_b = leaders(World())
    assert asyncio.run(a.tick())
    assert not asyncio.run(b.tick())
    time_b.now += TAKE_AFTER_S - 0.1
    assert not asyncio.run(b.tick())
    time_b.now += 0.2
    assert asyncio.run(b.tick())


def test_a_leader_that_renews_is_never_deposed() -> None:
    a, b, time_a, time_b = leaders(World())
    assert asyncio.run(a.tick())
    for _ in range(20):
        time_a.now += 3
        time_b.now += 3
        assert asyncio.run(a.tick())
        assert not asyncio.run(b.tick())


def test_a_leader_that_was_paused_for_twenty_seconds_writes_nothing_after_the_takeover() -> None:
    world = World()
    a, b, time_a, time_b = leaders(world)
    assert asyncio.run(a.tick())
    assert not asyncio.run(b.tick())
    kube = Fencing(world, world, a.left_s)
    for time in (time_a, time_b):
        time.now += 20
    assert asyncio.run(b.tick())
    before = len(world.requests)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": NAMESPACE}}
    for write in (
        lambda: kube.create(POD, NAMESPACE, copy.deepcopy(body)),
        lambda: kube.apply(POD, NAMESPACE, copy.deepcopy(body)),
        lambda: kube.patch(POD, NAMESPACE, "x", {}),
        lambda: kube.delete(POD, NAMESPACE, "x"),
        lambda: kube.evict(NAMESPACE, "x", "uid"),
        lambda: kube.switch_over(Way(("somewhere",), None), 0, "x"),
    ):
        with pytest.raises(Deposed):
            asyncio.run(write())
    assert world.writes(before) == []
    assert not asyncio.run(a.tick())


def test_a_request_that_is_under_way_when_the_time_to_act_is_over_is_given_up() -> None:
    class Slow(World):
        async def delete(self, *args: object, **kwargs: object) -> None:
            await asyncio.sleep(3600)

    kube = Fencing(Slow(), World(), Leaving().left_s)
    with pytest.raises(Deposed, match="not known"):
        asyncio.run(kube.delete(POD, NAMESPACE, "x"))


class Leaving:
    """A leader whose time is almost over."""

    def left_s(self) -> float:
        return 0.05


def test_what_a_leader_may_do_ends_before_another_one_can_begin() -> None:
    assert ACT_S * 4 / 3 < TAKE_AFTER_S


def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    a, b, _, _ = leaders(World())
    assert asyncio.run(a.tick())
    asyncio.run(a.release())
    assert not a.is_leading()
    assert asyncio.run(b.tick())


def test_two_operators_that_want_a_new_lease_at_once_are_one_leader() -> None:
    world = World()
    a, b, _, _ = leaders(world)

    async def both() -> list[bool]:
        return list(await asyncio.gather(a.tick(), b.tick()))

    assert sorted(asyncio.run(both())) == [False, True]
