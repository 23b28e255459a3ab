"""Bounds on who has not proven anything yet, per address.

A connection counts from its acceptance until it has authenticated or ended. Past the bound it is cut at once, before
its handshake has cost anything.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    per_address_max: int
    refused: int = 0
    _open: Counter[str] = field(default_factory=Counter)

    @property
    def unproven(self) -> int:
        return self._open.total()

    def enter(self, address: str) -> bool:
        """Whether there is room; ``leave`` follows exactly once if so."""
        if self._open[address] >= self.per_address_max:
            self.refused += 1
            return False
        self._open[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]
