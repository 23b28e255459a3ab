"""The checker of a log against histories that are right, and the same with one thing made wrong."""

from collections.abc import Callable

import pytest

from firn_node.drills.check import check
from firn_node.drills.history import SESSION, End, History, Pass, Row
from firn_node.drills.linear import Operation

ALICE, BOB, SINGLE = 1 * SESSION, 2 * SESSION, 3 * SESSION


def right() -> tuple[History, End]:
    """Two producers, one client of single writes, two partitions, a tombstone, an unknown outcome, a refusal."""
    sent = {
        ALICE: (b"a", b"a0"), ALICE + 1: (b"b", b"b0"), ALICE + 2: (b"a", b"a1"), ALICE + 3: (b"b", None),
        BOB: (b"a", b"a2"), BOB + 1: (b"c", b"c0"), BOB + 2: (b"c", b"never arrived"),
        SINGLE: (b"d", b"d0"), SINGLE + 1: (b"d", b"refused"),
    }  # fmt: skip
    order = [ALICE, ALICE + 2, BOB, SINGLE], [ALICE + 1, BOB + 1, ALICE + 3]
    raw = [Row(p, offset, id, *sent[id]) for p, ids in enumerate(order) for offset, id in enumerate(ids)]
    view = [row for row in raw if row.id in (BOB, SINGLE, BOB + 1, ALICE + 3)]
    history = History(
        sent=dict(sent),
        acknowledged={row.id: (row.partition, row.offset) for row in raw if row.id != BOB + 1},
        refused={SINGLE + 1},
        unordered={SINGLE // SESSION},
        operations=[
            Operation(key=b"d", kind="put", began=0, ended=1, outcome="done", write=SINGLE, offset=3),
            Operation(key=b"d", kind="get", began=2, ended=3, outcome="done", write=SINGLE, offset=3),
        ],
        passes=[
            Pass("raw reader", "raw", list(raw), is_whole=True),
            Pass("compacted reader", "compacted", list(view), is_whole=True),
        ],
    )
    gets: dict[bytes, Row | None] = {b"a": raw[2], b"b": None, b"c": raw[5], b"d": raw[3], b"unknown": None}
    return history, End(raw=raw, view=view, gets=gets)


def test_a_right_history_passes() -> None:
    faults = check(*right())
    assert faults.stories == []
    assert not faults.counts


def test_a_tombstone_may_be_gone_from_the_view() -> None:
    history, end = right()
    end.view = [row for row in end.view if row.value is not None]
    assert not check(history, end).counts


def _take(rows: list[Row], id: int) -> Row:
    [found] = [row for row in rows if row.id == id]
    rows.remove(found)
    return found


def loses(history: History, end: End) -> None:
    row = _take(end.raw, ALICE + 2)
    for reading in history.passes:
        if row in reading.rows:
            reading.rows.remove(row)


def loses_the_newest_of_a_key(history: History, end: End) -> None:
    for rows in (end.raw, end.view, *(reading.rows for reading in history.passes)):
        _take(rows, BOB)
    end.gets[b"a"] = end.raw[1]
    end.view.insert(0, end.raw[1])
    history.passes[1].rows.insert(0, end.raw[1])


def doubles(history: History, end: End) -> None:
    end.raw.append(Row(0, 4, ALICE + 2, b"a", b"a1"))


def moves(history: History, end: End) -> None:
    history.acknowledged[ALICE + 2] = (0, 2)


def reorders(history: History, end: End) -> None:
    first, second = end.raw[0], end.raw[1]
    end.raw[0], end.raw[1] = (
        Row(0, 0, second.id, second.key, second.value), Row(0, 1, first.id, first.key, first.value),
    )  # fmt: skip
    history.acknowledged |= {first.id: (0, 1), second.id: (0, 0)}
    history.passes.clear()


def writes_what_was_refused(history: History, end: End) -> None:
    end.raw.append(Row(0, 4, SINGLE + 1, *history.sent[SINGLE + 1]))
    history.passes.clear()


def invents(history: History, end: End) -> None:
    end.raw.append(Row(0, 4, 77, b"z", b"?"))


def changes_a_value(history: History, end: End) -> None:
    end.raw[2] = end.raw[2]._replace(value=b"other")


def resurrects_in_the_view(history: History, end: End) -> None:
    end.view = [row for row in end.view if row.key != b"b"] + [Row(1, 0, ALICE + 1, b"b", b"b0")]
    end.view.sort()


def resurrects_in_get(history: History, end: End) -> None:
    end.gets[b"b"] = end.raw[4]


def shows_an_older_value(history: History, end: End) -> None:
    end.gets[b"a"] = end.raw[1]


def misses_in_the_view(history: History, end: End) -> None:
    _take(end.view, BOB + 1)


def misses_in_get(history: History, end: End) -> None:
    end.gets[b"c"] = None


def view_goes_back(history: History, end: End) -> None:
    end.view[0], end.view[1] = end.view[1], end.view[0]


def a_reader_goes_back(history: History, end: End) -> None:
    history.passes.append(Pass("back", "compacted", [end.raw[1], end.raw[0]]))


def a_reader_is_shown_twice(history: History, end: End) -> None:
    history.passes.append(Pass("twice", "raw", [end.raw[0], end.raw[0]]))


def a_reader_saw_what_is_gone(history: History, end: End) -> None:
    history.passes.append(Pass("dirty", "raw", [Row(0, 4, BOB + 2, b"c", b"never arrived")]))


def a_reader_saw_another_record(history: History, end: End) -> None:
    history.passes.append(Pass("forked", "compacted", [Row(0, 2, BOB + 2, b"c", b"never arrived")]))


def a_raw_reader_skips(history: History, end: End) -> None:
    history.passes.append(Pass("skips", "raw", [end.raw[0], end.raw[2]]))


def a_raw_reader_stops_early(history: History, end: End) -> None:
    history.passes.append(Pass("stops", "raw", end.raw[:3], is_whole=True))


def a_compacted_reader_stops_early(history: History, end: End) -> None:
    history.passes.append(Pass("stops", "compacted", end.view[1:], is_whole=True))


def a_get_is_stale(history: History, end: End) -> None:
    history.operations.append(Operation(key=b"d", kind="get", began=4, ended=5, outcome="done"))


WRONG: dict[Callable[[History, End], None], str] = {
    loses: "lost", loses_the_newest_of_a_key: "lost", doubles: "doubled", moves: "lost", reorders: "reordered",
    writes_what_was_refused: "refused", invents: "never_sent", changes_a_value: "changed",
    resurrects_in_the_view: "resurrected", resurrects_in_get: "resurrected", shows_an_older_value: "stale",
    misses_in_the_view: "missing", misses_in_get: "missing", view_goes_back: "went_back",
    a_reader_goes_back: "went_back", a_reader_is_shown_twice: "went_back", a_reader_saw_what_is_gone: "vanished",
    a_reader_saw_another_record: "changed", a_raw_reader_skips: "left_out", a_raw_reader_stops_early: "left_out",
    a_compacted_reader_stops_early: "left_out", a_get_is_stale: "not_linearizable",
}  # fmt: skip


@pytest.mark.parametrize("break_it", WRONG, ids=lambda each: each.__name__)
def test_what_is_wrong_is_found_and_named(break_it: Callable[[History, End], None]) -> None:
    history, end = right()
    break_it(history, end)
    faults = check(history, end)
    assert faults.counts[WRONG[break_it]], faults


def test_an_unknown_write_that_stands_in_the_log_explains_what_was_read() -> None:
    history, end = right()
    id = SINGLE + 2
    history.sent[id] = (b"d", b"d1")
    end.raw.append(Row(0, 4, id, b"d", b"d1"))
    end.view.append(end.raw[-1])
    end.view.sort()
    end.gets[b"d"] = end.raw[-1]
    history.passes.clear()
    history.operations += [
        Operation(key=b"d", kind="put", began=4, write=id),
        Operation(key=b"d", kind="get", began=5, ended=6, outcome="done", write=id, offset=4),
    ]
    assert not check(history, end).counts
