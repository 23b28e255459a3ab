"""A network between simulated nodes: messages are lost, late, out of order, doubled, or go one way only."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firn_sim.world import World


@dataclass(slots=True)
class NetworkFaults:
    """Probabilities per message, and seconds."""

    loss: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    delay: tuple[float, float] = (0.001, 0.01)
    late_delay: tuple[float, float] = (0.5, 6.0)
    is_ordered: bool = True  # what is neither late nor doubled arrives in order, as over one connection

    @property
    def latest(self) -> float:
        """How long a message may be on its way."""
        return self.late_delay[1] if self.late or self.doubled else self.delay[1]


class SimNetwork:
    def __init__(self, world: World, rng: random.Random, faults: NetworkFaults) -> None:
        self.faults = faults
        self.cuts: set[tuple[str, str]] = set()  # (from, to): nothing passes
        self.sent = 0
        self._world = world
        self._rng = rng
        self._newest: dict[tuple[str, str], float] = {}

    def send(self, source: str, target: str, deliver: Callable[[Any], None], message: Any) -> None:
        """Deliver a message never, once or twice. A cut that opens meanwhile loses it too."""
        self.sent += 1
        faults, rng = self.faults, self._rng
        if (source, target) in self.cuts or (faults.loss and rng.random() < faults.loss):
            return
        if faults.late and rng.random() < faults.late:
            self._later(source, target, rng.uniform(*faults.late_delay), deliver, message)
            return
        at = self._world.now + rng.uniform(*faults.delay)
        if faults.is_ordered:
            at = max(at, self._newest.get((source, target), 0.0) + 1e-6)
            self._newest[source, target] = at
        self._later(source, target, at - self._world.now, deliver, message)
        if faults.doubled and rng.random() < faults.doubled:
            self._later(source, target, rng.uniform(*faults.late_delay), deliver, message)

    def _later(
        self, source: str, target: str, delay: float, deliver: Callable[[Any], None], message: Any
    ) -> None:
        def arrive() -> None:
            if (source, target) not in self.cuts:
                deliver(message)

        self._world.at(delay, arrive)
