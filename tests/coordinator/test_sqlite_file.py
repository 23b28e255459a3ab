"""The SQLite coordinator beyond the contract: ended and stopped processes, locks, damaged and exchanged files."""

import asyncio
import contextlib
import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import coordinator_child
import pytest
from coordinator_kit import GROUP, first_record, known, locked, next_of, renewed

from firn_node.coordinator import (
    Absent,
    Done,
    Found,
    SqliteCoordinator,
    Unknown,
    Unreachable,
    Unusable,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "coordinator.sqlite"
    SqliteCoordinator.create(path)
    return path


def with_handle(path: Path, test: Callable[[SqliteCoordinator], Awaitable[None]], **options: float) -> None:
    """``options``: of the handle, which is patient without them: a slow machine is not what is tested."""

    async def scene() -> None:
        handle = SqliteCoordinator(path, **{"busy_s": 20.0, "answer_s": 30.0, **options})
        try:
            await test(handle)
        finally:
            await handle.close()

    asyncio.run(scene())


def store(path: Path, versions: int) -> None:
    """The record's versions up to ``versions``, by a handle that is closed again: no WAL is left."""

    async def test(handle: SqliteCoordinator) -> None:
        record = first_record()
        await handle.compare_and_set(record, expected_version=0)
        for _ in range(versions - 1):
            record = renewed(record)
            assert isinstance(await handle.compare_and_set(record, expected_version=record.version - 1), Done)

    with_handle(path, test)


def version_at(path: Path, **options: float) -> int:
    async def test(handle: SqliteCoordinator) -> None:
        found = await handle.read(GROUP)
        assert isinstance(found, Found), found
        versions.append(found.record.version)

    versions: list[int] = []
    with_handle(path, test, **options)
    return versions[0]


def start_child(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, coordinator_child.__file__, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def lines_to_the_first_done(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    lines = [child.stdout.readline()]
    while not lines[-1].startswith("DONE"):
        assert lines[-1], "the child ended"
        lines.append(child.stdout.readline())
    return lines


def killed(child: subprocess.Popen[str]) -> list[str]:
    """Ends a child; the rest of what it said."""
    child.kill()
    assert child.stdout is not None
    with child.stdout:
        rest = child.stdout.read()
    child.wait()
    return rest.splitlines()


def test_writers_that_are_killed_at_any_moment_lose_nothing_and_block_nobody(path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    store(path, 1)
    children = [start_child(path) for _ in range(2)]
    told: list[str] = []
    try:
        for _ in range(8):
            at = chance.randrange(len(children))
            told += lines_to_the_first_done(children[at])
            time.sleep(chance.random() * 0.03)  # any moment of its swaps; nothing depends on which
            told += killed(children[at])
            children[at] = start_child(path)
    finally:
        for child in children:
            told += killed(child)
    done = [int(line.split()[1]) for line in told if line.startswith("DONE")]
    asked = [int(line.split()[1]) for line in told if line.startswith("ASKED ")]
    assert len(done) >= 8
    assert len(done) == len(set(done))
    newest = version_at(path)
    assert max(done) <= newest <= max(asked)
    assert newest - 1 - len(done) <= 10  # versions that nobody was told of: at most one a kill
    store_more(path, newest + 3)


def test_a_stopped_writer_does_not_hold_up_readers_and_nobody_once_it_is_killed(path: Path) -> None:
    store(path, 1)
    child = start_child(path)
    try:
        lines_to_the_first_done(child)
        for _ in range(10):
            child.send_signal(signal.SIGSTOP)
            assert version_at(path, busy_s=0.1) >= 1
            child.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGSTOP)
    finally:
        killed(child)

    async def test(handle: SqliteCoordinator) -> None:
        found = await handle.read(GROUP)
        assert isinstance(found, Found)
        following = renewed(found.record)
        assert await handle.compare_and_set(following, expected_version=found.record.version) == Done(
            following
        )

    with_handle(path, test)


def test_while_the_file_is_locked_reads_go_on_and_the_event_loop_too(path: Path) -> None:
    store(path, 1)

    async def test(handle: SqliteCoordinator) -> None:
        found, reader = await handle.read(GROUP), SqliteCoordinator(path, answer_s=30.0)
        following = renewed(first_record())
        with locked(path):
            swap = asyncio.create_task(handle.compare_and_set(following, expected_version=1))
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert await reader.read(GROUP) == found
            assert not swap.done()
        assert await swap == Done(following)
        await reader.close()

    with_handle(path, test)


def test_a_lock_of_another_handle_past_the_busy_time_out_is_unknown(path: Path) -> None:
    """As of a process that was stopped within a swap."""
    store(path, 1)

    child = subprocess.Popen(
        [sys.executable, "-c", LOCKING, f"{path}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGSTOP)

    async def test(handle: SqliteCoordinator) -> None:
        swap = await handle.compare_and_set(renewed(first_record()), expected_version=1)
        assert isinstance(swap, Unknown)
        assert "locked by another process" in swap.reason
        child.kill()
        await asyncio.to_thread(child.wait)  # only then its lock is free
        assert isinstance(await handle.compare_and_set(renewed(first_record()), expected_version=1), Done)

    try:
        with_handle(path, test, busy_s=0.2)
    finally:
        child.kill()
        child.communicate()


LOCKING = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_call_that_waits_behind_a_stuck_one_is_given_up_and_never_carried_out(path: Path) -> None:
    store(path, 1)

    async def test(handle: SqliteCoordinator) -> None:
        await known(lambda: handle.read(GROUP))
        record = renewed(first_record())
        with locked(path):
            stuck = asyncio.create_task(handle.compare_and_set(record, expected_version=1))
            await asyncio.sleep(0.05)
            behind = await handle.compare_and_set(renewed(record), expected_version=2)
            assert isinstance(behind, Unknown)
            assert "no answer within" in behind.reason
            assert isinstance(await handle.read(GROUP), Unreachable)
            assert isinstance(await stuck, Unknown)
        assert await known(lambda: handle.read(GROUP)) == Found(record)

    with_handle(path, test, answer_s=0.1)


def unusable(path: Path, options: dict[str, float] | None = None) -> str:
    """The reason that reads, swaps and watches of a new handle give."""
    reasons: list[str] = []

    async def test(handle: SqliteCoordinator) -> None:
        swap = await handle.compare_and_set(renewed(first_record()), expected_version=1)
        for answer in (await handle.read(GROUP), swap, await next_of(handle.watch(GROUP))):
            assert isinstance(answer, Unusable), answer
            reasons.append(answer.reason)

    with_handle(path, test, **(options or {}))
    assert len(set(reasons)) == 1
    assert str(path) in reasons[0]
    return reasons[0]


def test_a_missing_file_is_named_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite"
    assert "no such file" in unusable(path)
    assert not path.exists()


def test_a_file_that_is_no_database_is_damaged(path: Path) -> None:
    path.write_bytes(b"no database " * 1000)
    assert "not a database" in unusable(path)


def test_an_empty_file_is_not_taken_for_a_coordinator(path: Path) -> None:
    path.write_bytes(b"")
    assert "not a coordinator's file" in unusable(path)


def test_another_database_is_not_taken_for_a_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE record (id)")
    assert "not a coordinator's file" in unusable(path)


def test_a_file_of_a_newer_format_is_refused_by_number(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    assert "format 2 is unknown" in unusable(path)


def test_a_truncated_file_is_damaged(path: Path) -> None:
    store(path, 1)
    os.truncate(path, path.stat().st_size // 2)
    unusable(path)


def test_a_file_without_its_table_is_damaged(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE record")
    assert "no such table" in unusable(path)


def test_a_flipped_bit_in_the_record_is_found_by_its_checksum(path: Path) -> None:
    store(path, 1)
    data = bytearray(path.read_bytes())
    data[data.index(b'"epoch":1') + 8] ^= 2
    path.write_bytes(data)
    assert "checksum" in unusable(path)


def test_a_record_under_the_name_of_another_group_is_damaged(path: Path) -> None:
    store(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE record SET group_id = '1'")
        connection.execute("INSERT INTO record SELECT '0', version, document, crc FROM record")
        connection.commit()

    async def test(handle: SqliteCoordinator) -> None:
        assert isinstance(await handle.read(GROUP), Found)

    with_handle(path, test)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE record SET version = 9 WHERE group_id = '0'")
        connection.commit()
    assert "the record is of 0, 1" in unusable(path)


def rolled_back(path: Path, put_back: Callable[[], None]) -> tuple[object, object]:
    """What a handle that saw version 5 reads and swaps after ``put_back``; a watch tells the same."""
    answers: list[object] = []

    async def test(handle: SqliteCoordinator) -> None:
        found = await handle.read(GROUP)
        assert isinstance(found, Found)
        watch = handle.watch(GROUP)
        assert await next_of(watch) == found
        put_back()
        told = await next_of(watch)
        await watch.aclose()
        reading = await handle.read(GROUP)
        assert told == reading
        swap = await handle.compare_and_set(renewed(found.record), expected_version=found.record.version)
        answers.extend((reading, swap))

    with_handle(path, test, poll_s=0.01)
    return answers[0], answers[1]


def test_an_older_copy_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    store(path, 2)
    older = tmp_path / "backup"
    shutil.copy(path, older)
    store_more(path, 5)
    for answer in rolled_back(path, lambda: os.replace(older, path)):
        assert isinstance(answer, Unusable)
        assert "another file" in answer.reason


def test_a_record_that_went_back_in_the_same_file_is_refused(path: Path) -> None:
    store(path, 2)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT * FROM record").fetchone()
    store_more(path, 5)

    def put_back() -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)", row)
            connection.commit()

    for answer in rolled_back(path, put_back):
        assert isinstance(answer, Unusable)
        assert "version 5 was there, now 2" in answer.reason


def test_a_record_that_is_gone_is_refused(path: Path) -> None:
    store(path, 5)

    def remove() -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("DELETE FROM record")
            connection.commit()

    for answer in rolled_back(path, remove):
        assert isinstance(answer, Unusable)
        assert "now no record" in answer.reason


def test_a_file_that_was_removed_is_missed(path: Path) -> None:
    store(path, 5)
    for answer in rolled_back(path, path.unlink):
        assert isinstance(answer, Unusable)
        assert "no such file" in answer.reason


def store_more(path: Path, upto: int) -> None:
    async def test(handle: SqliteCoordinator) -> None:
        found = await handle.read(GROUP)
        assert isinstance(found, Found)
        record = found.record
        while record.version < upto:
            record = renewed(record)
            assert isinstance(await handle.compare_and_set(record, expected_version=record.version - 1), Done)

    with_handle(path, test)


def test_creating_again_changes_nothing_and_leaves_no_other_file(path: Path) -> None:
    store(path, 3)
    SqliteCoordinator.create(path)
    assert version_at(path) == 3
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.lock"]


def test_processes_that_create_at_once_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite"
    code = "import sys; from firn_node.coordinator import SqliteCoordinator as S; sys.stdin.read(); S.create(sys.argv[1])"
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE) for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    assert [child.wait() for child in children] == [0, 0, 0]
    store(path, 1)
    assert version_at(path) == 1


def test_the_wal_stays_small(path: Path) -> None:
    async def test(handle: SqliteCoordinator) -> None:
        record = first_record()
        await handle.compare_and_set(record, expected_version=0)
        for _ in range(300):
            record = renewed(record)
            await handle.compare_and_set(record, expected_version=record.version - 1)
        assert os.path.getsize(f"{path}-wal") < 1 << 20

    with_handle(path, test)


@pytest.fixture
def synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the WAL at each sync of it."""
    sizes: list[int] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        assert found.st_ino == os.stat(f"{path}-wal").st_ino
        real(descriptor)
        sizes.append(found.st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return sizes


def test_nothing_is_told_before_it_is_synced_once_by_each_handle(path: Path, synced: list[int]) -> None:
    async def test(one: SqliteCoordinator) -> None:
        other = SqliteCoordinator(path)
        first, second = first_record(), renewed(first_record())
        for handle, act, syncs in (
            (one, one.compare_and_set(first, expected_version=0), 1),
            (one, one.read(GROUP), 0),
            (other, other.read(GROUP), 1),
            (other, other.read(GROUP), 0),
            (one, one.compare_and_set(second, expected_version=1), 1),
            (other, other.compare_and_set(second, expected_version=1), 1),
            (other, other.read(GROUP), 0),
        ):
            before = len(synced)
            await act
            assert len(synced) - before == syncs, (handle is one, syncs)
            if syncs:
                assert synced[-1] == os.path.getsize(f"{path}-wal")
        await other.close()

    with_handle(path, test)


def test_a_sync_that_fails_ends_the_use_of_the_handle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(path, 1)

    async def test(handle: SqliteCoordinator) -> None:
        assert await handle.read(GROUP) == Found(first_record())
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", failing)
            swap = await handle.compare_and_set(renewed(first_record()), expected_version=1)
        for answer in (swap, await handle.read(GROUP)):
            assert isinstance(answer, Unusable)
            assert "could not be synced" in answer.reason

    with_handle(path, test)
    assert version_at(path) == 2


def failing(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_closed_handle_answers_that_it_is(path: Path) -> None:
    async def test(handle: SqliteCoordinator) -> None:
        assert await handle.read(GROUP) == Absent()
        await handle.close()
        assert isinstance(await handle.read(GROUP), Unreachable)
        assert isinstance(await handle.compare_and_set(first_record(), expected_version=0), Unknown)

    with_handle(path, test)
