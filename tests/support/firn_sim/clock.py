"""A clock that moves when told, and randomness that one seed replays."""

import random


class SimClock:
    """``Clock`` of ``firn_node.clock``: ``advance`` moves both times, ``jump`` the wall clock alone."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._seconds = 0.0
        self._wall_ms = float(wall_ms)

    def monotonic(self) -> float:
        return self._seconds

    def wall_ms(self) -> int:
        return int(self._wall_ms)

    def advance(self, seconds: float) -> None:
        self._seconds += seconds
        self._wall_ms += seconds * 1000

    def jump(self, seconds: float) -> None:
        self._wall_ms += seconds * 1000


class SimRandomness:
    """``Randomness`` of ``firn_node.clock`` from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, n: int) -> bytes:
        return self._random.randbytes(n)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)
