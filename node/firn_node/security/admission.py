"""Bounds on who has not proven anything yet, per address and in all.

A connection counts from its acceptance until it has authenticated or ended. Past the bound it is cut at once, before
its handshake has cost anything.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Admission:
    per_address_max: int
    total_max: int
    refused: int = 0
    unproven: int = 0
    _open: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> "Place | None":
        """A place, until it is left; None when there is no room."""
        if self.unproven >= self.total_max or self._open[address] >= self.per_address_max:
            self.refused += 1
            return None
        self._open[address] += 1
        self.unproven += 1
        return Place(self, address)

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        self.unproven -= 1
        if self._open[address] <= 0:
            del self._open[address]


@dataclass(slots=True)
class Place:
    """One connection's place; it is left once, however often that is said."""

    _admission: Admission
    address: str
    is_left: bool = False

    def leave(self) -> None:
        if not self.is_left:
            self.is_left = True
            self._admission.leave(self.address)
