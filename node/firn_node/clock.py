"""Time and randomness, as the broker may use them; tests hand in their own.

The **log clock** dates appends and measures every age (lags, retention, tombstones): it never goes back, and it
is slewed towards the wall clock by at most 1 %, so that a jump of the wall clock by an hour causes no burst of
retention and no early removal of a tombstone. It starts at max(wall clock, last append).
"""

import os
import random
import threading
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back, also counted while the machine sleeps."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970, as the machine believes."""
        ...


class Randomness(Protocol):
    def bytes(self, n: int) -> bytes: ...

    def uniform(self, low: float, high: float) -> float: ...


class RealClock:
    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class RealRandomness:
    def bytes(self, n: int) -> bytes:
        return os.urandom(n)  # noqa: TID251 - the rim: this is the replacement that the ban names

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)


SLEW = 0.01


class LogClock:
    """Milliseconds for ages. Invariant: never goes back; gains or loses at most 1 % against ``monotonic``."""

    def __init__(self, clock: Clock, last_append_ms: int = 0) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._now = float(max(clock.wall_ms(), last_append_ms))
        self._lock = threading.Lock()  # the appender, the compactor and the sealer ask

    def now_ms(self) -> int:
        with self._lock:
            return self._advance()

    def _advance(self) -> int:
        at = self._clock.monotonic()
        passed = max(0.0, (at - self._at) * 1000.0)
        self._at = max(at, self._at)
        ahead = self._now + passed - self._clock.wall_ms()
        correction = min(max(-ahead, -SLEW * passed), SLEW * passed)
        self._now += passed + correction
        return int(self._now)
