"""Copies of another replica's log: the same bytes at the same positions, or nothing."""

from itertools import pairwise

import pytest
from firn_sim.batches import batch, sized
from firn_sim.disk import SimDisk

from firn.batch import header_crc
from firn.errors import Corrupt, InvariantBroken, MalformedBatch
from firn_node import failpoints
from firn_node.filecache import FileCache
from firn_node.log.commitlog import CommitLog

FOLDER = "/data/log"


def open_log(disk: SimDisk, *, segment_bytes: int = 4096, create_at: int = 0) -> CommitLog:
    return CommitLog.open(
        disk, FileCache(disk, 16), FOLDER, segment_bytes=segment_bytes, verify_from=0, create_at=create_at
    )


def whole(log: CommitLog) -> bytes:
    return log.read(log.start, log.written_end - log.start)


def copied(source: CommitLog, target: CommitLog, *, chunk: int) -> None:
    for position, data in source.scan(target.written_end, source.written_end, chunk=chunk):
        assert target.append_copy(position, data, after=0) == ()
        assert target.written_end == position + len(data)


@pytest.mark.parametrize("chunk", [200, 3_000, 1 << 20])
@pytest.mark.parametrize("segment_bytes", [1024, 4096, 1 << 20])
def test_a_copy_has_the_same_bytes_and_topics_whatever_its_segments(chunk: int, segment_bytes: int) -> None:
    source = open_log(SimDisk(1))
    for serial in range(60):
        source.append([sized(300 + 61 * (serial % 40), serial, topic_id=8 * (serial % 3 + 1))])
    disk = SimDisk(2)
    target = open_log(disk, segment_bytes=segment_bytes)
    copied(source, target, chunk=chunk)
    assert whole(target) == whole(source)
    assert target.last_append_ms == source.last_append_ms
    for log in (source, target):
        infos = log.segments()
        assert [a.end for a, _ in pairwise(infos)] == [b.start for _, b in pairwise(infos)]
    assert _topics(target) == _topics(source)
    target.sync()
    disk.crash()
    again = open_log(disk, segment_bytes=segment_bytes)
    assert whole(again) == whole(source)
    assert _topics(again) == _topics(source)


def _topics(log: CommitLog) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for info in log.segments():
        for topic_id, counted in info.topics.items():
            size, newest = found.get(topic_id, (0, 0))
            found[topic_id] = size + counted.bytes, max(newest, counted.newest_append_ms)
    return found


def test_copied_segments_are_cut_where_single_appends_would_cut_them() -> None:
    batches = [sized(200 + 97 * (i % 50), i) for i in range(80)] + [sized(9_000, 80), sized(300, 81)]
    one_by_one, at_once = open_log(SimDisk(1)), open_log(SimDisk(2))
    for each in batches:
        one_by_one.append([each])
    at_once.append_copy(0, b"".join(batches), after=0)
    assert at_once.extents() == one_by_one.extents()
    assert at_once.segments() == one_by_one.segments()


def test_a_copy_that_is_damaged_anywhere_is_refused_and_changes_nothing() -> None:
    log = open_log(SimDisk(1))
    log.append([sized(500, 0)])
    before = whole(log)
    good = sized(400, 1) + batch([b"a", b"b"]) + sized(700, 2)
    for at in (0, 9, 50, 103, 104, 399, 410, len(good) - 1):
        damaged = bytearray(good)
        damaged[at] ^= 4
        with pytest.raises(MalformedBatch):
            log.append_copy(log.written_end, bytes(damaged), after=0)
    for end in (1, 103, len(good) - 8):
        with pytest.raises(MalformedBatch):
            log.append_copy(log.written_end, good[:end], after=0)
    with pytest.raises(MalformedBatch):
        log.append_copy(log.written_end, b"", after=0)
    assert whole(log) == before
    log.append_copy(len(before), good, after=0)
    assert whole(log) == before + good


def of_epoch(epoch: int, serial: int) -> bytes:
    data = bytearray(sized(400, serial))
    data[44:48] = epoch.to_bytes(4, "little")
    data[8:12] = header_crc(data[:104]).to_bytes(4, "little")
    return bytes(data)


def test_a_copy_tells_of_the_epochs_that_begin_in_it_and_refuses_one_that_goes_back() -> None:
    log = open_log(SimDisk(1))
    first = b"".join(of_epoch(epoch, serial) for serial, epoch in enumerate((3, 3, 4, 7)))
    size = len(first) // 4
    assert log.append_copy(0, first, after=3) == ((4, 2 * size), (7, 3 * size))
    assert log.append_copy(len(first), of_epoch(7, 4), after=7) == ()
    end = log.written_end
    for data, after in ((of_epoch(6, 5), 7), (of_epoch(8, 5) + of_epoch(7, 6), 7)):
        with pytest.raises(Corrupt, match="after epoch"):
            log.append_copy(end, data, after=after)
    assert log.written_end == end


@pytest.mark.parametrize("off", [-8, 8])
def test_a_copy_of_another_position_is_refused(off: int) -> None:
    log = open_log(SimDisk(1))
    log.append([sized(500, 0)])
    end = log.written_end
    with pytest.raises(InvariantBroken, match="cannot go to the end"):
        log.append_copy(end + off, sized(300, 1), after=0)
    assert log.written_end == end


class Stopped(BaseException):
    """The process dies at a failpoint."""


@pytest.mark.parametrize("power", [True, False], ids=["power loss", "process death"])
@pytest.mark.parametrize("to", [8, 100_000])
def test_a_crash_while_an_empty_log_is_moved_leaves_it_here_or_there(power: bool, to: int) -> None:
    steps = ["log.begin.written", "log.begin.folder_synced", "log.begin.unlinked"]
    for stop in steps:
        for seed in range(6):
            disk = SimDisk(seed)
            log = open_log(disk, create_at=4096)

            def hook(name: str, stop: str = stop) -> None:
                if name == stop:
                    raise Stopped

            failpoints.hook = hook
            try:
                with pytest.raises(Stopped):
                    log.begin_at(to)
            finally:
                failpoints.hook = None
            disk.crash() if power else disk.kill()
            log = open_log(disk, create_at=4096)
            assert log.start == log.written_end
            assert log.start in ((4096, to) if stop == steps[0] else (to,))
            log.begin_at(to)
            log.append_copy(to, sized(500, 1), after=0)
            log.sync()
            disk.crash()
            again = open_log(disk)
            assert (again.start, whole(again)) == (to, sized(500, 1))


def test_a_moved_log_is_like_one_that_was_made_there() -> None:
    log = open_log(SimDisk(3), create_at=4096)
    log.begin_at(8192)
    assert (log.start, log.durable_end, log.written_end) == (8192, 8192, 8192)
    assert log.append([sized(500, 0)]) == [8192]
    assert log.sync() == log.written_end
    with pytest.raises(InvariantBroken, match="is not empty"):
        log.begin_at(1 << 20)
