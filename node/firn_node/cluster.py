"""A whole cluster as processes of one machine: N replicas of G groups, a SQLite coordinator, and one supervisor.

::

    DIR/coordinator.sqlite         the group records
    DIR/<group>/<ordinal>/         the data folder of one replica

Ports count up from the one that was given, group by group; from 0: free ones. The supervisor starts every replica,
prefixes what it writes to stderr with its name, says READY once with all addresses, in that order, when all are ready,
and starts one that ended again after a pause. It decides nothing about masters: the groups do.

Invariants: no replica outlives the supervisor, whatever ends it (the kernel tells them); a replica that ends before
the cluster was ready ends the cluster, because its settings, not chance, are to blame.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firn.errors import Invalid, Unavailable
from firn_node.clock import RealClock
from firn_node.coordinator import SqliteCoordinator
from firn_node.disk import RealDisk
from firn_node.main import Announcer
from firn_node.ports import free_ports

if TYPE_CHECKING:
    from firn_node.security.localca import LocalFiles

COORDINATOR = "coordinator.sqlite"
STOP_S = 30.0  # a replica gets so long to stop before it is killed
_LINE_BYTES_MAX = 1 << 16
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a cluster."""

    group: int
    ordinal: int
    data: str
    host: str
    port: int

    @property
    def node(self) -> str:
        return f"firn-{self.group}-{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Cluster:
    data: str
    replicas: tuple[Replica, ...]

    @property
    def groups(self) -> int:
        return max(replica.group for replica in self.replicas) + 1

    @property
    def coordinator(self) -> str:
        return f"{self.data}/{COORDINATOR}"

    def replicas_of(self, group: int) -> int:
        return sum(replica.group == group for replica in self.replicas)


def plan_cluster(data: str, *, host: str, port: int, replicas: int, groups: int) -> Cluster:
    """Which processes a cluster is made of. *Errors*: Invalid for ports that do not exist."""
    count = replicas * groups
    if port + count - 1 > 65535:
        raise Invalid(
            f"ports {port} to {port + count - 1} are needed for {count} brokers; the last one is 65535"
        )
    ports = list(range(port, port + count)) if port else free_ports(host, count)
    return Cluster(
        data,
        tuple(
            Replica(group, ordinal, f"{data}/{group}/{ordinal}", host, ports[group * replicas + ordinal])
            for group in range(groups)
            for ordinal in range(replicas)
        ),
    )


class Supervisor:
    """``command``: the arguments that start a replica, which says ``READY ADDRESS`` on stdout when it is."""

    def __init__(
        self, cluster: Cluster, command: Callable[[Replica], Sequence[str]], announcer: Announcer, *,
        restart_after_s: float,
    ) -> None:  # fmt: skip
        """``restart_after_s`` 0: a replica that ended stays so."""
        self._cluster = cluster
        self._command = command
        self._announcer = announcer
        self._restart_after_s = restart_after_s
        self._addresses: dict[Replica, str] = {}
        self._is_ready = False
        self._running: dict[Replica, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._failure: str | None = None

    def stop(self) -> None:
        """End the cluster; ``run`` returns when all replicas have ended."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until ``stop``. *Errors*: Unavailable when a replica ended before the cluster was ready."""
        for replica in self._cluster.replicas:
            os.makedirs(replica.data, exist_ok=True)
        SqliteCoordinator.create(self._cluster.coordinator)
        keeping = [
            asyncio.create_task(self._keep(replica), name=replica.node) for replica in self._cluster.replicas
        ]
        try:
            await self._stopping.wait()
            await self._end_all()
        finally:
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*keeping)
        if self._failure is not None:
            raise Unavailable(self._failure)

    async def _keep(self, replica: Replica) -> None:
        """Run a replica over and over."""
        while not self._stopping.is_set():
            code = await self._run_once(replica)
            if self._stopping.is_set():
                return
            if not self._is_ready:
                self._failure = f"{replica.node} ended with {_ending(code)} before it was ready"
                self._stopping.set()
                return
            if not self._restart_after_s:
                self._announcer.warn(f"{replica.node} ended with {_ending(code)}; it is not started again")
                return
            self._announcer.warn(
                f"{replica.node} ended with {_ending(code)}; it is started again in {self._restart_after_s:g} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._restart_after_s)

    async def _run_once(self, replica: Replica) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command(replica), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, limit=_LINE_BYTES_MAX, preexec_fn=_dies_with_parent(),
        )  # fmt: skip
        self._running[replica] = process
        assert process.stdout is not None
        assert process.stderr is not None
        if self._stopping.is_set():
            process.terminate()
        await asyncio.gather(
            _lines(process.stdout, lambda line: self._heard(replica, line)),
            _lines(process.stderr, lambda line: self._announcer.warn(f"{replica.node}: {line}")),
        )
        code = await process.wait()
        del self._running[replica]
        return code

    def _heard(self, replica: Replica, line: str) -> None:
        word, _, address = line.partition(" ")
        if word != "READY":
            self._announcer.say(f"{replica.node}: {line}")
            return
        self._addresses[replica] = address
        if not self._is_ready and len(self._addresses) == len(self._cluster.replicas):
            self._is_ready = True
            self._announcer.ready(",".join(self._addresses[each] for each in self._cluster.replicas))

    async def _end_all(self) -> None:
        """Ask every replica to stop, all at once, so that none hands over to another, and wait for them."""
        processes = list(self._running.values())
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        if processes:
            await asyncio.wait([asyncio.create_task(p.wait()) for p in processes], timeout=STOP_S)


def start_cluster(
    cluster: Cluster, arguments: Sequence[str], announcer: Announcer, *, restart_after_s: float,
    local_ca: "LocalFiles | None" = None,
) -> None:  # fmt: skip
    """Run a cluster until SIGINT or SIGTERM. ``arguments``: of ``firn up``, for every replica; ``local_ca``: its TLS.

    *Errors*: as of ``Supervisor.run``.
    """

    def command(replica: Replica) -> Sequence[str]:
        return [
            sys.executable, "-m", "firn.cli.main", "up", *arguments, "--data", replica.data,
            "--listen", f"{replica.host}:{replica.port}", "--node", replica.node,
            "--coordinator", cluster.coordinator, "--group", str(replica.group), "--groups", str(cluster.groups),
            "--group-replicas", str(cluster.replicas_of(replica.group)),
            "--ordinal", str(replica.ordinal), *_tls_arguments(replica.node, local_ca),
        ]  # fmt: skip

    async def run() -> None:
        supervisor = Supervisor(cluster, command, announcer, restart_after_s=restart_after_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
        renewing = asyncio.create_task(_renew(cluster, local_ca))
        try:
            await supervisor.run()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    asyncio.run(run())


def _tls_arguments(node: str, files: "LocalFiles | None") -> list[str]:
    if files is None:
        return []
    return ["--tls-cert", files.certificate(node), "--tls-key", files.key(node), "--tls-ca", files.ca]


async def _renew(cluster: Cluster, files: "LocalFiles | None") -> None:
    """Keep the certificates of a cluster's own CA fresh; its replicas watch their files."""
    if files is not None:
        from firn_node.security.localca import keep

        nodes = [replica.node for replica in cluster.replicas]
        await keep(RealDisk(cluster.data), files.folder, nodes, RealClock())


async def _lines(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    """Hand on every line; one that is too long in pieces."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            line = await stream.read(_LINE_BYTES_MAX)
        if not line:
            return
        take(line.decode("utf-8", "replace").rstrip("\n"))


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _dies_with_parent() -> Callable[[], None] | None:
    """What a child runs before it becomes a broker: ask the kernel for SIGTERM when its parent ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask
