"""A request of one plain record takes a path of its own: what it leaves behind is what any other path leaves."""

import asyncio
from typing import Any

import pytest
from engine_kit import Kit, run, running

from firn.batch import Identity, columns_of, encode
from firn.errors import Conflict, Fenced, FirnError, MalformedBatch, SequenceGap
from firn_node.engine.api import Appended
from firn_node.engine.appender import WrittenRecord

INTERVAL: dict[str, Any] = {"durability": {"flush": "interval"}}
ROWS = [(b"a", b"1"), (b"b", b""), (b"a", None), (b"", b"2"), (b"c" * 300, b"3" * 5000), (b"b", b"4")]


async def started(kit: Kit, **spec: Any) -> None:
    """A topic whose partition and producer 9 are in use: the next record goes the short way."""
    await kit.create(**(spec or INTERVAL))
    await kit.put("t", [(b"first", b"0")], producer=(9, 0, 0))


def batches(kit: Kit) -> list[bytes]:
    return [kit.batch("t", [row], producer=(9, 0, i)) for i, row in enumerate(ROWS, 1)]


def waiting(kit: Kit) -> list[type]:
    return [type(write) for write in kit.broker.parts.appender.written]


async def left_behind(kit: Kit) -> Any:
    """All that can be seen of the topic, once it is dispatched."""
    await kit.broker.parts.commits.wait(kit.broker.core.log.written_end)
    partition = kit.broker.partitions.opened(kit.broker.topic("t").topic_id, 0)
    assert partition is not None
    assert not partition.pending
    state = partition.state
    values = [await kit.get("t", key) for key, _ in [*ROWS, (b"first", b"")]]
    found = [(r.offset, r.key, r.value, r.timestamp) for r in await kit.read("t", view="raw")]
    queried = [[r.offset for r in await kit.broker.query("t", key, 0, 1 << 62)] for key, _ in ROWS]
    counted = [kit.broker.core.metrics[f"append_{what}"] for what in ("records", "batches", "bytes")]
    return values, found, queried, counted, state.dirty_bytes, state.raw_bytes, state.next_offset


def test_records_sent_alone_leave_what_records_sent_together_leave(tmp_path):
    async def go():
        seen = []
        for alone in (True, False):
            async with running(tmp_path / str(alone), flush_interval_ms=3_600_000) as kit:
                await started(kit)
                requests = batches(kit) if alone else [b"".join(batches(kit))]
                outcomes = [o for request in requests for o in await kit.broker.produce(request)]
                assert waiting(kit).count(WrittenRecord) == (len(ROWS) if alone else 0)
                seen.append((outcomes, await left_behind(kit)))
        assert seen[0] == seen[1]

    run(go())


def test_a_record_sent_alone_is_on_disk_when_it_is_acknowledged_where_its_topic_says_so(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await started(kit, durability={"flush": "sync"})
            for data in batches(kit):
                await kit.broker.produce(data)
                assert kit.broker.core.log.durable_end == kit.broker.core.log.written_end
                assert kit.broker.core.dispatched_position == kit.broker.core.log.written_end

    run(go())


def test_a_repeated_record_gets_the_offset_of_its_first_time_and_one_too_early_is_refused(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await started(kit)
            sent = batches(kit)
            first = await kit.broker.produce(sent[0])
            assert await kit.broker.produce(sent[0]) == first
            assert isinstance((await kit.broker.produce(sent[2]))[0], SequenceGap)
            newer = kit.batch("t", [(b"k", b"v")], producer=(9, 1, 0))
            assert (await kit.broker.produce(newer)) == [Appended(kit.broker.topic("t").topic_id, 0, 2, 1)]
            assert isinstance((await kit.broker.produce(sent[1]))[0], Fenced)
            assert len(await kit.read("t", view="raw")) == 3

    run(go())


def test_a_record_sent_alone_is_seen_by_the_condition_of_the_next_one(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await started(kit)
            await kit.broker.produce(batches(kit)[0])
            assert isinstance(await kit.put_if("t", b"a", b"2", 0), Conflict)
            assert isinstance(await kit.put_if("t", b"a", b"2", 1), Appended)

    run(go())


@pytest.mark.parametrize("at", [0, 9, 21, 33, 110, 140, -9])
def test_a_damaged_record_sent_alone_is_refused_and_takes_no_offset(tmp_path, at):
    async def go():
        async with running(tmp_path) as kit:
            await started(kit)
            damaged = bytearray(batches(kit)[4])
            damaged[at] ^= 0x40
            end = kit.broker.core.log.written_end
            assert isinstance((await kit.broker.produce(damaged))[0], MalformedBatch)
            assert kit.broker.core.log.written_end == end
            assert (await kit.put("t", [(b"k", b"v")])).base_offset == 1

    run(go())


@pytest.mark.parametrize("topic_id", ["internal", "unknown", "partition"])
def test_a_record_sent_alone_to_where_none_may_go_is_refused(tmp_path, topic_id):
    async def go():
        async with running(tmp_path) as kit:
            await started(kit)
            await kit.broker.commit_offsets("g", "t", {0: (1, None)})
            internal = [
                t.topic_id for t in kit.broker.core.catalogue.by_id.values() if t.name.startswith("__")
            ]
            own = kit.broker.topic("t").topic_id
            id, partition = {"internal": (internal[0], 0), "unknown": (99, 0), "partition": (own, 5)}[
                topic_id
            ]
            data = encode(columns_of([b"k"], [b"v"], 1000), Identity(topic_id=id, partition=partition))
            assert isinstance((await kit.broker.produce(data))[0], FirnError)

    run(go())


def test_records_of_a_topic_that_is_being_deleted_are_passed_over(tmp_path):
    async def go():
        async with running(tmp_path, flush_interval_ms=3_600_000) as kit:
            await started(kit)
            deleting = asyncio.create_task(kit.broker.delete_topic("t"))
            await asyncio.sleep(0)  # it is written and on its way to the disk
            for data in batches(kit):
                assert isinstance((await kit.broker.produce(data))[0], Appended)
            await deleting
            await kit.broker.parts.commits.wait(kit.broker.core.log.written_end)
            assert kit.broker.core.health.index_error is None
            assert kit.broker.core.dispatched_position == kit.broker.core.log.written_end

    run(go())
