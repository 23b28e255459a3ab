"""One operator process from start to end: lead, read everything, work until told to stop or deposed.

Order at start: port, Lease, sweep (the cache is whole), workers and watches. Order at the end: watches, workers, then the
Lease is given back, so that nobody acts beside this process. One that is deposed ends with an error: its pod starts anew.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from firn.errors import FirnError, Forbidden, Unavailable
from firn_operator.brokers import Brokers, RealBrokers
from firn_operator.conditions import DEGRADED, find
from firn_operator.feed import Feed
from firn_operator.handlers import watch
from firn_operator.health import Health, Metrics, serve
from firn_operator.kube import CLUSTER, NODE, Kube, Obj, RealKube, load_client, name_of, namespace_of
from firn_operator.leader import Fencing, Leader
from firn_operator.observe import Cache
from firn_operator.preview import plan_lines
from firn_operator.queue import WorkQueue
from firn_operator.reconcile import Key, Reconciler

_log = logging.getLogger(__name__)
T = TypeVar("T")

WORKERS = 16
PAUSE_S, PAUSE_MAX_S = 0.5, 10.0  # between tries to read what is there
SWEEP_S = 300.0  # how long an object that went unseen may stay in the cache


@dataclass(frozen=True, slots=True)
class Settings:
    namespaces: tuple[str, ...] = ()  # none: all
    port: int = 8080
    lease: str = "firn-operator"
    lease_namespace: str = "default"
    identity: str = "firn-operator"
    image: str = ""  # of brokers whose cluster names none
    spark_image: str = ""  # of runs of Spark; none: there is no Spark
    sweep_s: float = SWEEP_S


def settings_from(namespaces: str, port: int, lease: str) -> Settings:
    """Settings of the command line and of the pod's environment."""
    return Settings(
        tuple(name.strip() for name in namespaces.split(",") if name.strip()), port, lease,
        os.environ.get("POD_NAMESPACE", "default"),
        f"{os.environ.get('POD_NAME', 'firn-operator')}_{uuid.uuid4().hex[:8]}", os.environ.get("FIRN_BROKER_IMAGE", ""),
        os.environ.get("FIRN_SPARK_IMAGE", ""),
    )  # fmt: skip


def boot_time() -> float:
    """Seconds since the machine began, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Operator:
    """Cache, queue and passes, put together; ``work`` runs them while this process leads."""

    def __init__(
        self, kube: Kube, brokers: Brokers, *, image: str, spark_image: str, sees_nodes: bool, randomness: random.Random,
        metrics: Metrics | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = boot_time,
    ) -> None:  # fmt: skip
        self.cache = Cache()
        self.metrics = metrics or Metrics()
        self.reconciler = Reconciler(
            kube,
            brokers,
            self.cache,
            note=self._note,
            default_image=image,
            spark_image=spark_image,
            sees_nodes=sees_nodes,
            now=now,
            clock=clock,
        )
        self.queue: WorkQueue[Key] = WorkQueue(self._pass, randomness)
        self.feed = Feed(self.cache, self.queue)
        self._kube = kube
        self.sees_nodes = sees_nodes
        self._randomness = randomness

    async def _note(self, obj: Obj) -> None:
        await self.feed.event(obj)

    async def _pass(self, key: Key) -> float | None:
        try:
            again = await self.reconciler.work(key)
        except BaseException:
            self.metrics.passes.labels(key.what, "failed").inc()
            raise
        self.metrics.passes.labels(key.what, "done").inc()
        return again

    def degraded(self) -> Iterator[tuple[str, str, str]]:
        """Namespace, name and reason of each cluster that needs a person."""
        for cluster in self.cache.all(CLUSTER):
            condition = find(cluster, DEGRADED)
            if condition is not None and condition.get("status") == "True":
                yield namespace_of(cluster), name_of(cluster), str(condition.get("reason", ""))

    async def sweep(self) -> None:
        await self.feed.sweep(self._kube, sees_nodes=self.sees_nodes)

    async def sweep_for_ever(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s * self._randomness.uniform(0.8, 1.2))
            try:
                await self.sweep()
            except FirnError as error:
                _log.warning("sweep: %s", error.message)


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Errors: Unavailable when this process was deposed, or a watch ended for good."""
    real = RealKube(await load_client(), namespaces=settings.namespaces)
    randomness = random.SystemRandom()
    leader = Leader(
        real,
        settings.lease_namespace,
        settings.lease,
        settings.identity,
        clock=boot_time,
        randomness=randomness,
    )
    metrics = Metrics()
    sees_nodes = await _in_the_end(lambda: _may_list_nodes(real), lambda: True, randomness)
    fencing = Fencing(real, RealBrokers(), leader.left_s)
    operator = Operator(
        fencing, fencing, image=settings.image, spark_image=settings.spark_image, sees_nodes=sees_nodes,
        randomness=randomness, metrics=metrics,
    )  # fmt: skip

    def refresh() -> None:
        metrics.leading.set(leader.is_leading())
        metrics.queue.set(len(operator.queue))
        metrics.objects.set(operator.cache.count())
        metrics.requests.set(sum(real.requests.values()))
        metrics.events.set(operator.feed.events)
        metrics.show_degraded(operator.degraded() if leader.is_leading() else ())

    health = Health(metrics, refresh)
    health.is_leading = leader.is_leading
    health.since_tick_s = lambda: boot_time() - leader.last_tick
    health.oldest_running_s = lambda: operator.queue.oldest_running_s
    runner = await serve(health, settings.port)
    stop = asyncio.Event()
    try:
        await _stoppable(leader.lead(), stop)
        if not stop.is_set():
            _log.warning("%s leads", leader.identity)
            await _lead(operator, leader, health, settings, randomness, stop)
    finally:
        await leader.release()
        await runner.cleanup()
        await real.close()


async def _lead(
    operator: Operator,
    leader: Leader,
    health: Health,
    settings: Settings,
    randomness: random.Random,
    stop: asyncio.Event,
) -> None:
    """Work for as long as this process leads. Errors: as those of ``run``."""
    keeping = asyncio.create_task(leader.keep(), name="leader")
    parts: list[asyncio.Task[None]] = [keeping]
    try:
        await _in_the_end(operator.sweep, lambda: leader.is_leading() and not stop.is_set(), randomness)
        health.is_listed = True
        parts += [
            asyncio.create_task(operator.queue.run(WORKERS), name="workers"),
            asyncio.create_task(operator.sweep_for_ever(settings.sweep_s), name="sweeps"),
            asyncio.create_task(_watch(operator, settings, stop), name="watches"),
        ]
        await operator.feed.look_at_everything()
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        if ended is keeping and not stop.is_set():
            raise Unavailable("this operator does not lead any more")
        ended.result()
        if not stop.is_set() and ended.get_name() != "watches":
            raise Unavailable(f"the operator's {ended.get_name()} have ended")
    finally:
        stop.set()
        for part in parts[1:]:
            part.cancel()
        await asyncio.gather(*parts[1:], return_exceptions=True)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _watch(operator: Operator, settings: Settings, stop: asyncio.Event) -> None:
    """Watches until SIGTERM or SIGINT, which kopf listens for, or ``stop``."""

    async def event(obj: Obj, is_gone: bool) -> None:
        await operator.feed.event(obj, is_gone=is_gone)

    await watch(event, namespaces=settings.namespaces, sees_nodes=operator.sees_nodes, stop=stop)
    stop.set()


async def _stoppable(waiting: Awaitable[None], stop: asyncio.Event) -> None:
    """Wait for something, or for a signal that sets ``stop``."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _in_the_end(
    ask: Callable[[], Awaitable[T]], goes_on: Callable[[], bool], randomness: random.Random
) -> T:
    """What is asked for, as soon as the API server has it. Errors: Unavailable when it is too late."""
    pause = PAUSE_S
    while True:
        try:
            return await ask()
        except Unavailable as error:
            if not goes_on():
                raise
            _log.warning("at the start: %s", error.message)
        await asyncio.sleep(pause * randomness.uniform(0.5, 1.0))
        pause = min(pause * 2, PAUSE_MAX_S)


async def _may_list_nodes(kube: RealKube) -> bool:
    """Whether nodes may be seen; where they may not, drains and lost nodes go unseen."""
    with contextlib.suppress(Forbidden):
        await kube.list(NODE, None)
        return True
    return False


async def show_plan(settings: Settings) -> list[str]:
    """What would be done now for every cluster, one line each; nothing is changed."""
    real = RealKube(await load_client(), namespaces=settings.namespaces)
    try:
        sees_nodes = await _may_list_nodes(real)
        fencing = Fencing(real, RealBrokers(), lambda: 0.0)
        operator = Operator(
            fencing,
            fencing,
            image=settings.image,
            spark_image=settings.spark_image,
            sees_nodes=sees_nodes,
            randomness=random.Random(0),
        )
        await operator.sweep()
        return await plan_lines(operator.cache, operator.reconciler)
    finally:
        await real.close()
