"""The coordinator as the core sees it: reads and swaps asked for, answers and changes as events.

Not knowing is no event: the core asks again. One read is under way at a time; a swap is asked once, and its answer may
come late. What a person must look at (``Unusable``) stays in ``trouble`` until the coordinator answers again: a master
that cannot renew its lease stops by itself. ``unknown`` says why nothing is known at the moment.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from firn.errors import InvariantBroken
from firn_node.coordinator import Absent, Coordinator, Done, Found, Reading, Refused, Unreachable, Unusable
from firn_node.replication.events import CompareAndSet, Outcome, ReadRecord, RecordRead, SwapAnswered
from firn_node.replication.record import GroupId

log = logging.getLogger("firn.replication")

SWAPS_MAX = 8  # under way; further ones are answered UNKNOWN without being asked
WATCH_AGAIN_S = 1.0


class Coordination:
    """``feed`` takes the events; ``broken`` a bug that must stop the node."""

    def __init__(
        self, coordinator: Coordinator, group_id: GroupId, *, feed: Callable[[RecordRead | SwapAnswered], None],
        broken: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._coordinator = coordinator
        self._group_id = group_id
        self._feed = feed
        self._broken = broken
        self._tasks: set[asyncio.Task[None]] = set()
        self._swaps = 0
        self._is_reading = False
        self._next_read: int | None = None
        self.trouble: str | None = None
        self.unknown: str | None = None
        self._spawn(self._watch())

    def read(self, action: ReadRecord) -> None:
        """Carry out ``ReadRecord``; one that is asked for during another replaces what waits."""
        self._next_read = action.at_least
        if not self._is_reading:
            self._is_reading = True
            self._spawn(self._read())

    async def _read(self) -> None:
        try:
            while (at_least := self._next_read) is not None:
                self._next_read = None
                reading = await self._coordinator.read(self._group_id)
                self._note(reading)
                if isinstance(reading, Found):
                    self._feed(RecordRead(reading.record, at_least))
                elif isinstance(reading, Absent):
                    self._feed(RecordRead(None, at_least))
        finally:
            self._is_reading = False

    def compare_and_set(self, action: CompareAndSet) -> None:
        """Carry out ``CompareAndSet``."""
        if self._swaps >= SWAPS_MAX:
            self._spawn(self._answer_unknown(action))
        else:
            self._swaps += 1
            self._spawn(self._swap(action))

    async def _answer_unknown(self, action: CompareAndSet) -> None:
        self._feed(SwapAnswered(action.new, Outcome.UNKNOWN))

    async def _swap(self, action: CompareAndSet) -> None:
        try:
            found = await self._coordinator.compare_and_set(action.new, expected_version=action.expected)
        finally:
            self._swaps -= 1
        if isinstance(found, Unusable):
            self.trouble = found.reason
        outcome = Outcome.UNKNOWN
        if isinstance(found, Done):
            outcome = Outcome.APPLIED
        elif isinstance(found, Refused):
            outcome = Outcome.CONFLICT
        self._feed(SwapAnswered(action.new, outcome))

    async def _watch(self) -> None:
        while True:
            async with contextlib.aclosing(self._coordinator.watch(self._group_id)) as readings:
                async for reading in readings:
                    self._note(reading)
                    if isinstance(reading, Found):
                        self._feed(RecordRead(reading.record))
            await asyncio.sleep(WATCH_AGAIN_S)

    def _note(self, reading: Reading) -> None:
        if isinstance(reading, Unusable) and reading.reason != self.trouble:
            log.error("the coordinator cannot be used: %s", reading.reason)
        self.trouble = reading.reason if isinstance(reading, Unusable) else None
        unknown = reading.reason if isinstance(reading, Unreachable) else None
        if unknown is not None and self.unknown is None:
            log.warning("the group record cannot be read: %s", unknown)
        self.unknown = unknown

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """The boundary of one task: a bug stops the node."""
        try:
            await work
        except Exception as error:
            log.exception("coordination failed")
            self._broken(error.message if isinstance(error, InvariantBroken) else repr(error))

    async def close(self) -> None:
        """Wait for nothing; swaps under way may still be applied."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
