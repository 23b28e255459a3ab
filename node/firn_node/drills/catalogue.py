"""The drills: what goes wrong in each, and what it passes with.

Beside its bounds every drill passes only with a clean check (``check``): nothing acknowledged lost, nothing doubled,
no reader shown anything wrong, replicas equal.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from firn.client import Client
from firn_node.drills import chaos, damage
from firn_node.drills.crowd import GUESTS, Crowd
from firn_node.drills.links import HOST
from firn_node.drills.stage import Stage
from firn_node.drills.verdict import Bounds, Drill

BYTES_A_GUEST = 64 << 10  # of a broker's memory, should all of a crowd come to one
GROWTH_BYTES = 256 << 20  # of a broker's memory under random faults, however many there were
DRILLS: dict[str, Drill] = {}
Story = Callable[[Stage], Awaitable[None]]


def _drill(name: str, number: str, sentence: str, bounds: Bounds, **more: Any) -> Callable[[Story], Story]:
    """Enter a story into ``DRILLS``. ``more``: other fields of ``Drill``."""

    def register(story: Story) -> Story:
        DRILLS[name] = Drill(name=name, number=number, sentence=sentence, bounds=bounds, story=story, **more)
        return story

    return register


def _failover(ttl_s: float) -> float:
    """Writes flow again so long after a master has gone, or a standby has left the in-sync set."""
    return ttl_s + 2.0


_ANOTHER_MASTER = Bounds(gap_s=_failover, elections_min=1)


# Processes.


@_drill("kill-master", "1", "SIGKILL of the master", _ANOTHER_MASTER)
async def _kill_master(stage: Stage) -> None:
    master = await stage.master()
    await stage.kill(master)
    await stage.until_master_is_not(master)
    await stage.until_writes()


@_drill(
    "kill-standby", "2", "SIGKILL of a standby, back after twice leaseTtl",
    Bounds(gap_s=_failover, elections_max=0),
)  # fmt: skip
async def _kill_standby(stage: Stage) -> None:
    await stage.kill((await stage.standbys())[0])
    await asyncio.sleep(2 * stage.ttl_s)


@_drill("pause-master", "3", "SIGSTOP of the master for 2.5 leaseTtl, then SIGCONT", _ANOTHER_MASTER)
async def _pause_master(stage: Stage) -> None:
    await stage.pause(await stage.master(), 2.5 * stage.ttl_s)


@_drill("pause-briefly", "4", "SIGSTOP of the master for half of leaseTtl", Bounds(elections_max=0))
async def _pause_briefly(stage: Stage) -> None:
    await stage.pause(await stage.master(), stage.ttl_s / 2)


@_drill("kill-all", "11", "SIGKILL of all replicas at once, started again in a random order", Bounds())
async def _kill_all(stage: Stage) -> None:
    await asyncio.gather(*(stage.kill(node) for node in stage.nodes))
    order = list(stage.nodes)
    stage.chance.shuffle(order)
    for node in order:
        await stage.start(node)
        await asyncio.sleep(stage.chance.random())


@_drill(
    "kill-master-and-cut", "12", "SIGKILL of the master, and one standby cut off from the other, at once", Bounds()
)  # fmt: skip
async def _kill_master_and_cut(stage: Stage) -> None:
    standby = (await stage.standbys())[0]
    master = await stage.master()
    stage.note(f"cut {standby.name} off")
    stage.links.isolate(standby.ordinal)
    await stage.kill(master)
    await asyncio.sleep(2 * stage.ttl_s)


@_drill(
    "rolling-restart", "20", "SIGTERM and start of one replica after another, five times",
    Bounds(gap_s=lambda ttl_s: 2.0, has_failed_writes=False),
)  # fmt: skip
async def _rolling_restart(stage: Stage) -> None:
    for _ in range(5):
        for node in stage.nodes:
            await stage.restart(node)


@_drill(
    "upgrade", "24", "replicas of another release (`--release`) become this one's, one by one, and go back",
    Bounds(gap_s=lambda ttl_s: 2.0, has_failed_writes=False), needs_release=True,
)  # fmt: skip
async def _upgrade(stage: Stage) -> None:
    for release, name in ((None, "this release"), (stage.release, "the other one")):
        for node in stage.nodes:
            stage.note(f"{node.name} changes to {name}")
            node.release = release
            await stage.restart(node)


@_drill(
    "switchovers", "21", "20 planned switchovers",
    Bounds(gap_s=lambda ttl_s: 1.0, elections_min=20, has_failed_writes=False),
)  # fmt: skip
async def _switchovers(stage: Stage) -> None:
    async with Client(stage.cluster.addresses, timeout=60) as client:
        for _ in range(20):
            to = stage.chance.choice(await stage.standbys())
            stage.note(f"switchover to {to.name}")
            await client.switchover(0, to=to.name)
            await stage.until_healthy()
            await asyncio.sleep(stage.chance.random() * 0.2)


@_drill(
    "crowd", "22",
    f"SIGKILL of the master before {GUESTS:,} clients, who come back at once; slow readers, oversize frames, garbage",
    Bounds(gap_s=_failover, elections_min=1, elections_max=1),
)  # fmt: skip
async def _crowd(stage: Stage) -> None:
    empty = max(node.resident_bytes for node in stage.nodes)
    async with Crowd([node.port for node in stage.nodes], HOST, stage.chance) as crowd:
        await stage.until(crowd.all_are_inside, "all clients have come in")
        stage.note(f"{crowd.idle:,} clients are connected")
        master = await stage.master()
        await stage.kill(master)
        await stage.until_master_is_not(master)
        await stage.until_writes()
        await stage.until(crowd.all_are_inside, "all clients have come back")
        await asyncio.sleep(2 * stage.ttl_s)  # while which the new master has to keep its lease
        most = max(node.resident_bytes for node in stage.nodes)
        stage.note(f"a broker has {most >> 20} MiB of memory, before the crowd came {empty >> 20} MiB")
        if most > empty + crowd.count * BYTES_A_GUEST:
            stage.fail(f"a client costs more than {BYTES_A_GUEST >> 10} KiB")


# The network.


@_drill(
    "cut-master-from-standbys", "5", "the master reaches the coordinator and clients, but no standby",
    Bounds(),
)  # fmt: skip
async def _cut_from_standbys(stage: Stage) -> None:
    master = await stage.master()
    stage.note(f"cut {master.name} off from the standbys")
    stage.links.isolate(master.ordinal)
    await asyncio.sleep(3 * stage.ttl_s)


@_drill(
    "cut-master-from-coordinator", "6", "the master reaches standbys and clients, but not the coordinator",
    _ANOTHER_MASTER,
)  # fmt: skip
async def _cut_from_coordinator(stage: Stage) -> None:
    master = await stage.master()
    stage.note(f"cut {master.name} off from the coordinator")
    master.faults.set(coordinator="down")
    await asyncio.sleep(3 * stage.ttl_s)


@_drill("isolate-master", "7", "the master reaches neither standbys nor the coordinator", _ANOTHER_MASTER)
async def _isolate_master(stage: Stage) -> None:
    master = await stage.master()
    stage.note(f"cut {master.name} off from everything but clients")
    stage.links.isolate(master.ordinal)
    master.faults.set(coordinator="down")
    await asyncio.sleep(3 * stage.ttl_s)


@_drill(
    "one-way-cuts", "8", "each of 5 replicas in turn cannot be heard by the next two",
    Bounds(gap_s=lambda ttl_s: 20.0, elections_max=2), nodes=5,
)  # fmt: skip
async def _one_way_cuts(stage: Stage) -> None:
    count = len(stage.nodes)
    for node in range(count):
        stage.note(f"{stage.nodes[node].name} is not heard by the next two")
        stage.links.cut_one_way(node, (node + 1) % count)
        stage.links.cut_one_way(node, (node + 2) % count)
        await asyncio.sleep(stage.ttl_s)
        stage.links.heal()


@_drill(
    "slow-network", "9", "links of 50 ms, 200 ms, 5 % loss, 1 Mbit/s, one after another",
    Bounds(elections_max=0),
)  # fmt: skip
async def _slow_network(stage: Stage) -> None:
    for what, badness in {
        "50 ms": {"delay_s": 0.05}, "200 ms": {"delay_s": 0.2}, "5 % loss": {"loss": 0.05}, "1 Mbit/s": {"rate": 125e3},
    }.items():  # fmt: skip
        stage.note(f"links of {what}")
        stage.links.worsen(**badness)
        await asyncio.sleep(1.5 * stage.ttl_s)
        await stage.until_writes()


@_drill("lossy-network", "9", "links that lose 20 % of all packets, for 4 leaseTtl", Bounds())
async def _lossy_network(stage: Stage) -> None:
    stage.links.worsen(loss=0.2)
    await asyncio.sleep(4 * stage.ttl_s)


# The coordinator.


@_drill(
    "coordinator-locked", "10", "another process holds the coordinator's file locked for 2 leaseTtl",
    Bounds(gap_s=lambda ttl_s: 2 * ttl_s + _failover(ttl_s)),
)  # fmt: skip
async def _coordinator_locked(stage: Stage) -> None:
    stage.note("lock the coordinator's file")
    with damage.locked(stage.cluster.coordinator_path):
        await asyncio.sleep(2 * stage.ttl_s)
    stage.note("unlock it")


@_drill(
    "coordinator-rolled-back", "10", "the coordinator's file is replaced by an older copy: refused, until put right",
    Bounds(),
)  # fmt: skip
async def _coordinator_rolled_back(stage: Stage) -> None:
    path = stage.cluster.coordinator_path
    damage.copy_coordinator(path, path.with_suffix(".old"))
    await asyncio.sleep(stage.ttl_s)
    stage.note("put an older copy in the coordinator's place")
    with damage.put_aside(path):
        path.with_suffix(".old").rename(path)
        await asyncio.sleep(2 * stage.ttl_s)
        count = len(stage.load.counts.acknowledged_at)
        await asyncio.sleep(stage.ttl_s)
        if len(stage.load.counts.acknowledged_at) != count:
            stage.fail("writes were acknowledged under an older group record")
        await stage.until(stage.cluster.epoch, "the older copy can be read")
        await asyncio.gather(*(stage.kill(node) for node in stage.nodes))
    stage.note("the newest file is in its place again")


# Disks and folders.


@_drill(
    "full-disk", "15", "the master's disk is full for 3 leaseTtl: ENOSPC",
    Bounds(gap_s=lambda ttl_s: 5.0, elections_min=1),
)  # fmt: skip
async def _full_disk(stage: Stage) -> None:
    master = await stage.master()
    stage.note(f"the disk of {master.name} is full")
    master.faults.set(write="ENOSPC")
    await asyncio.sleep(3 * stage.ttl_s)


@_drill(
    "write-errors", "15", "every write of the master fails for 3 leaseTtl: EIO",
    Bounds(gap_s=lambda ttl_s: 5.0, elections_min=1),
)  # fmt: skip
async def _write_errors(stage: Stage) -> None:
    master = await stage.master()
    stage.note(f"writes of {master.name} fail")
    master.faults.set(write="EIO")
    await asyncio.sleep(3 * stage.ttl_s)


@_drill("failed-sync", "15", "an fsync of the master fails: its process ends", _ANOTHER_MASTER)
async def _failed_sync(stage: Stage) -> None:
    master = await stage.master()
    stage.note(f"syncs of {master.name} fail")
    master.faults.set(sync="EIO")
    await stage.until_ended(master)
    master.faults.clear()
    await stage.until_master_is_not(master)


@_drill(
    "slow-standby", "15", "every sync of a standby takes 0.5 s longer, for 3 leaseTtl", Bounds(elections_max=0)
)  # fmt: skip
async def _slow_standby(stage: Stage) -> None:
    standby = (await stage.standbys())[0]
    stage.note(f"syncs of {standby.name} are slow")
    standby.faults.set(sync_delay_s=0.5)
    await asyncio.sleep(3 * stage.ttl_s)


@_drill("lost-volume", "19", "a standby's folder is lost, and it is killed twice while it joins", Bounds())
async def _lost_volume(stage: Stage) -> None:
    standby = (await stage.standbys())[0]
    await stage.replace_volume(standby)
    for _ in range(2):
        await asyncio.sleep(1 + stage.chance.random() * 2)
        await stage.kill(standby)
        await stage.start(standby)


@_drill("lost-volume-of-master", "13", "the master's folder is lost", _ANOTHER_MASTER)
async def _lost_volume_of_master(stage: Stage) -> None:
    master = await stage.master()
    await stage.replace_volume(master)


@_drill(
    "torn-tails", "14", "all are killed; behind their logs' ends lies half a batch, noise or zeros", Bounds()
)
async def _torn_tails(stage: Stage) -> None:
    await asyncio.gather(*(stage.kill(node) for node in stage.nodes))
    for node in stage.nodes:
        stage.note(f"{node.name}: {damage.append_torn_tail(node.data, stage.chance)}")


@_drill(
    "flipped-bit",
    "13",
    "a bit is flipped in a commit log file of a stopped standby",
    Bounds(),
    may_lose_folders=True,
)
async def _flipped_bit(stage: Stage) -> None:
    standby = (await stage.standbys())[0]
    await stage.kill(standby)
    stage.note(f"{standby.name}: {damage.flip_bit(standby.data, stage.chance)}")
    await stage.start(standby)


# Clocks.


@_drill(
    "wrong-clocks", "16", "one clock an hour ahead, one an hour behind, one 10 % fast", Bounds(elections_max=0)
)  # fmt: skip
async def _wrong_clocks(stage: Stage) -> None:
    for node, order in zip(
        stage.nodes, ({"jump_s": 3600.0}, {"jump_s": -3600.0}, {"drift": 0.1}), strict=True
    ):
        stage.note(f"{node.name}: {order}")
        node.faults.set(**order)
        await asyncio.sleep(stage.ttl_s)
    await asyncio.sleep(stage.ttl_s)


# Anything.


@_drill("random", "23", "one or two random faults at a time, for --seconds", Bounds())
async def _random(stage: Stage) -> None:
    began = max(node.resident_bytes for node in stage.nodes)
    await chaos.play(
        stage,
        chaos.plan(stage.chance, seconds=stage.seconds, ttl_s=stage.ttl_s, nodes=len(stage.nodes)),
    )
    most = max(node.resident_bytes for node in stage.nodes)
    stage.note(f"a broker has {most >> 20} MiB of memory, at the beginning {began >> 20} MiB")
    if most > began + GROWTH_BYTES:
        stage.fail(f"a broker has grown by more than {GROWTH_BYTES >> 20} MiB")
