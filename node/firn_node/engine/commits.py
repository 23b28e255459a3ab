"""When an append may be acknowledged, and when what was acknowledged can be read: the engine's one seam to durability.

A single broker is its own judge (``flusher.Flusher``): what is durable is committed. A replica asks its group
(``groupcommits.GroupCommits``). Both say "reached" of a position once everything below it is durable, committed *and
dispatched*, so acknowledged means visible.
"""

import asyncio
import heapq
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Protocol

from firn.errors import FirnError
from firn.topicspec import DurabilitySpec
from firn_node.engine.core import Core


class Commits(Protocol):
    @property
    def epoch(self) -> int:
        """What is stamped into batches, to be asked in the turn of the event loop that appends them."""
        ...

    @property
    def forced_epoch(self) -> int:
        """The newest epoch that accepted data loss: what was given out before it may be given out again. 0: none."""
        ...

    def refusal(self, durability: DurabilitySpec) -> FirnError | None:
        """Why nothing that asks for this may be appended now."""
        ...

    def promise(self, durabilities: Sequence[DurabilitySpec], *, names_older: bool) -> Awaitable[None] | None:
        """What must be awaited before a request's outcomes are told, if anything; to be called right after its append.

        ``durabilities``: what its appended batches ask for. ``names_older``: it also names records that were
        appended before it, which may not be committed yet. *Errors*: Unavailable, Timeout: the outcome is unknown.
        """
        ...

    def reached(self, position: int) -> "asyncio.Future[None] | None":
        """What ``wait`` waits for; None when it need not."""
        ...

    async def wait(self, position: int) -> None:
        """Return when all below ``position`` is durable, committed and dispatched.

        *Errors*: Unavailable, Timeout when that can no longer happen here.
        """
        ...

    def settle(self) -> None:
        """Tell those whose bytes are dispatched now."""
        ...

    def check_read(self) -> None:
        """Return when a read may be answered now, of what is dispatched. *Errors*: NotMaster, Unavailable.

        Asked when it arrives and again after anything that was waited for.
        """
        ...

    async def admit_read(self, floor: int) -> None:
        """Return when a read may be answered here, whether or not this is the master, of what is dispatched.

        ``floor``: as far as the reader was shown the log. *Errors*: NotMaster when this replica cannot tell.
        """
        ...

    async def stop(self) -> None:
        """Make durable what is left, then end; who still waits is told that it did not come about."""
        ...


class Waiters:
    """Futures by the log position that they wait for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, position: int) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self._loop.create_future()
        self._number += 1
        heapq.heappush(self._heap, (position, self._number, future))
        return future

    def settle(self, position: int) -> None:
        """Tell those who wait for ``position`` or less."""
        while self._heap and self._heap[0][0] <= position:
            future = heapq.heappop(self._heap)[2]
            if not future.done():
                future.set_result(None)

    def give_up(self, error: FirnError) -> None:
        """What all of them wait for can no longer come about."""
        waiting, self._heap = self._heap, []
        for _, _, future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # who waited may have been cancelled: that is no reason for a warning


class DispatchWaits(ABC):
    """The half of ``Commits`` that both judges share: who waits for a position is told once it is dispatched."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiters = Waiters()

    @abstractmethod
    def _hurry(self) -> None:
        """Somebody waits: make durable now what was appended."""

    async def wait(self, position: int) -> None:
        reached = self.reached(position)
        if reached is not None:
            await reached

    def reached(self, position: int) -> "asyncio.Future[None] | None":
        self._core.health.check_serving()
        if self._core.dispatched_position >= position:
            return None
        future = self._waiters.add(position)
        self._hurry()
        return future

    def settle(self) -> None:
        self._waiters.settle(self._core.dispatched_position)
