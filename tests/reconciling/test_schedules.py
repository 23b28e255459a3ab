"""Forced compactions by a topic's schedule."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from operator_kit import START, World, new_operator, one_round, rounds

from firn_operator.kube import COMPACTION, TOPIC, Obj, name_of
from firn_operator.schedules import plan_schedule, scheduled_run
from firn_operator.spec import parse_topic


@pytest.fixture
def world() -> World:
    made = World()
    made.cluster()
    made.topic("quotes", forceCompaction={"schedule": "30 3 * * *", "engine": "broker"})
    asyncio.run(rounds(made, new_operator(made), 15))
    return made


def go(world: World, count: int = 1) -> None:
    asyncio.run(rounds(world, new_operator(world), count))


def until(world: World, hour: int, minute: int, *, day: int = 1) -> None:
    world.now = datetime(2026, 1, day, hour, minute, 1, tzinfo=UTC)


def runs(world: World) -> list[str]:
    return [name_of(run) for run in world.all(COMPACTION)]


def schedule(world: World) -> Obj:
    return dict((world.find(TOPIC, "quotes") or {})["status"]["schedule"])


def test_a_schedule_that_is_new_waits_for_its_next_time(world: World) -> None:
    assert runs(world) == []
    shown = schedule(world)
    assert (shown["expression"], shown["nextTime"]) == ("30 3 * * *", "2026-01-01T03:30:00Z")
    before = len(world.requests)
    go(world, 3)
    assert world.writes(before) == []


def test_a_run_is_made_when_it_is_time_and_once(world: World) -> None:
    until(world, 3, 30)
    go(world, 12)
    [name] = runs(world)
    run = world.find(COMPACTION, name) or {}
    assert name == f"quotes-{int(datetime(2026, 1, 1, 3, 30, tzinfo=UTC).timestamp()) // 60}"
    assert (run["spec"]["topicRef"], run["spec"]["engine"]) == ({"name": "quotes"}, "broker")
    assert run["status"]["phase"] == "Succeeded"
    assert schedule(world)["nextTime"] == "2026-01-02T03:30:00Z"
    assert "CompactionScheduled" in world.events()


def test_a_run_that_is_deleted_is_not_made_again(world: World) -> None:
    until(world, 3, 30)
    go(world, 2)
    world.end(COMPACTION, runs(world)[0])
    go(world, 4)
    assert runs(world) == []


def test_a_run_is_made_once_when_the_operator_ends_before_it_could_say_so(world: World) -> None:
    until(world, 3, 30)

    def refuse(request: Any) -> None:
        if (request.verb, request.kind) == ("apply-status", "CompactedTopic"):
            raise KeyboardInterrupt

    world.on_request = refuse
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(one_round(new_operator(world)))
    assert len(runs(world)) == 1
    world.on_request = lambda request: None
    go(world, 3)
    assert len(runs(world)) == 1
    assert schedule(world)["lastTime"] == "2026-01-01T03:30:00Z"


def test_a_time_that_passed_while_there_was_no_operator_is_made_up_for_within_the_hour(world: World) -> None:
    until(world, 4, 20)
    go(world, 2)
    assert len(runs(world)) == 1


def test_a_time_that_is_long_past_is_passed_over_and_told_of(world: World) -> None:
    until(world, 9, 0, day=3)
    go(world, 2)
    assert runs(world) == []
    assert "ScheduleMissed" in world.events()
    assert schedule(world)["nextTime"] == "2026-01-04T03:30:00Z"


def test_a_time_is_passed_over_while_the_run_before_it_goes_on(world: World) -> None:
    world.change(TOPIC, "quotes", lambda topic: topic["spec"]["forceCompaction"].update(engine="spark"))
    world.drivers_at_work = False
    until(world, 3, 30)
    go(world, 4)
    until(world, 3, 30, day=2)
    go(world, 2)
    assert len(runs(world)) == 1
    assert "ScheduleMissed" in world.events()


def test_a_changed_schedule_makes_up_for_nothing(world: World) -> None:
    until(world, 12, 0)
    change = {"schedule": "0 11 * * *", "engine": "broker"}
    world.change(TOPIC, "quotes", lambda topic: topic["spec"].update(forceCompaction=change))
    go(world, 2)
    assert runs(world) == []
    assert schedule(world)["nextTime"] == "2026-01-02T11:00:00Z"


def test_a_schedule_that_is_taken_away_is_forgotten(world: World) -> None:
    world.change(TOPIC, "quotes", lambda topic: topic["spec"].pop("forceCompaction"))
    go(world, 2)
    assert "schedule" not in (world.find(TOPIC, "quotes") or {})["status"]


def test_a_schedule_that_is_none_is_a_condition_of_its_topic(world: World) -> None:
    change = {"schedule": "0 25 * * *"}
    world.change(TOPIC, "quotes", lambda topic: topic["spec"].update(forceCompaction=change))
    go(world, 2)
    condition = world.condition(TOPIC, "quotes", "Degraded")
    assert (condition["status"], condition["reason"]) == ("True", "BadSchedule")
    assert "'0 25 * * *' is no schedule: Bad hour" in condition["message"]
    assert world.condition(TOPIC, "quotes", "Ready")["status"] == "True"


def test_of_the_runs_of_a_schedule_as_many_are_kept_as_the_topic_says(world: World) -> None:
    world.change(TOPIC, "quotes", lambda topic: topic["spec"]["forceCompaction"].update(historyLimit=2))
    world.force("by-hand", "quotes", engine="broker")
    for day in range(2, 6):
        until(world, 3, 30, day=day)
        go(world, 12)
    stems = sorted(name for name in runs(world) if name != "by-hand")
    moments = [datetime(2026, 1, day, 3, 30, tzinfo=UTC) for day in (4, 5)]
    assert stems == [f"quotes-{int(moment.timestamp()) // 60}" for moment in moments]
    assert "by-hand" not in runs(world), "it went by its own time, of a day"


def _spans() -> Iterator[tuple[str, int]]:
    yield from (
        ("*/7 * * * *", 60),
        ("0 0 31 * *", 3600 * 24),
        ("15 4 * * MON", 3600 * 5),
        ("59 23 29 2 *", 3600 * 24 * 20),
    )


@pytest.mark.parametrize(("expression", "step_s"), list(_spans()))
def test_a_schedule_that_is_looked_at_often_is_due_at_each_of_its_times_once(
    expression: str, step_s: int
) -> None:
    """Whenever it is looked at: each moment that comes up is later than the one before it, and none is in the future."""
    topic = parse_topic({
        "metadata": {"name": "quotes", "namespace": "shop"}, "spec": {"forceCompaction": {"schedule": expression}},
    })  # fmt: skip
    known: dict[str, Any] = {}
    now, told = START, []
    for _ in range(300):
        found = plan_schedule(topic, known, now, is_busy=False)
        moment = found.due or found.missed
        if moment is not None:
            told.append(moment)
            assert moment <= now
        assert found.look_again is not None
        assert found.look_again >= timedelta(seconds=1)
        known = dict(found.status or {})
        now += timedelta(seconds=step_s)
    assert told == sorted(set(told))
    assert told


def test_a_moment_is_due_in_the_second_in_which_it_comes() -> None:
    topic = parse_topic({
        "metadata": {"name": "quotes", "namespace": "shop"}, "spec": {"forceCompaction": {"schedule": "30 3 * * *"}},
    })  # fmt: skip
    moment = datetime(2026, 1, 1, 3, 30, tzinfo=UTC)
    known = {"expression": "30 3 * * *", "lastTime": "2026-01-01T00:00:00Z"}
    early = plan_schedule(topic, known, moment - timedelta(seconds=1), is_busy=False)
    assert (early.due, early.look_again) == (None, timedelta(seconds=1))
    assert plan_schedule(topic, known, moment, is_busy=False).due == moment
    assert plan_schedule(topic, known, moment + timedelta(microseconds=1), is_busy=False).due == moment


def test_runs_of_topics_with_long_names_have_names_of_their_own() -> None:
    names = set()
    for last in "ab":
        topic = parse_topic({"metadata": {"name": "t" * 248 + last, "namespace": "shop"}, "spec": {}})
        name = scheduled_run(topic, START)["metadata"]["name"]
        assert len(name) <= 253
        names.add(name)
    assert len(names) == 2
