"""Drill 26 through kopf and HTTP: bad answers and bad watches, and what comes of them."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from flows_kit import FLOWS, roll, shape, uninterrupted
from kubernetes.aio.client import ApiClient, Configuration
from operator_kit import NAMESPACE, World
from world_server import Faults, WorldServer, kubeconfig, serving

from firn.errors import FirnError
from firn_operator.handlers import hearing, watch
from firn_operator.kube import CLUSTER, Obj, RealKube
from firn_operator.running import Operator

SWEEP_S = 0.3  # minutes in earnest; a silent watch costs so long
CONVERGED_S = 120.0

WORST = "all at once"
BAD = {
    "409 on every second write": Faults(conflicts=2),
    "429 and 500 on every fifth request": Faults(failures=5),
    "410 after every third event, which come backwards": Faults(watch_events=3),
    "silent watches": Faults(silent=frozenset({"CompactedTopic", "BrokerCluster", "BrokerGroup", "Pod"})),
    WORST: Faults(conflicts=2, failures=11, watch_events=5, silent=frozenset({"Pod"})),
}


@pytest.fixture(autouse=True)
def _quiet_kopf() -> None:
    logging.getLogger("kopf").setLevel(logging.ERROR)


async def operated(world: World, server: WorldServer, url: str, wanted: object) -> None:
    """Run an operator until the world is as wanted, and has been left alone for a while."""
    configuration = Configuration()
    configuration.host = url
    kube = RealKube(ApiClient(configuration))
    operator = Operator(
        kube, world, image="", sees_nodes=True, randomness=random.Random(0), now=world.time, clock=world.seconds
    )  # fmt: skip
    stop = asyncio.Event()

    async def event(obj: Obj, is_gone: bool) -> None:
        server.heard += 1
        await operator.feed.event(obj, is_gone=is_gone)

    async def sweep() -> None:
        while True:
            with contextlib.suppress(FirnError):
                await operator.sweep()
                await operator.feed.look_at_everything()
            await asyncio.sleep(SWEEP_S)

    parts = [
        asyncio.create_task(sweep()),
        asyncio.create_task(operator.queue.run(4)),
        asyncio.create_task(watch(event, namespaces=(NAMESPACE,), sees_nodes=True, stop=stop)),
    ]
    try:
        async with asyncio.timeout(CONVERGED_S):
            while shape(world) != wanted or not await _is_left_alone(world):
                await asyncio.sleep(0.1)
                for part in parts:
                    assert not part.done(), part
    finally:
        for part in parts[:2]:
            part.cancel()
        await asyncio.gather(*parts[:2], return_exceptions=True)
        await kube.close()
        stop.set()
        server.end_watches()  # kopf waits at its end for tasks that began after it, the server's too
        await asyncio.gather(*parts, return_exceptions=True)


async def _is_left_alone(world: World) -> bool:
    """No write in two sweeps."""
    before = len(world.requests)
    await asyncio.sleep(2.5 * SWEEP_S)
    return world.writes(before) == []


@pytest.mark.parametrize(
    ("flow", "fault"),
    [*((roll, fault) for fault in BAD), *((flow, WORST) for flow in FLOWS if flow is not roll)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_bad_answers_and_bad_watches_converge_to_the_same_with_few_writes(
    flow: Callable[[World], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, clean = uninterrupted(flow)
    world = World()
    flow(world)
    before = len(world.requests)
    server = WorldServer(world, BAD[fault])

    async def story() -> None:
        async with serving(server) as url:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
            await operated(world, server, url, wanted)

    asyncio.run(story())
    done = len(world.writes(before))
    assert done <= 2 * clean + 10, f"{done} writes came through, {clean} without faults"
    if server.faults.conflicts or server.faults.failures:
        assert server.refused > 0
    assert server.heard > 10
    assert world.most_down <= 1
    assert world.lost_writes == []


def test_a_watch_that_is_told_of_an_internal_error_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf goes on without it: the process has to end, which another one replaces."""
    world = World()
    world.cluster()
    server = WorldServer(world, Faults(broken_watches=1))

    async def event(obj: Obj, is_gone: bool) -> None:
        server.heard += 1

    async def story() -> None:
        async with serving(server) as url:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
            stop = asyncio.Event()
            listening = asyncio.create_task(hearing())
            watching = asyncio.create_task(watch(event, namespaces=(NAMESPACE,), sees_nodes=True, stop=stop))
            async with asyncio.timeout(CONVERGED_S):
                while not server.watches_broken or not listening.done():
                    await asyncio.sleep(0.2)
                    world.change(CLUSTER, "main", bumped)
            stop.set()
            server.end_watches()
            await asyncio.gather(watching, return_exceptions=True)

    def bumped(cluster: Obj) -> None:
        annotations = cluster["metadata"].setdefault("annotations", {})
        annotations["bump"] = str(server.heard) + annotations.get("bump", "")[:8]

    asyncio.run(story())
    assert server.watches_broken == 1
