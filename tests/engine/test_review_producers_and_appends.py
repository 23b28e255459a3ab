"""Appends seen from the side: checkpoints between append and dispatch, repeats, damage, internal topics."""

import asyncio
from pathlib import Path

from engine_kit import Kit, run, running, settings

from firn.batch import Identity, columns_of, encode
from firn.errors import PartitionParked, UnknownTopic
from firn.types import TOPICS_TOPIC_ID
from firn_node.engine import partitions
from firn_node.engine.api import Appended
from firn_node.engine.broker import Broker

LAZY = {"flush_interval_ms": 3_600_000}


def test_a_checkpoint_between_append_and_dispatch_does_not_forget_the_producers_batch(tmp_path):
    async def go():
        kit = Kit(Broker(settings(tmp_path, **LAZY)))
        await kit.broker.start()
        await kit.create(durability={"flush": "interval"})
        first = await kit.put("t", [(b"k", b"1")], producer=(9, 0, 0))
        await kit.broker.checkpoint()
        assert await kit.get("t", b"k") == b"1"
        await kit.broker.checkpoint()
        await kit.broker.stop()
        kit = Kit(Broker(settings(tmp_path, **LAZY)))
        await kit.broker.start()
        try:
            again = await kit.put("t", [(b"k", b"1")], producer=(9, 0, 0))
            assert again == first
            assert len(await kit.read("t", view="raw")) == 1
        finally:
            await kit.broker.stop()

    run(go())


def test_a_batch_twice_in_one_request_gets_one_offset_twice(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            await kit.put("t", [(b"k", b"0")] * 5, producer=(9, 0, 0))
            batch = kit.batch("t", [(b"k", b"1")], producer=(9, 0, 1))
            later = kit.batch("t", [(b"k", b"2")], producer=(9, 0, 2))
            old = kit.batch("t", [(b"k", b"0")] * 5, producer=(9, 0, 0))
            outcomes = await kit.broker.produce(batch + batch + later + old)
            assert [o.base_offset for o in outcomes if isinstance(o, Appended)] == [5, 5, 6, 0]
            assert len(await kit.read("t", view="raw")) == 7

    run(go())


def test_a_repeat_is_acknowledged_once_what_it_names_is_committed_also_under_flush_interval(tmp_path):
    async def go():
        async with running(tmp_path, **LAZY) as kit:
            await kit.create(durability={"flush": "interval"})
            await kit.put("t", [(b"k", b"1")], producer=(9, 0, 0))
            core = kit.broker.core
            assert core.dispatched_position < core.log.written_end
            await kit.put("t", [(b"k", b"1")], producer=(9, 0, 0))
            assert core.dispatched_position == core.log.written_end

    run(go())


def test_users_cannot_write_to_internal_topics(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            identity = Identity(topic_id=TOPICS_TOPIC_ID, partition=0)
            (outcome,) = await kit.broker.produce(encode(columns_of([b"\xff"], [b"no spec"], 0), identity))
            assert isinstance(outcome, UnknownTopic)
            await kit.create()

    run(go())


def test_a_cancelled_produce_is_neither_lost_nor_doubled(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            for n in range(30):
                task = asyncio.ensure_future(kit.put("t", [(b"k%d" % n, b"v")], producer=(9, 0, n)))
                for _ in range(n % 3):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert (await kit.put("t", [(b"k%d" % n, b"v")], producer=(9, 0, n))).base_offset == n
            assert [r.offset for r in await kit.read("t", view="raw")] == list(range(30))

    run(go())


def _flip(folder: Path, needle: bytes) -> None:
    """Change one byte of a value in the commit log, or change it back."""
    for path in folder.glob("log/*.log"):
        data = bytearray(path.read_bytes())
        at = data.find(needle)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(needle))
                file.write(bytes([data[at + len(needle)] ^ 1]))


def test_damage_in_one_partition_parks_it_alone_until_it_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "PARKED_RETRY_S", 0.0)

    async def go():
        async with running(tmp_path) as kit:
            await kit.create(partitions=2)
            await kit.put("t", [(b"a", b"needle-x")], partition=0)
            await kit.put("t", [(b"b", b"whole")], partition=1)
        _flip(tmp_path, b"needle-")
        async with running(tmp_path) as kit:
            request = kit.batch("t", [(b"a", b"2")], partition=0) + kit.batch(
                "t", [(b"b", b"2")], partition=1
            )
            refused, taken = await kit.broker.produce(request)
            assert isinstance(refused, PartitionParked)
            assert isinstance(taken, Appended)
            states = [row["state"] for row in (await kit.broker.describe("t"))["partitions"]]
            assert states == ["parked", "ready"]
            _flip(tmp_path, b"needle-")
            assert (await kit.put("t", [(b"a", b"2")], partition=0)).base_offset == 1

    run(go())
