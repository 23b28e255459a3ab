"""Finding raw records by key and time: exact, oldest first, with or without usable keys files."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from firn_sim.batches import batch
from firn_sim.disk import SimDisk
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.batch import Batch, Identity, columns_of, encode
from firn.errors import Corrupt
from firn_node.filecache import FileCache
from firn_node.kernels import secret_of
from firn_node.log import keyquery, keysbuild
from firn_node.log.commitlog import CommitLog
from firn_node.log.headpage import HEAD_BYTES
from firn_node.log.keyquery import KeyQueryIndex
from firn_node.log.segment import keys_path, segment_path

FOLDER = "/log"
SECRET = secret_of(bytes(range(16)))
FOREVER = (-(1 << 60), 1 << 60)


class Setting:
    def __init__(self, *, segment_bytes: int = 4096) -> None:
        self.disk = SimDisk(3)
        self.cache = FileCache(self.disk, 16)
        self.log = CommitLog.open(self.disk, self.cache, FOLDER, segment_bytes=segment_bytes, verify_from=0)
        self.index = KeyQueryIndex(self.log, self.disk, self.cache, FOLDER, SECRET)

    def find(
        self, key: bytes, topic_id: int = 8, times: tuple[int, int] = FOREVER
    ) -> list[tuple[int, list[int]]]:
        found = []
        for position, data, rows in self.index.find(topic_id, key, *times):
            assert data == self.log.read(position, len(data))
            assert {Batch(data).key_list()[row] for row in rows} == {key}
            found.append((position, rows))
        return found


def test_a_key_is_found_oldest_first_over_sealed_and_active_segments() -> None:
    s = Setting()
    wanted = []
    for serial in range(12):
        keys = [b"other-%d" % serial, b"k", b"", b"k"] if serial % 2 else [b"other"] * 3
        (position,) = s.log.append([batch(keys, value=bytes(200))])
        if serial % 2:
            wanted.append((position, [1, 3]))
    s.log.sync()
    assert len(s.log.extents()) >= 3
    assert s.find(b"k") == wanted
    assert s.index.build_missing() == len(s.log.extents()) - 1
    assert s.index.missing() == []
    assert s.find(b"k") == wanted
    assert [rows for _, rows in s.find(b"")] == [[2]] * 6
    assert s.find(b"absent") == []
    assert s.find(b"k", topic_id=16) == []


def test_one_java_hash_in_two_topics_finds_nothing_of_the_other() -> None:
    s = Setting()
    s.log.append([batch([b"Aa"], topic_id=8), batch([b"BB"], topic_id=16)])
    s.log.append([batch([b"filler"], value=bytes(4_000))])
    s.log.sync()
    for _ in range(2):
        assert s.find(b"BB", topic_id=8) == []
        assert s.find(b"Aa", topic_id=16) == []
        assert len(s.find(b"Aa", topic_id=8)) == len(s.find(b"BB", topic_id=16)) == 1
        s.index.build_missing()


def test_keys_and_topics_of_one_fingerprint_are_told_apart_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def same(
        keys: object, lengths: np.ndarray, topic_id: int, secret: object
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(lengths), 7, np.uint64), np.zeros(len(lengths), np.uint32)

    inspect = keyquery.inspect_group

    def same_group(*args: object, **options: object) -> object:
        group = inspect(*args, **options)  # type: ignore[arg-type]
        return replace(group, hi=np.full(len(group.hi), 7, np.uint64))

    monkeypatch.setattr(keyquery, "fingerprint", same)
    monkeypatch.setattr(keyquery, "inspect_group", same_group)
    s = Setting()
    for serial in range(10):
        s.log.append([batch([b"Aa", b"aA"], topic_id=8 + 8 * (serial % 2), value=bytes(500))])
    s.log.sync()
    s.index.build_missing()
    assert len(s.find(b"Aa", 8)) == len(s.find(b"aA", 16)) == 5
    assert s.find(b"BB", 8) == s.find(b"Aa", 24) == []


def test_times_bound_rows_start_inclusive_and_end_exclusive() -> None:
    s = Setting()
    columns = columns_of([b"k"] * 5, [bytes(300)] * 5, [10, 20, 30, 40, 50])
    for _ in range(4):
        s.log.append([encode(columns, Identity(topic_id=8, partition=0))])
    s.log.sync()
    for _ in range(2):
        assert [rows for _, rows in s.find(b"k", times=(20, 40))] == [[1, 2]] * 4
        assert s.find(b"k", times=(51, 100)) == s.find(b"k", times=(0, 10)) == []
        s.index.build_missing()


def test_a_segment_that_was_cut_and_grew_to_the_same_end_is_not_judged_by_its_old_times() -> None:
    s = Setting()
    for serial in range(5):
        s.log.append([batch([b"k"], value=bytes(1000), timestamp=10 + serial)])
    s.log.sync()
    before = s.log.extents()
    start = before[0][0]
    s.index.build(start)
    assert s.find(b"k", times=(1_000, 2_000)) == []  # by its header
    positions = [position for position, _ in s.find(b"k")]
    s.log.truncate(positions[1])
    for serial in range(4):
        s.log.append([batch([b"k"], value=bytes(1000), timestamp=1_000 + serial)])
    s.log.sync()
    assert s.log.extents() == before
    assert s.index.missing() == [start]
    for _ in range(2):
        assert [p for p, _ in s.find(b"k", times=(1_000, 2_000))] == positions[1:]
        assert [p for p, _ in s.find(b"k", times=(0, 100))] == positions[:1]
        s.index.build_missing()


def damage_first_page(s: Setting) -> None:
    s.disk.flip(keys_path(FOLDER, 0), 4096 + 3)


def damage_header(s: Setting) -> None:
    s.disk.flip(keys_path(FOLDER, 0), 20)


def cut(s: Setting) -> None:
    s.disk.put(keys_path(FOLDER, 0), s.disk.content(keys_path(FOLDER, 0))[:-1])


def take_another_segments(s: Setting) -> None:
    s.disk.put(keys_path(FOLDER, 0), s.disk.content(keys_path(FOLDER, s.log.extents()[1][0])))


def remove(s: Setting) -> None:
    s.disk.unlink(keys_path(FOLDER, 0))


@pytest.mark.parametrize("damage", [damage_first_page, damage_header, cut, take_another_segments, remove])
@pytest.mark.parametrize("is_reopened", [True, False], ids=["at the start", "while open"])
def test_a_damaged_keys_file_changes_no_answer_and_is_built_anew(
    damage: Callable[[Setting], None], is_reopened: bool
) -> None:
    s = Setting()
    for serial in range(8):
        s.log.append([batch([b"k", b"%d" % serial], value=bytes(600))])
    s.log.sync()
    s.index.build_missing()
    wanted, good = s.find(b"k"), s.disk.content(keys_path(FOLDER, 0))
    damage(s)
    if is_reopened or damage is not damage_first_page:
        s.cache.close()
        s.cache = FileCache(s.disk, 16)
        s.log.close()
        s.log = CommitLog.open(s.disk, s.cache, FOLDER, segment_bytes=4096, verify_from=s.log.written_end)
        s.index = KeyQueryIndex(s.log, s.disk, s.cache, FOLDER, SECRET)
    assert s.find(b"k") == wanted
    assert s.index.build_missing() >= 1
    assert s.disk.content(keys_path(FOLDER, 0)) == good
    assert s.find(b"k") == wanted


def test_another_secret_builds_the_files_anew() -> None:
    s = Setting()
    for serial in range(8):
        s.log.append([batch([b"k", b"%d" % serial], value=bytes(600))])
    s.log.sync()
    s.index.build_missing()
    wanted = s.find(b"k")
    s.index = KeyQueryIndex(s.log, s.disk, s.cache, FOLDER, secret_of(bytes(16)))
    assert s.index.missing() == [start for start, _ in s.log.extents()[:-1]]
    assert s.find(b"k") == wanted
    s.index.build_missing()
    assert s.find(b"k") == wanted


def test_nothing_is_built_ahead_of_the_durable_end() -> None:
    s = Setting()
    s.log.append([batch(value=bytes(3_000)), batch(value=bytes(3_000)), batch(value=bytes(3_000))])
    assert s.index.missing() == []
    s.index.build(0)
    assert not s.disk.exists(keys_path(FOLDER, 0))
    s.log.sync()
    assert len(s.index.missing()) == 2


def test_keys_files_go_with_their_segments_and_expired_records_are_not_found() -> None:
    s = Setting()
    positions = [s.log.append([batch([b"k"], value=bytes(3_000))])[0] for _ in range(4)]
    s.log.sync()
    s.index.build_missing()
    s.log.release(positions[2])
    assert [p for p, _ in s.find(b"k")] == positions[2:]
    assert [n for n in s.disk.list(FOLDER) if int(n[:20]) < positions[2]] == []


def test_a_damaged_batch_is_named_when_its_segment_is_indexed() -> None:
    s = Setting()
    second = s.log.append([batch([b"a"], value=bytes(1_000)), batch([b"b"], value=bytes(3_900))])[1]
    s.log.append([batch([b"c"], value=bytes(1_000))])
    s.log.sync()
    s.disk.flip(segment_path(FOLDER, second), HEAD_BYTES + 150)
    with pytest.raises(Corrupt, match=f"{segment_path(FOLDER, second)} at byte {second}: .*expected"):
        s.index.build(second)


def test_values_larger_than_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setting(segment_bytes=8 << 20)
    s.log.append([batch([b"k%d" % i], value=bytes(3 << 20)) for i in range(4)])
    s.log.sync()
    reads: list[int] = []
    with s.cache.reading(segment_path(FOLDER, 0)) as file:
        whole = file.pread

        class Counting:
            path = file.path

            def pread(self, size: int, position: int) -> bytes:
                reads.append(size)
                return whole(size, position)

        end = s.log.extents()[0][1]
        found = [b.key_list() for _, b in keyquery.keys_parts(Counting(), 0, end)]  # type: ignore[arg-type]
    assert found == [[b"k0"], [b"k1"]]
    assert sum(reads) <= 3 * keyquery.WINDOW


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=400), min_size=1, max_size=12),
    st.integers(0, 40),
)
def test_files_and_scans_give_the_same_answer(groups: list[list[int]], wanted: int) -> None:
    s = Setting(segment_bytes=16 << 10)
    for numbers in groups:
        s.log.append([batch([b"key-%d" % n for n in numbers], value=b"v" * 8)])
    s.log.append([batch([b"last"], value=bytes(20_000))])
    s.log.sync()
    scanned = s.find(b"key-%d" % wanted)
    assert [rows for _, rows in scanned] == [
        rows for numbers in groups if (rows := [i for i, n in enumerate(numbers) if n == wanted])
    ]
    s.index.build_missing()
    assert s.index.missing() == []
    assert s.find(b"key-%d" % wanted) == scanned


def test_a_build_through_the_scratch_file_finds_the_same_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keysbuild, "CHUNK_PAIRS", 37)
    s = Setting()
    for serial in range(60):
        keys = [b"key %d" % ((serial * 7 + i) % 50) for i in range(9)] + [b"hot"] * 3
        s.log.append([batch(keys, topic_id=8, value=bytes(30))])
    s.log.sync()
    before = {key: s.find(key) for key in [b"hot", b"absent", *(b"key %d" % i for i in range(50))]}
    assert len(before[b"hot"]) == 60
    assert s.index.build_missing() > 0
    assert {key: s.find(key) for key in before} == before
    assert not [name for name in s.disk.list(FOLDER) if name.endswith(".tmp")]
