"""A replica of the simulated rebuild: the broker's own parts above ``SimDisk``; its group is told by the simulation.

Of the broker: commit log, index, dispatch, compaction, sealing, checkpoints, retention, the source of a rebuild, and
the rebuild itself. In place of the group's driver stands ``Member``, which knows who is master and keeps the role.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from firn_sim.disk import SimDisk
from firn_sim.turns import Died, SimLoop, Turn

from firn.types import Epoch, Position
from firn_node.compaction.ahead import AHEAD
from firn_node.engine.loading import load_catalogue
from firn_node.engine.partition import unpack_state
from firn_node.engine.parts import FIRST_POSITION, Parts
from firn_node.engine.replica import Replica
from firn_node.rebuild import folder
from firn_node.rebuild.remote import Remote, Where
from firn_node.rebuild.source import Source
from firn_node.rebuild.standby import Rebuilding
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member
from firn_node.replication.state import Role
from firn_node.settings import BrokerSettings, GroupSettings

T = TypeVar("T")
DATA = "/data"
GROUP = GroupId("0")
LOG_SEGMENT_BYTES = 4 << 10
NEVER_MS = 10**12


class SimClock:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self._loop.time() * 1000)


class SimRandomness:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def bytes(self, n: int) -> bytes:
        return self._rng.randbytes(n)

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)


class SimMember:
    """What the engine and the rebuild ask of the group's driver."""

    forced_epoch = Epoch(0)
    has_others_in_sync = True

    def __init__(self, node: "Node", cluster: "Cluster") -> None:
        self._node = node
        self._cluster = cluster
        self.me = SimpleNamespace(group_id=GROUP, log_id=node.log_id)

    @property
    def epoch(self) -> Epoch:
        return Epoch(self._cluster.epoch)

    @property
    def role(self) -> Role:
        if not self._node.is_rebuilt:
            return Role.BLANK
        return Role.MASTER if self._cluster.master is self._node else Role.STANDBY

    @property
    def state(self) -> SimpleNamespace:
        log = self._node.core.log
        history = (1,) if log.written_end > log.start or self._node.has_begun else ()
        return SimpleNamespace(record=self._record(), log=SimpleNamespace(history=history))

    def _record(self) -> GroupRecord:
        nodes = {LogId(node.log_id): node for node in self._cluster.nodes}
        members = {log_id: Member(node.name, node.address, node.ordinal) for log_id, node in nodes.items()}
        master = Master(LogId(self._cluster.master.log_id), Incarnation("-"))
        in_sync = frozenset(log_id for log_id, node in nodes.items() if node.is_rebuilt)
        return GroupRecord(GROUP, 1, self.epoch, 0, master, in_sync, members)

    def rebuilt(self) -> None:
        self._node.is_rebuilt = True

    def damaged(self, reason: str) -> None:
        self._node.start_anew(reason)

    def dispatched(self, position: int) -> None:
        """The master needs not know in this simulation."""

    def released(self, position: int) -> None:
        """As above."""

    def hurry(self) -> None:
        """Every append is synced at once."""

    def topics_changed(self, *, largest_min_in_sync: int, has_interval: bool) -> None:
        """Everything that is appended is committed."""


class Unchecked(Rebuilding):
    """Does not look whether offsets are missing: what is to be left out would be noticed."""

    def _missing(self, *_: object) -> str | None:
        return None


class Cluster:
    """What the replicas have in common."""

    def __init__(self, loop: SimLoop, rng: random.Random, min_dead_ratio: float) -> None:
        self.loop = loop
        self.rng = rng
        self.min_dead_ratio = min_dead_ratio
        self.epoch = 1
        self.nodes: list[Node] = []
        self.master: Node

    def at(self, address: str) -> "Node":
        return next(node for node in self.nodes if node.address == address)


class Node:
    """One replica over many lives. Implements ``rebuild.standby.Host``."""

    def __init__(
        self, ordinal: int, cluster: Cluster, dial: Callable[["Node", Where], Remote],
        rebuilding: type[Rebuilding] = Rebuilding,
    ) -> None:  # fmt: skip
        self.name, self.ordinal = f"n{ordinal}", ordinal
        self.address = f"{self.name}:1"
        self.disk = SimDisk(cluster.rng.getrandbits(32))
        self.is_rebuilt = False  # durable, goes with the folder
        self.is_up = False
        self.life = 0
        self.has_begun = False  # streaming has told where the log begins
        # Of rebuilds that leave out a clause: what the folder held before, and what an earlier pin gave.
        self.given_up: dict[tuple[int, int], Any] = {}
        self.had: dict[tuple[int, int], Any] = {}
        self._cluster = cluster
        self._dial = dial
        self._make_rebuilding = rebuilding
        self._turns: list[Turn] = []

    @property
    def log_id(self) -> str:
        return self.core.identity.log_id

    @property
    def has_failed(self) -> bool:
        return self.core.health.failed is not None

    @property
    def is_whole(self) -> bool:
        """It serves what its log tells."""
        return self.is_up and self.is_rebuilt and not self.has_failed

    # Life.

    def start(self) -> None:
        while True:
            try:
                self._open()
                return
            except Died:  # at a step of what a start does to the folder
                self.disk.crash()

    def _open(self) -> None:
        cluster, disk, rng = self._cluster, self.disk, self._cluster.rng
        disk.make_folder(DATA)
        if folder.carry_out(disk, DATA) is not None:
            self.is_rebuilt = False
        folder.install(disk, DATA)
        settings = BrokerSettings(
            data=DATA, node=self.name, index="files", log_segment_bytes=LOG_SEGMENT_BYTES, disk_reserve=0.0,
            compaction_check_ms=NEVER_MS, min_dead_ratio=cluster.min_dead_ratio,
            group=GroupSettings("", ordinal=self.ordinal),
        )  # fmt: skip
        self._closing = contextlib.ExitStack()
        parts = self.parts = Parts(settings, disk, SimClock(cluster.loop), SimRandomness(rng), self._closing)
        self.core, self.partitions = parts.core, parts.partitions
        self.has_begun = False
        load_catalogue(self.core, self.partitions)
        self._member: Any = SimMember(self, cluster)
        commits: Any = parts.commits
        self.replica = Replica(
            self.core, self.partitions, parts.lookup, parts.dispatcher, parts.appender, commits,
            first_position=FIRST_POSITION,
        )  # fmt: skip
        commits.join(self._member)
        self.replica.join(self._member)
        self.source = Source(self.core, self.partitions, parts.scheduler)
        self.rebuilding = self._make_rebuilding(
            self.core, self.partitions, parts.scheduler, self._member, self, dialling=Dialling(),
            first_position=FIRST_POSITION, dial=lambda where: self._dial(self, where),
        )  # fmt: skip
        self.replica.holds = lambda: self.rebuilding.holds_dispatch
        self.is_up = True
        self.life += 1
        parts.scheduler.start()
        self._tasks = [
            cluster.loop.create_task(work) for work in (self.rebuilding.run(), self._scan_states())
        ]

    async def _scan_states(self) -> None:
        """As ``Upkeep`` does after a start."""
        await self.rebuilding.whole.wait()
        for topic_id, number, row in self.core.index.states():
            if topic_id in self.core.catalogue.by_id:
                self.partitions.states.setdefault((topic_id, number), unpack_state(row))

    async def stop(self, how: str) -> None:
        """``clean``, ``kill`` (the page cache stays) or ``power``."""
        if not self.is_up:
            return
        self.is_up = False
        self.life += 1
        for turn in self._turns:
            turn.kill()
        self._turns.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.parts.sealer.stop()
        await self.parts.scheduler.stop()
        await self.parts.background.end()
        self.replica.close()
        if how == "clean":
            self._closing.close()
        self._closing.pop_all()
        AHEAD.settle(drops=True)
        if how == "power":
            self.disk.crash()
        else:
            self.disk.kill()

    async def restart(self, how: str) -> None:
        await self.stop(how)
        self.start()

    def start_anew(self, reason: str) -> None:
        """Order it; whoever looks after the nodes ends this process and starts the next."""
        self.replica.rebuild(reason, keeps_tail=False)
        self.core.health.fail(reason)

    # Its log.

    def append(self, batch: bytes) -> int:
        """As the master: in the log, durable, dispatched. The position."""
        [position] = self.core.log.append([batch])
        self.core.log.sync()
        self.dispatch()
        return position

    def begin(self, start: int) -> None:
        """The log is empty: let it begin where the master's does."""
        self.core.log.begin_at(start)
        self.replica.begin(Position(start))
        self.has_begun = True

    def copy(self, position: int, data: bytes) -> None:
        self.core.log.append_copy(position, data, after=0)
        self.core.log.sync()
        self.dispatch()

    def dispatch(self) -> None:
        self.replica.dispatch(Position(self.core.log.written_end))

    async def compact(self, name: str, *, force: bool) -> None:
        topic = self.core.catalogue.by_name.get(name)
        if topic is None:
            return
        life, run = self.life, self.parts.scheduler.request(topic, force=force)
        while life == self.life and not run.is_done:
            await asyncio.sleep(0.001)

    async def let_go(self) -> None:
        """A checkpoint, then retention: the log begins as late as it may."""
        if self.rebuilding.whole.is_set():
            await self.parts.upkeep.checkpoint()
            await self.parts.upkeep.retain()

    # The rebuild's host.

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        turn = Turn(self._cluster.loop, function, *arguments)
        self._turns.append(turn)
        self._cluster.loop.call_soon(turn.go)
        found: T = await turn.future
        return found

    async def checkpoint(self) -> None:
        await self.parts.upkeep.checkpoint()

    async def reach(self, position: int) -> None:
        await self.parts.commits.wait(position)

    def take_over_pulled(self) -> None:
        self.partitions.forget_all()
        load_catalogue(self.core, self.partitions)
        self.replica.release()
