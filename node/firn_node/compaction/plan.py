"""Which clean segments a compaction writes anew, and which neighbours become one output. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A clean segment, or the dirty part, as it is after the decision."""

    rows: int
    masked: int
    held: int  # masked tombstones that have older rows in other segments: rewriting alone may not remove them
    bytes: int
    masked_since_ms: int | None
    is_dirty: bool = False

    @property
    def live_bytes(self) -> int:
        return self.bytes * (self.rows - self.masked) // max(self.rows, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    min_dead_ratio: float
    reclaim_age_ms: int
    segment_bytes: int
    force: bool
    now_ms: int


def is_due(unit: Unit, t: Thresholds) -> bool:
    """Whether a segment is written anew for its masked rows."""
    if unit.is_dirty:
        return True
    if unit.masked == 0:
        return False
    if t.force or (unit.masked_since_ms is not None and t.now_ms - unit.masked_since_ms >= t.reclaim_age_ms):
        return True
    return unit.masked - unit.held >= max(1, t.min_dead_ratio * unit.rows)


def plan_rewrites(units: Sequence[Unit], t: Thresholds) -> list[bool]:
    """Per unit whether it is written anew; units in offset order.

    A neighbour of what is written is taken along when it is not larger than that and both fit one segment: each
    byte is so copied a number of times that grows with the logarithm of the segment size, and small segments do
    not pile up.
    """
    found = [is_due(unit, t) for unit in units]
    for order in (range(len(units) - 1, -1, -1), range(len(units))):
        group = 0
        for i in order:
            size = units[i].live_bytes
            if found[i]:
                group = group + size if group + size <= t.segment_bytes else size
            elif 0 < size <= group and group + size <= t.segment_bytes:
                found[i] = True
                group += size
            else:
                group = 0
    return found


def plan_groups(is_rewritten: Sequence[bool]) -> list[list[int]]:
    """Neighbouring units that are written become one output: their numbers, in order."""
    groups: list[list[int]] = []
    for i, rewritten in enumerate(is_rewritten):
        if rewritten and i and is_rewritten[i - 1]:
            groups[-1].append(i)
        elif rewritten:
            groups.append([i])
    return groups
