"""Group records in a dictionary: for tests, and behind the simulated network of ``tests/support/firn_sim``.

``Records`` is the store, without I/O and time. ``MemoryCoordinator`` is a handle of it, with the faults that every
user of a coordinator has to live with.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from firn_node.coordinator.api import (
    Absent,
    Done,
    Found,
    Reading,
    Refused,
    Seen,
    Swap,
    Unknown,
    Unreachable,
    Unusable,
    decide,
)
from firn_node.replication.record import GroupId, GroupRecord


@dataclass(slots=True)
class Records:
    """The one store of all handles."""

    by_group: dict[GroupId, GroupRecord] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # of the next change; then another one's

    def read(self, group_id: GroupId) -> Found | Absent:
        found = self.by_group.get(group_id)
        return Absent() if found is None else Found(found)

    def compare_and_set(self, new: GroupRecord, *, expected_version: int) -> Done | Refused:
        """Errors: InvariantBroken, as of ``Coordinator``."""
        refused = decide(self.by_group.get(new.group_id), new, expected_version)
        if refused is not None:
            return refused
        self.by_group[new.group_id] = new
        self.wake()
        return Done(new)

    def wake(self) -> None:
        """Let every watch look again."""
        woken, self.changed = self.changed, asyncio.Event()
        woken.set()


class MemoryCoordinator:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._cut = False
        self._answers_lost = 0
        self._seen = Seen()
        self._closed = False

    def cut(self) -> None:
        """From now on nothing is answered and nothing applied."""
        self._cut = True
        self._records.wake()

    def heal(self) -> None:
        self._cut = False
        self._records.wake()

    def lose_next_answer(self) -> None:
        """The next swap is carried out, and its caller never hears how it went."""
        self._answers_lost += 1

    async def read(self, group_id: GroupId) -> Reading:
        await asyncio.sleep(0)
        return self._reading(group_id)

    def _reading(self, group_id: GroupId) -> Reading:
        if self._cut:
            return Unreachable("cut off")
        found = self._records.read(group_id)
        why = self._seen.meet(group_id, found.record if isinstance(found, Found) else None)
        return found if why is None else Unusable(why)

    async def watch(self, group_id: GroupId, *, late_s: float = 0.0) -> AsyncGenerator[Reading, None]:
        told: Reading | None = None
        while not self._closed:
            changed = self._records.changed
            reading = self._reading(group_id)
            if reading != told:
                told = reading
                yield reading
            else:
                await changed.wait()

    async def compare_and_set(self, new: GroupRecord, *, expected_version: int) -> Swap:
        await asyncio.sleep(0)
        if self._cut:
            return Unknown("cut off")
        if (why := self._seen.meet(new.group_id, self._records.by_group.get(new.group_id))) is not None:
            return Unusable(why)
        swap = self._records.compare_and_set(new, expected_version=expected_version)
        if self._answers_lost:
            self._answers_lost -= 1
            return Unknown("the answer was lost")
        return swap

    async def close(self) -> None:
        self._closed = True
        self._records.wake()
