"""The queue of keys, and the cache that watches and sweeps feed."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from random import Random

import pytest
from operator_kit import NAMESPACE, World, new_operator

from firn.errors import Unavailable
from firn_operator.health import Health, Metrics
from firn_operator.kube import CLUSTER, SERVICE, TOPIC, Obj
from firn_operator.observe import Cache
from firn_operator.queue import Interrupted, WorkQueue
from firn_operator.reconcile import Key
from firn_operator.same import covers, digest, is_applied, sealed


async def working(
    work: Callable[[str], Awaitable[float | None]], use: Callable[[WorkQueue[str]], Awaitable[None]]
) -> None:
    queue: WorkQueue[str] = WorkQueue(work, Random(0))
    task = asyncio.create_task(queue.run(4))
    try:
        await use(queue)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_a_key_that_is_added_often_is_worked_on_once_and_once_more_when_that_was_meanwhile() -> None:
    worked: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def work(key: str) -> None:
        worked.append(key)
        begun.set()
        await go_on.wait()

    async def use(queue: WorkQueue[str]) -> None:
        for _ in range(5):
            await queue.add("a")
        await begun.wait()
        for _ in range(5):
            await queue.add("a")
        assert worked == ["a"]
        go_on.set()
        await queue.settle()

    asyncio.run(working(work, use))
    assert worked == ["a", "a"]


def test_other_keys_are_worked_on_while_one_waits() -> None:
    stuck, done = asyncio.Event(), asyncio.Event()

    async def work(key: str) -> None:
        if key == "stuck":
            await stuck.wait()
        done.set()

    async def use(queue: WorkQueue[str]) -> None:
        await queue.add("stuck")
        await queue.add("other")
        await done.wait()
        stuck.set()
        await queue.settle()

    asyncio.run(working(work, use))


def test_a_key_whose_work_fails_comes_back_later_and_later() -> None:
    loop_times: list[float] = []

    async def work(_: str) -> None:
        loop_times.append(asyncio.get_running_loop().time())
        if len(loop_times) < 4:
            raise Unavailable("away")

    async def use(queue: WorkQueue[str]) -> None:
        await queue.add("a")
        await queue.settle(within=60)
        assert (queue.failed, queue.done, queue.failures("a")) == (3, 1, 0)

    asyncio.run(working(work, use))
    pauses = [later - earlier for earlier, later in itertools.pairwise(loop_times)]
    assert all(pause >= least for pause, least in zip(pauses, (0.125, 0.25, 0.5), strict=True))


def test_a_key_whose_work_gets_on_before_it_fails_is_not_put_off_for_longer_and_longer() -> None:
    failures: list[int] = []

    async def use(queue: WorkQueue[str]) -> None:
        await queue.add("a")
        await queue.settle(within=60)

    async def run() -> None:
        async def work(key: str) -> None:
            failures.append(queue.failures(key))
            if len(failures) < 4:
                raise Interrupted("away")

        queue: WorkQueue[str] = WorkQueue(work, Random(0))
        task = asyncio.create_task(queue.run(1))
        await use(queue)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert failures == [0, 1, 1, 1]


def test_work_that_asks_for_it_is_done_again_without_a_cause() -> None:
    count = 0

    async def work(_: str) -> float | None:
        nonlocal count
        count += 1
        return 0.01 if count < 3 else None

    async def use(queue: WorkQueue[str]) -> None:
        await queue.add("a")
        await queue.settle(within=60)

    asyncio.run(working(work, use))
    assert count == 3


# The cache.


def service(version: int, *, uid: str = "u", **spec: object) -> Obj:
    meta = {"name": "s", "namespace": NAMESPACE, "uid": uid, "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def test_an_older_version_never_takes_the_place_of_a_newer_one() -> None:
    cache = Cache()
    assert cache.put(service(7, a=1))
    assert not cache.put(service(5, a=0))
    assert not cache.put(service(7, a=0))
    found = cache.get(SERVICE, NAMESPACE, "s")
    assert found is not None
    assert found["spec"] == {"a": 1}


def test_what_is_gone_is_not_brought_back_by_an_event_that_comes_late() -> None:
    cache = Cache()
    cache.put(service(7))
    assert cache.drop(service(9))
    assert not cache.put(service(8))
    assert cache.get(SERVICE, NAMESPACE, "s") is None
    assert cache.put(service(10, uid="another"))
    assert not cache.drop(service(9))


def test_the_topics_of_a_cluster_are_those_of_the_newest_versions() -> None:
    world, cache = World(), Cache()
    world.topic("quotes")
    world.topic("other", cluster="elsewhere")

    def asked() -> list[int | None]:
        for topic in world.all(TOPIC):
            cache.put(topic)
        return [topic.min_in_sync for topic in cache.topics_of(NAMESPACE, "main")]

    assert asked() == [None]
    world.change(TOPIC, "quotes", lambda obj: obj["spec"].update(durability={"minInSync": 2}))
    assert asked() == [2]
    gone = world.find(TOPIC, "quotes")
    assert gone is not None
    world.remove(TOPIC, "quotes")
    cache.drop(gone)
    assert asked() == []


def test_a_sweep_finds_what_went_while_nobody_watched() -> None:
    world = World()
    world.cluster()
    world.topic("quotes")
    operator = new_operator(world)
    asyncio.run(operator.sweep())
    world.remove(TOPIC, "quotes")
    assert operator.cache.get(TOPIC, NAMESPACE, "quotes") is not None
    asyncio.run(operator.sweep())
    assert operator.cache.get(TOPIC, NAMESPACE, "quotes") is None


def test_a_cluster_that_changes_is_looked_at_with_its_topics() -> None:
    world = World()
    world.cluster()
    world.topic("quotes")
    world.topic("other", cluster="elsewhere")
    operator = new_operator(world)
    asyncio.run(operator.sweep())
    seen: list[Key] = []

    async def add(key: Key, *, after: float = 0.0) -> None:
        seen.append(key)

    operator.queue.add = add  # type: ignore[method-assign]
    world.change(CLUSTER, "main", lambda obj: obj["spec"].update(replicas=2))
    changed = world.find(CLUSTER, "main")
    assert changed is not None
    asyncio.run(operator.feed.event(changed))
    assert sorted(seen) == [Key("cluster", NAMESPACE, "main"), Key("topic", NAMESPACE, "quotes")]


# What counts as the same.


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"cpu": "500m"}, {"cpu": "0.5"}, True),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1Gi"}, {"memory": "1G"}, False),
        ({"a": 1, "added": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([{"name": "x", "v": 1, "added": 0}, {"name": "sidecar"}], [{"name": "x", "v": 1}], True),
        ([{"name": "y"}], [{"name": "x"}], False),
        (["a", "b"], ["a"], False),
        (None, {}, True),
        (True, 1, True),
    ],
)
def test_defaults_and_other_words_for_a_quantity_are_no_difference(
    live: object, wanted: object, same: bool
) -> None:
    assert covers(live, wanted) is same


def test_a_field_that_is_wished_no_more_shows_in_the_hash() -> None:
    body = service(1, selector={"a": "b"}, extra=1)
    del body["metadata"]["resourceVersion"]
    stored = sealed(body)
    assert is_applied(stored, sealed(body))
    less = {**body, "spec": {"selector": {"a": "b"}}}
    assert covers(stored["spec"], less["spec"])
    assert not is_applied(stored, sealed(less))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_health_names_what_has_stopped() -> None:
    health = Health(Metrics(), lambda: None)
    assert health.trouble() == ""
    health.since_tick_s = lambda: 61.0
    assert "leader" in health.trouble()
    health.since_tick_s = lambda: 0.0
    health.oldest_running_s = lambda: 400.0
    assert "pass" in health.trouble()
