"""Forced compactions that are asked for by a resource."""

import asyncio
from datetime import timedelta

import pytest
from operator_kit import World, new_operator, rounds

from firn_operator.kube import COMPACTION


@pytest.fixture
def world() -> World:
    made = World()
    made.cluster()
    made.topic("quotes")
    asyncio.run(rounds(made, new_operator(made), 15))
    return made


def go(world: World, count: int = 10) -> None:
    asyncio.run(rounds(world, new_operator(world), count))


def status(world: World, name: str) -> dict[str, object]:
    found = world.find(COMPACTION, name)
    assert found is not None
    return dict(found["status"])


def test_a_run_is_asked_of_the_brokers_and_its_result_kept(world: World) -> None:
    world.force("now", "quotes")
    go(world)
    shown = status(world, "now")
    assert (shown["phase"], shown["engine"], shown["progress"]) == ("Succeeded", "broker", "1/1")
    assert shown["partitions"] == [
        {"partition": 0, "state": "done", "recordsBefore": 10, "recordsAfter": 4, "seconds": 0.5}
    ]
    assert {"CompactionStarted", "CompactionDone"} <= set(world.events())


def test_a_run_that_has_ended_is_written_nothing_to_and_goes_after_its_time(world: World) -> None:
    world.force("now", "quotes", ttlSecondsAfterFinished=60)
    go(world)
    before = len(world.requests)
    go(world, 3)
    assert world.writes(before) == []
    world.now += timedelta(seconds=61)
    go(world, 3)
    assert world.find(COMPACTION, "now") is None


def test_two_runs_of_a_topic_come_one_after_the_other(world: World) -> None:
    world.force("a", "quotes")
    world.force("b", "quotes")
    go(world, 3)
    assert (status(world, "a")["phase"], status(world, "b")["phase"]) == ("Running", "Pending")
    assert "a compacts the topic before it" in world.condition(COMPACTION, "b", "Complete")["message"]
    go(world, 15)
    assert (status(world, "a")["phase"], status(world, "b")["phase"]) == ("Succeeded", "Succeeded")


def test_a_run_by_spark_says_that_there_is_none(world: World) -> None:
    world.force("now", "quotes", engine="spark")
    go(world, 3)
    assert status(world, "now")["phase"] == "Pending"
    assert world.condition(COMPACTION, "now", "Complete")["reason"] == "EngineUnavailable"
    assert world.compactions == {}


def test_a_run_of_a_topic_that_is_not_there_waits_and_says_so(world: World) -> None:
    world.force("now", "nothing")
    go(world, 3)
    assert world.condition(COMPACTION, "now", "Complete")["message"] == "there is no topic nothing"


def test_a_run_that_is_deleted_is_cancelled(world: World) -> None:
    world.force("now", "quotes")
    go(world, 3)
    world.end(COMPACTION, "now")
    go(world, 2)
    assert world.cancelled == ["quotes"]
    assert world.find(COMPACTION, "now") is None


def test_a_run_that_the_brokers_have_forgotten_is_asked_for_again(world: World) -> None:
    world.force("now", "quotes")
    go(world, 3)
    world.compactions.clear()
    go(world)
    assert status(world, "now")["phase"] == "Succeeded"
