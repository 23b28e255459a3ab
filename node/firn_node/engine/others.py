"""Where the broker groups of the cluster are: their members and masters, as the group records say.

What is known here only leads somebody to an address; who answers there decides by itself what it is. So it may be told
a little late, and is kept when the coordinator cannot be asked. The coordinator tells by its watches: a cluster at rest
is not read again and again by every broker for every group.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from firn_node.coordinator import Coordinator, Found, Reading
from firn_node.replication.record import GroupId, GroupRecord

LATE_S = 0.25  # where a watch is a look again and again: 0.2 ms of CPU each
AGAIN_S = 0.2  # between reads for those who ask of a group of which nothing was told


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """``master``: its address, None: nobody is."""

    group: int
    master: str | None
    brokers: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {"group": self.group, "master": self.master, "brokers": list(self.brokers)}


class Others:
    """``own_group``: that of this broker, which follows the record in any case; ``own``: that record."""

    def __init__(
        self, coordinator: Coordinator, groups: Sequence[int], own_group: int, own: Callable[[], GroupRecord | None]
    ) -> None:  # fmt: skip
        self._coordinator = coordinator
        self._groups = tuple(groups)
        self._others = tuple(group for group in groups if group != own_group)
        self._own_group = own_group
        self._own = own
        self.records: dict[int, GroupRecord] = {}
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Be told of what changes, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for group in self._others:
                tasks.create_task(self._follow(group))

    async def _follow(self, group: int) -> None:
        while True:
            watch = self._coordinator.watch(GroupId(str(group)), late_s=LATE_S)
            async with contextlib.aclosing(watch) as readings:
                async for reading in readings:
                    self._note(group, reading)
            await asyncio.sleep(LATE_S)

    def _note(self, group: int, reading: Reading) -> None:
        known = self.records.get(group)
        if isinstance(reading, Found) and (known is None or known.version <= reading.record.version):
            self.records[group] = reading.record

    async def look(self) -> None:
        """Know of every group that can be known of: one that nothing was told of yet is asked for."""
        async with self._looking:
            loop = asyncio.get_running_loop()
            unknown = [group for group in self._others if group not in self.records]
            if not unknown or loop.time() < self._looked_at + AGAIN_S:
                return
            for group in unknown:
                self._note(group, await self._coordinator.read(GroupId(str(group))))
            self._looked_at = loop.time()

    def master_of(self, group: int) -> str | None:
        """The address of a group's master, None where none is known."""
        return self.place_of(group).master

    def place_of(self, group: int) -> GroupPlace:
        record = self._own() if group == self._own_group else self.records.get(group)
        if record is None:
            return GroupPlace(group, None, ())
        master = record.members.get(record.master.log_id) if record.master is not None else None
        ordered = sorted(record.members.values(), key=lambda member: (member.ordinal, member.node))
        return GroupPlace(
            group, None if master is None else master.address, tuple(member.address for member in ordered)
        )

    def places(self) -> list[GroupPlace]:
        """All groups of the cluster, by number."""
        return [self.place_of(group) for group in self._groups]
