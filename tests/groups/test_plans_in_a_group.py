"""Plans of forced compactions in a broker group: made by the master, told to the standbys by the log."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_kit import run
from group_kit import Replica, broker_group, clean, filled
from plan_kit import compact_by_plan, encoded, ended, keys, map_all, open_plan, statement, upload

from firn.errors import FirnError, UnknownPlan
from firn_node import failpoints
from firn_node.engine.api import TopicInfo

BEFORE_TOLD, TOLD = "plan.statements_gone", "plan.told"


@contextmanager
def stuck_at(step: str) -> Iterator[asyncio.Event]:
    """No plan comes past a step, as if its master had died there; set once one has come so far."""
    reached, loop = asyncio.Event(), asyncio.get_running_loop()

    def hook(name: str) -> None:
        if name == step:
            loop.call_soon_threadsafe(reached.set)
            raise RuntimeError(f"stopped at {step} by the test")

    failpoints.hook = hook
    try:
        yield reached
    finally:
        failpoints.hook = None


async def carried_out_up_to(step: str, master: Replica, *others: Replica) -> str:
    """The id of a plan whose master has compacted everything, and dies before it is done with it; ``others`` stop."""
    with stuck_at(step) as reached:
        plan = await open_plan(master.kit)
        await map_all(master.kit, plan)
        await reached.wait()
        for replica in others:
            await replica.stop()
        await master.fail()
    return str(plan["id"])


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


@pytest.mark.parametrize("step", [BEFORE_TOLD, TOLD])
def test_a_master_that_dies_around_the_telling_of_the_others_leaves_it_to_the_next_plan_or_to_the_log(
    tmp_path: Path, step: str
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            id = await carried_out_up_to(step, master)
            new = await group.until_master(other_than=master)
            await group.until_equal()
            if step == TOLD:
                await group.until(lambda: clean(new) == (5, 30), "the log has told it, without any driver")
            else:
                assert new.broker.compaction("t") is None
                assert clean(new) != (5, 30)
            found = await compact_by_plan(new.kit)
            assert (found["id"] != id, found["partitions"][0]["state"]) == (True, "done")
            assert found["partitions"][0]["records_after"] == 5
            await master.start()
            await group.until_equal()
            await group.until(lambda: all(clean(each) == (5, 30) for each in group.up), "all have compacted")
            assert (
                await group.maps("t", [b"k%d" % n for n in range(5)])
                == [[b"%d" % n for n in range(25, 30)]] * 2
            )

    run(story())


@pytest.mark.parametrize("step", [BEFORE_TOLD, TOLD])
def test_a_master_that_is_back_before_another_one_tells_the_others_then(tmp_path: Path, step: str) -> None:
    """When it starts it is no master yet, and could not tell."""

    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await filled(group)
            [standby] = [each for each in group.up if each is not master]
            id = await carried_out_up_to(step, master, standby)
            await master.start()
            await group.until_master()
            await standby.start()
            await group.until(lambda: clean(standby) == (5, 30), "it was told")
            found = await ended(master.kit)
            assert (found["id"], found["state"]) == (id, "done")
            assert clean(master) == (5, 30)

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
