"""Where the broker groups of the cluster are: their members and masters, as the group records say.

What is known here only leads somebody to an address; who answers there decides by itself what it is. So it may be a
second old, and is kept when the coordinator cannot be asked.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firn_node.coordinator import Coordinator, Found
from firn_node.replication.record import GroupId, GroupRecord

LOOK_S = 1.0  # between looks at all records: 0.2 ms of CPU each
FRESH_S = 0.2  # a record younger than this is not read again for somebody who asks


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """``master``: its address, None: nobody is."""

    group: int
    master: str | None
    brokers: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {"group": self.group, "master": self.master, "brokers": list(self.brokers)}


class Others:
    def __init__(self, coordinator: Coordinator, groups: Sequence[int]) -> None:
        self._coordinator = coordinator
        self._groups = tuple(groups)
        self.records: dict[int, GroupRecord] = {}
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Know what the records say now, or said ``FRESH_S`` ago."""
        async with self._looking:
            loop = asyncio.get_running_loop()
            is_complete = len(self.records) == len(self._groups)
            if is_complete and loop.time() < self._looked_at + FRESH_S:
                return
            for group in self._groups:
                found = await self._coordinator.read(GroupId(str(group)))
                if isinstance(found, Found):
                    self.records[group] = found.record
            self._looked_at = loop.time()

    def master_of(self, group: int) -> str | None:
        """The address of a group's master, None where none is known."""
        return self.place_of(group).master

    def place_of(self, group: int) -> GroupPlace:
        record = self.records.get(group)
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
