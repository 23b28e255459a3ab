"""Replicas of one group in one process: real folders, real logs, real loopback connections, one coordinator.

Every node has a door of its own (``Door``): a TCP proxy in front of its port, whose address is the one that the group
record shows. It tells who dials by the request line, and can be shut for some, so that partitions need nothing of the
code under test.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from firn_sim.batches import sized
from firn_sim.clock import SimRandomness

from firn.batch import header_crc
from firn.errors import FirnError
from firn.types import Epoch, Position
from firn_node.clock import LogClock, RealClock
from firn_node.coordinator import MemoryCoordinator, Records
from firn_node.disk import RealDisk
from firn_node.engine.identity import load_identity
from firn_node.filecache import FileCache
from firn_node.log import CommitLog
from firn_node.replication.doors.given import Doors
from firn_node.replication.doors.startup import open_folder
from firn_node.replication.driver import GroupDriver
from firn_node.replication.record import GroupId, Incarnation, LogId, Member
from firn_node.replication.state import Me, Role, Timing
from firn_node.server import Server, serve
from firn_node.settings import BrokerSettings

GROUP = GroupId("orders-0")
TIMING = Timing(lease_ttl=1.5, replica_max_lag=1.5)
_SOURCE = re.compile(rb"[?&]from=([^& ]+)")


class Door:
    """The proxy of one node. ``shut_for``: log_ids that get no further; ``is_shut``: nobody does."""

    def __init__(self) -> None:
        self.shut_for: set[str] = set()
        self.is_shut = False
        self.flips = 0  # so many large pieces from behind it arrive with a bit flipped
        self.rate = 0  # bytes a second from behind it; 0: no bound
        self.port = 0  # of the node behind it
        self._open: list[tuple[str, asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def shut(self, *log_ids: str) -> None:
        """Cut the connections of these, or of all, and let them make no new one."""
        self.is_shut = not log_ids
        self.shut_for |= set(log_ids)
        for source, *writers in self._open:
            if self._refuses(source):
                for writer in writers:
                    writer.transport.abort()

    def reopen(self) -> None:
        self.is_shut, self.shut_for = False, set()

    def _refuses(self, source: str) -> bool:
        return self.is_shut or source in self.shut_for

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\r\n")
        found = _SOURCE.search(line)
        source = found[1].decode() if found else ""
        if self._refuses(source):
            return
        inner_reader, inner = await asyncio.open_connection("127.0.0.1", self.port)
        entry = (source, writer, inner)
        self._open.append(entry)
        try:
            inner.write(line)
            there = asyncio.create_task(_copy(reader, inner))
            back = asyncio.create_task(_copy(inner_reader, writer, self._flipped, lambda: self.rate))
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
        finally:
            self._open.remove(entry)
            inner.transport.abort()

    def _flipped(self, data: bytes) -> bytes:
        if not self.flips or len(data) < 4096:
            return data
        self.flips -= 1
        return data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    change: Callable[[bytes], bytes] = bytes,
    rate: Callable[[], int] = int,
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16 if rate() else 1 << 18):
            if rate():
                await asyncio.sleep(len(data) / rate())
            writer.write(change(data))
            await writer.drain()


@dataclass
class StandInEngine:
    """Dispatches at once; remembers what it was ordered."""

    log: CommitLog
    dispatched: int = 0
    loads: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    steps_down: list[str] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    rebuilds: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)

    def dispatch(self, position: Position) -> Position:
        assert position <= self.log.durable_end
        self.dispatched = position
        return Position(self.dispatched)

    async def load_state(self, epoch: Epoch) -> None:
        self.loads.append(epoch)

    def stepped_down(self, reason: str) -> None:
        self.steps_down.append(reason)

    def cut(self, end: Position) -> None:
        assert end >= self.dispatched
        self.cuts.append(end)

    def begin(self, start: Position) -> None:
        self.begins.append(start)

    def rebuild(self, reason: str, *, keeps_tail: bool) -> None:
        self.rebuilds.append(reason)

    def stopped(self, reason: str, *, is_bug: bool) -> None:
        (self.bugs if is_bug else self.stops).append(reason)


class Node:
    """One replica over many lives of its process."""

    def __init__(self, number: int, folder: Path, records: Records) -> None:
        self.number = number
        self.folder = folder / f"node-{number}"
        self.records = records
        self.door = Door()
        self.driver: GroupDriver
        self.engine: StandInEngine
        self.log: CommitLog
        self.coordinator: MemoryCoordinator
        self.lives = 0
        self.is_up = False
        self.boot_id = "boot-1"
        self.has_interval = False
        self.flush_interval_s = 0.0

    @property
    def log_id(self) -> LogId:
        return self.driver.me.log_id

    async def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        folder, clock = str(self.folder), RealClock()
        disk = self.disk = RealDisk(self.folder)
        self.lives += 1
        randomness = SimRandomness(100 * self.number + self.lives)
        identity = load_identity(disk, folder, randomness)
        self.cache = FileCache(disk, 16)
        self.log = CommitLog.open(
            disk, self.cache, f"{folder}/log", segment_bytes=1 << 20, verify_from=0, create_at=4096
        )
        found = open_folder(
            disk, folder, GROUP, self.log, boot_id=self.boot_id, committed=0, has_interval=self.has_interval
        )
        if not self.door.address:
            await self.door.open()
        self.coordinator = MemoryCoordinator(self.records)
        self.engine = StandInEngine(self.log)
        me = Me(
            GROUP, LogId(identity.log_id), Incarnation(f"{self.number}/{self.lives}"),
            Member(f"node-{self.number}", self.door.address, self.number),
        )  # fmt: skip
        doors = Doors(
            log=self.log, folder=found, coordinator=self.coordinator, engine=self.engine, clock=clock,
            log_clock=LogClock(clock, self.log.last_append_ms), randomness=randomness, timing=TIMING,
            flush_interval_s=self.flush_interval_s,
        )  # fmt: skip
        self.driver = GroupDriver(me, doors)
        broker: Any = SimpleNamespace(settings=BrokerSettings(data=folder))
        self.server: Server = await serve(broker, host="127.0.0.1", port=0)
        self.server.context.peers = self.driver.peers
        self.door.port = int(self.server.address.rpartition(":")[2])
        self.is_up = True
        self.driver.start()

    async def stop(self) -> None:
        """As a person would stop it."""
        await self._end()

    async def kill(self) -> None:
        """As SIGKILL does: nothing is said to anyone; the page cache lives."""
        self.driver.fail("killed")
        await self._end()

    async def _end(self) -> None:
        self.is_up = False
        await self.driver.stop()
        await self.server.stop()
        await self.coordinator.close()
        self.log.close()
        self.cache.close()

    # What clients do.

    async def write(
        self, serial: int, size: int = 400, *, min_in_sync: int = 1, is_interval: bool = False
    ) -> bytes:
        """Append one batch and wait until it is acknowledged. *Errors*: as ``Replication``."""
        self.driver.admit(min_in_sync)
        data = bytearray(sized(size, serial))
        data[44:48] = self.driver.epoch.to_bytes(4, "little")
        data[8:12] = header_crc(data[:104]).to_bytes(4, "little")
        self.log.append([bytes(data)])
        await self.driver.written(self.log.written_end, min_in_sync=min_in_sync, is_interval=is_interval)
        return bytes(data)

    def content(self, start: int, end: int) -> bytes:
        return self.log.read(start, end - start) if end > start else b""


class Group:
    def __init__(self, folder: Path, size: int) -> None:
        self.records = Records()
        self.nodes = [Node(number, folder, self.records) for number in range(size)]
        self.acknowledged: list[bytes] = []
        self._serial = 0

    @property
    def up(self) -> list[Node]:
        return [node for node in self.nodes if node.is_up]

    def master(self) -> Node | None:
        """The node that takes writes now."""
        for node in self.up:
            with contextlib.suppress(FirnError):
                node.driver.admit(1)
                return node
        return None

    async def until(self, holds: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Return once something holds; the test fails when it never does."""
        end = asyncio.get_running_loop().time() + seconds
        while not holds():
            rows = [node.driver.status() for node in self.up]
            assert asyncio.get_running_loop().time() < end, f"never happened: {what}: {rows}"
            await asyncio.sleep(0.01)

    async def until_master(self, *, other_than: Node | None = None) -> Node:
        await self.until(lambda: self.master() not in (None, other_than), "a master takes writes")
        found = self.master()
        assert found is not None
        return found

    async def until_in_sync(self, *nodes: Node) -> None:
        """All of these, or all that are up, are in sync; blank ones are told that they have everything."""

        def holds() -> bool:
            for node in self.up:
                if (
                    node.driver.role is Role.BLANK
                    and node.driver.state.following is not None
                    and node.log.written_end > 4096
                ):
                    node.driver.rebuilt()
            record = self.records.by_group.get(GROUP)
            return record is not None and {n.log_id for n in nodes or self.up} <= record.in_sync

        await self.until(holds, "all are in sync")

    async def write(self, count: int = 1, **options: Any) -> None:
        """Write at the master of the moment, over and over, until ``count`` more are acknowledged."""
        end = asyncio.get_running_loop().time() + 60
        done = 0
        while done < count:
            assert asyncio.get_running_loop().time() < end, "writes are not acknowledged"
            master = self.master()
            self._serial += 1
            try:
                if master is not None:
                    self.acknowledged.append(await master.write(self._serial, **options))
                    done += 1
                    continue
            except FirnError:
                pass
            await asyncio.sleep(0.02)

    async def check(self) -> None:
        """All that are up agree, and hold everything that was acknowledged, in order, once."""
        await self.until_in_sync()
        await self.write()
        await self.until(
            lambda: len({(n.driver.committed, n.engine.dispatched, n.log.written_end) for n in self.up}) == 1,
            "they agree",
        )
        logs = [node.content(node.log.start, node.log.written_end) for node in self.up]
        assert all(log == logs[0] for log in logs)
        at = 0
        for batch in self.acknowledged:
            at = logs[0].find(batch, at)
            assert at >= 0, "an acknowledged batch is missing"
            at += len(batch)
        assert [node.engine.bugs for node in self.up] == [[]] * len(self.up)


@contextlib.asynccontextmanager
async def group(
    folder: Path, size: int = 3, *, checks: bool = True, flush_interval_s: float = 0.0
) -> AsyncIterator[Group]:
    """A started group of in-sync replicas; at the end all must agree on everything that was acknowledged."""
    found = Group(folder, size)
    try:
        for node in found.nodes:
            node.flush_interval_s = flush_interval_s
            await node.start()
        await found.until_master()
        await found.until_in_sync()
        yield found
        if checks:
            await found.check()
    finally:
        for node in found.up:
            await node.stop()
        for node in found.nodes:
            if node.door.address:
                await node.door.close()
