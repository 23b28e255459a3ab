"""Keys files made of what was gathered while a segment was written: the same bytes as made of the segment itself."""

from dataclasses import dataclass

import numpy as np
import pytest
from firn_sim.batches import batch
from firn_sim.disk import SimDisk

from firn.errors import Corrupt
from firn_node.filecache import FileCache
from firn_node.kernels import inspect_group, secret_of
from firn_node.log import keysgather
from firn_node.log.commitlog import CommitLog
from firn_node.log.keyquery import KeyQueryIndex
from firn_node.log.segment import keys_path, segment_path

FOLDER = "/log"
SECRET = secret_of(bytes(range(16)))


class Setting:
    """A log whose appends are gathered, and whose segments can be told to be unreadable."""

    def __init__(self, segment_bytes: int = 1 << 16) -> None:
        self.disk = SimDisk(3)
        self.cache = FileCache(self.disk, 16)
        self.log = CommitLog.open(self.disk, self.cache, FOLDER, segment_bytes=segment_bytes, verify_from=0)
        self.index = self.fresh_index()
        self.draw = np.random.default_rng(5)

    def fresh_index(self) -> KeyQueryIndex:
        return KeyQueryIndex(self.log, self.disk, self.cache, FOLDER, SECRET)

    def append(self, *batches: bytes, refused: tuple[int, ...] = (), gather: bool = True) -> None:
        """One request: its batches go to the log, but for the refused ones."""
        group = inspect_group(b"".join(batches), SECRET)
        rows = [i for i in range(len(batches)) if i not in refused]
        positions = self.log.append([batches[i] for i in rows])
        if gather:
            self.index.gather(group, rows, positions)

    def some(self, records: int = 20) -> bytes:
        """A batch of a few keys out of many, one of them hot."""
        keys = [b"hot", *(b"%d" % n for n in self.draw.integers(0, 500, records).tolist())]
        return batch(keys, value=bytes(50), topic_id=8 * int(self.draw.integers(1, 3)))

    def sealed(self) -> list[int]:
        self.log.sync()
        return [start for start, _ in self.log.extents()[:-1]]

    def keys_file(self, start: int) -> bytes:
        with self.cache.reading(keys_path(FOLDER, start)) as file:
            return bytes(file.pread(file.size(), 0))

    def damage(self, start: int) -> None:
        """Whoever reads the segment meets a wrong CRC."""
        file = self.disk.open(segment_path(FOLDER, start), "write")
        file.pwrite([b"damaged!" * 16], 8000)
        file.close()


def test_a_keys_file_of_gathered_keys_has_the_bytes_of_one_that_is_read() -> None:
    s = Setting()
    while len(s.log.extents()) < 5:
        s.append(*(s.some() for _ in range(int(s.draw.integers(1, 9)))))
    read = s.fresh_index()
    for start in s.sealed():
        s.index.build(start)
        gathered = s.keys_file(start)
        read.build(start)
        assert s.keys_file(start) == gathered


@dataclass
class OneRecord:
    hi: int
    position: int
    end: int
    timestamp: int
    append_ms: int


@pytest.mark.parametrize("together", [1, 7, 1000])
def test_batches_of_one_record_are_gathered_as_any_others(together: int) -> None:
    s, waiting = Setting(), []
    while len(s.log.extents()) < 4:
        at, draw = len(waiting), s.draw.integers(0, 500, 3).tolist()
        data = batch(
            [b"%d" % draw[0]], value=bytes(50 + draw[1]), timestamp=900 + draw[2], append_ms=2_000 + at
        )
        (position,) = s.log.append([data])
        hi = int(inspect_group(data, SECRET).hi[0])
        waiting.append(OneRecord(hi, position, position + len(data), 900 + draw[2], 2_000 + at))
    for first in range(0, len(waiting), together):
        s.index.gather_records(waiting[first : first + together])
    read = s.fresh_index()
    for start in s.sealed():
        read.build(start)
        expected = s.keys_file(start)
        s.damage(start)  # whoever reads the segment fails
        s.index.build(start)
        assert s.keys_file(start) == expected


def test_a_gathered_segment_is_not_read_again() -> None:
    s = Setting()
    while len(s.log.extents()) < 3:
        s.append(s.some())
    for start in s.sealed():
        s.damage(start)
        s.index.build(start)
    assert s.index.missing() == []


@pytest.mark.parametrize("refused", [(0,), (1,), (0, 2)])
def test_keys_of_refused_batches_are_not_gathered(refused: tuple[int, ...]) -> None:
    s = Setting()
    while len(s.log.extents()) < 3:
        s.append(s.some(), s.some(3), s.some(), refused=refused)
    read = s.fresh_index()
    for start in s.sealed():
        s.index.build(start)
        gathered = s.keys_file(start)
        read.build(start)
        assert s.keys_file(start) == gathered


@pytest.mark.parametrize("missed", [0, 1, 7])
def test_a_segment_of_which_a_batch_was_missed_is_read(missed: int) -> None:
    s = Setting()
    for number in range(200):
        s.append(s.some(), gather=number != missed)
    starts = s.sealed()
    read = s.fresh_index()
    for start in starts:
        s.index.build(start)
        built = s.keys_file(start)
        read.build(start)
        assert s.keys_file(start) == built


def test_batches_that_are_dispatched_again_are_gathered_once() -> None:
    s = Setting()
    while len(s.log.extents()) < 2:
        data = s.some()
        group = inspect_group(data, SECRET)
        positions = s.log.append([data])
        for _ in range(2):
            s.index.gather(group, [0], positions)
    (start,) = s.sealed()
    s.index.build(start)
    gathered = s.keys_file(start)
    s.fresh_index().build(start)
    assert s.keys_file(start) == gathered


def test_what_was_gathered_before_a_truncation_is_not_used() -> None:
    s = Setting()
    for _ in range(10):
        s.append(s.some())
    position = s.log.written_end
    s.append(batch([b"old"] * 30, value=bytes(50), topic_id=8))
    s.log.truncate(position)
    s.append(batch([b"new"] * 30, value=bytes(50), topic_id=8))  # as long as what it replaces
    while len(s.log.extents()) < 2:
        s.append(s.some())
    (start,) = s.sealed()
    s.index.build(start)
    built = s.keys_file(start)
    s.fresh_index().build(start)
    assert s.keys_file(start) == built


def test_a_sealed_segment_that_is_not_dispatched_waits_for_it() -> None:
    """A standby's log runs ahead of its dispatch: what is gathered so far must not be let go, and read, for that."""
    s, late = Setting(), []
    while len(s.log.extents()) < 2:
        data = s.some()
        late.append((inspect_group(data, SECRET), s.log.append([data])))
    (start,) = s.sealed()
    s.damage(start)  # whoever reads the segment fails
    dispatched = start
    for group, positions in late:
        assert s.index.build_missing(1, dispatched) == int(dispatched >= s.log.starts[1])
        s.index.gather(group, [0], positions)
        dispatched = positions[0] + int(group.size[0])
    s.index.build_missing(1, dispatched)
    assert s.index.missing() == []


def test_past_its_bound_nothing_is_held_and_the_segment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keysgather, "GATHERED_RECORDS_MAX", 100)
    s = Setting()
    while len(s.log.extents()) < 2:
        s.append(s.some())
    (start,) = s.sealed()
    s.damage(start)
    with pytest.raises(Corrupt):
        s.index.build(start)
