"""Simulated time: a queue of what happens when. One thread, no waiting, the same order for the same seed."""

import heapq
from collections.abc import Callable


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay: float, call: Callable[[], None]) -> None:
        """Call something ``delay`` seconds from now; equal times in the order of asking."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, call))

    def run(self, until: float) -> None:
        """All that is due before ``until``; errors go through."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call = heapq.heappop(queue)
            self.happened += 1
            call()
        self.now = until
