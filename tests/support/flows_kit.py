"""Flows of a cluster's life, and what they come to when nothing goes wrong: what runs with faults is compared with."""

import asyncio
from collections.abc import Callable

from operator_kit import World, new_operator, rounds, until_quiet

from firn_operator.kube import CLUSTER, TOPIC, Obj, name_of


def set_image(world: World, image: str) -> None:
    world.change(CLUSTER, "main", lambda obj: obj["spec"].update(image=image))


def shape(world: World) -> dict[tuple[str, str], object]:
    """What is there, without what differs from run to run: uids, versions, certificates, times."""

    def of(obj: Obj) -> object:
        labels = {
            k: v for k, v in (obj["metadata"].get("labels") or {}).items() if k != "controller-revision-hash"
        }
        said = sorted(
            (c["type"], c["status"], c["reason"])
            for c in obj.get("status", {}).get("conditions", [])
            if "reason" in c
        )
        return (
            labels,
            obj.get("spec") if obj["kind"] not in ("Lease", "Pod") else None,
            said,
            sorted(obj.get("data") or {}),
        )

    return {(obj["kind"], name_of(obj)): of(obj) for obj in world.objects.values() if obj["kind"] != "Event"}


def create(world: World) -> None:
    world.cluster()
    world.topic("quotes")


def roll(world: World) -> None:
    create(world)
    asyncio.run(rounds(world, new_operator(world), 15))
    set_image(world, "firn:2")


def shrink(world: World) -> None:
    create(world)
    asyncio.run(rounds(world, new_operator(world), 15))
    world.change(CLUSTER, "main", lambda obj: obj["spec"].update(replicas=2))


def delete(world: World) -> None:
    create(world)
    asyncio.run(rounds(world, new_operator(world), 15))
    world.end(TOPIC, "quotes")
    world.end(CLUSTER, "main")


FLOWS = [create, roll, shrink, delete]


def uninterrupted(flow: Callable[[World], None]) -> tuple[dict[tuple[str, str], object], int]:
    world = World()
    flow(world)
    before = len(world.requests)
    asyncio.run(until_quiet(world, new_operator(world)))
    return shape(world), len(world.writes(before))
