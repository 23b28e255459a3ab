"""Rule 18 at the engine: whatever a client reads by, it sees what was acknowledged before it was durable.

The engine waits for the part of the rules' barrier that its partition has; with one partition that is all of it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engine_kit import Kit, run
from firn_sim.node import read_barrier
from group_kit import PATIENT_MS, BrokerGroup, Replica, broker_group

from firn.errors import NotMaster
from firn_node.engine.api import ReadRequest

KEY = b"key"
HOUR_MS = 3_600_000  # a write stays unsynced at its master until somebody asks for it


async def one_get(kit: Kit) -> object:
    return await kit.get("t", KEY)


async def gets(kit: Kit) -> object:
    found = (await kit.broker.get("t", [b"other", KEY]))[1]
    return None if found is None else found.value


async def raw_read(kit: Kit) -> object:
    return (await kit.read("t", view="raw"))[-1].value


async def compacted_read(kit: Kit) -> object:
    return (await kit.map("t"))[KEY]


async def snapshot(kit: Kit) -> object:
    found = await kit.broker.snapshot("t")
    return (await kit.map("t", snapshot=found.id))[KEY]


async def query(kit: Kit) -> object:
    return (await kit.broker.query("t", KEY))[-1].value


async def offset_of_time(kit: Kit) -> None:
    await kit.broker.offset_of_time("t", 0, 0)


async def find_id(kit: Kit) -> object:
    topic = kit.broker.topic("t")
    position = kit.broker.partitions.get(topic, 0).pending[-1].position
    found = await kit.broker.find_id("t", f"0-{position:x}-0-{topic.topic_id:x}")
    return None if found is None else found.value


WAYS: tuple[Callable[[Kit], Awaitable[object]], ...] = (
    one_get, gets, raw_read, compacted_read, snapshot, query, offset_of_time, find_id,
)  # fmt: skip


async def with_topic(group: BrokerGroup) -> Replica:
    master = await group.until_master()
    await master.kit.create("t", durability={"flush": "interval"})
    await group.until_equal()
    return master


async def put_unsynced(master: Replica, value: bytes) -> int:
    """The barrier of a read that comes now: a write is acknowledged, and neither durable nor dispatched."""
    core, group = master.broker.core, master.broker.group
    assert group is not None
    await master.kit.put("t", [(KEY, value)])
    barrier = read_barrier(group.state)
    assert core.dispatched_position < core.log.written_end == barrier
    return barrier


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_read_sees_what_was_acknowledged_before_it_was_durable(
    way: Callable[[Kit], Awaitable[object]], tmp_path: Path
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2, lease_ttl_ms=PATIENT_MS, flush_interval_ms=HOUR_MS) as group:
            master = await with_topic(group)
            for value in (b"first", b"second"):
                barrier = await put_unsynced(master, value)
                seen = await way(master.kit)
                assert master.broker.core.dispatched_position >= barrier
                assert seen == value or way is offset_of_time

    run(story())


def test_a_read_that_waits_when_its_master_is_deposed_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2, lease_ttl_ms=PATIENT_MS, flush_interval_ms=HOUR_MS) as group:
            master = await with_topic(group)
            await put_unsynced(master, b"value")
            reading = asyncio.create_task(master.broker.read(ReadRequest(topic="t", partition=0)))
            await asyncio.sleep(0)
            assert not reading.done()
            await master.broker.switch_over(0, None)
            with pytest.raises(NotMaster):
                await reading

    run(story())
