"""What a drill works with: its cluster, its links, its load, and the steps that drills share."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from firn_node.drills.links import Links
from firn_node.drills.load import Load
from firn_node.drills.processes import Cluster, Node

SETTLE_S = 90.0  # how long anything that must come may take on a busy machine
_POLL_S = 0.05
ENDS_BEFORE_REPAIR = 3  # a replica that ends so often by itself has lost its folder


class Never(Exception):
    """What had to come did not: the drill failed."""


@dataclass(slots=True)
class Stage:
    cluster: Cluster
    links: Links
    load: Load
    chance: random.Random
    ttl_s: float
    seconds: float  # how long the drill's faults are to take, where the drill does not say itself
    may_lose_folders: bool  # a replica may be left with a folder that it refuses
    release: str | None  # where another release is imported from
    say: Callable[[str], None]
    events: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    has_all_volumes: bool = True

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    def note(self, event: str) -> None:
        """Write down what happens now."""
        self.events.append(event)
        self.say(event)

    def fail(self, sentence: str) -> None:
        """The drill goes on, and has failed."""
        self.note(sentence)
        self.failures.append(sentence)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(
        self, holds: Callable[[], Awaitable[object]], what: str, seconds: float = SETTLE_S
    ) -> None:
        """Return once something holds. *Errors*: Never."""
        end = self.now() + seconds
        while not await holds():
            if self.now() > end:
                raise Never(f"{what}: not within {seconds:g} s: {await self.cluster.rows()}")
            await asyncio.sleep(_POLL_S)

    # Roles.

    async def master(self) -> Node:
        """The master by the record, once one runs that takes writes."""

        async def holds() -> bool:
            node = await self.cluster.master()
            return node is not None and node.is_up

        await self.until(holds, "there is a master")
        found = await self.cluster.master()
        return found if found is not None else await self.master()

    async def standbys(self) -> list[Node]:
        """The others, in a random order."""
        master = await self.master()
        others = [node for node in self.nodes if node is not master]
        self.chance.shuffle(others)
        return others

    async def until_master_is_not(self, node: Node) -> None:
        async def holds() -> bool:
            return await self.cluster.master() not in (None, node)

        await self.until(holds, f"another master than {node.name}")

    async def until_writes(self, count: int = 20) -> None:
        """So many acknowledgements from now on."""
        times = self.load.counts.acknowledged_at
        target = len(times) + count

        async def holds() -> bool:
            return len(times) >= target

        await self.until(holds, "writes are acknowledged")

    async def until_ended(self, node: Node, seconds: float = SETTLE_S) -> None:
        """Its process has ended by itself once more."""
        count = len(node.ends)

        async def holds() -> bool:
            return len(node.ends) > count

        await self.until(holds, f"{node.name} ends", seconds)

    async def until_healthy(self) -> None:
        """All replicas answer, are in sync and have a master."""
        wanted = {node.address for node in self.nodes}

        async def holds() -> bool:
            await self._repair()
            return (
                await self.cluster.in_sync() == wanted
                and await self.cluster.master() is not None
                and len(await self.cluster.rows()) == len(self.nodes)
            )

        await self.until(holds, "all replicas are in sync")

    async def _repair(self) -> None:
        """What a person or the operator does with a replica that ends again and again: give it an empty volume."""
        for node in self.nodes:
            if len(node.ends) >= ENDS_BEFORE_REPAIR:
                if not self.may_lose_folders:
                    self.fail(f"{node.name} ends again and again; it says: {node.last_words()}")
                await self.replace_volume(node)

    async def until_quiet(self) -> None:
        """Nothing is written any more, and every replica has and has committed all of it."""

        async def holds() -> bool:
            await self._repair()
            rows = await self.cluster.rows()
            ends = {(row["log_end"], row["committed_position"]) for row in rows}
            return len(rows) == len(self.nodes) and len(ends) == 1 and len(set(next(iter(ends)))) == 1

        await self.until(holds, "all replicas have all of the log")

    # Faults.

    async def kill(self, node: Node) -> None:
        self.note(f"SIGKILL {node.name}")
        await node.kill()

    async def start(self, node: Node) -> None:
        self.note(f"start {node.name}")
        await node.start()

    async def restart(self, node: Node) -> None:
        """Stop it in order and start it again; returns when all is well and writes have gone on with it."""
        self.note(f"SIGTERM {node.name}")
        await node.stop()
        await self.start(node)
        await self.until_healthy()
        await self.until_writes()

    async def pause(self, node: Node, seconds: float) -> None:
        self.note(f"SIGSTOP {node.name} for {seconds:.1f} s")
        node.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            node.resume()
        self.note(f"SIGCONT {node.name}")

    async def replace_volume(self, node: Node) -> None:
        self.note(f"{node.name} gets an empty volume")
        self.has_all_volumes = False
        await node.kill()
        node.ends.clear()
        node.wipe()
        await node.start()

    async def heal(self) -> None:
        """End every fault: links, disks, paused and missing processes."""
        self.links.heal()
        for node in self.nodes:
            node.faults.clear()
            node.ends.clear()
            node.resume()
            if not node.is_wanted:
                await self.start(node)
