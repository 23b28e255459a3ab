"""Forced compactions by Spark of a broker group whose standby has compacted for itself, and what it reads from whom."""

import asyncio
from pathlib import Path

import group_kit
import pytest
from engine_kit import run
from group_kit import address, asked_at, broker_group, clean
from pyspark.sql import SparkSession

from firn.topicspec import parse_spec
from firn_spark import force_compaction
from firn_spark.connection import Connection
from firn_spark.force_compaction import Document

SPEC = {"durability": {"minInSync": 1}, "compaction": {"minDirtyRatio": 1.0, "deleteRetention": "0s"}}
KEYS = [b"k%d" % number for number in range(20)]
RECORDS = 600
SLICE_RECORDS = 20  # 30 tasks, of which each asks either broker: once in 2 ** 30 runs all ask the same one


@pytest.mark.parametrize("is_past_the_plan", [False, True])
def test_a_standby_that_has_masked_rows_which_the_master_has_not_is_read_as_well_and_nothing_is_lost(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_past_the_plan: bool
) -> None:
    """By compacting for itself before the plan is made, or past the plan's end before it is read."""
    monkeypatch.setattr(
        group_kit, "LEASE_TTL_MS", 60_000
    )  # nobody is elected because Spark takes the processors

    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await group.until_master()
            [standby] = [each for each in group.up if each is not master]
            await master.broker.create_topic("t", parse_spec(SPEC))
            for at in range(0, RECORDS, len(KEYS)):
                await master.kit.put("t", [(key, b"%d" % at) for key in KEYS])
            await master.kit.put("t", [(KEYS[0], None)])
            await group.until_equal()
            loop, plans = asyncio.get_running_loop(), list[Document]()
            expected: dict[bytes, bytes | None] = {**dict.fromkeys(KEYS, b"%d" % at), KEYS[0]: None}

            async def compact_standby() -> None:
                await standby.kit.compact_here("t")

            async def go_past_the_plan() -> None:
                await master.kit.put("t", [(KEYS[1], b"past the plan")])
                expected[KEYS[1]] = b"past the plan"
                await group.until_equal()
                await compact_standby()

            def watch(plan: Document) -> None:
                if is_past_the_plan and not plans:
                    asyncio.run_coroutine_threadsafe(go_past_the_plan(), loop).result()
                plans.append(plan)

            if not is_past_the_plan:
                await compact_standby()
            before = asked_at(standby)
            connection = Connection(bootstrap=f"{address(master)},{address(standby)}", timeout=120)
            plan = await asyncio.to_thread(
                force_compaction.compact, spark, connection, "t", slice_records=SLICE_RECORDS, watch=watch
            )
            assert asked_at(standby) > before, "tasks read from standbys too"
            (row,) = plan["partitions"]
            assert (row["state"], row["disagreements"]) == ("done", [])
            assert (row["plan_end"], row["records"]) == (RECORDS + 1, RECORDS + 1)
            assert row["compared"] == row["seen"] < row["records"], "what the standby has masked was not seen"
            lived = len(KEYS) - 1  # one is deleted
            await group.until(lambda: clean(standby)[0] == lived, "the standby has compacted")
            assert clean(master) == (lived, RECORDS + 1)
            rows = [expected[key] for key in KEYS]
            assert await group.maps("t", KEYS) == [rows, rows]

    run(story(), seconds=300)
