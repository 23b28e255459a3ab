"""Dispatch of much that was written: in portions, between which the event loop serves others, and all of it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from firn_node.disk import File, Mode, RealDisk
from firn_node.engine.broker import Broker
from firn_node.engine.flusher import UNSYNCED_BYTES_MAX
from support.engine_kit import Kit, run, running, settings

INTERVAL: dict[str, Any] = {"durability": {"flush": "interval"}}
RECORDS = 3000


async def _written(kit: Kit) -> None:
    """Records of an hour's flush interval, each in a request of its own."""
    await kit.create("t", **INTERVAL)
    for number in range(RECORDS):
        assert kit.broker.begin_produce(kit.batch("t", [(b"key%d" % number, b"%d" % number)]))[1] is None


def test_the_event_loop_goes_on_while_a_long_interval_is_dispatched(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, flush_interval_ms=3_600_000) as kit:
            await _written(kit)
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            assert (partition.dispatched_end, len(partition.pending)) == (0, RECORDS)
            ends = {0}

            async def watch() -> None:
                while partition.dispatched_end < RECORDS:
                    ends.add(partition.dispatched_end)
                    await asyncio.sleep(0)

            watching = asyncio.create_task(watch())
            assert await kit.get("t", b"key%d" % (RECORDS - 1)) == b"%d" % (RECORDS - 1)
            assert not partition.pending
            await watching
            assert len(ends) >= 5, ends
            assert [r.offset for r in await kit.read("t", view="raw")] == list(range(RECORDS))

    run(main())


def test_what_is_acknowledged_at_once_is_seen_though_much_before_it_is_not_dispatched(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, flush_interval_ms=3_600_000) as kit:
            await _written(kit)
            await kit.create("synced", durability={"flush": "sync"})
            puts = [kit.put("synced", [(b"k%d" % n, b"v")]) for n in range(20)]
            for done in asyncio.as_completed(puts):
                offset = (await done).base_offset
                partition = kit.broker.partitions.get(kit.broker.topic("synced"), 0)
                assert partition.dispatched_end > offset

    run(main())


class _GatedDisk(RealDisk):
    """Its log's syncs wait at a gate while that is shut."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def open(self, path: str, mode: Mode = "read") -> Any:
        file = super().open(path, mode)
        return _GatedFile(self, file) if path.endswith(".log") and mode != "read" else file


class _GatedFile:
    def __init__(self, disk: _GatedDisk, file: File) -> None:
        self._disk = disk
        self._file = file

    def sync(self) -> None:
        if not self._disk.gate.is_set():
            self._disk.is_waiting.set()
        self._disk.gate.wait()
        self._file.sync()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@contextlib.asynccontextmanager
async def _during_a_sync(folder: Path) -> AsyncIterator[Kit]:
    """A broker whose sync of a first record waits at the gate. At the end it passes, and all of two records is dispatched
    though nobody asks for it and nothing comes behind it.
    """
    disk = _GatedDisk(folder)
    broker = Broker(settings(folder, flush_interval_ms=20), disk=disk)
    await broker.start()
    kit = Kit(broker)
    await kit.create("t", **INTERVAL)
    disk.gate.clear()
    await kit.put("t", [(b"a", b"1")])
    while not disk.is_waiting.is_set():
        await asyncio.sleep(0.005)
    try:
        yield kit
    finally:
        disk.gate.set()
    partition = broker.partitions.get(broker.topic("t"), 0)
    while partition.dispatched_end < 2:
        await asyncio.sleep(0.005)
    await broker.stop()


def test_what_is_written_during_a_sync_is_synced_though_its_interval_ends_before_that(tmp_path: Path) -> None:
    async def main() -> None:
        async with _during_a_sync(tmp_path) as kit:
            await kit.put("t", [(b"b", b"2")])
            await asyncio.sleep(0.2)  # its interval ends, most likely

    run(main(), seconds=60)


def test_what_is_too_much_to_wait_for_its_interval_is_synced_though_a_sync_is_under_way(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with _during_a_sync(tmp_path) as kit:
            await kit.put("t", [(b"b", bytes(UNSYNCED_BYTES_MAX + 1))])

    run(main(), seconds=60)
