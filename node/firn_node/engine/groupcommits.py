"""``Commits`` of a replica: its group decides what may be appended, acknowledged and read (``replication.serving``)."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from firn.errors import FirnError, Timeout, Unavailable
from firn.topicspec import DurabilitySpec
from firn_node.engine.commits import DispatchWaits
from firn_node.engine.core import Core

if TYPE_CHECKING:
    from firn_node.replication.serving import Replication

_UNDISPATCHED_WAIT_BYTES = 24 << 20
_STANDBY_WAIT_S = 0.25  # a standby that follows is a round trip and a sync behind
_MASTER_WAIT_S = 5.0  # a standby may dispatch what is committed before the master does


class GroupCommits(DispatchWaits):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._group: Replication

    def join(self, group: "Replication") -> None:
        """Before anything is asked."""
        self._group = group

    @property
    def epoch(self) -> int:
        return self._group.epoch

    @property
    def forced_epoch(self) -> int:
        return self._group.forced_epoch

    def refusal(self, durability: DurabilitySpec) -> FirnError | None:
        try:
            self._group.admit(durability.min_in_sync)
        except FirnError as error:
            return error
        return None

    def promise(self, durabilities: Sequence[DurabilitySpec], *, names_older: bool) -> Awaitable[None] | None:
        end = self._core.log.written_end
        waits: list[Awaitable[None]] = [
            self._group.written(end, min_in_sync=min_in_sync, is_interval=is_interval)
            for min_in_sync, is_interval in {(d.min_in_sync, d.flush == "interval") for d in durabilities}
        ]
        if names_older and (reached := self.reached(end)) is not None:
            waits.append(reached)
        elif end - self._core.dispatched_position > _UNDISPATCHED_WAIT_BYTES:
            # What is not dispatched is held in memory: who writes faster than the group commits waits for it.
            behind = self.reached(end - _UNDISPATCHED_WAIT_BYTES)
            waits += [] if behind is None else [behind]
        if len(waits) < 2:
            return waits[0] if waits else None
        return _all(waits)

    def _hurry(self) -> None:
        self._group.hurry()

    def stepped_down(self, reason: str) -> None:
        """What was appended here and is not dispatched may be cut: nobody can be told that it was."""
        self._waiters.give_up(Timeout(f"the outcome is unknown: {reason}; ask again with the same sequence"))

    def check_read(self) -> None:
        self._group.check_read()

    async def admit_read(self, floor: int) -> None:
        """Wait for what the reader has been shown elsewhere: a moment, or at the master, which will get there, longer."""
        self._group.check_any_read()
        if (reached := self.reached(floor)) is None:
            return
        is_master = self._group.is_master
        try:
            await asyncio.wait_for(reached, _MASTER_WAIT_S if is_master else _STANDBY_WAIT_S)
        except TimeoutError:
            late = Unavailable(
                "the master has not dispatched yet what this reader was shown elsewhere; ask again"
            )
            raise late if is_master else self._group.not_master() from None
        self._group.check_any_read()

    async def stop(self) -> None:
        """The driver syncs (``GroupDriver.stop``); who still waits has no known outcome."""
        self.stepped_down("this broker has stopped")


async def _all(waits: list[Awaitable[None]]) -> None:
    await asyncio.gather(*waits)
