"""One broker process from start to stop: engine, port, topics of ``-f``, signals.

Order at start: lock and engine (recovery), topics, port, then ``READY``. Order at stop (SIGINT, SIGTERM): a replica
that is told SIGTERM steps aside for the others, the port refuses new requests and ends running ones, then the engine
flushes and closes. A signal a second later ends the process at once: what was acknowledged is durable without any stop.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from firn.errors import Invalid, Unavailable
from firn.tls import ClientProof
from firn.topicspec import TopicDocument
from firn_node.clock import RealClock
from firn_node.config_topics import apply_topics
from firn_node.disk import RealDisk
from firn_node.engine.api import FIRST_GROUP
from firn_node.memory import bound_heaps, release_compiler
from firn_node.settings import BrokerSettings

if TYPE_CHECKING:
    from firn_node.coordinator import Coordinator
    from firn_node.engine.broker import Broker
    from firn_node.replication.doors.peers import Dialling
    from firn_node.security.guard import Guard
    from firn_node.security.trust import TrustFiles
    from firn_node.server.health import HealthPort

READY_POLL_S = 0.01
_SAME_SIGNAL_S = 1.0  # a terminal's signal and that of the supervisor are one
# One busy Python thread delays the event loop by a switch interval at a time; 5 ms by default.
SWITCH_INTERVAL_S = 0.0005

log = logging.getLogger("firn.main")


class Announcer:
    """What a person must know, one line each; with ``ready_only`` stdout holds the READY line alone."""

    def __init__(self, *, ready_only: bool) -> None:
        self._ready_only = ready_only

    def say(self, line: str) -> None:
        if not self._ready_only:
            print(line, flush=True)

    def warn(self, line: str) -> None:
        print(f"firn: {line}", file=sys.stderr, flush=True)

    def ready(self, address: str) -> None:
        print(f"READY {address}", flush=True)


async def run_broker(settings: BrokerSettings, topics: Sequence[TopicDocument], announcer: Announcer) -> None:
    """Serve until SIGINT or SIGTERM.

    Errors: Unavailable when the data folder is in use or the port is taken; Corrupt when the log is damaged;
    Invalid for a topic that cannot become what its file says.
    """
    from firn_node.engine.broker import Broker

    stopping = _Stopping()
    stopping.listen()
    async with _health(settings) as health, _coordinator(settings) as coordinator:
        parts: dict[str, Any] = {"coordinator": coordinator, "dialling": _dialling(settings)}
        if orders := os.environ.get("FIRN_FAULTS"):  # a drill's
            from firn_node.drills.faults import spoiled

            parts = spoiled(orders, settings.data, **parts)
        while not stopping.is_set():
            broker = Broker(settings, **parts)
            if health is not None:
                health.starting()
            await broker.start()
            try:
                if broker.group is None:
                    await _apply(broker, topics, announcer)
                await _serve(broker, settings, topics, announcer, stopping, health)
            except Unavailable:
                if not broker.starts_anew:
                    raise
                announcer.warn("this replica starts anew; it gets what is missing from its master")
            finally:
                await broker.stop()
    announcer.say("stopped")


async def _apply(broker: "Broker", topics: Sequence[TopicDocument], announcer: Announcer) -> None:
    """Topics of ``-f``; of a group its master has them, of several groups that of group 0."""
    for line in await apply_topics(broker, topics):
        announcer.say(line)


@contextlib.asynccontextmanager
async def _health(settings: BrokerSettings) -> "AsyncIterator[HealthPort | None]":
    """The port for probes, open before anything that takes time."""
    if not settings.health_host:
        yield None
        return
    from firn_node.server.health import HealthPort

    try:
        port = HealthPort(settings.health_host, settings.health_port)
    except OSError as error:
        raise _port_error(f"{settings.health_host}:{settings.health_port}", error) from error
    try:
        yield port
    finally:
        await port.close()


@contextlib.asynccontextmanager
async def _coordinator(settings: BrokerSettings) -> "AsyncIterator[Coordinator | None]":
    """A replica's handle of the group records."""
    if settings.group is None:
        yield None
        return
    coordinator: Coordinator
    if settings.group.is_in_kubernetes:
        from firn_node.kubernetes.cluster import coordinator_of

        coordinator = await coordinator_of(settings.group)
    else:
        from firn_node.coordinator import SqliteCoordinator

        coordinator = SqliteCoordinator(settings.group.coordinator)
    try:
        yield coordinator
    finally:
        await coordinator.close()


def _dialling(settings: BrokerSettings) -> "Dialling | None":
    """How a replica reaches the others: with TLS as it serves with TLS, by the certificates of the moment."""
    if settings.group is None:
        return None
    from firn_node.replication.doors.peers import Dialling

    return Dialling(tls=ClientProof(settings.security.as_client()).context)


async def _serve(
    broker: "Broker", settings: BrokerSettings, topics: Sequence[TopicDocument], announcer: Announcer,
    stopping: "_Stopping", health: "HealthPort | None",
) -> None:  # fmt: skip
    from firn_node.server import serve
    from firn_node.server.metrics import metrics_text

    async with _security(broker, settings) as (trust, guard):
        try:
            server = await serve(
                broker, host=settings.host, port=settings.port, trust=trust, guard=guard,
                peers=broker.group.peers if broker.group is not None else None,
            )  # fmt: skip
        except OSError as error:
            raise _port_error(f"{settings.host}:{settings.port}", error) from error
        broker.address = settings.advertise or server.address
        if health is not None:
            health.serving(broker.why_unready, lambda: metrics_text(server.context))
        try:
            async with _looked_after(broker, settings):
                await _answer(broker, server.address, topics, announcer, stopping)
        finally:
            await server.stop()


@contextlib.asynccontextmanager
async def _looked_after(broker: "Broker", settings: BrokerSettings) -> AsyncIterator[None]:
    """Its part in a cluster of Kubernetes, if it has one."""
    if settings.group is None or not settings.group.is_in_kubernetes:
        yield
        return
    from firn_node.kubernetes.cluster import looked_after

    async with looked_after(broker, settings.group):
        yield


@contextlib.asynccontextmanager
async def _security(
    broker: "Broker", settings: BrokerSettings
) -> "AsyncIterator[tuple[TrustFiles | None, Guard | None]]":
    """What is trusted, watched for changes, and who is let in; None and None where everybody is.

    Errors: Invalid, naming the file that is no good; OSError for the audit log.
    """
    security = settings.security
    if not security.has_tls and not security.has_authentication:
        yield None, None
        return
    from firn_node.security.audit import AuditLog
    from firn_node.security.guard import Guard
    from firn_node.security.trust import TrustFiles

    trust, clock = TrustFiles(security), RealClock()
    tasks = [asyncio.create_task(trust.watch())]
    if security.local_ca:
        from firn_node.security.localca import keep

        disk = RealDisk(settings.data)
        tasks.append(asyncio.create_task(keep(disk, security.local_ca, [settings.node], clock)))
    audit, reviews = None, None
    try:
        if not security.has_authentication:
            yield trust, None
            return
        if security.token_review:
            from firn_node.kubernetes.cluster import reviews_for

            reviews = await reviews_for(security.token_review, clock)
        audit = AuditLog(security.audit_log or f"{settings.data}/audit.log", clock)
        yield trust, Guard(trust, clock, broker, audit, reviews)
    finally:
        if reviews is not None:
            await reviews.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if audit is not None:
            audit.close()


async def _answer(
    broker: "Broker", address: str, topics: Sequence[TopicDocument], announcer: Announcer,
    stopping: "_Stopping",
) -> None:  # fmt: skip
    """Say when the broker takes writes, or follows a master, then go on until it is stopped.

    Errors: as ``_until_stopped_or_failed``; Invalid for a topic that cannot become what its file says.
    """
    has_failed = asyncio.create_task(broker.failed())
    while not (broker.is_ready() or stopping.is_set() or has_failed.done()):
        await asyncio.sleep(READY_POLL_S)
    has_failed.cancel()
    if broker.is_ready() and not stopping.is_set():
        if broker.group is not None and broker.group.is_master and broker.core.group == FIRST_GROUP:
            await _apply(broker, topics, announcer)
        announcer.ready(address)
    loading = asyncio.create_task(asyncio.to_thread(_load_kernels, stopping))
    await _until_stopped_or_failed(broker, stopping)
    if stopping.steps_aside:
        await broker.step_aside()
    await loading


def _load_kernels(stopping: asyncio.Event) -> None:
    """What the first requests would load otherwise, and wait for: the start did not.

    What lives then lives for good, half a million objects: the collector of Python, which would hold up requests for
    a tenth of a second each time it walks them, is off meanwhile and passes over them from then on. A broker that is
    told to stop loads no further ones: where none is compiled yet, all of them take a minute.
    """
    from firn_node.kernels.jit import load_all

    gc.disable()
    try:
        if load_all(lambda: not stopping.is_set()):
            release_compiler()
            gc.freeze()
    finally:
        gc.enable()


async def _until_stopped_or_failed(broker: "Broker", stopping: asyncio.Event) -> None:
    """Errors: Unavailable, with the reason, when the broker must be started anew (a failed fsync)."""
    stop, failed = asyncio.create_task(stopping.wait()), asyncio.create_task(broker.failed())
    try:
        await asyncio.wait([stop, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise Unavailable(
                f"the broker ends: {failed.result()}; start it again, it recovers from its disk"
            )
    finally:
        stop.cancel()
        failed.cancel()


def _port_error(address: str, error: OSError) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"cannot listen on {address}: another process does; stop it, or give another --listen"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES) or error.errno is None or error.errno < 0:
        return Invalid(f"cannot listen on {address}: {error.strerror or error}; give another --listen")
    return error


class _Stopping(asyncio.Event):
    """Set by SIGINT or SIGTERM; another one a second later, or more, ends the process at once.

    SIGTERM is for this process: a replica steps aside for the others first. SIGINT comes to all of a group, from a
    terminal and from their supervisor, in the same moment: nobody is left to step aside for.
    """

    steps_aside = False

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        began = float("inf")

        def stop(number: int) -> None:
            nonlocal began
            if loop.time() - began >= _SAME_SIGNAL_S:
                os._exit(128 + number)
            if not self.is_set():
                began = loop.time()
                self.steps_aside = number == signal.SIGTERM
                self.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)


@contextlib.contextmanager
def no_certificates() -> Iterator[None]:
    """OpenSSL finds no certificates of the system meanwhile."""
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


def start(settings: BrokerSettings, topics: Sequence[TopicDocument], announcer: Announcer) -> None:
    """Run one broker in this process until it is told to stop."""
    bound_heaps()
    # aiohttp reads the system's certificates twice when it is imported, for a client's contexts that nothing here
    # uses: a tenth of the start.
    with no_certificates():
        from firn_node.server import install_uvloop

    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("FIRN_LOG", "WARNING").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    install_uvloop()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(run_broker(settings, topics, announcer))
