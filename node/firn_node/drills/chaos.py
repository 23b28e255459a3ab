"""Random faults: which, when, on whom and for how long is drawn from the seed before the first one begins.

At most one fault at a time is on a node, and two at most are under way. A fault on ``master`` meets whoever is master
then. One volume is lost at most, while all replicas are in sync: two copies lost are more than a group survives.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from firn_node.drills import damage
from firn_node.drills.processes import Node
from firn_node.drills.stage import Never, Stage

AT_ONCE = 2
_PAUSE_TTLS = (0.1, 0.6)  # between two faults, in leaseTtl
_LENGTH_TTLS = (0.2, 2.0)
_END_S = 30.0  # a replica whose fsync failed ends within this


@dataclass(frozen=True, slots=True)
class Fault:
    """``node``: an ordinal, or None for the master of the moment; ``at``: seconds after the one before it."""

    kind: str
    node: int | None
    at: float
    seconds: float


def plan(chance: random.Random, *, seconds: float, ttl_s: float, nodes: int) -> list[Fault]:
    """The faults of one run."""
    found: list[Fault] = []
    left = seconds
    while left > 0:
        at = chance.uniform(*_PAUSE_TTLS) * ttl_s
        node = None if chance.random() < 0.5 else chance.randrange(nodes)
        found.append(Fault(chance.choice(KINDS), node, at, chance.uniform(*_LENGTH_TTLS) * ttl_s))
        left -= at + found[-1].seconds / AT_ONCE
    return found


async def play(stage: Stage, faults: list[Fault]) -> None:
    """Carry the faults out; returns when the last one has ended."""
    busy: set[Node] = set()
    room = asyncio.Semaphore(AT_ONCE)

    async def one(fault: Fault) -> None:
        try:
            node = await stage.master() if fault.node is None else stage.nodes[fault.node]
            if node in busy:
                return
            busy.add(node)
            try:
                stage.note(f"{fault.kind} of {node.name} for {fault.seconds:.1f} s")
                await _FAULTS[fault.kind](stage, node, fault.seconds)
            finally:
                busy.discard(node)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            await asyncio.sleep(fault.at)
            await room.acquire()
            group.create_task(one(fault))


async def _kill(stage: Stage, node: Node, seconds: float) -> None:
    await node.kill()
    await asyncio.sleep(seconds)
    await node.start()


async def _stop(stage: Stage, node: Node, seconds: float) -> None:
    await node.stop()
    await asyncio.sleep(seconds)
    await node.start()


async def _pause(stage: Stage, node: Node, seconds: float) -> None:
    await stage.pause(node, seconds)


async def _isolate(stage: Stage, node: Node, seconds: float) -> None:
    stage.links.isolate(node.ordinal)
    await asyncio.sleep(seconds)
    stage.links.rejoin(node.ordinal)


async def _deafen(stage: Stage, node: Node, seconds: float) -> None:
    await _half_cut(stage, node, seconds, hears=False)


async def _mute(stage: Stage, node: Node, seconds: float) -> None:
    await _half_cut(stage, node, seconds, hears=True)


async def _half_cut(stage: Stage, node: Node, seconds: float, *, hears: bool) -> None:
    """``hears``: the node hears the others, and they do not hear it; else the other way round."""
    for other in stage.nodes:
        if other is not node:
            sender, receiver = (node, other) if hears else (other, node)
            stage.links.cut_one_way(sender.ordinal, receiver.ordinal)
    await asyncio.sleep(seconds)
    stage.links.rejoin(node.ordinal)


async def _without_coordinator(stage: Stage, node: Node, seconds: float) -> None:
    node.faults.set(coordinator="down")
    await asyncio.sleep(seconds)
    node.faults.set(coordinator=None)


async def _alone(stage: Stage, node: Node, seconds: float) -> None:
    """Cut off from replicas and coordinator."""
    node.faults.set(coordinator="down")
    await _isolate(stage, node, seconds)
    node.faults.set(coordinator=None)


async def _slow_disk(stage: Stage, node: Node, seconds: float) -> None:
    node.faults.set(sync_delay_s=0.3)
    await asyncio.sleep(seconds)
    node.faults.set(sync_delay_s=0.0)


async def _full_disk(stage: Stage, node: Node, seconds: float) -> None:
    node.faults.set(write="ENOSPC")
    await asyncio.sleep(seconds)
    node.faults.set(write=None)


async def _failed_sync(stage: Stage, node: Node, seconds: float) -> None:
    """Until its process has ended, which it may without a write that must be synced."""
    node.faults.set(sync="EIO")
    try:
        await stage.until_ended(node, _END_S)
    except Never:
        stage.note(f"{node.name} had nothing to sync")
    node.faults.set(sync=None)


async def _bad_network(stage: Stage, node: Node, seconds: float) -> None:
    stage.links.worsen(delay_s=0.05, loss=0.05)
    await asyncio.sleep(seconds)
    stage.links.worsen()


async def _kill_torn(stage: Stage, node: Node, seconds: float) -> None:
    await node.kill()
    stage.note(f"{node.name}: {damage.append_torn_tail(node.data, stage.chance)}")
    await asyncio.sleep(seconds)
    await node.start()


async def _kill_all(stage: Stage, node: Node, seconds: float) -> None:
    """All of them, those with other faults too; the one that was drawn comes back last."""
    down = [each for each in stage.nodes if each.is_wanted]
    await asyncio.gather(*(each.kill() for each in down))
    for each in sorted(down, key=lambda each: each is node):
        await each.start()


async def _lose_volume(stage: Stage, node: Node, seconds: float) -> None:
    if stage.has_all_volumes and len(await stage.cluster.in_sync()) == len(stage.nodes):
        await stage.replace_volume(node)


_FAULTS: dict[str, Callable[[Stage, Node, float], Awaitable[None]]] = {
    "SIGKILL": _kill, "SIGTERM": _stop, "SIGSTOP": _pause, "isolation": _isolate, "deafness": _deafen,
    "muteness": _mute, "loss of the coordinator": _without_coordinator, "loss of everybody": _alone,
    "slow disk": _slow_disk, "full disk": _full_disk, "failed fsync": _failed_sync, "bad network": _bad_network,
    "SIGKILL and torn tail": _kill_torn, "SIGKILL of all": _kill_all, "loss of the volume": _lose_volume,
}  # fmt: skip
KINDS = tuple(_FAULTS)
