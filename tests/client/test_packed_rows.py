"""The packed rows of a table against a dictionary: keys that meet in one place, merges, numbers that run out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.client import packedrows
from firn.client.packedrows import Chunk, PackedRows
from firn.errors import LimitExceeded

Row = tuple[int, int, bytes]  # partition, offset, value

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 400).map(b"%d".__mod__), min_size=1, max_size=40)),
        st.tuples(
            st.just("remove"), st.lists(st.integers(0, 400).map(b"%d".__mod__), min_size=1, max_size=40)
        ),
        st.tuples(st.just("forget"), st.integers(0, 2)),
    ),
    max_size=25,
)


def add(packed: PackedRows, rows: dict[bytes, Row]) -> None:
    keys = list(rows)
    chunk = Chunk.of(
        keys,
        [value for _, _, value in rows.values()],
        np.array([offset for _, offset, _ in rows.values()], np.int64),
        np.array([partition for partition, _, _ in rows.values()], np.int32),
    )
    packed.add(chunk, packed.tags_of(keys))


def row_of(packed: PackedRows, key: bytes) -> Row | None:
    found = packed.find(key)
    if found is None:
        return None
    chunk, at = found
    assert chunk.key(at) == key
    return int(chunk.partitions[at]), int(chunk.offsets[at]), chunk.value(at)


def check(packed: PackedRows, model: dict[bytes, Row]) -> None:
    assert len(packed) == len(model)
    assert packed.live_bytes == sum(
        len(key) + len(value) + packedrows.ROW_BYTES for key, (_, _, value) in model.items()
    )
    assert {key: row_of(packed, key) for key in model} == model
    shown = [chunk.key(at) for chunk, rows in packed.live_rows() for at in rows.tolist()]
    assert sorted(shown) == sorted(model)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([hash, len, lambda key: 0xFFFF_FFFF, lambda key: -1]), st.integers(0, 3000))
def test_packed_rows_are_the_dictionary_of_what_was_added_and_not_removed(
    steps: list[tuple[str, Any]], hash_of: Callable[[bytes], int], chunk_bytes: int
) -> None:
    model: dict[bytes, Row] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packedrows, "SLACK_BYTES", 500)
        patch.setattr(packedrows, "CHUNK_BYTES", chunk_bytes)
        packed = PackedRows(hash_of)
        for number, (step, given_) in enumerate(steps):
            if step == "add":
                rows = {key: (int(key) % 3, number, key * (number % 4)) for key in given_ if key not in model}
                if rows:
                    add(packed, rows)
                    model |= rows
            elif step == "remove":
                for key in given_:
                    if model.pop(key, None) is not None:
                        packed.remove(key)
                    assert packed.find(key) is None
                packed.tidy()
            else:
                packed.forget_offsets(given_)
                model = {k: (p, -1 if p == given_ else o, v) for k, (p, o, v) in model.items()}
            check(packed, model)


def test_what_probe_calls_new_has_an_empty_place_and_every_key_that_is_there_is_doubted() -> None:
    packed = PackedRows()
    old, new = [b"a%d" % i for i in range(3000)], [b"b%d" % i for i in range(3000)]
    add(packed, {key: (0, 1, key) for key in old})
    packed.reserve(len(new))
    tags = packed.tags_of(old + new)
    doubted, places = packed.probe(tags)
    assert doubted[:3000].all()
    fresh = np.flatnonzero(~doubted)
    assert len(fresh) > 2900
    chunk = Chunk.of(old + new, old + new, np.zeros(6000, np.int64), np.zeros(6000, np.int32))
    packed.replace(chunk, fresh, tags[fresh], places[fresh], doubted[fresh])
    assert len(packed) == 3000 + len(fresh)
    assert all(row_of(packed, new[at - 3000]) == (0, 0, new[at - 3000]) for at in fresh.tolist())
    assert all(row_of(packed, key) == (0, 1, key) for key in old)


def test_rows_of_known_keys_are_replaced_where_they_are_older_and_leave_no_live_bytes() -> None:
    packed = PackedRows(len)  # all of a length meet
    model: dict[bytes, Row] = {b"a%d" % i: (i % 2, i, b"old" * i) for i in range(9)}
    add(packed, model)
    keys = [*model, b"new"]
    tags = packed.tags_of(keys)
    is_known, places = packed.probe(tags)
    assert is_known.tolist() == [True] * 9 + [False]
    offsets = np.full(10, 20)
    older = np.zeros(10, np.bool_)
    older[:9] = packed.are_older(places[:9], keys[:9], 0, offsets[:9])
    assert older.sum() == 1  # the place found first names one of them; of the others nothing is said
    rows = np.flatnonzero(older | ~is_known)
    chunk = Chunk.of(keys, [b"newer"] * 10, offsets, np.zeros(10, np.int32))
    packed.replace(chunk, rows, tags[rows], places[rows], is_known[rows])
    at = rows[:1]
    check(packed, {**model, keys[at[0]]: (0, 20, b"newer"), b"new": (0, 20, b"newer")})
    name = [keys[at[0]]]
    assert packed.are_older(places[at], name, 0, offsets[:1]).tolist() == [False]  # as old
    assert packed.are_older(places[at], name, 1, offsets[:1]).tolist() == [True]  # of another partition


def test_memory_follows_the_live_rows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packedrows, "SLACK_BYTES", 10_000)
    packed = PackedRows()
    keys = [b"%d" % i for i in range(100_000)]
    add(packed, {key: (0, 0, b"v" * 100) for key in keys[:50_000]})
    add(packed, {key: (0, 0, b"v" * 100) for key in keys[50_000:]})
    assert packed.nbytes > 12_000_000
    for number, key in enumerate(keys[100:]):
        packed.remove(key)
        if not number % 1000:
            packed.tidy()
    packed.tidy()
    assert len(packed) == 100
    assert packed.nbytes < 60_000


def test_more_rows_than_numbers_are_refused_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packedrows, "ROWS_MAX", 5)
    packed = PackedRows()
    first = {b"%d" % i: (0, i, b"") for i in range(4)}
    add(packed, first)
    with pytest.raises(LimitExceeded, match="at most 5 rows"):
        add(packed, {b"x": (0, 0, b""), b"y": (0, 0, b"")})
    check(packed, first)


def test_numbers_that_ran_out_begin_again_at_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packedrows, "ROWS_MAX", 40)
    monkeypatch.setattr(packedrows, "SLACK_BYTES", 0)
    packed = PackedRows()
    model: dict[bytes, Row] = {}
    for turn in range(30):
        rows = {b"%d-%d" % (turn, i): (0, turn, b"%d" % i) for i in range(7)}
        add(packed, rows)
        model |= rows
        for key in [key for key, (_, added, value) in model.items() if added == turn - 1 and value != b"3"]:
            packed.remove(key)
            del model[key]
        for key in [key for key, (_, added, _) in model.items() if added == turn - 9]:
            packed.remove(key)
            del model[key]
        packed.tidy()
        check(packed, model)
