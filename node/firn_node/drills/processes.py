"""The replicas of a drill as processes: started, killed, paused, their folders damaged.

::

    DIR/coordinator.sqlite    the group record
    DIR/<ordinal>/            the data folder of a replica
    DIR/<ordinal>.faults      its orders (``faults``)
    DIR/<ordinal>.log         what it said on stderr, over all its lives

A replica that ends by itself is started again after a moment, as ``firn up`` or a pod's kubelet does; one that the
drill ended stays down until the drill starts it. Only processes that were started here are ever sent a signal.

A replica runs this release, or from its next start on another one (``release``), as in a rolling upgrade.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import firn_node
from firn.client import Client
from firn.errors import FirnError
from firn_node.coordinator import SqliteCoordinator
from firn_node.coordinator.api import Found
from firn_node.drills.faults import VARIABLE, FaultFile
from firn_node.drills.links import HOST, Links
from firn_node.ports import free_ports
from firn_node.replication.record import GroupId, GroupRecord

GROUP = GroupId("0")
_RESTART_S = 0.5
_STOP_S = 60.0
_STATUS_S = 5.0
_THIS = Path(firn_node.__file__).absolute().parents[1]  # where this release is imported from


def environment_of(release: str | None) -> dict[str, str]:
    """Of a process of that release, None: this one.

    What lies in its folder goes before everything that is installed, and before the folder that the drill was started
    in, where ``-m`` would look first.
    """
    path = release
    if path is None:
        path = os.pathsep.join([str(_THIS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


class Node:
    """One replica over many lives."""

    def __init__(self, folder: Path, ordinal: int, port: int, options: Sequence[str]) -> None:
        self.ordinal = ordinal
        self.port = port
        self.name = f"firn-0-{ordinal}"
        self.data = folder / str(ordinal)
        self.faults = FaultFile(str(folder / f"{ordinal}.faults"))
        self.ends: list[int] = []  # exit codes of lives that the drill did not end
        self.is_wanted = False
        self.is_paused = False
        self.release: str | None = None  # where another release is imported from; None: this one
        self._log = folder / f"{ordinal}.log"
        self._command = [
            sys.executable, "-m", "firn_node", "up", "--data", str(self.data), "--listen", f"{HOST}:{port}",
            "--node", self.name, "--coordinator", str(folder / "coordinator.sqlite"), "--ordinal", str(ordinal),
            "--print-ready", *options,
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def is_up(self) -> bool:
        return self._process is not None

    async def start(self) -> None:
        """Return once the process runs; it is ready later. It must be down."""
        assert self._keeping is None, f"{self.name} runs"
        self.is_wanted = True
        await self._run()
        self._keeping = asyncio.create_task(self._keep(), name=f"drill keeps {self.name}")

    async def _run(self) -> None:
        with open(self._log, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={**environment_of(self.release), VARIABLE: self.faults.path}, start_new_session=True,
            )  # fmt: skip

    async def _keep(self) -> None:
        while self._process is not None:
            code = await self._process.wait()
            self._process = None
            if not self.is_wanted:
                return
            self.ends.append(code)
            await asyncio.sleep(_RESTART_S)
            if self.is_wanted:
                await self._run()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone. It stays down."""
        self.is_wanted = self.is_paused = False
        self._signal(signal.SIGKILL)
        await self._gone()

    async def stop(self) -> int | None:
        """SIGTERM; the exit code, None when it was not up. It stays down. *Errors*: TimeoutError, and it is killed."""
        self.is_wanted = False
        process = self._process
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._gone()
        except TimeoutError:
            await self.kill()
            raise
        return None if process is None else process.returncode

    async def _gone(self) -> None:
        if self._keeping is not None:
            await asyncio.shield(self._keeping)
            self._keeping = None

    def pause(self) -> None:
        self.is_paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._signal(signal.SIGCONT)

    @property
    def resident_bytes(self) -> int:
        """Memory of its process; 0 when it is down, or has ended just now."""
        if self._process is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def last_words(self) -> str:
        """The last line that it wrote."""
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "nothing"

    def wipe(self) -> None:
        """Lose the volume. The process must be down."""
        shutil.rmtree(self.data)


class Cluster:
    """The replicas of one group. Use as ``async with``: nothing that it started outlives it."""

    def __init__(
        self, folder: Path, count: int, options: Sequence[str], *, release: str | None = None
    ) -> None:
        """``release``: what all replicas run at first."""
        self.folder = folder
        self._release = release
        ports = free_ports(HOST, count)
        self.nodes = [Node(folder, ordinal, port, options) for ordinal, port in enumerate(ports)]
        self._coordinator: SqliteCoordinator | None = None

    @property
    def coordinator_path(self) -> Path:
        return self.folder / "coordinator.sqlite"

    @property
    def addresses(self) -> str:
        return ",".join(node.address for node in self.nodes)

    async def start(self, links: Links) -> None:
        SqliteCoordinator.create(self.coordinator_path)
        for node in self.nodes:
            node.faults.set(routes=links.routes(node.ordinal))
            node.release = self._release
        for node in self.nodes:
            await node.start()

    async def __aenter__(self) -> "Cluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.kill()
        await self._close_coordinator()

    async def stop(self) -> list[str]:
        """Stop all at once; what was wrong with how they ended."""
        codes = await asyncio.gather(*(node.stop() for node in self.nodes), return_exceptions=True)
        return [
            f"{node.name} ended with {code!r} at SIGTERM"
            for node, code in zip(self.nodes, codes, strict=True)
            if code not in (0, None)
        ]

    # What the group says of itself.

    async def record(self) -> GroupRecord | None:
        """The group record; None while there is none that can be read."""
        if self._coordinator is None:
            self._coordinator = SqliteCoordinator(self.coordinator_path)
        found = await self._coordinator.read(GROUP)
        if isinstance(found, Found):
            return found.record
        await self._close_coordinator()
        return None

    async def _close_coordinator(self) -> None:
        if self._coordinator is not None:
            await self._coordinator.close()
            self._coordinator = None

    async def epoch(self) -> int:
        record = await self.record()
        return 0 if record is None else record.epoch

    async def master(self) -> Node | None:
        """The master by the group record, which may be dead by now."""
        record = await self.record()
        if record is None or record.master is None:
            return None
        address = record.members[record.master.log_id].address
        return next(node for node in self.nodes if node.address == address)

    async def in_sync(self) -> set[str]:
        """Addresses of the in-sync set."""
        record = await self.record()
        return set() if record is None else {record.members[log_id].address for log_id in record.in_sync}

    async def rows(self) -> list[dict[str, object]]:
        """The status row of every replica that answers."""
        return [row for row in await asyncio.gather(*map(self._row, self.nodes)) if row is not None]

    async def _row(self, node: Node) -> dict[str, object] | None:
        try:
            async with Client(node.address, timeout=_STATUS_S) as client:
                rows = (await client.status())["brokers"]
        except FirnError:
            return None
        return next((row for row in rows if row["address"] == node.address), None)
