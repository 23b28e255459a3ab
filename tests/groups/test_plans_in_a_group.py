"""Plans of forced compactions in a broker group: made by the master, told to the standbys by the log."""

from pathlib import Path

import pytest
from engine_kit import run
from group_kit import broker_group, clean, filled
from plan_kit import compact_by_plan, encoded, ended, keys, map_all, open_plan, statement, upload

from firn.errors import FirnError, UnknownPlan
from firn_node.engine.api import TopicInfo


def test_every_standby_compacts_by_itself_once_the_plan_is_carried_out_and_the_master_not_twice(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3) as group:
            master = await filled(group)
            found = await compact_by_plan(master.kit)
            assert [p["state"] for p in found["partitions"]] == ["done"]
            await group.until(lambda: all(clean(each) == (5, 30) for each in group.up), "all have compacted")
            assert master.broker.compaction("t") is None
            for replica in group.replicas:
                await replica.stop()
            for replica in group.replicas:
                await replica.start()
            await group.until_equal()
            again = await group.until_master()
            assert again.broker.compaction("t") is None, "what a plan has done is not asked for again"

    run(story())


def test_a_compaction_that_somebody_else_asks_for_just_then_is_not_taken_for_the_plans(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            plans, runs = master.broker.parts.plans, []
            tell = plans.force
            assert tell is not None

            async def tell_behind_somebody_else(topic: TopicInfo, plan: str) -> None:
                runs.append(await master.broker.compact("t", force=True))
                await tell(topic, plan)

            plans.force = tell_behind_somebody_else
            await compact_by_plan(master.kit)
            [asked] = runs
            await group.until(lambda: asked.is_done, "what was asked for is done")
            assert asked.state == "done"
            assert master.broker.compaction("t") is asked, "what the plan has done is not done again"
            await group.until(lambda: all(clean(each) == (5, 30) for each in group.up), "all have compacted")

    run(story())


def test_a_new_master_knows_no_plan_and_a_new_one_is_carried_out_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            plan = await open_plan(master.kit)
            part = plan["partitions"][0]
            data = statement(plan, part, 0, await keys(master.kit, "t", 0))
            [standby] = [each for each in group.up if each is not master]
            with pytest.raises(FirnError):
                standby.broker.plan("t")
            await group.until_in_sync()
            await master.fail()
            new = await group.until_master(other_than=master)
            with pytest.raises(UnknownPlan):
                await upload(new.kit, plan, part, 0, data)
            found = await compact_by_plan(new.kit)
            assert (found["id"] != plan["id"], found["partitions"][0]["state"]) == (True, "done")
            await master.start()
            await group.until(lambda: clean(master) == (5, 30), "the old master compacts when it is back")

    run(story())


def test_rows_that_a_standby_has_masked_already_are_passed_over(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            [standby] = [each for each in group.up if each is not master]
            plan = await open_plan(master.kit)
            await standby.kit.compact_here("t")
            seen = [r for segment in standby.broker.partitions.get(standby.broker.topic("t"), 0).log.view.segments
                    for n in range(len(segment.reader.batches)) for r in segment.reader.offsets(n).tolist()]  # fmt: skip
            assert seen == [25, 26, 27, 28, 29]
            part = plan["partitions"][0]
            await upload(master.kit, plan, part, 0, encoded(plan, part, 0, seen, []))
            found = (await ended(master.kit))["partitions"][0]
            assert (found["state"], found["compared"], found["records_after"]) == ("done", 5, 5)
            await map_all(master.kit, await open_plan(master.kit))

    run(story())
