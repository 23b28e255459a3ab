"""What every kind of index must do, checked against a plain dict and lists."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firn.errors import Invalid, LimitExceeded
from firn_node.disk import RealDisk
from firn_node.index import Entry, LightEntry, NewEntry, NewLight, PartitionIndex, open_index

KINDS = ("rocksdb", "files", "mirrored")
MEMORY = 4 << 20


def opened(kind: str, path: Path) -> PartitionIndex:
    return open_index(kind, str(path / "index"), RealDisk(path), memory_bytes=MEMORY)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def index(kind: str, tmp_path: Path):
    index = opened(kind, tmp_path)
    yield index
    index.close()


def runs(count: int, *, topic: int = 8, partition: int = 0, first: int = 0, each: int = 10, at: int = 0):
    """``count`` neighbouring runs of ``each`` records and 100 bytes; timestamps equal base offsets."""
    return [
        NewEntry(topic, partition, o, o + each, at + (o - first) * 10, 100, 7, o)
        for o in range(first, first + count * each, each)
    ]


def entry(new: NewEntry) -> Entry:
    return Entry(*new[2:])


def test_an_entry_is_found_by_any_offset_it_covers_as_soon_as_append_returns(index: PartitionIndex) -> None:
    index.append(runs(5))
    assert [index.find(8, 0, offset) for offset in (0, 9, 10, 49)] == [
        Entry(0, 10, 0, 100, 7, 0),
        Entry(0, 10, 0, 100, 7, 0),
        Entry(10, 20, 100, 100, 7, 10),
        Entry(40, 50, 400, 100, 7, 40),
    ]
    assert index.find(8, 0, 50) is None
    assert index.find(8, 1, 0) is None
    assert index.find(9, 0, 0) is None
    assert index.find(7, 0, 0) is None


def test_an_offset_in_a_gap_gives_the_next_entry(index: PartitionIndex) -> None:
    index.append([NewEntry(8, 0, 5, 10, 0, 8, 0, 1), NewEntry(8, 0, 20, 30, 8, 8, 0, 2)])
    for offset, base in ((0, 5), (10, 20), (19, 20), (29, 20)):
        found = index.find(8, 0, offset)
        assert found is not None
        assert found.base_offset == base


def test_a_repeated_append_changes_nothing(index: PartitionIndex) -> None:
    index.append(runs(5))
    index.append(runs(5))
    index.append(runs(7))
    assert index.scan(8, 0, 0) == [entry(new) for new in runs(7)]


def test_a_replayed_run_cut_elsewhere_is_stored_from_the_known_end_on(index: PartitionIndex) -> None:
    index.append(runs(2))
    index.append([NewEntry(8, 0, 10, 35, 100, 250, 0, 30)])
    assert index.scan(8, 0, 10) == [Entry(10, 20, 100, 100, 7, 10), Entry(20, 35, 100, 250, 0, 30)]
    assert index.bounds(8, 0, 0) == (0, 35)


def test_the_running_maximum_never_falls_and_time_finds_the_first_entry_that_reaches_it(
    index: PartitionIndex,
) -> None:
    times = [50, 10, 70, 20, 70, 90]
    index.append([NewEntry(8, 0, i, i + 1, i * 8, 8, 0, t) for i, t in enumerate(times)])
    assert [e.max_timestamp for e in index.scan(8, 0, 0)] == [50, 50, 70, 70, 70, 90]
    for wanted, offset in ((-5, 0), (50, 0), (51, 2), (70, 2), (71, 5), (90, 5)):
        found = index.find_time(8, 0, wanted)
        assert found is not None
        assert found.base_offset == offset
    assert index.find_time(8, 0, 91) is None


def test_a_scan_ends_at_its_end_and_its_limit(index: PartitionIndex) -> None:
    index.append(runs(9) + runs(3, partition=1))
    assert [e.base_offset for e in index.scan(8, 0, 15, end=40)] == [10, 20, 30]
    assert [e.base_offset for e in index.scan(8, 0, 15, end=41, limit=10)] == [10, 20, 30, 40]
    assert [e.base_offset for e in index.scan(8, 0, 0, limit=2)] == [0, 10]
    assert len(index.scan(8, 0, 0)) == 9


def test_trimmed_entries_are_gone_at_once_and_the_end_is_kept(
    index: PartitionIndex, kind: str, tmp_path: Path
) -> None:
    index.append(runs(10) + runs(4, partition=1))
    index.flush(1000)
    index.trim(450)
    assert index.bounds(8, 0, 0) == (50, 100)
    assert index.bounds(8, 0, 800) == (80, 100)
    assert index.bounds(8, 1, 0) == (40, 40)
    assert index.find(8, 0, 0) == Entry(50, 60, 500, 100, 7, 50)
    assert index.find(8, 1, 0) is None
    assert index.find_time(8, 0, 0) == Entry(50, 60, 500, 100, 7, 50)
    index.append(runs(4, partition=1))
    assert index.scan(8, 1, 0) == []
    index.flush(1000)
    index.close()
    again = opened(kind, tmp_path)
    assert again.log_start == 450
    assert again.bounds(8, 0, 0) == (50, 100)
    assert again.bounds(8, 1, 0) == (40, 40)
    assert [e.base_offset for e in again.scan(8, 0, 0)] == [50, 60, 70, 80, 90]
    again.close()


def test_a_deleted_topic_is_gone_and_a_new_id_starts_anew(
    index: PartitionIndex, kind: str, tmp_path: Path
) -> None:
    index.append(runs(3) + runs(3, topic=16) + runs(3, topic=24))
    index.put_state(16, 0, b"s")
    index.put_producer(16, 0, 5, bytes(8))
    index.flush(10)
    index.delete_topic(16)
    assert index.bounds(16, 0, 0) is None
    assert (index.state(16, 0), index.producer(16, 0, 5), index.find(16, 0, 0)) == (None, None, None)
    index.append(runs(2, topic=32))
    index.append(runs(1, topic=16, at=5000))  # what a replay meets before it reaches the deletion once more
    index.flush(20)
    index.delete_topic(16)
    index.flush(30)
    index.close()
    again = opened(kind, tmp_path)
    assert again.bounds(16, 0, 0) is None
    assert [len(again.scan(topic, 0, 0)) for topic in (8, 16, 24, 32)] == [3, 0, 3, 2]
    again.close()


def test_states_and_producers_are_kept_listed_in_order_and_forgotten_by_age(index: PartitionIndex) -> None:
    for partition in (3, 1, 2):
        index.put_state(8, partition, b"%d" % partition)
    index.put_state(8, 1, b"one")
    assert list(index.states()) == [(8, 1, b"one"), (8, 2, b"2"), (8, 3, b"3")]
    for producer in range(5):
        index.put_producer(8, 0, producer, (producer * 100).to_bytes(8, "little", signed=True) + b"x")
    index.delete_producers(200)
    assert [row.producer_id for row in index.producers()] == [2, 3, 4]
    assert index.producer(8, 0, 1) is None
    assert index.producer(8, 0, 2) == (200).to_bytes(8, "little") + b"x"


def test_a_close_without_flush_keeps_a_state_at_or_after_the_last_flush(kind: str, tmp_path: Path) -> None:
    index = opened(kind, tmp_path)
    index.append(runs(3))
    index.put_state(8, 0, b"old")
    index.flush(300)
    index.append(runs(5))
    index.put_state(8, 0, b"new")
    index.close()
    again = opened(kind, tmp_path)
    assert again.checkpoint == 300
    bounds = again.bounds(8, 0, 0)
    assert bounds in ((0, 30), (0, 50))
    again.append(runs(5))
    assert again.scan(8, 0, 0) == [entry(new) for new in runs(5)]
    again.flush(500)
    again.close()
    last = opened(kind, tmp_path)
    assert (last.checkpoint, last.bounds(8, 0, 0)) == (500, (0, 50))
    last.close()


def test_light_queues_are_refused_by_name_where_the_files_take_part(tmp_path: Path) -> None:
    for kind in ("files", "mirrored"):
        index = opened(kind, tmp_path / kind)
        with pytest.raises(Invalid, match="light queues"):
            index.append(runs(1), [NewLight(8, 0, "q", 0, 0, 0, 0)])
        with pytest.raises(Invalid, match="light queues"):
            index.light_scan(8, 0, "q", 0, limit=1)
        assert index.bounds(8, 0, 0) is None
        index.close()


def test_the_files_refuse_more_partitions_than_they_can_keep(tmp_path: Path) -> None:
    index = opened("files", tmp_path)
    index.append([NewEntry(8, partition, 0, 1, partition * 8, 8, 0, 0) for partition in range(10_000)])
    with pytest.raises(LimitExceeded, match="10000 partitions"):
        index.append([NewEntry(8, 10_000, 0, 1, 80_000, 8, 0, 0)])
    index.append([NewEntry(8, 9_999, 1, 2, 80_008, 8, 0, 0)])
    assert index.bounds(8, 9_999, 0) == (0, 2)
    index.close()


def test_light_entries_are_counted_in_log_order_and_once(tmp_path: Path) -> None:
    index = opened("rocksdb", tmp_path)
    lights = [
        NewLight(8, 0, name, 100 * (o // 10), o % 10, o, o)
        for o in range(50)
        for name in ("a", "ab", f"n{o}")
    ]
    index.append(runs(5), lights)
    index.append(runs(5), lights)  # a replay
    index.append(
        runs(1, first=50, at=500), [NewLight(8, 0, "a", 500, 0, 50, 50), NewLight(8, 0, "a", 500, 1, 51, 50)]
    )
    assert index.light_bounds(8, 0, "a") == (0, 52)
    assert index.light_bounds(8, 0, "ab") == (0, 50)
    assert index.light_bounds(8, 0, "n7") == (0, 1)
    assert index.light_bounds(8, 0, "b") is None
    assert index.light_bounds(8, 1, "a") is None
    assert index.light_scan(8, 0, "a", 49, limit=10) == [
        LightEntry(49, 400, 9, 49),
        LightEntry(50, 500, 0, 50),
        LightEntry(51, 500, 1, 51),
    ]
    assert [e.queue_offset for e in index.light_scan(8, 0, "a", 0, limit=3)] == [0, 1, 2]
    index.trim(300)
    assert index.light_bounds(8, 0, "ab") == (30, 50)
    assert index.light_bounds(8, 0, "n7") == (1, 1)
    assert index.light_scan(8, 0, "n7", 0, limit=3) == []
    assert index.light_scan(8, 0, "ab", 3, limit=1) == [LightEntry(30, 300, 0, 30)]
    while index.sweep(300, 7):
        pass
    assert len([row for row in index.lights() if row.name == "a"]) == 22
    index.append(runs(1, first=60, at=600), [NewLight(8, 0, "n7", 600, 0, 60, 60)])
    assert index.light_scan(8, 0, "n7", 0, limit=3) == [LightEntry(1, 600, 0, 60)]
    index.delete_topic(8)
    assert list(index.lights()) == []
    assert index.light_bounds(8, 0, "a") is None
    index.close()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 6), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("flush")),
        st.tuples(st.just("trim"), st.integers(0, 100)),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("delete"), st.integers(0, 1)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations)
def test_an_index_answers_like_a_list_of_its_entries(kind: str, tmp_path_factory, operations) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("model")
    index = opened(kind, path)
    model: dict[tuple[int, int], list[Entry]] = {}
    position = log_start = 0
    topics = [8, 16]
    try:
        for operation in operations:
            if operation[0] == "append":
                _, where, size, timestamp, is_repeated = operation
                key = (topics[where // 2], where % 2)
                held = model.setdefault(key, [])
                end, running = (held[-1].end_offset, held[-1].max_timestamp) if held else (0, -1)
                new = NewEntry(*key, end, end + size, position, 8, where, timestamp)
                index.append([new, new] if is_repeated else [new])
                held.append(Entry(end, end + size, position, 8, where, max(running, timestamp)))
                position += 8
            elif operation[0] == "flush":
                index.flush(position)
            elif operation[0] == "trim":
                log_start = max(log_start, position * operation[1] // 100 // 8 * 8)
                index.trim(log_start)
            elif operation[0] == "reopen":
                index.flush(position)
                index.close()
                index = opened(kind, path)
            else:
                topic = topics[operation[1]]
                index.delete_topic(topic)
                model = {key: held for key, held in model.items() if key[0] != topic}
                topics[operation[1]] = max(topics) + 8
            check(index, model, log_start)
    finally:
        index.close()


def check(index: PartitionIndex, model: dict[tuple[int, int], list[Entry]], log_start: int) -> None:
    for key, held in model.items():
        live = [e for e in held if e.position >= log_start]
        assert index.scan(*key, 0) == live
        end = held[-1].end_offset
        assert index.bounds(*key, 0) == (live[0].base_offset if live else end, end)
        for offset in range(0, end + 1, 3):
            assert index.find(*key, offset) == next((e for e in live if e.end_offset > offset), None)
        for timestamp in (0, 4, 9):
            expected = next((e for e in live if e.max_timestamp >= timestamp), None)
            assert index.find_time(*key, timestamp) == expected
