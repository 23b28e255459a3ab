"""What a reader delivers and when it stops, and what a table shows, without sockets."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.batch import Batch, Identity, columns_of, encode
from firn.client import packedrows, tablestate
from firn.client.cursor import Cursor, PageMeta, Piece
from firn.client.tablestate import TableState
from firn.errors import InvariantBroken, MalformedBatch, SnapshotExpired
from firn.wire import mask_block

TOPIC = 16


def batch(base: int, keys: list[bytes], *, tags: list[str | None] | None = None, partition: int = 0) -> bytes:
    columns = columns_of(keys, [b"v"] * len(keys), 0, tags=tags, base_offset=base)
    return encode(columns, Identity(topic_id=TOPIC, partition=partition))


def meta(next_offset: int, *, end: int, horizon: int = 0, floor: int = 0, topic_id: int = TOPIC) -> PageMeta:
    return PageMeta(topic_id, next_offset, end, horizon, floor)


def keys_of(cursor: Cursor, found: PageMeta, data: bytes) -> list[tuple[int, bytes]]:
    return [(r.offset, r.key) for r in cursor.accept(found, data).records("t")]


def test_masked_rows_rows_below_the_offset_and_rows_past_the_page_are_dropped() -> None:
    cursor = Cursor(0, offset=2)
    data = mask_block(np.array([False, False, False, True, False, False])) + batch(
        0, [b"%d" % i for i in range(6)]
    )
    assert keys_of(cursor, meta(5, end=6), data) == [(2, b"2"), (4, b"4")]
    assert keys_of(cursor, meta(6, end=6), batch(0, [b"%d" % i for i in range(6)])) == [(5, b"5")]


def test_only_records_of_the_tag_are_delivered_even_when_others_share_its_batch() -> None:
    cursor = Cursor(0, tag="red")
    assert keys_of(cursor, meta(3, end=3), batch(0, [b"a", b"b", b"c"], tags=["red", None, "blue"])) == [
        (0, b"a")
    ]


def test_until_end_is_reached_at_the_end_at_the_start_though_more_is_written() -> None:
    cursor = Cursor(0)
    cursor.accept(meta(4, end=10), batch(0, [b"a"] * 4))
    assert not cursor.is_caught_up
    cursor.accept(meta(10, end=50), b"")
    assert cursor.is_caught_up


def test_until_end_goes_on_to_a_horizon_that_passed_the_end_at_the_start() -> None:
    """Else a key whose old record was masked, because of one behind the end, would be missed."""
    cursor = Cursor(0)
    cursor.accept(meta(50, end=100, horizon=0), b"")
    cursor.accept(meta(100, end=151, horizon=151), b"")
    assert not cursor.is_caught_up
    cursor.accept(meta(151, end=200, horizon=151), b"")
    assert cursor.is_caught_up


def test_until_end_ends_when_the_last_offsets_are_compacted_away() -> None:
    cursor = Cursor(0)
    cursor.accept(meta(100, end=100, horizon=100), batch(3, [b"a"]))
    assert cursor.is_caught_up


def test_an_empty_partition_is_caught_up_at_its_first_answer() -> None:
    cursor = Cursor(0)
    cursor.accept(meta(0, end=0), b"")
    assert cursor.is_caught_up


def test_a_fresh_reader_meets_any_floor_and_one_that_has_seen_less_is_told() -> None:
    fresh = Cursor(0)
    fresh.accept(meta(0, end=9, horizon=9, floor=7), b"")
    assert fresh.since == 9
    old = Cursor(0, offset=3, since=4)
    with pytest.raises(SnapshotExpired):
        old.accept(meta(9, end=9, horizon=9, floor=5), b"")
    assert (old.offset, old.since) == (3, 4)
    old.accept(meta(9, end=9, horizon=9, floor=4), b"")


def test_since_is_the_least_horizon_seen() -> None:
    cursor = Cursor(0)
    for horizon in (8, 5, 20):
        cursor.accept(meta(20, end=20, horizon=horizon), b"")
    assert cursor.since == 5
    raw = Cursor(0, view="raw")
    raw.accept(meta(20, end=20, horizon=8, floor=99), b"")
    assert raw.since is None


def test_an_answer_of_another_creation_of_the_topic_means_to_start_anew() -> None:
    cursor = Cursor(0)
    cursor.accept(meta(0, end=0), b"")
    with pytest.raises(SnapshotExpired, match="created anew"):
        cursor.accept(meta(0, end=0, topic_id=TOPIC + 8), b"")


def test_going_back_foreign_batches_and_flipped_bits_are_refused() -> None:
    with pytest.raises(InvariantBroken):
        Cursor(0, offset=5).accept(meta(4, end=9), b"")
    with pytest.raises(MalformedBatch, match="partition 1"):
        Cursor(0).accept(meta(1, end=1), batch(0, [b"a"], partition=1))
    with pytest.raises(MalformedBatch, match="behind one"):
        Cursor(0).accept(meta(2, end=2), batch(1, [b"a"]) + batch(0, [b"a"]))
    damaged = bytearray(batch(0, [b"a"]))
    damaged[-8] ^= 1
    with pytest.raises(MalformedBatch, match="values CRC"):
        Cursor(0).accept(meta(1, end=1), damaged)


Changes = list[tuple[bytes, bytes | None, bytes | None]]


def table() -> tuple[TableState, Changes]:
    changes: Changes = []
    return TableState(lambda *change: changes.append(change)), changes


def shown(state: TableState) -> dict[bytes, bytes | None]:
    return {key: state.get(key) for key in state}


def test_a_pass_over_an_older_replica_shows_nothing_old_and_reports_only_differences() -> None:
    state, changes = table()
    for offset, (key, value) in enumerate(
        [(b"a", b"1"), (b"b", b"1"), (b"c", b"1"), (b"a", b"2"), (b"b", None)]
    ):
        state.apply(0, offset, key, value)
    changes.clear()
    state.begin_pass(0)
    state.apply(0, 0, b"a", b"1")
    state.apply(0, 1, b"b", b"1")
    assert shown(state) == {b"a": b"2", b"c": b"1"}
    state.apply(0, 3, b"a", b"2")
    state.apply(0, 4, b"b", None)
    state.apply(0, 5, b"d", b"1")
    assert changes == []
    state.end_pass(0)
    assert shown(state) == {b"a": b"2", b"d": b"1"}
    assert sorted(changes) == [(b"c", b"1", None), (b"d", None, b"1")]


def test_a_pass_of_one_partition_leaves_the_others_alone() -> None:
    state, changes = table()
    state.apply(0, 0, b"a", b"1")
    state.apply(1, 0, b"b", b"1")
    state.begin_pass(0)
    state.apply(1, 1, b"c", b"1")
    state.end_pass(0)
    assert shown(state) == {b"b": b"1", b"c": b"1"}
    assert changes[-1] == (b"a", b"1", None)


RECORDS = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 3))), max_size=40)


@contextmanager
def packing_at_once() -> Iterator[None]:
    """Few keys are packed, and few dead rows merged, as else many are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tablestate, "YOUNG_ROWS", 3)
        patch.setattr(tablestate, "COLUMN_ROWS", 2)
        patch.setattr(packedrows, "SLACK_BYTES", 0)
        yield


@pytest.mark.parametrize("packing", [nullcontext, packing_at_once])
@settings(max_examples=200, deadline=None)
@given(RECORDS, RECORDS, st.data())
def test_after_a_pass_the_table_is_the_map_of_the_log_and_callbacks_tell_the_same_story(
    packing: Callable[[], AbstractContextManager[None]],
    before: list[tuple[int, int | None]],
    after: list[tuple[int, int | None]],
    data: st.DataObject,
) -> None:
    with packing():
        check_a_pass(before, after, data)


def check_a_pass(
    before: list[tuple[int, int | None]], after: list[tuple[int, int | None]], data: st.DataObject
) -> None:
    log = [(b"%d" % k, None if v is None else b"v%d" % v) for k, v in before + after]
    state, changes = table()
    for offset, (key, value) in enumerate(log[: len(before)]):
        state.apply(0, offset, key, value)
    newest = {key: offset for offset, (key, _) in enumerate(log)}
    state.begin_pass(0)
    # A compacted view: of a key's older records some are gone; of a deleted key perhaps all, tombstone included.
    dropped = {key for key, offset in newest.items() if log[offset][1] is None and data.draw(st.booleans())}
    for offset, (key, value) in enumerate(log):
        if key not in dropped and (newest[key] == offset or data.draw(st.booleans())):
            state.apply(0, offset, key, value)
    state.end_pass(0)
    expected = {key: value for key, value in log if log[newest[key]][1] is not None}
    assert shown(state) == expected
    told: dict[bytes, bytes | None] = {}
    for key, old, new in changes:
        assert told.get(key) == old
        told[key] = new
    assert {k: v for k, v in told.items() if v is not None} == expected


def test_many_deletes_give_memory_back() -> None:
    state, _ = table()
    value = b"v" * 900
    for i in range(40_000):
        state.apply(0, i, b"%d" % i, value)
    assert state.nbytes > 30_000_000
    for i in range(39_000):
        state.apply(0, 40_000 + i, b"%d" % i, None)
    assert len(state) == len(list(state)) == 1000
    assert state.nbytes < 11_000_000
    assert state.get(b"39999") == value
    assert state.offset(b"39999") == 39_999


BATCHES = st.lists(
    st.tuples(
        st.integers(0, 1),  # partition
        st.lists(
            st.tuples(
                st.integers(0, 30).map(b"%d".__mod__),
                st.one_of(st.none(), st.binary(max_size=3)),
                st.booleans(),  # whether it is to be delivered
            ),
            min_size=1,
            max_size=30,
        ),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(BATCHES, st.sampled_from([hash, len, lambda key: 0xFFFF_FFFF]))
def test_batches_that_are_packed_at_once_make_the_same_table_as_their_records(
    batches: list[tuple[int, list[tuple[bytes, bytes | None, bool]]]], hash_of: Callable[[bytes], int]
) -> None:
    expected: dict[bytes, tuple[int, bytes]] = {}
    ends = [0, 0]
    with packing_at_once():
        state = TableState(lambda *_: None, hash_of)
        state.is_watched = False
        for partition, rows in batches:
            columns = columns_of(
                [b"%d-" % partition + key for key, _, _ in rows],
                [value for _, value, _ in rows],
                0,
                base_offset=ends[partition],
            )
            keep = np.array([kept for _, _, kept in rows])
            made = Batch(encode(columns, Identity(topic_id=TOPIC, partition=partition)))
            state.apply_piece(partition, Piece(made, None if keep.all() else keep))
            for place, (key, value, kept) in enumerate(rows):
                name = b"%d-" % partition + key
                if kept and value is None:
                    expected.pop(name, None)
                elif kept and value is not None:
                    expected[name] = (ends[partition] + place, value)
            ends[partition] += len(rows)
        assert sorted(state) == sorted(expected)
        assert len(state) == len(expected)
        for key, (offset, value) in expected.items():
            assert (state.offset(key), state.get(key), key in state) == (offset, value, True)
        assert state.get(b"none") is state.offset(b"none") is None


def test_a_watched_table_tells_each_change_of_a_large_batch() -> None:
    state, changes = table()
    keys = [b"%d" % (i % 600) for i in range(1200)]
    made = Batch(encode(columns_of(keys, keys[1:] + keys[:1], 0), Identity(topic_id=TOPIC, partition=0)))
    state.apply_piece(0, Piece(made, None))
    assert len(changes) == 600
    state.is_watched = False
    state.apply_piece(0, Piece(made, None))
    assert len(state) == 600


@pytest.mark.parametrize("packing", [nullcontext, packing_at_once])
def test_any_record_of_a_topic_made_anew_is_newer(
    packing: Callable[[], AbstractContextManager[None]],
) -> None:
    state, _ = table()
    with packing():
        for offset in range(10):
            state.apply(offset % 2, 50 + offset, b"%d" % offset, b"old")
        state.forget_offsets(0)
        for offset in range(10):
            state.apply(offset % 2, 0, b"%d" % offset, b"new")
    assert [state.get(b"%d" % offset) for offset in range(10)] == [b"new", b"old"] * 5
