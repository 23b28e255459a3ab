"""Appender, flusher and readers at once, with real files and with a disk whose fdatasync takes long."""

import threading
from pathlib import Path

from firn_sim.batches import sized
from firn_sim.disk import SimDisk

from firn_node.disk import RealDisk
from firn_node.filecache import FileCache
from firn_node.log.commitlog import CommitLog


def test_append_sync_and_readers_run_at_once_on_real_files(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    disk = RealDisk(tmp_path)
    cache = FileCache(disk, 3)  # fewer than segments: files are opened and closed all the time
    log = CommitLog.open(disk, cache, folder, segment_bytes=64 << 10, verify_from=0)
    batches = [sized(500 + 37 * (i % 50), i) for i in range(600)]
    expected, positions, done, errors = b"".join(batches), [], threading.Event(), []

    def flush() -> None:
        last = 0
        while not done.is_set() or log.durable_end < log.written_end:
            end = log.sync()
            if not last <= end <= log.written_end:
                errors.append(f"durable end {end} after {last}")
            last = end

    def read() -> None:
        while not done.is_set():
            end = log.written_end
            for position, data in log.scan(max(0, end - 150_000) and positions[len(positions) // 2], end):
                if data != expected[position : position + len(data)]:
                    errors.append(f"other bytes at {position}")
            log.segments()

    positions += log.append(batches[:2])
    threads = [threading.Thread(target=flush), threading.Thread(target=read), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for first in range(2, len(batches), 4):
        positions += log.append(batches[first : first + 4])
    done.set()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert log.durable_end == log.written_end == len(expected)
    assert len(log.extents()) > 5
    log.close()
    cache.close()
    again = CommitLog.open(disk, FileCache(disk, 3), folder, segment_bytes=64 << 10, verify_from=0)
    assert again.read(0, again.written_end) == expected
    assert sum(t.bytes for i in again.segments() for t in i.topics.values()) == len(expected)
    again.close()


def test_appends_go_on_during_a_slow_fdatasync_and_are_not_counted_by_it() -> None:
    disk = SimDisk(1)
    log = CommitLog.open(disk, FileCache(disk, 4), "/log", segment_bytes=4096, verify_from=0)
    log.append([sized(500, 0)])
    first_end = log.written_end
    is_syncing, go_on = threading.Event(), threading.Event()

    def delay(kind: str, path: str) -> None:
        if kind == "sync" and not go_on.is_set():
            is_syncing.set()
            assert go_on.wait(60)

    disk.delay = delay
    ends: list[int] = []
    thread = threading.Thread(target=lambda: ends.append(log.sync()))
    thread.start()
    assert is_syncing.wait(60)
    for serial in range(1, 20):  # over several segments
        log.append([sized(1_000, serial)])
    assert len(log.extents()) > 3
    assert log.durable_end == 0
    go_on.set()
    thread.join(60)
    assert ends == [first_end]
    assert log.sync() == log.written_end
    disk.crash()
    again = CommitLog.open(disk, FileCache(disk, 4), "/log", segment_bytes=4096, verify_from=0)
    assert again.written_end == log.written_end
