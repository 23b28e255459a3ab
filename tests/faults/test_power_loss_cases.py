"""What single losses of power did to a broker once, one sentence a case."""

import pytest
from engine_kit import run
from fault_kit import machine

from firn_node.engine.broker import Broker


def rows(number):
    return [(b"a", b"%d" % number), (b"b", b"%d" % number)]


def test_the_raw_view_has_no_hole_when_a_compaction_outlived_the_last_index_flush():
    async def go():
        async with machine(1) as found:
            kit = found.kit
            await kit.create(compaction={"deleteRetention": "0s"})
            for number in range(5):
                await kit.put("t", rows(number))
            await found.broker.checkpoint()
            for number in range(5, 10):
                await kit.put("t", rows(number))
            assert (await kit.compact("t")).state == "done"
            await found.lose_power()
            kit = await found.start()
            assert [r.offset for r in await kit.read("t", view="raw")] == list(range(20))
            assert await kit.map("t") == dict(rows(9))

    run(go())


def test_a_replay_of_old_topic_records_does_not_delete_the_topic_that_has_the_name_now():
    async def go():
        async with machine(2) as found:
            kit = found.kit
            await kit.create()
            await kit.put("t", rows(0))
            await kit.broker.delete_topic("t")
            topic_id = await kit.create(compaction={"deleteRetention": "0s"})
            for number in range(5):
                await kit.put("t", rows(number))
            assert (await kit.compact("__topics")).state == "done"
            assert (await kit.compact("t")).state == "done"
            await found.lose_power()
            kit = await found.start()
            assert kit.broker.topic("t").topic_id == topic_id
            assert await kit.map("t") == dict(rows(4))
            await found.end()
            kit = await found.start()
            assert await kit.map("t") == dict(rows(4))
            assert any(path.startswith(f"/data/compacted/{topic_id}/") for path in found.disk.files())

    run(go())


async def broken_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next call of the index fail, as a full RocksDB does."""
    index = broker.core.index
    real = index.append

    def fail(entries, lights=()):
        monkeypatch.setattr(index, "append", real)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "append", fail)


def test_records_are_in_the_index_after_it_has_failed_once(monkeypatch):
    async def go():
        async with machine(3) as found:
            kit = found.kit
            await kit.create()
            await kit.put("t", rows(0))
            await broken_once(found.broker, monkeypatch)
            appended = await kit.put("t", rows(1))  # acknowledged once the index has taken it, a second later
            assert appended.base_offset == 2
            assert [r.offset for r in await kit.read("t", view="raw")] == [0, 1, 2, 3]
            await found.lose_power()
            kit = await found.start()
            assert [r.offset for r in await kit.read("t", view="raw")] == [0, 1, 2, 3]

    run(go())


def test_entries_of_a_topic_that_is_deleted_in_the_same_group_are_not_added_again():
    async def go():
        async with machine(4) as found:
            kit = found.kit
            topic_id = await kit.create(durability={"flush": "interval"})
            await kit.put("t", rows(0))  # waits for its sync, together with the record that deletes the topic
            await kit.broker.delete_topic("t")
            await found.broker.checkpoint()
            assert [end for end in found.broker.core.index.partitions() if end.topic_id == topic_id] == []
            assert [s for s in found.broker.core.index.states() if s[0] == topic_id] == []

    run(go())
