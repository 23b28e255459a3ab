"""Group commit: one ``fdatasync`` at a time, in a thread of its own, for all that was written before it began.

``wait`` returns once everything below a position is durable *and dispatched*: the dispatcher runs on the event
loop when a sync has ended, before anyone who waited is told, so acknowledged means visible. It runs in portions, between
which the loop serves others; the next sync begins after the last one.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence

from firn.errors import FirnError, Unavailable
from firn.topicspec import DurabilitySpec
from firn_node.engine.commits import DispatchWaits
from firn_node.engine.core import Core
from firn_node.failpoints import step

_log = logging.getLogger(__name__)

# `flush: interval` is synced early beyond this: what is not dispatched yet is held in memory.
UNSYNCED_BYTES_MAX = 8 << 20
UNSYNCED_WAIT_BYTES = 3 * UNSYNCED_BYTES_MAX
FIRST_EPOCH = 1  # of a single broker, which has no other


class Flusher(DispatchWaits):
    def __init__(self, core: Core, on_durable: Callable[[int], bool]) -> None:
        """``on_durable``: dispatch the next portion of what lies below a position; whether that was all of it."""
        super().__init__(core)
        self._on_durable = on_durable
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Event()
        self._stopping = False
        self._syncing = False  # until what was synced is dispatched
        self._is_due = False  # a flush interval has ended meanwhile
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="firn-flusher", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return FIRST_EPOCH

    @property
    def forced_epoch(self) -> int:
        return 0

    def refusal(self, durability: DurabilitySpec) -> FirnError | None:
        return None

    def promise(self, durabilities: Sequence[DurabilitySpec], *, names_older: bool) -> Awaitable[None] | None:
        """As ``Commits``: bytes that were appended are synced now, or within ``flushInterval``."""
        log = self._core.log
        sync = any(durability.flush == "sync" for durability in durabilities)
        if durabilities:
            if sync or log.written_end - log.durable_end > UNSYNCED_BYTES_MAX:
                self._hurry()
            # Hurried or not: a sync that is under way may have begun before.
            if not sync and self._timer is None:
                self._timer = self._loop.call_later(
                    self._core.settings.flush_interval_ms / 1000, self._interval_over
                )
        if sync or names_older:
            return self.reached(log.written_end)
        if log.written_end - self._core.dispatched_position > UNSYNCED_WAIT_BYTES:
            # `flush: interval` on a disk that does not keep up: what is not synced is held in memory.
            return self.reached(log.written_end - UNSYNCED_WAIT_BYTES)
        return None

    async def admit_read(self, floor: int) -> None:
        self.check_read()

    def check_read(self) -> None:
        """A single broker may always answer."""

    async def stop(self) -> None:
        """Sync what is left, then end the thread."""
        if self._timer is not None:
            self._timer.cancel()
        if self._core.health.failed is None:
            await self._last_sync()
        self._stopping = True
        self._wanted.set()
        await asyncio.to_thread(self._thread.join)
        self._give_up("this broker has stopped; what was written and not acknowledged may be there or not")

    async def _last_sync(self) -> None:
        """Return when all is durable and dispatched, or an index that fails shows that it will not be."""
        last = self._loop.create_task(self.wait(self._core.log.written_end))
        while not (await asyncio.wait([last], timeout=0.2))[0]:
            if self._core.health.index_error is not None:
                last.cancel()
        for error in await asyncio.gather(last, return_exceptions=True):
            if error is not None:
                _log.error("the last sync failed: %s", error or self._core.health.index_error)

    def _give_up(self, reason: str) -> None:
        self._waiters.give_up(Unavailable(f"not acknowledged: {reason}"))

    def _hurry(self) -> None:
        if not self._syncing:
            self._syncing = True
            self._wanted.set()

    def _interval_over(self) -> None:
        self._timer = None
        if self._core.log.durable_end < self._core.log.written_end:
            self._is_due = self._syncing  # it may not cover all
            self._hurry()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopping:
                return
            try:
                end = self._core.log.sync()
                step("append.synced")
            except OSError as error:
                self._tell(self._failed, f"fsync failed: {error}; the page cache cannot be trusted")
                return
            except BaseException as error:
                _log.exception("flusher")
                self._tell(self._failed, f"the flusher failed: {error}")
                return
            self._tell(self._synced, end)

    def _tell(self, callback: Callable[..., None], value: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, value)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._stopping = True

    def _synced(self, end: int) -> None:
        try:
            is_done = self._on_durable(end)
        except Exception as error:
            # Dispatch is the engine's task boundary: it stands still and says why; acknowledgements wait.
            _log.exception("dispatch failed")
            self._core.health.index_error = f"dispatch failed: {error}"
            self._syncing = False
            self._loop.call_later(1.0, self._hurry)
            return
        self._core.health.index_error = None
        self.settle()
        if not is_done:
            self._loop.call_soon(self._synced, end)
            return
        self._syncing, is_due, self._is_due = False, self._is_due, False
        if self._waiters or is_due:
            self._hurry()

    def _failed(self, reason: str) -> None:
        self._core.health.fail(reason)
        self._give_up(f"{reason}; restart the broker")
