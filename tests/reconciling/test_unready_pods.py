"""What is said of pods that are not ready: nothing for a moment, how far a rebuild is, and what is stuck."""

import asyncio
from datetime import timedelta

import pytest
from operator_kit import IMAGE, TIME, World, new_operator, rounds

from firn_operator.kube import CLUSTER, POD, Obj

POD_NAME = "main-0-2"


def go(world: World, count: int = 3) -> None:
    asyncio.run(rounds(world, new_operator(world), count))


@pytest.fixture
def settled() -> World:
    """A cluster whose pods are a month old."""
    world = World()
    world.cluster()
    go(world, 15)
    world.now += timedelta(days=30)
    go(world)
    assert world.condition(CLUSTER, "main", "Ready")["status"] == "True"
    return world


def drop_out(world: World, pod: str = POD_NAME) -> None:
    """The pod runs, and is not in sync any more."""
    world.never_in_sync.add((IMAGE, pod))
    world.records[pod.rpartition("-")[0]].in_sync.discard(pod)


def rebuild(world: World, phase: str = "pulling", done: int = 3, reason: str = "") -> None:
    world.rebuilds[POD_NAME] = {
        "phase": phase, "partitions": 8, "partitionsDone": done, "bytes": 10 * done, "bytesExpected": 90, "reason": reason,
        "lastProgressTime": world.now.strftime(TIME),
    }  # fmt: skip
    world.records["main-0"].in_sync.discard(POD_NAME)


def degraded(world: World) -> str:
    condition = world.condition(CLUSTER, "main", "Degraded")
    return condition["reason"] if condition["status"] == "True" else ""


def progress(world: World) -> str:
    return str(world.condition(CLUSTER, "main", "Progressing")["message"])


def test_an_old_pod_that_is_not_ready_for_a_moment_is_not_called_stuck(settled: World) -> None:
    drop_out(settled)
    go(settled, 10)
    assert settled.condition(CLUSTER, "main", "Ready")["reason"] == "ReplicasNotReady"
    assert degraded(settled) == ""
    assert "PodStuck" not in settled.events()


def test_a_pod_that_is_not_ready_for_five_minutes_is_called_stuck_once(settled: World) -> None:
    drop_out(settled)
    go(settled)
    settled.now += timedelta(minutes=6)
    go(settled)
    assert degraded(settled) == "PodStuck"
    assert settled.events().count("PodStuck") == 1


def test_a_pod_is_called_stuck_also_while_another_group_rolls() -> None:
    world = World()
    world.cluster(groups=2)
    go(world, 30)
    drop_out(world, "main-1-2")
    go(world)
    world.now += timedelta(minutes=6)
    world.bad_images.add("firn:bad")
    world.change(CLUSTER, "main", lambda obj: obj["spec"].update(image="firn:bad"))
    go(world, 10)
    assert world.condition(CLUSTER, "main", "Progressing")["reason"] == "Rolling"
    assert world.condition(CLUSTER, "main", "Degraded")["message"] == "main-1-2 is not ready"


def test_a_long_rebuild_that_gets_further_is_progress_and_nothing_is_wrong(settled: World) -> None:
    rebuild(settled)
    go(settled)
    for done in range(4, 8):
        settled.now += timedelta(minutes=4)
        rebuild(settled, done=done, reason="a partition: the master was away")
        go(settled)
    assert degraded(settled) == ""
    assert {"PodStuck", "RebuildStuck"}.isdisjoint(settled.events())
    said = f"{POD_NAME} is rebuilt from its master: pulling, 7 of 8 partitions, 77%: a partition: the master was away"
    assert said in progress(settled)
    assert settled.condition(CLUSTER, "main", "Progressing")["status"] == "True"


def test_a_rebuild_that_gets_no_further_is_said_with_its_reason_until_it_does(settled: World) -> None:
    rebuild(settled, reason="a partition: the master does not answer")
    go(settled)
    settled.now += timedelta(minutes=6)
    go(settled)
    assert degraded(settled) == "RebuildStuck"
    said = settled.condition(CLUSTER, "main", "Degraded")["message"]
    assert POD_NAME in said
    assert "the master does not answer" in said
    assert settled.events().count("RebuildStuck") == 1
    rebuild(settled, done=4)
    go(settled)
    assert degraded(settled) == ""
    del settled.rebuilds[POD_NAME]
    go(settled, 5)
    assert settled.condition(CLUSTER, "main", "Ready")["status"] == "True"


@pytest.mark.parametrize("phase", ["dispatching", "compacting"])
def test_a_phase_of_a_rebuild_that_counts_nothing_has_an_hour(settled: World, phase: str) -> None:
    rebuild(settled, phase)
    go(settled)
    settled.now += timedelta(minutes=50)
    go(settled)
    assert degraded(settled) == ""
    settled.now += timedelta(minutes=11)
    go(settled)
    assert degraded(settled) == "RebuildStuck"


def test_a_rebuild_whose_pod_does_not_run_is_a_pod_that_is_stuck_in_the_words_of_kubernetes(
    settled: World,
) -> None:
    rebuild(settled)
    go(settled)
    settled._running.pop(POD_NAME)
    settled.stuck.add(POD_NAME)

    def crash(pod: Obj) -> None:
        pod["status"]["containerStatuses"] = [
            {"name": "broker", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        ]

    settled.change(POD, POD_NAME, crash)
    go(settled)
    assert degraded(settled) == ""
    settled.now += timedelta(minutes=6)
    go(settled)
    assert degraded(settled) == "PodStuck"
    assert "CrashLoopBackOff" in settled.condition(CLUSTER, "main", "Degraded")["message"]
