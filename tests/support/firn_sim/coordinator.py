"""The group record behind a bad network: outages, lost and late requests, lost answers, stale reads.

A swap is applied when its request arrives, if it arrives; the sender may have given up, or be dead, by then. A
conflict may hide a success (a library that retried). Reads are consistent, or stale and then say so.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from firn_sim.world import World

from firn_node.coordinator.api import decide
from firn_node.replication.events import Outcome, RecordRead, SwapAnswered
from firn_node.replication.record import NO_VERSION, GroupRecord


@dataclass(slots=True)
class CoordinatorFaults:
    """Probabilities per request, and seconds."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    late_request: float = 0.0
    stale_read: float = 0.0
    stale_by: int = 30  # versions
    hidden_success: float = 0.0
    delay: tuple[float, float] = (0.001, 0.02)
    late_delay: tuple[float, float] = (0.3, 6.0)

    @property
    def latest(self) -> float:
        """How long a request may be on its way."""
        return self.late_delay[1] if self.late_request else self.delay[1]


Answer = RecordRead | SwapAnswered


class SimCoordinator:
    def __init__(self, world: World, rng: random.Random, faults: CoordinatorFaults) -> None:
        self.faults = faults
        self.history: list[GroupRecord] = []
        self.unreachable: set[str] = set()
        self.stale_for: dict[str, GroupRecord] = {}  # nodes that are shown an old version
        self.is_down = False
        self.is_checked = True  # every change by the invariants of the record
        self.watchers: dict[str, Callable[[RecordRead], None]] = {}
        self.changed: Callable[[GroupRecord | None, GroupRecord], None] = lambda old, new: None
        self._world = world
        self._rng = rng

    @property
    def record(self) -> GroupRecord | None:
        return self.history[-1] if self.history else None

    @property
    def version(self) -> int:
        return self.history[-1].version if self.history else NO_VERSION

    def read(self, node: str, at_least: int, answer: Callable[[RecordRead], None]) -> None:
        def arrive() -> None:
            if not self._is_reached(node):
                return
            if node in self.stale_for:
                read = RecordRead(self.stale_for[node])
            elif self.history and self._rng.random() < self.faults.stale_read:
                read = RecordRead(self.old_version())
            else:
                read = RecordRead(self.record, at_least)
            self._reply(node, partial(answer, read))

        if not self._is_lost():
            self._world.at(self._rng.uniform(*self.faults.delay), arrive)

    def old_version(self) -> GroupRecord:
        """One of the last versions, or the last one of the mastership before."""
        newest = self.history[-1]
        if self._rng.random() < 0.5:
            before = (record for record in reversed(self.history) if record.epoch < newest.epoch)
            return next(before, newest)
        return self._rng.choice(self.history[-self.faults.stale_by :])

    def compare_and_set(
        self, node: str, expected: int, new: GroupRecord, answer: Callable[[SwapAnswered], None]
    ) -> None:
        """Applied at most once, at any later time; the answer may never come."""

        def arrive() -> None:
            if not self._is_reached(node):
                return
            is_applied = self.apply(expected, new)
            if is_applied and self._rng.random() < self.faults.hidden_success:
                is_applied = False
            outcome = Outcome.APPLIED if is_applied else Outcome.CONFLICT
            self._reply(node, partial(answer, SwapAnswered(new, outcome)))

        if self._is_lost():
            return
        is_late = self._rng.random() < self.faults.late_request
        self._world.at(self._rng.uniform(*(self.faults.late_delay if is_late else self.faults.delay)), arrive)

    def apply(self, expected: int, new: GroupRecord) -> bool:
        """The compare-and-set itself, as every coordinator decides it."""
        before = self.record
        if self.is_checked:
            if decide(before, new, expected) is not None:
                return False
        elif new.version == expected and before is not None:
            return self._renew_beside(new)
        elif self.version != expected:
            return False
        self._store(before, new)
        return True

    def _renew_beside(self, new: GroupRecord) -> bool:
        """A lease that is no part of the record's version, as a mutation has it: always renewed."""
        record = self.history[-1]
        self.history[-1] = replace(record, renewals=max(record.renewals, new.renewals) + 1)
        return True

    def _store(self, before: GroupRecord | None, new: GroupRecord) -> None:
        self.history.append(new)
        self.changed(before, new)
        read = RecordRead(new)
        for node, tell in sorted(self.watchers.items()):
            if node not in self.stale_for:
                self._reply(node, partial(tell, read))

    def _is_reached(self, node: str) -> bool:
        return not self.is_down and node not in self.unreachable

    def _is_lost(self) -> bool:
        return self._rng.random() < self.faults.lost_request

    def _reply(self, node: str, call: Callable[[], None]) -> None:
        if self._rng.random() < self.faults.lost_answer:
            return
        self._world.at(
            self._rng.uniform(*self.faults.delay), lambda: call() if self._is_reached(node) else None
        )
