"""Memory that requests may hold: one number of bytes shared by all connections, granted first come first served.

Invariants: ``0 <= used <= limit``; who waits is served in order of arrival, so a large request is not starved by
small ones; what was granted is given back exactly once. A request above the whole budget is granted when nobody
else holds anything: it is then alone, and bounded by the limits of its body.
"""

import asyncio
from collections import deque
from types import TracebackType

from firn.errors import LimitExceeded


class Busy(LimitExceeded):
    """No room now: the same request may pass a moment later."""

    status, retry = 503, True


class Budget:
    def __init__(self, limit: int, *, name: str, wait_seconds: float) -> None:
        self.limit = limit
        self.used = 0
        self._name = name
        self._wait_seconds = wait_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def try_take(self, size: int) -> int | None:
        """The bytes granted at once (``size``, at most the limit), or None when the caller would have to wait."""
        granted = min(size, self.limit)
        if self._waiting or self.used + granted > self.limit:
            return None
        self.used += granted
        return granted

    async def take(self, size: int) -> int:
        """The bytes granted: ``size``, at most the limit. They go back by ``give``.

        Errors: Busy when there was no room for the whole waiting time.
        """
        granted = self.try_take(size)
        if granted is not None:
            return granted
        granted = min(size, self.limit)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, turn))
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            self._leave(granted, turn)
            if isinstance(error, TimeoutError):
                raise Busy(
                    f"{self._name}: no room for {size} bytes within {self._wait_seconds:g} s "
                    f"({self.used} of {self.limit} in use); send less at once, or slower"
                ) from None
            raise
        return granted

    def give(self, granted: int) -> None:
        self.used -= granted
        self._wake()

    def _leave(self, granted: int, turn: "asyncio.Future[None]") -> None:
        if turn.done() and not turn.cancelled():
            self.give(granted)
            return
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not turn)
        self._wake()  # who stood behind a large request may fit

    def _wake(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            granted, turn = self._waiting.popleft()
            if not turn.done():
                self.used += granted
                turn.set_result(None)


class Charge:
    """What one request holds of a budget; all of it goes back at the end of the ``async with``."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held = 0

    async def add(self, size: int) -> None:
        """Hold ``size`` bytes more; in all at most the budget's limit. *Errors*: Busy."""
        size = min(size, self._budget.limit - self._held)
        if size > 0:
            self._held += await self._budget.take(size)

    def release(self) -> None:
        """Give everything back before the end."""
        held, self._held = self._held, 0
        if held:
            self._budget.give(held)

    async def __aenter__(self) -> "Charge":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
