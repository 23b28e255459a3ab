"""Forced compactions that somebody else decides: planned, checked against the key index, carried out, dropped."""

import asyncio
import random

import numpy as np
import pytest
from engine_kit import Kit, run, running
from plan_kit import compact_by_plan, encoded, ended, keys, map_all, open_plan, said_of, statement, upload

from firn.errors import AlreadyUploaded, Invalid, NotFound, UnknownPlan
from firn.survivors import survivors
from firn_node.disk import RealDisk
from firn_node.dump import read_any
from firn_node.engine.scheduler import Scheduler
from firn_node.plans import plans


async def filled(kit: Kit, *, records: int = 300, keys: int = 20, seed: int = 1, **spec: object) -> None:
    compaction = {"minDirtyRatio": 1.0, **spec}  # never because it is due
    await kit.create(partitions=2, compaction=compaction)
    seeded = random.Random(seed)
    for partition in range(2):
        for at in range(0, records, 50):
            rows = [(b"k%d" % seeded.randrange(keys), b"v%d" % n) for n in range(at, at + 50)]
            rows = [(k, None if seeded.random() < 0.2 else v) for k, v in rows]
            await kit.put("t", rows, partition=partition)


@pytest.mark.parametrize("retention", ["0s", "24h"])
@pytest.mark.parametrize("slice_records", [1000, 40])
@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_newest_record_of_each_key_is_left(tmp_path, seed, slice_records, retention):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit, seed=seed, deleteRetention=retention)
            if seed:
                await kit.compact("t")
                await kit.put("t", [(b"k%d" % n, None if n % 3 else b"again") for n in range(8)])
            raw = [await kit.read("t", view="raw", partition=p) for p in range(2)]
            view = [await keys(kit, "t", p) for p in range(2)]
            before = [await kit.map("t", partition=p) for p in range(2)]
            found = await compact_by_plan(kit, slice_records=slice_records)
            assert [p["state"] for p in found["partitions"]] == ["done", "done"]
            assert found["state"] == "done"
            for p, part in enumerate(found["partitions"]):
                rows = [(r.offset, r.key, r.value is None) for r in raw[p]]
                over = part["plan_end"] if retention == "0s" else 0
                left = survivors(rows, tombstones_end=over)
                assert [r.offset for r in await kit.read("t", partition=p)] == left
                assert part["records_after"] == len(left)
                assert part["compared"] == part["seen"] == part["records"]
                assert part["seen"] == len(view[p])
                assert part["dead"] == part["seen"] - len({key for _, key in view[p]})
                assert part["slices"] == -(-part["records"] // slice_records)
                assert await kit.map("t", partition=p) == before[p]

    run(go())


def test_an_empty_topic_and_one_whose_keys_are_all_deleted_end_with_nothing(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create("t", compaction={"deleteRetention": "0s"})
            assert [p["state"] for p in (await compact_by_plan(kit))["partitions"]] == ["done"]
            await kit.put("t", [(b"a", b"1"), (b"b", b"2"), (b"a", None), (b"b", None)])
            found = (await compact_by_plan(kit))["partitions"][0]
            assert (found["state"], found["records_after"], found["tombstones_dropped"]) == ("done", 0, 2)
            again = (await compact_by_plan(kit))["partitions"][0]
            assert (again["state"], again["records_after"]) == ("done", 0)

    run(go())


def test_a_wrong_statement_changes_nothing_and_names_the_offsets(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            plan = await open_plan(kit)
            left, right = plan["partitions"]
            rows = await keys(kit, "t", 0)
            seen, dead = said_of(rows, plan_end=left["plan_end"])
            wrong = dead[3:] + sorted(set(seen) - set(dead))[:1]
            await upload(kit, plan, left, 0, encoded(plan, left, 0, seen, sorted(wrong)))
            await upload(kit, plan, right, 0, statement(plan, right, 0, await keys(kit, "t", 1)))
            generation = kit.broker.partitions.get(kit.broker.topic("t"), 0).log.manifest.generation
            found = await ended(kit)
            first, second = found["partitions"]
            assert first["state"] == "disagreement"
            assert first["disagreements"] == sorted([*dead[:3], *sorted(set(seen) - set(dead))[:1]])
            assert str(dead[0]) in first["reason"]
            assert await keys(kit, "t", 0) == rows, "nothing was changed"
            assert kit.broker.partitions.get(kit.broker.topic("t"), 0).log.manifest.generation == generation
            assert second["state"] == "done", "the other partition is none the worse"
            assert kit.broker.metrics["compactions_disagreement"] == 1
            assert kit.broker.plan("t")["id"] != (await open_plan(kit))["id"], "another run is another plan"

    run(go())


def test_a_partition_that_its_broker_compacts_meanwhile_is_still_compared(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            plan = await open_plan(kit)
            part = plan["partitions"][0]
            rows = await keys(kit, "t", 0)
            await kit.put("t", [(b"k1", b"late"), (b"new", b"late")])
            await kit.compact("t")
            await map_all(kit, {**plan, "partitions": plan["partitions"][1:]})
            await upload(kit, plan, part, 0, statement(plan, part, 0, rows))
            found = (await ended(kit))["partitions"][0]
            assert found["state"] == "done"
            assert 0 < found["compared"] < found["seen"], "what is gone is passed over"

    run(go())


def test_a_row_that_is_served_here_though_spark_calls_it_dead_is_a_disagreement_behind_the_horizon_too(
    tmp_path,
):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            await kit.put("t", [(b"a", b"1"), (b"b", b"2")])
            plan = await open_plan(kit)
            await kit.put("t", [(b"c", b"3")])
            await kit.compact("t")
            part = plan["partitions"][0]
            await upload(kit, plan, part, 0, encoded(plan, part, 0, [0, 1], [0]))
            found = (await ended(kit))["partitions"][0]
            assert (found["state"], found["disagreements"]) == ("disagreement", [0])

    run(go())


def test_what_is_written_after_the_plan_waits_for_nothing_and_is_not_touched(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            plan = await open_plan(kit)
            await kit.put("t", [(b"k1", b"late")] * 3)
            await map_all(kit, plan)
            await ended(kit)
            end = plan["partitions"][0]["plan_end"]
            late = [r.offset for r in await kit.read("t") if r.offset >= end]
            assert late == [end, end + 1, end + 2]

    run(go())


def test_there_is_one_open_plan_and_a_run_that_is_done_is_not_done_again(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            with pytest.raises(NotFound):
                kit.broker.plan("t")
            plan = await open_plan(kit, run="first")
            assert (await open_plan(kit, run="second"))["id"] == plan["id"]
            await map_all(kit, plan)
            await ended(kit)
            again, is_new = await kit.broker.open_plan("t", run="first", slice_records=7)
            assert (again["id"], again["state"], is_new) == (plan["id"], "done", False)
            other, is_new = await kit.broker.open_plan("t", run="second", slice_records=1000)
            assert is_new
            assert other["id"] != plan["id"]

    run(go())


def test_an_equal_upload_may_be_repeated_and_another_one_is_refused(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            plan = await open_plan(kit, slice_records=200)
            part = plan["partitions"][0]
            rows = await keys(kit, "t", 0)
            data = statement(plan, part, 0, rows)
            for _ in range(2):
                assert (await upload(kit, plan, part, 0, data))["missing"] == [1]
            with pytest.raises(AlreadyUploaded):
                await upload(kit, plan, part, 0, encoded(plan, part, 0, [1, 2], [1]))
            good = statement(plan, part, 1, rows)
            for damaged in (good[:-8], good[:90] + b"\xff" + good[91:], b"", good + bytes(8)):
                with pytest.raises(Invalid, match=r"statement: (at byte|expected one about)"):
                    await upload(kit, plan, part, 1, damaged)
            with pytest.raises(Invalid, match="expected one about"):
                await upload(kit, plan, part, 1, data)
            folder = tmp_path / "plans" / str(plan["topic_id"])
            assert len(list(folder.iterdir())) == 2, "the plan and one statement"
            (kept,) = folder.glob("*.statement")
            told, said = (read_any(RealDisk("."), str(path)) for path in (folder / "PLAN", kept))
            assert (told.kind, told.facts["id"], told.facts["state"]) == ("plan", plan["id"], "open")
            assert (said.kind, said.facts["plan_end"], said.facts["blocks"]) == ("statement", 300, 1)
            for path in folder.iterdir():
                data = path.read_bytes()
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
                assert len(read_any(RealDisk("."), str(path)).damages) == 1

    run(go())


def test_a_statement_about_a_dropped_plan_is_refused_and_leaves_no_file(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            plan = await open_plan(kit)
            part = plan["partitions"][0]
            data = statement(plan, part, 0, await keys(kit, "t", 0))
            begun = kit.broker.upload_to_plan("t", plan["id"], 0, 0)
            await begun.write(data)
            assert (await kit.broker.cancel_plan("t", plan["id"]))["state"] == "cancelled"
            with pytest.raises(UnknownPlan):
                await begun.finish()
            await begun.close()
            with pytest.raises(UnknownPlan):
                await upload(kit, plan, part, 0, data)
            with pytest.raises(UnknownPlan):
                kit.broker.touch_plan("t", "0" * 16, None)
        async with running(tmp_path, plan_ttl_ms=50) as kit:
            await open_plan(kit)
            while kit.broker.plan("t")["state"] == "open":
                await asyncio.sleep(0.02)
                await kit.broker.parts.plans.expire()
            assert kit.broker.plan("t")["state"] == "expired"
            await open_plan(kit)
            await kit.broker.delete_topic("t")
            while list((tmp_path / "plans").iterdir()):
                await asyncio.sleep(0.005)

    run(go())


def test_a_plan_goes_on_after_a_restart_with_what_was_uploaded(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            plan = await open_plan(kit, slice_records=200)
            part = plan["partitions"][0]
            rows = await keys(kit, "t", 0)
            await upload(kit, plan, part, 1, statement(plan, part, 1, rows))
        async with running(tmp_path) as kit:
            again = await open_plan(kit, slice_records=5)
            assert again["id"] == plan["id"]
            assert [p["missing"] for p in again["partitions"]] == [[0], [0, 1]]
            assert again["partitions"][0]["seen"] > 0
            await map_all(kit, again)
            assert [p["state"] for p in (await ended(kit))["partitions"]] == ["done", "done"]
        async with running(tmp_path) as kit:
            found = kit.broker.plan("t")
            assert (found["id"], found["state"]) == (plan["id"], "done")
            assert [p["records_before"] for p in found["partitions"]] == [300, 300]

    run(go())


def test_records_younger_than_min_lag_are_left_out_and_counted(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit, minLag="1h")
            found = (await compact_by_plan(kit))["partitions"][0]
            assert (found["state"], found["plan_end"], found["records_kept_by_min_lag"]) == ("done", 0, 300)

    run(go())


def test_two_keys_that_a_key_index_takes_for_one_are_a_disagreement_and_both_stay(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create(compaction={"minDirtyRatio": 1.0})
            await kit.put("t", [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
            log = kit.broker.partitions.get(kit.broker.topic("t"), 0).log
            hi = np.array([7, 7, 9], np.uint64)  # of a and b the same fingerprint; its checksums are right
            word = np.array([5 << 32 | row << 1 for row in range(3)], np.uint64)
            log.seal(0, 3, [(hi, word)], bytes=500, max_append_ms=1)
            found = (await compact_by_plan(kit))["partitions"][0]
            assert (found["state"], found["disagreements"]) == ("disagreement", [0])
            assert await kit.map("t") == {b"a": b"1", b"b": b"2", b"c": b"3"}
            state = kit.broker.partitions.states[kit.broker.topic("t").topic_id, 0]
            assert state.retry_ms > kit.broker.core.clock.now_ms() + 3_600_000, "not because it is due either"
            assert state.horizon == 0

    run(go())


def test_a_key_index_whose_checksum_is_wrong_is_made_anew_and_agrees(tmp_path):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            plan = await open_plan(kit)
            kit.broker.parts.sealer.seal(partition)
            while not partition.log.manifest.dirty:
                await asyncio.sleep(0.005)
            (sealed,) = partition.log.manifest.dirty
            path = tmp_path / "compacted" / str(plan["topic_id"]) / "0" / sealed.name
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
            await map_all(kit, plan)
            found = (await ended(kit))["partitions"][0]
            assert (found["state"], found["compared"]) == ("done", 300)

    run(go())


def test_a_plan_of_more_slices_than_anybody_can_list_is_refused_and_says_what_would_do(tmp_path, monkeypatch):
    async def go():
        async with running(tmp_path) as kit:
            await kit.create()
            await kit.put("t", [(b"k%d" % n, b"v") for n in range(30)])
            monkeypatch.setattr(plans, "SLICES_MAX", 10)
            with pytest.raises(Invalid, match="30 slices of 1; at most 10, so say slice_records 3 or more"):
                await open_plan(kit, slice_records=1)
            assert len((await open_plan(kit, slice_records=3))["partitions"][0]["missing"]) == 10

    run(go())


def test_a_plan_from_before_accepted_data_loss_that_ends_late_does_not_replace_the_one_of_now(
    tmp_path, monkeypatch
):
    async def go():
        async with running(tmp_path) as kit:
            await filled(kit)
            work, may_work = Scheduler._compact, asyncio.Event()

            async def held(scheduler, works, is_cancelled):
                await may_work.wait()
                await work(scheduler, works, is_cancelled)

            monkeypatch.setattr(Scheduler, "_compact", held)
            before = await open_plan(kit)
            await map_all(kit, before)
            while kit.broker.parts.plans._running is None:
                await asyncio.sleep(0.001)
            (stale,) = kit.broker.parts.plans._plans.values()
            monkeypatch.setattr(type(kit.broker.parts.commits), "forced_epoch", 7)
            now = await open_plan(kit)
            assert now["id"] != before["id"]
            may_work.set()
            while stale.is_open or kit.broker.parts.plans._running is not None:
                await asyncio.sleep(0.001)
            assert [plan.id for plan in kit.broker.parts.plans.folder.load()] == [now["id"]]

    run(go())
