"""A queue of keys for which each key is there once, is worked on by one worker at a time, and comes back after failures.

What is to be done for a key is found out by the worker, from what is there by then: so a key that is added ten times
while it waits, or while it is worked on, is worked on once more, not ten times.
"""

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from random import Random
from typing import Generic, TypeVar

from firn.errors import FirnError, Unavailable

K = TypeVar("K")
_log = logging.getLogger(__name__)

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 60.0


class Interrupted(Unavailable):
    """Something was done before the API server failed: the rest of it is not put off for longer and longer."""


class WorkQueue(Generic[K]):
    """``work(key)`` gives the seconds after which to look at the key again without any cause, None: never.

    Any exception of it counts as a failure: the key comes back after a pause, with jitter, that doubles as long as
    nothing is done (``Interrupted``).
    """

    def __init__(self, work: Callable[[K], Awaitable[float | None]], randomness: Random) -> None:
        self._work = work
        self._randomness = randomness
        self._heap: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        self._running: dict[K, float] = {}  # since when
        self._again: set[K] = set()  # added while worked on
        self._failures: dict[K, int] = {}
        self._number = 0
        self._changed = asyncio.Condition()
        self.done = self.failed = 0

    def __len__(self) -> int:
        return len(self._due) + len(self._running)

    @property
    def oldest_running_s(self) -> float:
        """For how long the longest piece of work has been going on."""
        now = asyncio.get_running_loop().time()
        return max((now - since for since in self._running.values()), default=0.0)

    def failures(self, key: K) -> int:
        return self._failures.get(key, 0)

    async def add(self, key: K, *, after: float = 0.0) -> None:
        """Work on a key, at the earliest after so many seconds; an earlier time counts."""
        async with self._changed:
            if key in self._running and after <= 0:
                self._again.add(key)
                return
            self._put(key, asyncio.get_running_loop().time() + after)
            self._changed.notify_all()

    def _put(self, key: K, due: float) -> None:
        if self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        self._number += 1
        heapq.heappush(self._heap, (due, self._number, key))

    async def run(self, workers: int) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._worker())

    async def settle(self, *, within: float = 0.0) -> None:
        """Return when nothing is worked on and nothing is due within so many seconds."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running and not self._is_due(within))

    def _is_due(self, within: float) -> bool:
        horizon = asyncio.get_running_loop().time() + within
        return any(due <= horizon for due in self._due.values())

    async def _worker(self) -> None:
        while True:
            key = await self._next()
            again: float | None = None
            try:
                again = await self._work(key)
                self._failures.pop(key, None)
                self.done += 1
            except Exception as error:
                again = self._failed(key, error)
            finally:
                await self._finish(key, again)

    def _failed(self, key: K, error: Exception) -> float:
        count = 1 if isinstance(error, Interrupted) else self._failures.get(key, 0) + 1
        self._failures[key] = count
        self.failed += 1
        doubled: float = min(BACKOFF_FIRST_S * 2.0 ** min(count - 1, 16), BACKOFF_MAX_S)
        pause = doubled * self._randomness.uniform(0.5, 1.0)
        if isinstance(error, FirnError):
            _log.warning("%s: %s; again in %.1f s", key, error.message, pause)
        else:
            _log.exception("%s: again in %.1f s", key, pause, exc_info=error)
        return pause

    async def _next(self) -> K:
        async with self._changed:
            while True:
                now = asyncio.get_running_loop().time()
                while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                    heapq.heappop(self._heap)  # an earlier time took its place
                if self._heap and self._heap[0][0] <= now:
                    key = heapq.heappop(self._heap)[2]
                    if key in self._running:
                        self._again.add(key)
                        del self._due[key]
                        continue
                    del self._due[key]
                    self._running[key] = now
                    return key
                pause = self._heap[0][0] - now if self._heap else None
                try:
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def _finish(self, key: K, again: float | None) -> None:
        async with self._changed:
            del self._running[key]
            now = asyncio.get_running_loop().time()
            if key in self._again:
                self._again.discard(key)
                self._put(key, now)
            if again is not None:
                self._put(key, now + again)
            self._changed.notify_all()
