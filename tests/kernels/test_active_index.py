"""The active index against a plain list of fingerprints."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.errors import InvariantBroken
from firn_node.kernels import ActiveIndex, ascending, lookup_newest, lookup_range, sort_key_index

Row = tuple[int, int, bool]
MASK = (1 << 64) - 1


def columns(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([h for h, _, _ in rows], np.uint64),
        np.array([l for _, l, _ in rows], np.uint32),
        np.array([t for _, _, t in rows], np.bool_),
    )


class Model:
    """What an ActiveIndex holds, one tuple a row."""

    def __init__(self, base: int) -> None:
        self.start, self.rows = base, []  # type: tuple[int, list[Row]]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def newest(self, hi: int, lo: int, below: int | None) -> list[int]:
        limit = self.end if below is None else below
        held = enumerate(self.rows, self.start)
        return [o for o, (h, l, _) in held if (h, l) == (hi, lo) and o < limit][::-1]

    def sorted(self, start: int, end: int) -> list[tuple[int, int]]:
        held = self.rows[start - self.start : end - self.start]
        return sorted((h, l << 32 | i << 1 | t) for i, (h, l, t) in enumerate(held))


FINGERPRINTS = [(0, 0), (0, 1), (7, 0), (7, 0xFFFFFFFF), (MASK, 3), (MASK, 0xFFFFFFFF), (1 << 63, 5)]
a_row = st.tuples(st.sampled_from(FINGERPRINTS), st.booleans()).map(lambda r: (*r[0], r[1]))
a_step = st.one_of(
    st.tuples(st.just("append"), st.lists(a_row, max_size=40), st.integers(1, 60)),
    st.tuples(st.just("drop"), st.floats(0, 1), st.just(0)),
    st.tuples(st.just("truncate"), st.floats(0, 1), st.just(0)),
)


def apply(step: tuple, index: ActiveIndex, model: Model) -> None:
    what, argument, times = step
    if what == "append":
        rows = argument * times
        if times % 2:
            for hi, lo, is_tombstone in rows:
                index.append_one(hi, lo, is_tombstone)
        else:
            index.append(*columns(rows))
        model.rows += rows
        return
    offset = model.start + round(argument * len(model.rows))
    if what == "drop":
        index.drop_before(offset)
        model.rows = model.rows[offset - model.start :]
        model.start = offset
    else:
        index.truncate(offset)
        del model.rows[offset - model.start :]


def sorted_rows(index: ActiveIndex, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a range in key index order, as a seal writes them."""
    parts = list(ascending(index.pieces(start, end)))
    none = np.empty(0, np.uint64)
    return np.concatenate([none, *(hi for hi, _ in parts)]), np.concatenate([none, *(w for _, w in parts)])


def check(index: ActiveIndex, model: Model, below: int | None, cut: tuple[float, float]) -> None:
    assert (index.start, index.end) == (model.start, model.end)
    for hi, lo in [*FINGERPRINTS, (1, 1), (7, 1)]:
        assert list(index.newest(hi, lo, below=below)) == model.newest(hi, lo, below)
    for wanted in (FINGERPRINTS, FINGERPRINTS * 2):  # few are scanned for, many searched
        hi, lo, _ = columns([(h, l, False) for h, l in wanted])
        expected = [(model.newest(h, l, below) or [-1])[0] for h, l in wanted]
        assert index.newest_many(hi, lo, below=below).tolist() == expected
    start, end = sorted(model.start + round(share * len(model.rows)) for share in cut)
    found = sorted_rows(index, start, end)
    assert list(zip(found[0].tolist(), found[1].tolist(), strict=True)) == model.sorted(start, end)


@given(
    st.lists(a_step, min_size=1, max_size=8), st.integers(0, 1 << 40),
    st.none() | st.integers(-5, 5000), st.tuples(st.floats(0, 1), st.floats(0, 1)),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_history_of_changes_leaves_the_rows_of_a_plain_list(steps, base, below, cut) -> None:  # type: ignore[no-untyped-def]
    index, model = ActiveIndex(base), Model(base)
    for step in steps:
        apply(step, index, model)
        check(index, model, None if below is None else base + below, cut)


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 3000,
        [100] * 200,
        [5000, 1, 70_000, 3],
        [1024] * 9,
        [1023, 1, 1023, 2],
        [65_536] * 3,
        [8192] * 20,
    ],
)
def test_appends_of_any_size_are_all_found(sizes: list[int]) -> None:
    draw = np.random.default_rng(len(sizes))
    n = sum(sizes)
    hi = draw.integers(0, MASK, n, np.uint64, endpoint=True)
    lo, tombstone = draw.integers(0, 1 << 32, n, np.uint32), draw.random(n) < 0.2
    index, at = ActiveIndex(77), 0
    for size in sizes:
        index.append(hi[at : at + size], lo[at : at + size], tombstone[at : at + size])
        at += size
    assert index.newest_many(hi, lo).tolist() == list(range(77, 77 + n))
    assert (index.newest_many(hi ^ np.uint64(1), lo) == -1).all()
    word = lo.astype(np.uint64) << np.uint64(32) | np.arange(n, dtype=np.uint64) << np.uint64(1) | tombstone
    expected, found = sort_key_index(hi, word), sorted_rows(index, 77, 77 + n)
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])


def test_lookups_between_large_appends_find_the_newest_row_of_all_before() -> None:
    draw = np.random.default_rng(3)
    index, newest, dead = ActiveIndex(0), np.full(5000, -1), np.zeros(20_000, np.bool_)
    for size in [1500, 20_000, 3, 8192, 8192, 1, 20_000, 20_000]:
        picks = draw.integers(0, 5000, size)
        newest[picks] = np.arange(index.end, index.end + size)
        index.append(picks.astype(np.uint64) << np.uint64(51), picks.astype(np.uint32), dead[:size])
        keys = np.arange(5000, dtype=np.uint64) << np.uint64(51)
        asked = draw.integers(0, 5000, 7)
        for wanted in asked.tolist():
            assert next(index.newest(wanted << 51, wanted), -1) == newest[wanted]
        assert index.newest_many(keys, np.arange(5000, dtype=np.uint32)).tolist() == newest.tolist()


def test_what_bulk_appends_leave_unsorted_or_unmerged_is_bounded() -> None:
    index, n, size = ActiveIndex(0), 0, 60_000
    hi, lo = np.random.default_rng(4).integers(0, MASK, size, np.uint64), np.zeros(size, np.uint32)
    for _ in range(60):
        index.append(hi, lo, np.zeros(size, np.bool_))
        n += size
        assert index.nbytes <= 16 * (n + (1 << 17))
    assert list(index.newest(int(hi[0]), 0)) == list(range(n - size, -1, -size))


def test_a_hot_key_gives_its_rows_newest_first_and_costs_sixteen_bytes_a_row() -> None:
    index, n = ActiveIndex(0), 60_000
    hi, lo = np.full(n, 9, np.uint64), np.full(n, 4, np.uint32)
    for at in range(0, n, 500):
        index.append(hi[at : at + 500], lo[at : at + 500], np.zeros(500, np.bool_))
    assert list(index.newest(9, 4, below=50_000)) == list(range(49_999, -1, -1))
    assert next(index.newest(9, 4)) == n - 1
    assert index.nbytes <= 16 * (n + 1024)


def test_blocks_double_from_sixteen_rows_and_an_empty_index_has_none() -> None:
    index, sizes = ActiveIndex(5), []
    assert index.nbytes == 0
    for _ in range(33):
        index.append(*columns([(1, 1, False)]))
        sizes.append(index.nbytes // 16)
    assert sorted(set(sizes)) == [16, 32, 64]
    index.drop_before(index.end)
    assert index.nbytes == 0


def test_an_iteration_goes_on_over_the_rows_of_its_beginning_while_others_write() -> None:
    index = ActiveIndex(0)
    index.append(*columns([(1, 1, False)] * 30))
    found = index.newest(1, 1)
    assert next(found) == 29
    index.truncate(10)
    index.append(*columns([(2, 2, False)] * 2000))
    assert list(found) == list(range(28, -1, -1))


def test_readers_in_another_thread_always_see_whole_appends() -> None:
    index, stop, wrong = ActiveIndex(0), threading.Event(), []
    hi, lo = np.arange(7, dtype=np.uint64), np.arange(7, dtype=np.uint32)

    def read() -> None:
        last = -1
        while not stop.is_set():
            found = index.newest_many(hi, lo).tolist()
            if found[0] >= 0 and (found != list(range(found[0], found[0] + 7)) or found[0] < last):
                wrong.append(found)
            last = found[0]

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3000):
        index.append(hi, lo, np.zeros(7, np.bool_))
    stop.set()
    reader.join()
    assert not wrong
    assert index.end == 21_000


def test_rows_of_a_hot_key_leave_in_offset_order_however_they_are_cut() -> None:
    index = ActiveIndex(0)
    n = 50_000
    hot = np.full(n, 7, np.uint64)
    hot[::10] = np.arange(n // 10) * 3
    for _ in range(3):
        index.append(hot, np.zeros(n, np.uint32), np.zeros(n, np.bool_))
    parts = list(ascending(index.pieces(0, 3 * n)))
    assert len(parts) > 1
    hi, word = np.concatenate([h for h, _ in parts]), np.concatenate([w for _, w in parts])
    expected = sort_key_index(np.tile(hot, 3), np.arange(3 * n, dtype=np.uint64) << np.uint64(1))
    assert np.array_equal(hi, expected[0])
    assert np.array_equal(word, expected[1])


@pytest.mark.parametrize("wanted", [(9, 12), (10, 16), (13, 12)])
def test_a_range_that_is_not_held_is_refused(wanted: tuple[int, int]) -> None:
    index = ActiveIndex(10)
    index.append(*columns([(1, 1, False)] * 5))
    with pytest.raises(InvariantBroken):
        index.pieces(*wanted)


@given(st.lists(st.tuples(st.sampled_from(FINGERPRINTS), st.booleans()), max_size=200), st.integers(0, 300))
@settings(max_examples=80, deadline=None)
def test_lookups_in_a_key_index_give_the_newest_row_and_the_range(picks, noise: int) -> None:  # type: ignore[no-untyped-def]
    draw = np.random.default_rng(noise)
    rows = [(h, l, t) for (h, l), t in picks] + [
        (int(h), int(h) & 0xFF, False) for h in draw.integers(0, MASK, noise, np.uint64)
    ]
    raw_hi, raw_lo, dead = columns(rows)
    raw_word = (
        raw_lo.astype(np.uint64) << np.uint64(32)
        | np.arange(len(rows), dtype=np.uint64) << np.uint64(1)
        | dead
    )
    hi, word = sort_key_index(raw_hi, raw_word)
    wanted = [*FINGERPRINTS, (1, 1), *((h, l) for h, l, _ in rows)]
    ask_hi, ask_lo, _ = columns([(h, l, False) for h, l in wanted])
    newest = lookup_newest(hi, word, ask_hi, ask_lo).tolist()
    first, last = (a.tolist() for a in lookup_range(hi, word, ask_hi, ask_lo))
    for i, pair in enumerate(wanted):
        expected = [row for row, (h, l, _) in enumerate(rows) if (h, l) == pair]
        assert newest[i] == (expected[-1] if expected else -1)
        assert [int(w) >> 1 & 0x7FFFFFFF for w in word[first[i] : last[i]]] == expected
        assert all(h == pair[0] for h in hi[first[i] : last[i]].tolist())


def test_the_last_row_and_the_last_fingerprint_are_found() -> None:
    word = np.array([0xFFFFFFFF_FFFFFFFD, 0xFFFFFFFF_FFFFFFFF], np.uint64)
    hi = np.array([MASK, MASK], np.uint64)
    ask = hi[:1], np.array([0xFFFFFFFF], np.uint32)
    assert lookup_newest(hi, word, *ask).tolist() == [0x7FFFFFFF]
    assert [a.tolist() for a in lookup_range(hi, word, *ask)] == [[0], [2]]
