"""Compaction beside everything else: seals, appends, deletions, snapshots, few objects in memory, shutdown."""

import asyncio
import errno
import os

import pytest
from engine_kit import Kit, run, running, settings

from firn.errors import FirnError, Unavailable
from firn_node.disk import File, Mode, RealDisk
from firn_node.engine import partitions
from firn_node.engine.api import Appended, ReadRequest, outcomes_or_raise
from firn_node.engine.broker import Broker

KEYS = 11


async def fill(kit: Kit, model: dict[bytes, bytes], start: int, count: int, *, size: int = 400) -> None:
    for n in range(start, start + count):
        rows = [(b"k%d" % ((n * 3 + i) % KEYS), b"%d.%d " % (n, i) * (size // 8)) for i in range(3)]
        await kit.put("t", rows)
        model.update(rows)


def test_segments_seal_at_any_instant_of_a_forced_compaction(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"segmentBytes": "4Ki", "memory": "64Ki", "deleteRetention": "0s"})
            model: dict[bytes, bytes] = {}
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            for n in range(30):
                await fill(kit, model, n * 10, 5)
                compaction = await kit.broker.compact("t", force=True)
                at = 0
                while not compaction.is_done:
                    if at < 40:
                        await fill(kit, model, n * 10 + 5, 1)
                        kit.broker.parts.sealer.seal(partition)
                    at += 1
                    await asyncio.sleep(0)
                row = compaction.partitions[0]
                assert (row.state, row.reason) == ("done", None)
            assert await kit.map("t") == model
            for key, value in model.items():
                assert await kit.get("t", key) == value

    run(go())


def test_a_seal_right_before_the_compactor_looks_does_not_fail_the_compaction(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "0s"})
            model: dict[bytes, bytes] = {}
            await fill(kit, model, 0, 20)
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            compaction = await kit.broker.compact("t", force=True)
            while not partition.compacting:
                await asyncio.sleep(0)
            kit.broker.parts.sealer.seal(partition)
            while not compaction.is_done:
                await asyncio.sleep(0.001)
            assert (compaction.state, compaction.partitions[0].reason) == ("done", None)
            assert await kit.map("t") == model

    run(go())


def test_a_forced_compaction_after_a_restart_runs_beside_appends(tmp_path):
    async def go():
        model: dict[bytes, bytes] = {}
        async with running(tmp_path) as kit:
            await kit.create(durability={"flush": "interval"}, compaction={"deleteRetention": "0s"})
            rows = [(b"k%d" % i, b"v") for i in range(2000)]
            for _ in range(100):
                await kit.put("t", rows)
            model.update(rows)
        async with running(tmp_path) as kit:
            compaction = await kit.broker.compact("t", force=True)
            n = 0
            while not compaction.is_done:
                n += 1
                await kit.put("t", [(b"k%d" % (n % 2000), b"new %d" % n)])
                model[b"k%d" % (n % 2000)] = b"new %d" % n
                await asyncio.sleep(0)
            assert (compaction.state, compaction.partitions[0].reason) == ("done", None)
            assert await kit.map("t") == model
            await kit.compact("t")
            assert await kit.map("t") == model

    run(go())


class NoRoomToSeal(RealDisk):
    is_full = False

    def open(self, path: str, mode: Mode = "read") -> File:
        if self.is_full and path.endswith(".dirty"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, mode)


def test_a_seal_that_finds_no_room_does_not_keep_compaction_from_making_some(tmp_path):
    async def go():
        disk = NoRoomToSeal(str(tmp_path))
        kit = Kit(Broker(settings(tmp_path), disk=disk))
        await kit.broker.start()
        try:
            await kit.create(compaction={"deleteRetention": "0s"})
            model: dict[bytes, bytes] = {}
            await fill(kit, model, 0, 20)
            disk.is_full = True
            kit.broker.parts.sealer.seal(kit.broker.partitions.get(kit.broker.topic("t"), 0))
            while not kit.broker.metrics["seal_failures"]:
                await asyncio.sleep(0.005)
            await fill(kit, model, 20, 5)
            compaction = await asyncio.wait_for(kit.compact("t"), 60)
            assert (compaction.state, compaction.partitions[0].records_after) == ("done", KEYS)
            assert await kit.map("t") == model
        finally:
            await asyncio.wait_for(kit.broker.stop(), 30)

    run(go())


def test_a_topic_deleted_while_it_is_sealed_does_not_hold_back_retention(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            topic_id = await kit.create()
            await fill(kit, {}, 0, 20)
            kit.broker.parts.sealer.seal(kit.broker.partitions.get(kit.broker.topic("t"), 0))
            await kit.broker.delete_topic("t")
            await asyncio.sleep(0.1)
            assert (topic_id, 0) not in kit.broker.partitions.states

    run(go())


def test_a_topic_deleted_while_it_is_compacted_leaves_nothing_behind(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            for n in range(10):
                topic_id = await kit.create(compaction={"deleteRetention": "0s"})
                await fill(kit, {}, 0, 10)
                compaction = await kit.broker.compact("t", force=True)
                for _ in range(n):
                    await asyncio.sleep(0)
                await kit.broker.delete_topic("t")
                while not compaction.is_done:
                    await asyncio.sleep(0.001)
                while (tmp_path / "compacted" / str(topic_id)).exists():
                    await asyncio.sleep(0.01)
                assert not [key for key in kit.broker.partitions.states if key[0] == topic_id]

    run(go())


def test_a_changed_spec_reaches_partitions_in_use(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "24h"})
            await kit.put("t", [(b"a", b"1"), (b"a", None), (b"b", b"1")])
            await kit.compact("t")
            assert len(await kit.read("t")) == 2
            await kit.broker.update_topic("t", kit.spec({"compaction": {"deleteRetention": "0s"}}))
            await kit.compact("t")
            assert [r.key for r in await kit.read("t")] == [b"b"]

    run(go())


def test_force_asked_for_during_a_gentle_run_is_done_by_a_run_of_its_own(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "0s"})
            await fill(kit, {}, 0, 10)
            gentle = await kit.broker.compact("t", force=False)
            forced = await kit.broker.compact("t", force=True)
            assert (await kit.broker.compact("t", force=False)) is forced
            while not (gentle.is_done and forced.is_done):
                await asyncio.sleep(0.001)
            assert forced.force
            assert forced.partitions[0].records_after == KEYS

    run(go())


@pytest.mark.parametrize("seed", range(3))
def test_partitions_dropped_from_memory_lose_nothing(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(partitions, "OPEN_PARTITIONS_MAX", 4)
    count = 24

    async def go():
        async with running(tmp_path) as kit:
            await kit.create(
                partitions=count, compaction={"deleteRetention": "0s", "segmentBytes": "4Ki"},
                durability={"flush": "interval" if seed % 2 else "sync"},
            )  # fmt: skip
            models: list[dict[bytes, bytes]] = [{} for _ in range(count)]
            ends = [0] * count

            async def write(n: int) -> None:
                request, wanted = b"", []
                for p in range(count):
                    rows = [(b"k%d" % (n % 5), b"%d " % n * 50), (b"l%d" % p, b"%d" % n)]
                    request += kit.batch("t", rows, partition=p, producer=(7, 0, n))
                    models[p].update(rows)
                    wanted.append(ends[p])
                    ends[p] += 2
                got = outcomes_or_raise(await kit.broker.produce(request))
                assert [a.base_offset for a in got] == wanted

            for n in range(12):
                task = asyncio.ensure_future(write(n))
                await asyncio.sleep(0)
                snapshot = await kit.broker.snapshot("t") if n % 4 == 1 else None
                compaction = await kit.broker.compact("t", force=bool((n + seed) % 2))
                if n % 3 == seed:
                    await kit.broker.checkpoint()
                for p in range(0, count, 5):
                    request = ReadRequest(topic="t", partition=p, offset=ends[p] - 2, view="raw")
                    (await kit.broker.read(request)).release()
                await task
                while not compaction.is_done:
                    await asyncio.sleep(0.001)
                assert compaction.state == "done", [row.reason for row in compaction.partitions]
                if snapshot is not None:
                    for p in range(count):
                        assert await kit.read("t", partition=p, snapshot=snapshot.id)
                    kit.broker.close_snapshot(snapshot.id)
            # What was sealed meanwhile may be due, and is compacted by itself.
            while any(partition.sealing or partition.compacting for partition in kit.broker.partitions):
                await asyncio.sleep(0.01)
            await kit.broker.checkpoint()
            assert len(kit.broker.partitions) <= 4
            for p in range(count):
                assert await kit.map("t", partition=p) == models[p]
                raw = await kit.read("t", partition=p, view="raw")
                assert [r.offset for r in raw] == list(range(ends[p]))

    run(go())


def test_stopping_ends_reads_that_wait_and_loses_nothing_acknowledged(tmp_path):
    async def go():
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        await kit.create(partitions=2, compaction={"segmentBytes": "4Ki"})
        acknowledged = []

        async def write() -> None:
            n = 0
            while True:
                outcome = (await kit.broker.produce(kit.batch("t", [(b"k%d" % n, b"v" * 300)])))[0]
                assert isinstance(outcome, Appended)
                acknowledged.append(b"k%d" % n)
                n += 1

        async def compact() -> None:
            while True:
                await kit.compact("t")

        waiting = asyncio.ensure_future(kit.broker.read(ReadRequest(topic="t", partition=1, wait_ms=60_000)))
        tasks = [asyncio.ensure_future(write()), asyncio.ensure_future(compact())]
        await asyncio.sleep(0.3)
        await asyncio.wait_for(asyncio.gather(kit.broker.stop(), kit.broker.stop()), 60)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 30)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, FirnError | asyncio.CancelledError) for e in ended), ended
        kit = Kit(Broker(settings(tmp_path)))
        await kit.broker.start()
        try:
            assert set(await kit.map("t")) >= set(acknowledged)
        finally:
            await kit.broker.stop()

    run(go())
