"""Figures and deadlines: status from whatever is in memory, ages by a clock that the test moves."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from engine_kit import Kit, run, running, settings
from firn_sim.clock import SimClock
from hypothesis import HealthCheck, given, note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from firn.errors import FirnError
from firn_node.engine.api import Appended
from firn_node.engine.broker import Broker

HOUR = 3600.0


async def started(folder: Path | str, clock: SimClock | None = None, **changes: object) -> Kit:
    kit = Kit(Broker(settings(folder, **changes), clock=clock))
    await kit.broker.start()
    return kit


async def row(kit: Kit, number: int = 0) -> dict[str, object]:
    found: dict[str, object] = (await kit.broker.describe("t"))["partitions"][number]
    return found


async def until(condition: object, what: str) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not condition():  # type: ignore[operator]
        assert asyncio.get_running_loop().time() < end, f"never happened: {what}"
        await asyncio.sleep(0.02)


FIGURES = (
    "earliest",
    "latest",
    "horizon",
    "live_records",
    "dirty_ratio",
    "raw_bytes",
    "compacted_bytes",
    "last_compaction",
)


def test_status_shows_the_same_figures_before_and_after_a_restart_without_opening_a_partition(tmp_path):
    async def go():
        kit = await started(tmp_path)
        await kit.create(compaction={"deleteRetention": "0s"})
        await kit.put("t", [(b"k%d" % (i % 5), b"v" * 100) for i in range(50)])
        await kit.compact("t")
        await kit.put("t", [(b"k1", b"w" * 100)])
        before = await row(kit)
        assert (before["horizon"], before["latest"], before["live_records"]) == (50, 51, 6)
        log = kit.broker.core.log
        assert before["raw_bytes"] == sum(
            s.topics[kit.broker.topic("t").topic_id].bytes for s in log.segments()
        )
        await kit.broker.stop()
        kit = await started(tmp_path)
        try:
            after = await row(kit)
            assert after["state"] == "idle"
            assert {name: after[name] for name in FIGURES} == {name: before[name] for name in FIGURES}
            await kit.read("t")
            assert {name: (await row(kit))[name] for name in FIGURES} == {
                name: before[name] for name in FIGURES
            }
        finally:
            await kit.broker.stop()

    run(go())


@pytest.mark.parametrize("portion", [1, 3, 1024])
def test_raw_bytes_stay_right_while_the_log_expires(tmp_path, monkeypatch, portion):
    monkeypatch.setattr("firn_node.engine.rawbytes.PORTION_ENTRIES", portion)

    async def go():
        async with running(tmp_path, log_segment_bytes=16 << 10) as kit:
            topic_id = await kit.create(compaction={"deleteRetention": "0s"}, retention={"size": "1Ki"})
            await kit.create("other", retention={"size": "1Ki"})
            await kit.compact("__topics")
            starts = set()
            for n in range(12):
                for i in range(12):
                    await kit.put("t", [(b"k%d" % i, b"v" * 300)])
                    await kit.put("other" if i % 3 == 0 else "t", [(b"k", b"v" * 100)])
                await kit.compact("t")
                await kit.compact("other")
                if n % 3 == 2:
                    await kit.broker.checkpoint()
                    await kit.broker.parts.upkeep.retain()
                start = -1
                while start != kit.broker.core.log.start:  # housekeeping retains in a thread of its own
                    start = kit.broker.core.log.start
                    entries = [
                        entry
                        for entry in kit.broker.core.index.scan(topic_id, 0, 0, limit=100_000)
                        if entry.position >= start
                    ]
                    for _ in range(30):  # bounded portions a call
                        shown = (await row(kit))["raw_bytes"]
                starts.add(start)
                assert shown == sum(entry.size for entry in entries)
            assert len(starts) > 1, "nothing expired: the test looks at nothing"

    run(go())


def test_offsets_go_on_after_everything_has_expired_and_the_newest_rows_were_dropped_tombstones(tmp_path):
    async def go():
        changes = {"log_segment_bytes": 8 << 10}
        kit = await started(tmp_path, **changes)
        await kit.create(compaction={"deleteRetention": "0s"}, retention={"time": "0s", "size": "0"})
        await kit.create(
            "filler", retention={"time": "0s", "size": "0"}, compaction={"deleteRetention": "0s"}
        )
        await kit.put("t", [(b"k%d" % i, b"v") for i in range(10)])
        await kit.put("t", [(b"k%d" % i, None) for i in range(10)])
        await kit.compact("t")
        for _ in range(30):
            await kit.put("filler", [(b"k", b"v" * 1000)])
        await kit.compact("filler")
        await kit.broker.checkpoint()
        kit.broker.parts.scheduler.held_back = set()
        topics = kit.broker.core.catalogue.by_name["__topics"]
        kit.broker.parts.scheduler.request(topics, force=True)
        await until(
            lambda: kit.broker.parts.scheduler.requests[topics.topic_id].run.is_done, "__topics is compacted"
        )
        await asyncio.sleep(0.01)
        await kit.broker.parts.upkeep.retain()
        assert kit.broker.core.log.start > 4096
        assert (await row(kit))["raw_bytes"] == 0
        for _ in range(2):
            await kit.broker.stop()
            kit = await started(tmp_path, **changes)
            shown = await row(kit)
            assert (shown["earliest"], shown["latest"], shown["horizon"], shown["live_records"]) == (
                20,
                20,
                20,
                0,
            )
        try:
            assert (await kit.put("t", [(b"k", b"v")])).base_offset == 20
            assert await kit.map("t") == {b"k": b"v"}
        finally:
            await kit.broker.stop()

    run(go())


def test_an_idle_topic_is_compacted_by_age_its_tombstones_go_and_then_nothing_more_is_done(tmp_path):
    async def go():
        clock = SimClock()
        kit = await started(tmp_path, clock, compaction_check_ms=5, reclaim_age_ms=100 * 3_600_000)
        try:
            topic_id = await kit.create(
                compaction={"maxSegmentAge": "1h", "deleteRetention": "24h", "minDirtyRatio": 0.5}
            )
            await kit.put("t", [(b"k%d" % (i % 10), b"v" * 50) for i in range(100)])
            await kit.put("t", [(b"k3", None)])
            await asyncio.sleep(0.1)
            assert (await row(kit))["horizon"] == 0
            state = kit.broker.partitions.state_of(topic_id, 0)
            clock.advance(1.1 * HOUR)
            # The manifest has its horizon a moment before the end, from which the next compaction is spaced.
            await until(lambda: state.horizon == 101, "compaction by age")
            assert len(await kit.read("t")) == 10
            clock.advance(25 * HOUR)
            await until(
                lambda: kit.broker.status()["topics"][0]["partitions"][0]["live_records"] == 9,
                "the tombstone goes",
            )
            clock.advance(200 * HOUR)
            await until(lambda: state.oldest_masked_ms == -1, "the tombstone's row goes")
            done = kit.broker.metrics["compactions_done"]
            for _ in range(10):
                clock.advance(60)
                await asyncio.sleep(0.02)
            assert kit.broker.metrics["compactions_done"] == done, "compacted again with nothing to do"
            assert len(await kit.read("t")) == 9
        finally:
            await kit.broker.stop()

    run(go())


def test_max_lag_compacts_what_the_dirty_ratio_never_would_also_after_a_restart(tmp_path):
    async def go():
        clock = SimClock()
        kit = await started(tmp_path, clock, compaction_check_ms=5)
        await kit.create(compaction={"maxLag": "48h", "maxSegmentAge": "1h"})
        await kit.put("t", [(b"k%d" % i, b"v" * 50) for i in range(1000)])
        await kit.compact("t")
        clock.advance(HOUR)
        await kit.put("t", [(b"new", b"v")])
        clock.advance(2 * HOUR)
        await asyncio.sleep(0.1)
        assert (await row(kit))["horizon"] == 1000
        await kit.broker.stop()
        clock.advance(46 * HOUR)
        kit = await started(tmp_path, clock, compaction_check_ms=5)
        try:
            await until(
                lambda: kit.broker.status()["topics"][0]["partitions"][0]["horizon"] == 1001,
                "compaction by lag",
            )
        finally:
            await kit.broker.stop()

    run(go())


def test_a_failing_compaction_backs_off_and_succeeds_once_it_can(tmp_path):
    async def go():
        clock = SimClock()
        kit = await started(tmp_path, clock, compaction_check_ms=5)
        try:
            topic_id = await kit.create(compaction={"maxSegmentAge": "1h"})
            await kit.put("t", [(b"k", b"v")] * 10)
            folder = tmp_path / "compacted" / str(topic_id)
            folder.write_bytes(b"in the way")
            clock.advance(2 * HOUR)
            await until(lambda: kit.broker.metrics["compactions_failed"] == 1, "a failure")
            await asyncio.sleep(0.1)
            assert kit.broker.metrics["compactions_failed"] == 1, "tried again without waiting"
            shown = (await row(kit))["last_compaction"]
            assert isinstance(shown, dict)
            assert shown["result"] == "failed"
            assert shown["reason"]
            folder.unlink()
            clock.advance(HOUR)
            await until(lambda: kit.broker.status()["topics"][0]["partitions"][0]["horizon"] == 10, "success")
        finally:
            await kit.broker.stop()

    run(go())


steps = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=12)


@hypothesis_settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(steps, st.integers(1, 120)), min_size=1, max_size=3))
def test_min_lag_keeps_out_exactly_the_younger_batches(rounds):
    """Against a plain scan of append times; batches of one request lie in one index entry."""
    note(f"rounds: {rounds!r}")

    async def go(folder: str) -> None:
        clock = SimClock()
        kit = await started(folder, clock, flush_interval_ms=3_600_000)
        try:
            await kit.create(durability={"flush": "interval"})
            ages: list[int] = []  # append time per record
            horizon = 0
            for appends, lag in rounds:
                for batches, records, seconds in appends:
                    request = b"".join(kit.batch("t", [(b"k", b"v")] * records) for _ in range(batches))
                    outcomes = await kit.broker.produce(request)
                    assert all(isinstance(o, Appended | FirnError) for o in outcomes)
                    ages += [kit.broker.core.clock.now_ms()] * (batches * records)
                    clock.advance(seconds)
                await kit.broker.update_topic("t", kit.spec({"compaction": {"minLag": f"{lag}s"}}))
                compaction = await kit.compact("t")
                limit = kit.broker.core.clock.now_ms() - lag * 1000
                old = next((i for i, at in enumerate(ages) if at > limit), len(ages))
                horizon = max(horizon, old)
                result = compaction.partitions[0]
                assert (result.state, result.records_kept_by_min_lag) == ("done", len(ages) - horizon)
                assert (await row(kit))["horizon"] == horizon
        finally:
            await kit.broker.stop()

    with tempfile.TemporaryDirectory() as folder:
        run(go(folder))
