"""A broker on a simulated disk whose power can be cut at any operation, and what must hold of it afterwards.

The fault model, beyond that of ``firn_sim.disk``: once the power is off every operation fails, so that the threads
of the old process cannot touch the disk of the next one; only then are unsynced bytes lost and torn (``crash``).
"""

import contextlib
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine_kit import Kit, settings
from firn_sim.clock import SimClock, SimRandomness
from firn_sim.disk import SimDisk, SimFile

from firn.batch import parse_header
from firn_node.disk import Mode
from firn_node.engine.broker import Broker

DATA = "/data"
Ends = dict[tuple[int, int], int]


class PowerDisk(SimDisk):
    """``cut_in(n)``: the n-th change from now on (from 1) does not happen, and nothing does any more."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(seed, **options)
        self.is_dark = False
        self._cut_at: int | None = None

    def cut_in(self, changes: int | None) -> None:
        self._cut_at = None if changes is None else len(self.operations) + changes

    def power_off(self) -> None:
        self.is_dark = True

    def power_on(self) -> None:
        """The next life of the machine: what was not durable is gone."""
        self.crash()
        self.is_dark, self._cut_at = False, None

    def files(self) -> dict[str, bytes]:
        """All files by path, with their content."""
        with self.mutex:
            return {
                f"{folder}/{name}": bytes(inode.live)
                for folder, found in self._folders.items()
                if folder not in ("", "/")
                for name, inode in found.live.items()
            }

    def copy(self) -> "PowerDisk":
        """A disk with the same files, all of them durable."""
        other = PowerDisk(self.random.randrange(1 << 30), capacity=self.capacity)
        for folder in sorted(f for f in self._folders if f not in ("", "/")):
            other.make_folder(folder)
        for path, data in self.files().items():
            other.put(path, data)
        return other

    def open(self, path: str, mode: Mode = "read") -> SimFile:
        self._check_power(path)
        return super().open(path, mode)

    def remove_tree(self, folder: str) -> None:
        with self.mutex:
            self._change_or_raise("remove_tree", folder)
            super().remove_tree(folder)

    def _slow(self, kind: str, path: str) -> None:
        self._check_power(path)
        super()._slow(kind, path)

    def _change(self, kind: str, path: str) -> int | None:
        if self._cut_at is not None and len(self.operations) + 1 >= self._cut_at:
            self.is_dark = True
        self._check_power(path)
        return super()._change(kind, path)

    def _check_power(self, path: str) -> None:
        if self.is_dark:
            raise OSError(errno.EIO, "the power is off", path)


class Machine:
    """One data folder over many lives of its broker."""

    def __init__(self, seed: int = 0, *, disk: PowerDisk | None = None, **changes: Any) -> None:
        self.disk = disk or PowerDisk(seed)
        self.clock = SimClock()
        self.randomness = SimRandomness(seed)
        self._changes = {
            "index": "files", "log_segment_bytes": 8 << 10, "flush_interval_ms": 3_600_000, **changes,
        }  # fmt: skip
        self.kit: Kit

    @property
    def broker(self) -> Broker:
        return self.kit.broker

    async def start(self) -> Kit:
        """Start the broker. *Errors*: those of ``Broker.start``; the machine may be started again."""
        broker = Broker(
            settings(DATA, **self._changes), disk=self.disk, clock=self.clock, randomness=self.randomness
        )
        await broker.start()
        self.kit = Kit(broker, timestamp=self.clock.wall_ms())
        return self.kit

    async def lose_power(self) -> None:
        """Cut the power, end the process, and turn the power on again."""
        self.disk.power_off()
        if hasattr(self, "kit"):
            self.broker.core.health.fail("the power is off")
            with contextlib.suppress(OSError):
                await self.broker.stop()
            del self.kit
        self.disk.power_on()

    async def end(self) -> None:
        """Stop the broker as a person would; one whose log is broken is just closed."""
        with contextlib.suppress(OSError):
            await self.broker.stop()
        del self.kit


@asynccontextmanager
async def machine(seed: int = 0, **options: Any) -> AsyncIterator[Machine]:
    """A machine with a started broker, stopped at the end."""
    found = Machine(seed, **options)
    await found.start()
    try:
        yield found
    finally:
        if hasattr(found, "kit"):
            await found.end()


def log_ends(broker: Broker) -> Ends:
    """The end offset of each partition as the commit log's own batches say."""
    log = broker.core.log
    ends: Ends = {}
    for _, data in log.scan(log.start, log.written_end):
        at = 0
        while at < len(data):
            header = parse_header(data, at)
            ends[header.topic_id, header.partition] = header.last_offset + 1
            at += header.size
    return ends
