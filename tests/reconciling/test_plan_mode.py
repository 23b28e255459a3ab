"""``python -m firn_operator plan``: says what would be done, what it would restart and whether it may, and does nothing."""

import asyncio

import pytest
from operator_kit import World, new_operator, rounds

from firn_operator.kube import CLUSTER, LEASE, Obj
from firn_operator.names import PAUSED
from firn_operator.preview import plan_lines


def lines(world: World) -> list[str]:
    """What is printed; that nothing is written on the way is part of it."""
    operator, before = new_operator(world), len(world.requests)

    async def show() -> list[str]:
        await operator.sweep()
        return await plan_lines(operator.cache, operator.reconciler)

    shown = asyncio.run(show())
    assert world.writes(before) == []
    return shown


@pytest.fixture
def settled() -> World:
    world = World()
    for number in range(3):
        world.node(f"node-{number}")
    world.cluster()
    asyncio.run(rounds(world, new_operator(world), 15))
    return world


def newer(cluster: Obj) -> None:
    cluster["spec"]["image"] = "firn:2"


def test_a_cluster_at_rest_has_nothing_to_do(settled: World) -> None:
    assert lines(settled) == ["shop/main: nothing to do"]


def test_a_new_image_shows_who_would_restart_and_in_which_order(settled: World) -> None:
    settled.change(CLUSTER, "main", newer)
    shown = lines(settled)
    assert "shop/main: restarts: main-0-2, then main-0-1, then main-0-0, after a switchover" in shown


def test_what_changes_no_pod_restarts_none(settled: World) -> None:
    settled.change(CLUSTER, "main", lambda obj: obj["spec"].update(replicas=5))
    assert [line for line in lines(settled) if "restarts" in line] == []


def test_a_paused_cluster_is_shown_as_if_it_were_not(settled: World) -> None:
    settled.change(CLUSTER, "main", newer)
    settled.change(
        CLUSTER, "main", lambda obj: obj["metadata"].setdefault("annotations", {}).update({PAUSED: "true"})
    )
    shown = lines(settled)
    assert shown[0] == "shop/main: paused: nothing of this is done before it is resumed"
    assert any("restarts: main-0-2" in line for line in shown)


def test_a_stop_says_whether_the_guard_would_allow_it_now(settled: World) -> None:
    settled.change(CLUSTER, "main", newer)
    operator = new_operator(settled)
    asyncio.run(rounds(settled, operator, 1))
    settled.turn()
    stops = [line for line in lines(settled) if "StopPod" in line]
    assert len(stops) == 1
    assert "(now: main-0-0" in stops[0]
    settled.remove(LEASE, "main-0")
    refused = [line for line in lines(settled) if "StopPod" in line]
    assert "(not now: the record of main-0 cannot be read" in refused[0]
