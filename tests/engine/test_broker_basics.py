"""The engine's promises, one sentence a test, on real files."""

import asyncio

import numpy as np
import pytest
from engine_kit import NOW, run, running, settings

from firn.batch import Codec, Codecs
from firn.errors import (
    BadOffset,
    Conflict,
    Fenced,
    FirnError,
    Invalid,
    MalformedBatch,
    SequenceGap,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from firn.topicspec import parse_spec
from firn_node.engine.api import Appended, ReadRequest
from firn_node.engine.broker import Broker


def test_what_was_put_is_got_and_read_in_order(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            first = await kit.put("t", [(b"a", b"1"), (b"b", b"2")])
            second = await kit.put("t", [(b"a", b"3"), (b"", b"empty key")])
            assert (first.base_offset, second.base_offset) == (0, 2)
            assert await kit.get("t", b"a") == b"3"
            assert await kit.get("t", b"") == b"empty key"
            assert await kit.get("t", b"absent") is None
            read = await kit.read("t", view="raw")
            assert [(r.offset, r.key, r.value, r.timestamp) for r in read] == [
                (0, b"a", b"1", NOW), (1, b"b", b"2", NOW), (2, b"a", b"3", NOW), (3, b"", b"empty key", NOW),
            ]  # fmt: skip

    run(go())


@pytest.mark.parametrize("codec", list(Codec))
def test_a_forced_compaction_leaves_the_newest_record_of_each_key(tmp_path, codec):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "0s"})
            for i in range(20):
                rows = [(b"k%d" % (j % 7), b"value %d of %d" % (i, j) * 5) for j in range(i, i + 10)]
                await kit.put("t", rows, codecs=Codecs(codec, codec, codec))
            await kit.put("t", [(b"k3", None)])
            before = await kit.map("t")
            compaction = await kit.compact("t")
            row = compaction.partitions[0]
            assert (row.state, row.reason) == ("done", None)
            assert (row.records_before, row.records_after, row.tombstones_dropped) == (201, 6, 1)
            assert await kit.map("t") == before
            assert b"k3" not in before
            assert len(await kit.read("t")) == 6
            assert await kit.get("t", b"k3") is None
            assert await kit.get("t", b"k4") == before[b"k4"]

    run(go())


def test_tombstones_stay_readable_for_delete_retention(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "24h"})
            await kit.put("t", [(b"a", b"1"), (b"b", b"2")])
            await kit.put("t", [(b"a", None)])
            await kit.compact("t")
            assert [(r.key, r.value) for r in await kit.read("t")] == [(b"b", b"2"), (b"a", None)]
            assert await kit.get("t", b"a") is None

    run(go())


def test_many_partitions_are_compacted_in_one_sweep(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(partitions=40)
            for i in range(10):
                for p in range(40):
                    await kit.put("t", [(b"a", b"%d" % i), (b"b%d" % i, b"x" * p)], partition=p)
            before = [await kit.map("t", partition=p) for p in range(40)]
            compaction = await kit.compact("t")
            assert {row.state for row in compaction.partitions} == {"done"}
            assert [await kit.map("t", partition=p) for p in range(40)] == before
            assert sum(row.records_after for row in compaction.partitions) == 40 * 11

    run(go())


def test_compare_and_set_sees_undispatched_records_of_the_same_request(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            batches = b"".join(kit.batch("t", [(b"k", b"%d" % i)]) for i in range(3))
            outcomes = await kit.broker.produce(batches, conditions=[-1, 0, 0])
            assert isinstance(outcomes[0], Appended)
            assert isinstance(outcomes[1], Appended)
            assert isinstance(outcomes[2], Conflict)
            assert outcomes[2].details["newest_offset"] == 1
            assert await kit.get("t", b"k") == b"1"

    run(go())


def test_compare_and_set_by_offset_before_and_after_compaction(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            assert isinstance(await kit.put_if("t", b"k", b"1", -1), Appended)
            assert isinstance(await kit.put_if("t", b"k", b"2", -1), Conflict)
            assert isinstance(await kit.put_if("t", b"k", b"2", 7), Conflict)
            assert isinstance(await kit.put_if("t", b"k", b"2", 0), Appended)
            await kit.compact("t")
            assert isinstance(await kit.put_if("t", b"k", b"3", 0), Conflict)
            assert isinstance(await kit.put_if("t", b"k", None, 1), Appended)
            assert isinstance(await kit.put_if("t", b"k", b"4", 2), Appended), "a tombstone's offset matches"
            assert isinstance(await kit.put_if("t", b"k", None, 3), Appended)
            assert isinstance(await kit.put_if("t", b"k", b"5", -1), Appended), "deleted counts as absent"

    run(go())


def test_a_producers_retry_gets_its_first_offsets_also_after_a_restart(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            for sequence in range(70):
                await kit.put("t", [(b"k", b"%d" % sequence)], producer=(9, 0, sequence))
            again = await kit.put("t", [(b"k", b"69")], producer=(9, 0, 69))
            assert again.base_offset == 69
            with pytest.raises(SequenceGap):
                await kit.put("t", [(b"k", b"x")], producer=(9, 0, 72))
            with pytest.raises(SequenceGap):
                await kit.put("t", [(b"k", b"x")], producer=(9, 0, 1))  # older than what is remembered
            with pytest.raises(SequenceGap):
                await kit.put("t", [(b"k", b"x")], producer=(10, 0, 5))
            await kit.put("t", [(b"k", b"new epoch")], producer=(9, 1, 0))
            with pytest.raises(Fenced):
                await kit.put("t", [(b"k", b"x")], producer=(9, 0, 70))
        async with running(tmp_path) as kit:
            assert (await kit.put("t", [(b"k", b"new epoch")], producer=(9, 1, 0))).base_offset == 70
            assert (await kit.put("t", [(b"k", b"next")], producer=(9, 1, 1))).base_offset == 71

    run(go())


def test_sequences_of_one_request_are_checked_in_order(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            data = b"".join(kit.batch("t", [(b"k", b"%d" % s)], producer=(5, 0, s)) for s in (0, 1, 1, 3, 2))
            outcomes = await kit.broker.produce(data)
            kinds = [type(o).__name__ for o in outcomes]
            assert kinds[:2] == ["Appended", "Appended"]
            assert kinds[4] == "Appended"
            assert isinstance(outcomes[3], SequenceGap)
            assert len(await kit.read("t", view="raw")) == 3, "the repeated sequence was not appended twice"

    run(go())


def test_a_refused_batch_leaves_the_others_of_its_request_alone(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            good = kit.batch("t", [(b"k", b"v")])
            bad = bytearray(good)
            bad[-3] ^= 1
            outcomes = await kit.broker.produce(good + bytes(bad) + good)
            assert [type(o) for o in outcomes] == [Appended, MalformedBatch, Appended]
            assert len(await kit.read("t", view="raw")) == 2

    run(go())


def test_requests_that_make_no_sense_are_named(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            await kit.put("t", [(b"k", b"v")])
            for request, error in (
                (ReadRequest(topic="nope", partition=0), UnknownTopic),
                (ReadRequest(topic="t", partition=1), UnknownPartition),
                (ReadRequest(topic="t", partition=0, offset=2), BadOffset),
                (ReadRequest(topic="t", partition=0, offset=-1), BadOffset),
            ):
                with pytest.raises(error):
                    await kit.broker.read(request)
            with pytest.raises(TopicExists):
                await kit.create()
            with pytest.raises(Invalid):
                await kit.create("__secret")
            with pytest.raises(Invalid, match="partitions cannot change"):
                await kit.broker.update_topic("t", parse_spec({"partitions": 2}))
            with pytest.raises(Invalid):
                await kit.broker.find_id("t", "no such id")

    run(go())


def test_a_deleted_and_recreated_topic_never_shows_old_bytes(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            for round in range(3):
                old = await kit.create()
                assert await kit.map("t") == {}
                await kit.put("t", [(b"k", b"round %d" % round)])
                if round:
                    await kit.compact("t")
                stale = kit.batch("t", [(b"k", b"late")])
                await kit.broker.delete_topic("t")
                with pytest.raises(UnknownTopic):
                    await kit.get("t", b"k")
                assert isinstance((await kit.broker.produce(stale))[0], UnknownTopic)
            new = await kit.create()
            assert new != old
            assert await kit.read("t", view="raw") == []
            assert (await kit.put("t", [(b"k", b"new")])).base_offset == 0
            assert await kit.map("t") == {b"k": b"new"}
        assert len(list((tmp_path / "compacted").iterdir())) <= 2

    run(go())


def test_a_reader_at_the_end_is_woken_by_the_next_record(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            request = ReadRequest(topic="t", partition=0, wait_ms=60_000)
            waiting = asyncio.create_task(kit.broker.read(request))
            await asyncio.sleep(0.05)
            await kit.put("t", [(b"k", b"v")])
            result = await asyncio.wait_for(waiting, 30)
            assert result.next_offset == 1
            result.release()
            empty = await kit.broker.read(ReadRequest(topic="t", partition=0, offset=1, wait_ms=20))
            assert (empty.parts, empty.next_offset) == ([], 1)

    run(go())


def test_flush_interval_is_acknowledged_before_the_sync_and_visible_to_get_and_read(tmp_path):
    async def go():
        async with running(tmp_path, flush_interval_ms=3_600_000) as kit:
            await kit.create(durability={"flush": "interval"})
            durable = kit.broker.core.log.durable_end
            await kit.put("t", [(b"k", b"v")])
            assert kit.broker.core.log.durable_end == durable, "acknowledged before any sync"
            assert await kit.get("t", b"k") == b"v"
            assert kit.broker.core.log.durable_end > durable, "what was shown is durable"
            await kit.put("t", [(b"k", b"w")])
            assert [r.value for r in await kit.read("t", view="raw")] == [b"v", b"w"]

    run(go())


def test_a_query_finds_a_keys_history_by_time_and_compares_real_topics_and_keys(tmp_path):
    async def go():
        async with running(tmp_path, log_segment_bytes=64 << 10) as kit:
            await kit.create("Aa")
            await kit.create("BB")
            for i in range(300):
                await kit.put(
                    "Aa", [(b"BB", b"%d" % i * 50), (b"other%d" % i, b"x" * 100)], timestamps=NOW + i
                )
            assert len(kit.broker.core.log.segments()) > 1
            found = await kit.broker.query("Aa", b"BB", NOW + 10, NOW + 20)
            assert [r.value for r in found] == [b"%d" % i * 50 for i in range(10, 20)]
            assert await kit.broker.query("BB", b"Aa") == []
            assert await kit.broker.query("BB", b"BB") == []
            by_id = await kit.broker.find_id("Aa", found[3].id)
            assert by_id == found[3]
            assert await kit.broker.find_id("BB", found[3].id) is None
            assert await kit.broker.find_id("Aa", found[3].id.replace("-", "-8", 1)) is None

    run(go())


def test_light_queues_count_their_own_offsets(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            await kit.put("t", [(b"a", b"1"), (b"b", b"2")], queues=[["red"], ["red", "blue"]])
            await kit.put("t", [(b"c", b"3"), (b"d", b"4"), (b"e", b"5")], queues=[["blue"], [], ["red"]])
            request = ReadRequest(topic="t", partition=0, view="raw", queue="red")
            result = await kit.broker.read(request)
            assert result.queue_rows == [[(0, 0), (1, 1)], [(2, 2)]]
            assert (result.next_offset, result.end) == (3, 3)
            with pytest.raises(Invalid, match="no compacted view"):
                await kit.broker.read(ReadRequest(topic="t", partition=0, queue="red"))

    run(go())


def test_groups_commit_offsets_by_topic_id(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(partitions=3)
            await kit.broker.commit_offsets("g", "t", {0: (5, 3), 2: (7, None)})
            await kit.broker.commit_offsets("g", "t", {0: (6, 3)})
            assert await kit.broker.fetch_offsets("g", "t") == {0: (6, 3), 2: (7, None)}
            assert await kit.broker.fetch_offsets("other", "t") == {}
            with pytest.raises(Invalid):
                await kit.broker.commit_offsets("g", "t", {3: (1, None)})
        async with running(tmp_path) as kit:
            await kit.compact("__offsets")
            assert await kit.broker.fetch_offsets("g", "t") == {0: (6, 3), 2: (7, None)}
            await kit.broker.delete_topic("t")
            await kit.create(partitions=3)
            assert await kit.broker.fetch_offsets("g", "t") == {}

    run(go())


def test_min_lag_binds_a_forced_compaction_and_the_result_counts_what_it_kept_out(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"minLag": "1h"})
            for i in range(5):
                await kit.put("t", [(b"k", b"%d" % i)])
            row = (await kit.compact("t")).partitions[0]
            assert (row.state, row.records_kept_by_min_lag) == ("done", 5)
            assert len(await kit.read("t")) == 5

    run(go())


def test_a_folder_in_use_is_refused(tmp_path):
    async def go():
        async with running(tmp_path):
            with pytest.raises(Unavailable, match="in use"):
                await Broker(settings(tmp_path)).start()

    run(go())


def test_sealed_segments_answer_gets_and_survive_a_restart(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"segmentBytes": "16Ki"})
            for i in range(40):
                await kit.put("t", [(b"k%d" % (j % 50), b"%d" % i * 10) for j in range(i, i + 20)])
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            while partition.sealing:
                await asyncio.sleep(0.005)
            assert len(partition.log.manifest.dirty) >= 2
            expected = await kit.map("t", view="raw")
            for key, value in expected.items():
                assert await kit.get("t", key) == value
            row = (await kit.compact("t", force=False)).partitions[0]
            assert row.state == "done"
            assert 0 < partition.log.manifest.horizon < 800, "the active segment stays out"
            assert await kit.map("t") == expected
        async with running(tmp_path) as kit:
            for key, value in expected.items():
                assert await kit.get("t", key) == value
            await kit.compact("t")
            assert await kit.map("t") == expected

    run(go())


def test_a_snapshot_is_one_exact_map_while_the_topic_is_written_and_compacted(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"deleteRetention": "0s"})
            for i in range(10):
                await kit.put("t", [(b"k%d" % i, b"old")])
            await kit.compact("t")
            await kit.put("t", [(b"k1", b"new"), (b"k2", None)])
            snapshot = await kit.broker.snapshot("t")
            expected = await kit.map("t")
            await kit.put("t", [(b"k%d" % i, b"later") for i in range(10)])
            await kit.compact("t")
            await kit.put("t", [(b"k3", None)])
            await kit.compact("t")
            assert await kit.map("t", snapshot=snapshot.id) == expected
            kit.broker.close_snapshot(snapshot.id)
            with pytest.raises(FirnError, match="expired"):
                await kit.read("t", snapshot=snapshot.id)

    run(go())


def test_concurrent_produces_are_grouped_and_all_visible(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(partitions=4)
            await asyncio.gather(
                *(kit.put("t", [(b"k%d" % i, b"v%d" % i)], partition=i % 4) for i in range(400))
            )
            found = {}
            for p in range(4):
                found |= await kit.map("t", partition=p)
            assert found == {b"k%d" % i: b"v%d" % i for i in range(400)}
            assert kit.broker.core.log.durable_end == kit.broker.core.log.written_end

    run(go())


def test_offsets_of_times_follow_the_running_maximum(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            for i, stamp in enumerate((10, 30, 20, 50)):
                await kit.put("t", [(b"k%d" % i, b"v")], timestamps=np.array([NOW + stamp]))
            for stamp, offset in ((0, 0), (10, 0), (11, 1), (30, 1), (31, 3), (51, 4)):
                assert await kit.broker.offset_of_time("t", 0, NOW + stamp) == offset

    run(go())
