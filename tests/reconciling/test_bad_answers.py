"""Drill 26: the operator as its process runs it, kopf and all, where the API server answers badly."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from operator_kit import NAMESPACE, World
from world_server import Faults, HeardWorld, Served, Watch, Write, served

from firn.errors import Unavailable
from firn_operator.handlers import WATCHER, hearing, settings_of, watches_of
from firn_operator.health import Health, serve
from firn_operator.kube import CLUSTER, SERVICE, TOPIC, Kind, Obj
from firn_operator.running import Settings, run

TOPICS = ("quotes", "trades", "orders")
WITHIN_S = 120.0
SWEEP_S = 0.5  # what watches do not tell is seen after so long


async def operating(use: Callable[[], Awaitable[None]], sweep_s: float = SWEEP_S) -> None:
    """Run the operator until ``use`` is through. Errors: what ended the operator before."""
    settings = Settings((NAMESPACE,), 0, lease_namespace=NAMESPACE, sweep_s=sweep_s)
    process, using = asyncio.create_task(run(settings)), asyncio.ensure_future(use())
    try:
        await asyncio.wait([process, using], return_when=asyncio.FIRST_COMPLETED)
        (process if process.done() else using).result()
    finally:
        for task in (using, process):
            task.cancel()
        await asyncio.gather(using, process, return_exceptions=True)


async def until(shown: Served, is_so: Callable[[World], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not shown.ask(is_so):
            await asyncio.sleep(0.05)


# A life: a cluster and its topics; then fewer replicas, a topic less, and somebody's hand in an owned object.


def begin(world: World) -> None:
    world.cluster()
    for name in TOPICS:
        world.topic(name)


def is_settled(world: World) -> bool:
    return is_ready(world, CLUSTER, "main") and all(is_ready(world, TOPIC, name) for name in TOPICS)


def is_ready(world: World, kind: Kind, name: str) -> bool:
    return world.condition(kind, name, "Ready").get("status") == "True"


def change(world: World) -> None:
    world.change(CLUSTER, "main", lambda obj: obj["spec"].update(replicas=2))
    world.change(SERVICE, "main-bootstrap", expose)
    world.end(TOPIC, "trades")


def expose(service: Obj) -> None:
    service["spec"]["type"] = "NodePort"


def is_changed(world: World) -> bool:
    service = world.find(SERVICE, "main-bootstrap")
    return (
        len(world.pods()) == 2
        and is_ready(world, CLUSTER, "main")
        and all(is_ready(world, TOPIC, name) for name in ("quotes", "orders"))
        and service is not None
        and service["spec"]["type"] == "ClusterIP"
        and world.find(TOPIC, "trades") is None
    )


def some(reads: float, writes: float, *statuses: int) -> Callable[[bool], int]:
    """One of the statuses for so large a part of the reads and of the writes."""
    chance = Random(1)
    return lambda is_write: (
        chance.choice(statuses) if chance.random() < (writes if is_write else reads) else 0
    )


def every_second_write(status: int) -> Callable[[bool], int]:
    count = Counter[bool]()

    def answer(is_write: bool) -> int:
        count[is_write] += 1
        return status if is_write and count[is_write] % 2 else 0

    return answer


def sometimes(share: float) -> Callable[[], bool]:
    chance = Random(2)
    return lambda: chance.random() < share


FAULTS: dict[str, Callable[[], Faults]] = {
    "nothing": Faults,
    "409 on every second write": lambda: Faults(status=every_second_write(409)),
    "429 and 500 on a third of the writes, and on some reads": lambda: Faults(status=some(0.03, 0.33, 429, 500)),
    "500 for what is done": lambda: Faults(after=sometimes(0.25)),
    "watches that end with 410 after every event": lambda: Faults(watch="gone"),
    "silent watches": lambda: Faults(watch="silent"),
    "old events again, the newest of them first": lambda: Faults(watch="repeating"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wished_comes_true_with_one_write_for_each_change(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = HeardWorld()
    with served(world, FAULTS[fault](), tmp_path) as shown:
        monkeypatch.setenv("KUBECONFIG", str(shown.kubeconfig))

        async def use() -> None:
            shown.ask(begin)
            await until(shown, is_settled)
            shown.ask(change)
            await until(shown, is_changed)

        asyncio.run(operating(use))
        assert world.most_down <= 1
        assert world.lost_writes == []
        check(shown.of_resources())


def check(writes: list[Write]) -> None:
    """Every write that was done said something new, but for those that were answered as if they had not been done."""
    lied_about = Counter(each.place for each in writes if each.is_new and each.status >= 500)
    in_vain = Counter(each.place for each in writes if not each.is_new and each.status < 300)
    assert in_vain - lied_about == Counter()
    refused = [each for each in writes if each.status >= 400]
    assert len(writes) <= 3 * (len(writes) - len(refused)) + 20, "back-off"
    made_once = ("Service ", "ConfigMap ", "Role ", "RoleBinding ", "ServiceAccount ", "NetworkPolicy ")
    changes = Counter(each.place for each in writes if each.is_new and each.place.startswith(made_once))
    assert changes.pop("Service main-bootstrap") == 2, "made, and taken back"
    assert {place for place, count in changes.items() if count > 1} == set()


@pytest.mark.parametrize("watch", ["failed", "garbled", "refused"])
def test_a_watch_that_ends_for_good_ends_the_operator_so_that_it_starts_anew(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, faults = HeardWorld(), Faults()
    with served(world, faults, tmp_path) as shown:
        monkeypatch.setenv("KUBECONFIG", str(shown.kubeconfig))

        async def use() -> None:
            shown.ask(begin)
            await until(shown, is_settled)
            shown.break_watches(watch, SERVICE)
            await asyncio.sleep(WITHIN_S)

        with pytest.raises(Unavailable, match="watch"):
            asyncio.run(operating(use, sweep_s=WITHIN_S))
        faults.watch = "sound"

        async def anew() -> None:
            shown.ask(change)
            await until(shown, is_changed)

        asyncio.run(operating(anew, sweep_s=WITHIN_S))


def test_an_operator_on_a_machine_that_was_suspended_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader's time stood still meanwhile, and what judged it did not: no operator there ever came up."""
    world, made = HeardWorld(), list[Health]()

    async def opened(health: Health, port: int) -> web.AppRunner:
        made.append(health)
        return await serve(health, port)

    monkeypatch.setattr("firn_operator.running.boot_time", lambda: time.monotonic() + 3600)
    monkeypatch.setattr("firn_operator.running.serve", opened)
    with served(world, Faults(), tmp_path) as shown:
        monkeypatch.setenv("KUBECONFIG", str(shown.kubeconfig))

        async def use() -> None:
            shown.ask(begin)
            await until(shown, is_settled)
            assert made[0].is_leading()
            assert made[0].trouble() == ""

        asyncio.run(operating(use))


def test_a_namespace_that_is_named_twice_is_watched_once() -> None:
    assert watches_of(("a", "b", "a"), sees_nodes=False) == watches_of(("a", "b"), sees_nodes=False)


def test_tries_of_watches_come_at_other_times_in_each_process_and_never_end() -> None:
    backoffs = settings_of().networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    first, second = (list(itertools.islice(backoffs, 40)) for _ in range(2))
    assert first != second
    assert max(first) <= 30 < sum(first[-3:])


@pytest.mark.parametrize("begun", [1, 2])
def test_watches_that_have_not_all_begun_in_time_are_missed(begun: int) -> None:
    async def listen() -> None:
        watches = [
            asyncio.create_task(asyncio.sleep(WITHIN_S), name=f"{WATCHER}{number}") for number in range(begun)
        ]
        listening = asyncio.create_task(hearing(2, check_s=0.01, begun_s=0.1))
        if begun == 2:
            await asyncio.sleep(0.3)
            assert not listening.done()
            watches[0].cancel()
        async with asyncio.timeout(WITHIN_S):
            await listening
        watches[1 - begun].cancel()

    asyncio.run(listen())
