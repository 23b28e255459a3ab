"""Can the operations on one key have happened one after another, each between its call and its answer?

The search of Wing and Gong, with Lowe's memory of what was tried: take any operation that no unfinished one precedes,
see whether its answer fits the key's state, go on; come back when nothing fits. A write whose outcome is unknown may
take effect at any time after its call, or never.

The state is a register with an offset: the newest record of the key. Offsets only grow, so acknowledged writes have
one possible order, and the search is short; ``STEPS_MAX`` bounds it where it is not.

*Source*: Wing, Gong: Testing and verifying concurrent objects (1993); Lowe: Testing for linearizability (2017).
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

STEPS_MAX = 200_000
NONE = -1  # the offset of no record


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call and its answer.

    ``write``: what identifies the value that was written, or read (None: nothing was found, or a tombstone);
    ``offset``: where it was written, or read; None when that is not known. ``newest``: what a refused compare-and-set
    named. ``ended``: infinite while the outcome is unknown.
    """

    key: bytes
    kind: Literal["put", "get"]
    began: float
    ended: float = math.inf
    outcome: Literal["done", "conflict", "unknown"] = "unknown"
    write: int | None = None
    is_delete: bool = False
    if_offset: int | None = None
    offset: int | None = None
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    offset: int | None = NONE  # None: of a write whose offset nobody was told
    write: int | None = None
    is_live: bool = False

    def fits(self, if_offset: int | None) -> bool | None:
        """Whether a compare-and-set would be done; None: both are possible."""
        if if_offset is None:
            return True
        if if_offset == NONE:
            return not self.is_live
        if self.offset is None or (not self.is_live and self.offset == if_offset):
            return None  # a tombstone may be gone
        return self.offset == if_offset


def after(state: State, done: Operation) -> State | None:
    """The state behind an operation; None when its answer contradicts the state."""
    if done.kind == "get":
        if done.write is None:
            return None if state.is_live else state
        if not state.is_live or state.write != done.write:
            return None
        return state if state.offset in (None, done.offset) else None
    if done.outcome == "conflict":
        return state if _may_conflict(state, done) else None
    if state.fits(done.if_offset) is False:
        return None
    if done.offset is not None and state.offset is not None and done.offset <= state.offset:
        return None
    return State(done.offset, done.write, not done.is_delete)


def _may_conflict(state: State, refused: Operation) -> bool:
    if state.fits(refused.if_offset):
        return False
    if refused.newest is None or state.offset is None:
        return True
    return refused.newest == state.offset or (refused.newest == NONE and not state.is_live)


@dataclass(frozen=True, slots=True)
class Trouble:
    """``is_proof``: no order exists; else the search was given up."""

    key: bytes
    is_proof: bool
    story: str


def check(operations: Iterable[Operation], *, steps_max: int = STEPS_MAX) -> list[Trouble]:
    """What is wrong, one entry for each key whose operations have no order."""
    by_key: defaultdict[bytes, list[Operation]] = defaultdict(list)
    for each in operations:
        by_key[each.key].append(each)
    found = [_Search(key, with_offsets(each)).run(steps_max) for key, each in by_key.items()]
    return [trouble for trouble in found if trouble is not None]


def with_offsets(operations: list[Operation]) -> list[Operation]:
    """The same, with offsets of unknown writes that a read has told."""
    told = {each.write: each.offset for each in operations if each.kind == "get" and each.write is not None}
    return [
        replace(each, offset=told[each.write])
        if each.kind == "put" and each.offset is None and each.write in told
        else each
        for each in operations
    ]


class _Search:
    """Answered operations by the time of their call, unknown ones apart: they never must be taken."""

    def __init__(self, key: bytes, operations: list[Operation]) -> None:
        self._key = key
        answered = [each for each in operations if each.outcome != "unknown"]
        self._answered = sorted(answered, key=lambda each: each.began)
        self._unknown = _that_may_matter(operations)

    def run(self, steps_max: int) -> Trouble | None:
        first, taken, tried = 0, 0, 0  # all below ``first`` are taken, beyond it the bits of ``taken``
        stack = [(first, taken, tried, State())]
        seen = {stack[0]}
        deepest, steps = stack[0], 0
        while stack:
            first, taken, tried, state = stack.pop()
            if first == len(self._answered):
                return None
            if first + taken.bit_count() > deepest[0] + deepest[1].bit_count():
                deepest = (first, taken, tried, state)
            steps += 1
            if steps > steps_max:
                return Trouble(self._key, False, f"{self._key!r}: not decided within {steps_max} steps")
            for reached in self._next(first, taken, tried, state):
                if reached not in seen:
                    seen.add(reached)
                    stack.append(reached)
        return Trouble(self._key, True, self._story(*deepest))

    def _next(
        self, first: int, taken: int, tried: int, state: State
    ) -> list[tuple[int, int, int, State]]:  # fmt: skip
        """Where one more operation leads; the best guess comes last."""
        found = []
        horizon = math.inf  # the first answer among those that are not taken: what began later comes later
        candidates = []
        for at in range(first, len(self._answered)):
            each = self._answered[at]
            if each.began > horizon:
                break
            if not taken >> (at - first) & 1:
                candidates.append((at, each))
                horizon = min(horizon, each.ended)
        for number, each in enumerate(self._unknown):
            if not tried >> number & 1 and each.began <= horizon and (new := after(state, each)) is not None:
                found.append((first, taken, tried | 1 << number, new))
        for at, each in sorted(candidates, key=lambda pair: -pair[1].ended):
            if each.began <= horizon and (new := after(state, each)) is not None:
                found.append((*_advanced(first, taken | 1 << (at - first)), tried, new))
        return found

    def _story(self, first: int, taken: int, tried: int, state: State) -> str:
        """How far the search came, and what fits no further."""
        left = [each for at, each in enumerate(self._answered[first:]) if not taken >> at & 1]
        done = len(self._answered) - len(left)
        return (
            f"{self._key!r}: {len(self._answered)} operations have no order; {done} fit, with {tried.bit_count()} "
            f"unknown ones, up to {state}; of the next none does: {left[:3]}"
        )


def _that_may_matter(operations: list[Operation]) -> list[Operation]:
    """Unknown writes that may explain an answer. A value that nobody was shown explains a refusal at most."""
    has_refusal = any(each.outcome == "conflict" for each in operations)
    return [
        each
        for each in operations
        if each.kind == "put"
        and each.outcome == "unknown"
        and (each.offset is not None or each.is_delete or has_refusal)
    ]


def _advanced(first: int, taken: int) -> tuple[int, int]:
    while taken & 1:
        first, taken = first + 1, taken >> 1
    return first, taken
