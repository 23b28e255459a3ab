"""The checker of single keys against histories whose verdict is known."""

import random
from itertools import pairwise
from typing import Any

import pytest

from firn_node.drills.linear import Operation, check

KEY = b"k"


def put(began: float, ended: float, write: int, offset: int | None = None, **more: Any) -> Operation:
    known = {"outcome": "done", "offset": write if offset is None else offset}
    return Operation(
        **{"key": KEY, "kind": "put", "began": began, "ended": ended, "write": write, **known, **more}
    )


def lost(began: float, write: int, **more: Any) -> Operation:
    return Operation(key=KEY, kind="put", began=began, write=write, **more)


def get(began: float, ended: float, write: int | None, offset: int | None = None) -> Operation:
    at = write if offset is None else offset
    return Operation(
        key=KEY, kind="get", began=began, ended=ended, outcome="done", write=write, offset=at
    )  # fmt: skip


def refused(began: float, ended: float, if_offset: int, newest: int | None = None) -> Operation:
    return Operation(
        key=KEY, kind="put", began=began, ended=ended, outcome="conflict", write=99, if_offset=if_offset, newest=newest
    )  # fmt: skip


LINEARIZABLE = {
    "nothing is there at first": [get(0, 1, None)],
    "a read sees the write before it": [put(0, 1, 1), get(2, 3, 1)],
    "a read beside a write sees the old value": [put(0, 1, 1), put(2, 9, 2), get(3, 4, 1)],
    "a read beside a write sees the new value": [put(0, 1, 1), put(2, 9, 2), get(3, 4, 2)],
    "two writes at once take either order": [put(0, 9, 2), put(0, 9, 1), get(10, 11, 2)],
    "an unknown write took effect": [put(0, 1, 1), lost(2, 2), get(3, 4, 1), get(5, 6, 2)],
    "an unknown write never took effect": [
        put(0, 1, 1),
        lost(2, 2),
        get(3, 4, 1),
        put(5, 6, 3),
        get(7, 8, 3),
    ],
    "an unknown write took effect late": [put(0, 1, 1), lost(2, 3), put(4, 5, 2), get(6, 7, 3)],
    "a deletion hides the key": [put(0, 1, 1), put(2, 3, 2, is_delete=True), get(4, 5, None)],
    "a compare-and-set of the newest": [put(0, 1, 1), put(2, 3, 2, if_offset=1), get(4, 5, 2)],
    "a compare-and-set of an absent key": [put(0, 1, 1, is_delete=True), put(2, 3, 2, if_offset=-1)],
    "a compare-and-set lost to another": [put(0, 1, 1), put(2, 9, 2), refused(3, 4, 1, newest=2)],
    "a compare-and-set lost to an unknown write": [put(0, 1, 1), lost(2, 2), refused(3, 4, 1, newest=2)],
}
WRONG = {
    "a read misses an acknowledged write": [put(0, 1, 1), get(2, 3, None)],
    "a read shows what was overwritten": [put(0, 1, 1), put(2, 3, 2), get(4, 5, 1)],
    "reads go back": [put(0, 1, 1), put(2, 9, 2), get(3, 4, 2), get(5, 6, 1)],
    "a read shows what was never written": [put(0, 1, 1), get(2, 3, 7)],
    "a read sees a write that began later": [get(0, 1, 1), put(2, 3, 1)],
    "a deleted key comes back": [put(0, 1, 1), put(2, 3, 2, is_delete=True), get(4, 5, 1)],
    "a deletion is not seen": [put(0, 1, 1), put(2, 3, 2, is_delete=True), get(4, 5, 2)],
    "two compare-and-sets of one offset are done": [
        put(0, 1, 1), put(2, 9, 2, if_offset=1), put(2, 9, 3, if_offset=1),
    ],
    "a compare-and-set of an older offset is done": [put(0, 1, 1), put(2, 3, 2), put(4, 5, 3, if_offset=1)],
    "a compare-and-set of the newest is refused": [put(0, 1, 1), refused(2, 3, 1)],
    "a refusal names an offset that nobody wrote": [put(0, 1, 1), refused(2, 3, 0, newest=5)],
    "a later write has an earlier offset": [put(0, 1, 5), put(2, 3, 4)],
    "an unknown write takes effect, is gone, and is there again": [
        put(0, 1, 1), lost(2, 2), get(3, 4, 2), get(5, 6, 1), get(7, 8, 2),
    ],
    "an unknown write is seen before it was asked for": [get(0, 1, 2), lost(2, 2)],
}  # fmt: skip


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_a_history_that_has_an_order_passes(name: str) -> None:
    assert check(LINEARIZABLE[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_history_without_an_order_is_found(name: str) -> None:
    [found] = check(WRONG[name])
    assert found.is_proof, found
    assert found.key == KEY


def test_keys_are_judged_apart() -> None:
    other = Operation(key=b"other", kind="get", began=5, ended=6, outcome="done")
    assert check([put(0, 1, 1), other]) == []


def history_of_a_register(chance: random.Random, count: int, clients: int) -> list[Operation]:
    """What clients of a real register would log: each operation takes effect at one moment within its time."""
    moments = sorted(chance.random() * count for _ in range(count))
    newest: int | None = None
    found = []
    for number, moment in enumerate(moments, 1):
        began, ended = moment - chance.random() * clients, moment + chance.random() * clients
        kind = chance.choice(("put", "put", "get", "get", "unknown", "delete"))
        if kind == "get":
            found.append(get(began, ended, newest))
        elif kind == "unknown":
            took_effect = chance.random() < 0.5
            found.append(lost(began, number))
            newest = number if took_effect else newest
        else:
            found.append(put(began, ended, number, is_delete=kind == "delete"))
            newest = None if kind == "delete" else number
    return found


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_register_logs_has_an_order(seed: int) -> None:
    assert check(history_of_a_register(random.Random(seed), 300, 4)) == []


@pytest.mark.parametrize("seed", range(40))
def test_one_read_that_goes_back_is_found_among_hundreds(seed: int) -> None:
    chance = random.Random(seed)
    history = [each for each in history_of_a_register(chance, 300, 4) if each.outcome == "done"]
    history = [each for each in history if each.kind == "put" and not each.is_delete]
    old, new = chance.choice([pair for pair in pairwise(history) if pair[0].ended < pair[1].began])
    assert check(history) == []
    stale = get(new.ended + 0.001, new.ended + 0.002, old.write)
    [found] = check([*history, stale])
    assert found.is_proof


def test_a_search_that_takes_too_long_is_given_up() -> None:
    history = [lost(0, number, is_delete=True) for number in range(30)] + [get(1, 2, 77)]
    [found] = check(history, steps_max=1000)
    assert not found.is_proof
