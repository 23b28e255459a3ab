"""A bound on the bytes that compaction reads and writes per second."""

import time
from collections.abc import Callable

from firn_node.clock import Clock, RealClock

BURST_SECONDS = 0.25  # so long may be caught up at once: keeps big batches from pausing after each
PAUSE_SECONDS_MAX = 0.1  # a cancelled or loosened compaction reacts so soon


class Throttle:
    """A token bucket; ``bytes_per_second`` 0 is no bound, and may be changed at any time."""

    def __init__(
        self,
        bytes_per_second: int = 0,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock or RealClock()
        self._sleep = sleep
        self._at = self._clock.monotonic()
        self._tokens = 0.0

    def take(self, size: int, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Return when ``size`` more bytes are within the bound, or when cancelled."""
        self._tokens -= size
        while (rate := self.bytes_per_second) > 0 and not is_cancelled():
            now = self._clock.monotonic()
            self._tokens = min(self._tokens + max(0.0, now - self._at) * rate, rate * BURST_SECONDS)
            self._at = now
            if self._tokens > -1:
                return
            self._sleep(min(-self._tokens / rate, PAUSE_SECONDS_MAX))
        self._tokens = max(self._tokens, 0.0)
        self._at = self._clock.monotonic()
