"""What goes wrong in a broker of a drill: its disk, its clock, its way to the coordinator.

A process that is started with ``$FIRN_FAULTS`` reads that file, again whenever it was replaced::

    {"routes": {"127.0.0.1:7701": "127.0.0.1:40001"},   where another replica's address is dialled (read once)
     "write": "ENOSPC", "sync": "EIO",                  what every write and sync of a file fails with
     "sync_delay_s": 0.2,                               how much longer a sync takes
     "coordinator": "down",                             no answer from the coordinator
     "jump_s": 3600, "drift": 0.1}                      the wall clock is wrong by, both clocks run faster by

All may be left out. Without the variable nothing of this module is imported. RocksDB writes its files itself, beside
the broker's disk: a full disk is better shown by one that is full.
"""

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from firn_node.clock import RealClock
from firn_node.coordinator import Coordinator
from firn_node.coordinator.api import Reading, Swap, Unknown, Unreachable
from firn_node.disk import Data, Mode, RealDisk, RealFile
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.record import GroupId, GroupRecord

VARIABLE = "FIRN_FAULTS"
_LOOK_S = 0.02  # so often a process looks for new orders
ANSWER_S = 1.5  # after which a coordinator that does not answer is given up, as the real one is


@dataclass(frozen=True, slots=True)
class Faults:
    """The orders of one process."""

    routes: Mapping[str, str] = field(default_factory=dict)
    write: str | None = None
    sync: str | None = None
    sync_delay_s: float = 0.0
    coordinator: Literal["down"] | None = None
    jump_s: float = 0.0
    drift: float = 0.0


class FaultFile:
    """The order's file, as the drill writes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.faults = Faults()

    def set(self, **changes: object) -> None:
        """Change some orders. *Effects*: the process follows them within 0.1 s."""
        self.faults = replace(self.faults, **changes)  # type: ignore[arg-type]
        temporary = f"{self.path}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(asdict(self.faults), file)
        os.replace(temporary, self.path)

    def clear(self) -> None:
        """All is well again, but for the clock, which stays where it is, and the routes."""
        self.set(write=None, sync=None, sync_delay_s=0.0, coordinator=None, drift=0.0)


class Orders:
    """The same file, as the process reads it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._seen: tuple[int, int] | None = None
        self._faults = Faults()

    def now(self) -> Faults:
        with self._lock:
            at = time.monotonic()
            if at - self._looked >= _LOOK_S:
                self._looked = at
                found = os.stat(self._path)
                if (found.st_ino, found.st_mtime_ns) != self._seen:
                    self._seen = (found.st_ino, found.st_mtime_ns)
                    with open(self._path, encoding="utf-8") as file:
                        self._faults = Faults(**json.load(file))
            return self._faults


def _fail(name: str | None, path: str) -> None:
    if name is not None:
        code = getattr(errno, name)
        raise OSError(code, os.strerror(code), path)


class FaultyFile(RealFile):
    __slots__ = ("_orders",)

    def __init__(self, path: str, fd: int, orders: Orders) -> None:
        super().__init__(path, fd)
        self._orders = orders

    def pwrite(self, buffers: Sequence[Data], position: int) -> int:
        _fail(self._orders.now().write, self.path)
        return super().pwrite(buffers, position)

    def sync(self) -> None:
        faults = self._orders.now()
        if faults.sync_delay_s:
            time.sleep(faults.sync_delay_s)
        _fail(faults.sync, self.path)
        super().sync()


class FaultyDisk(RealDisk):
    def __init__(self, root: str, orders: Orders) -> None:
        super().__init__(root)
        self._orders = orders

    def open(self, path: str, mode: Mode = "read") -> FaultyFile:
        if mode == "create":
            _fail(self._orders.now().write, path)
        opened = super().open(path, mode)
        return FaultyFile(path, opened.fileno() or 0, self._orders)

    def free(self) -> tuple[int, int]:
        free, total = super().free()
        return (0 if self._orders.now().write == "ENOSPC" else free), total


class FaultyClock(RealClock):
    """Invariant: ``monotonic`` never goes back, whatever is ordered."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._lock = threading.Lock()
        self._at = super().monotonic()
        self._gained = 0.0

    def monotonic(self) -> float:
        with self._lock:
            at = super().monotonic()
            self._gained += max(0.0, at - self._at) * self._orders.now().drift
            self._at = max(at, self._at)
            return self._at + self._gained

    def wall_ms(self) -> int:
        self.monotonic()
        return super().wall_ms() + int(1000 * (self._orders.now().jump_s + self._gained))


class FaultyCoordinator:
    """A way to the coordinator that can be cut."""

    def __init__(self, inner: Coordinator, orders: Orders) -> None:
        self._inner = inner
        self._orders = orders

    async def _is_down(self) -> bool:
        if self._orders.now().coordinator is None:
            return False
        await asyncio.sleep(ANSWER_S)
        return True

    async def read(self, group_id: GroupId) -> Reading:
        if await self._is_down():
            return Unreachable("cut off from the coordinator by a drill")
        return await self._inner.read(group_id)

    async def watch(self, group_id: GroupId, *, late_s: float = 0.0) -> AsyncGenerator[Reading, None]:
        async for reading in self._inner.watch(group_id, late_s=late_s):
            if await self._is_down():
                yield Unreachable("cut off from the coordinator by a drill")
            else:
                yield reading

    async def compare_and_set(self, new: GroupRecord, *, expected_version: int) -> Swap:
        if await self._is_down():
            return Unknown("cut off from the coordinator by a drill")
        return await self._inner.compare_and_set(new, expected_version=expected_version)

    async def close(self) -> None:
        await self._inner.close()


def spoiled(
    orders_path: str, data: str, *, coordinator: Coordinator | None, dialling: Dialling | None
) -> dict[str, Any]:
    """The parts of a ``Broker`` that can go wrong as a drill orders."""
    orders = Orders(orders_path)
    routes = orders.now().routes
    return {
        "disk": FaultyDisk(data, orders),
        "clock": FaultyClock(orders),
        "coordinator": None if coordinator is None else FaultyCoordinator(coordinator, orders),
        "dialling": None if dialling is None else replace(dialling, routes=routes),
    }
