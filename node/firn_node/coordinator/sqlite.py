"""Group records in a SQLite file, for the processes of one machine.

One row a group::

    group_id TEXT primary key | version INTEGER | document BLOB (JSON) | crc INTEGER (CRC-32C of document)

Invariants:

- every swap is one ``BEGIN IMMEDIATE`` transaction;
- nothing is told before it is durable, neither what this handle swapped nor what it found; the fdatasync comes after
  the locks are given back, because a process may be stopped at any moment;
- the file appears whole or not at all, by one who is told to make it, never by one who looks for it;
- one thread holds the connection, so the event loop never waits; a call that is not answered within ``answer_s``
  is answered without knowledge, and one that has not begun by then never begins;
- what contradicts what this handle saw before (an older version, no record, another file of the name) is
  ``Unusable``, as is every damage.

WAL mode: a process that is stopped while it reads holds up nobody. One that is stopped while it writes holds up
writers until it goes on or ends, as any lock does (that is for 0.2 ms of a swap, and for the two syncs of every
``_CHECKPOINT_PAGES``-th); the kernel frees the locks of an ended one. SQLite before 3.51.3
can damage a file in WAL mode when one connection checkpoints while another starts the WAL anew, so everything that
may do either runs under an exclusive ``flock`` of ``<file>.lock``.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from firn.crc import crc32c
from firn.errors import Corrupt
from firn_node.coordinator.api import (
    Absent,
    Done,
    Found,
    Reading,
    Seen,
    Swap,
    Unknown,
    Unreachable,
    Unusable,
    decide,
)
from firn_node.replication.record import GroupId, GroupRecord, from_document

T = TypeVar("T")

APPLICATION_ID = 0x4649524E  # "FIRN", in the file's header
FORMAT = 1  # the header's user_version
_SCHEMA = """
CREATE TABLE record (
    group_id TEXT PRIMARY KEY, version INTEGER NOT NULL, document BLOB NOT NULL, crc INTEGER NOT NULL
) WITHOUT ROWID
"""
_CHECKPOINT_PAGES = 128  # the WAL stays at about 512 KiB; a renewal writes one page
_LOCK_POLL_S = 0.002


class _Busy(Exception):
    """Another process holds the file for longer than the busy time-out."""


class SqliteCoordinator:
    """A handle of the file at ``path``. Nothing is opened before the first call.

    ``busy_s``: how long a call waits for other processes. ``answer_s``: when the caller is told that nothing is
    known; above ``busy_s``, a call that lost that wait says why. ``poll_s``: how often a watch looks that may not be late.
    """

    def __init__(
        self, path: str | Path, *, busy_s: float = 1.0, answer_s: float = 1.5, poll_s: float = 0.05
    ) -> None:
        self._path = os.fspath(path)
        self._answer_s = answer_s
        self._poll_s = poll_s
        self._file = _File(self._path, busy_s)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="firn coordinator")
        self._closed = False

    @staticmethod
    def create(path: str | Path) -> None:
        """Make an empty file at ``path`` unless there is one. *Effects*: durable on return; may be repeated."""
        _create(os.fspath(path))

    async def read(self, group_id: GroupId) -> Reading:
        reading: Found | Absent | Unknown | Unusable = await self._answer(lambda: self._file.read(group_id))
        return Unreachable(reading.reason) if isinstance(reading, Unknown) else reading

    async def watch(self, group_id: GroupId, *, late_s: float = 0.0) -> AsyncGenerator[Reading, None]:
        told: Reading | None = None
        while not self._closed:
            reading = await self.read(group_id)
            if reading != told and not self._closed:
                told = reading
                yield reading
            await asyncio.sleep(max(self._poll_s, late_s))

    async def compare_and_set(self, new: GroupRecord, *, expected_version: int) -> Swap:
        return await self._answer(lambda: self._file.compare_and_set(new, expected_version))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            closing = self._worker.submit(self._file.close)
            self._worker.shutdown(wait=False)
            await asyncio.wait([asyncio.wrap_future(closing)], timeout=self._answer_s)

    async def _answer(self, work: "Callable[[], T | Unknown | Unusable]") -> "T | Unknown | Unusable":
        """What ``work`` gives in the thread, or ``Unknown`` when it takes too long."""
        if self._closed:
            return Unknown(f"{self._path}: this handle is closed")
        asked: Future[T | Unknown | Unusable] = self._worker.submit(work)
        waited = asyncio.wrap_future(asked)
        try:
            done, _ = await asyncio.wait([waited], timeout=self._answer_s)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if done:
            return waited.result()
        waited.cancel()  # what has not begun never does
        return Unknown(f"{self._path}: no answer within {self._answer_s:g} s")


class _File:
    """The connection and what was seen through it. All methods run in the one thread of its handle."""

    def __init__(self, path: str, busy_s: float) -> None:
        self._path = path
        self._busy_s = busy_s
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = (
            None  # device and inode of the file, for as long as the handle
        )
        self._seen = Seen()
        self._durable: dict[GroupId, int] = {}  # versions that are synced
        self._broken: str | None = None

    def read(self, group_id: GroupId) -> Found | Absent | Unknown | Unusable:
        def work(connection: sqlite3.Connection) -> Found | Absent:
            found = self._select(connection, group_id)
            self._make_durable(found)
            return Absent() if found is None else Found(found)

        return self._guarded(work)

    def compare_and_set(self, new: GroupRecord, expected_version: int) -> Swap:
        def work(connection: sqlite3.Connection) -> Swap:
            with _flocked(f"{self._path}.lock", self._busy_s), _transaction(connection):
                found = self._select(connection, new.group_id)
                refused = decide(found, new, expected_version)
                if refused is None:
                    self._store(connection, new)
            if refused is not None:
                self._make_durable(found)
                return refused
            self._make_durable(new)
            self._seen.meet(new.group_id, new)
            return Done(new)

        return self._guarded(work)

    def _store(self, connection: sqlite3.Connection, new: GroupRecord) -> None:
        document = json.dumps(new.to_document(), separators=(",", ":")).encode()
        connection.execute(
            "INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)",
            (new.group_id, new.version, document, crc32c(document)),
        )

    def _make_durable(self, record: GroupRecord | None) -> None:
        """Return when a record that the file holds would survive a power loss.

        Errors: Corrupt, now and for as long as the handle lives: after a failed sync nobody knows what is on the disk.
        """
        if record is None or record.version <= self._durable.get(record.group_id, 0):
            return
        try:
            _sync_wal(f"{self._path}-wal")
        except OSError as error:
            self._broken = f"could not be synced: {error}"
            raise Corrupt(self._broken) from error
        self._durable[record.group_id] = record.version

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.ExitStack() as held:  # the last one to close checkpoints
            with contextlib.suppress(
                _Busy, OSError
            ):  # who holds it has the file open: then this is not the last
                held.enter_context(_flocked(f"{self._path}.lock", self._busy_s))
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _guarded(self, work: Callable[[sqlite3.Connection], T]) -> T | Unknown | Unusable:
        """What ``work`` gives; what went wrong as an answer. After an error the file is opened anew."""
        try:
            return work(self._open())
        except _Busy:
            return Unknown(f"{self._path}: locked by another process for {self._busy_s:g} s")
        except Corrupt as error:
            problem: Unknown | Unusable = Unusable(f"{self._path}: {error.message}")
        except (sqlite3.Error, OSError) as error:
            problem = self._problem(error)
            if isinstance(problem, Unknown) and _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return problem  # nothing is wrong with the connection
        self.close()
        return problem

    def _problem(self, error: Exception) -> Unknown | Unusable:
        if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            return Unusable(f"{self._path}: damaged: {error}")
        if not os.path.exists(self._path):
            return Unusable(f"{self._path}: there is no such file")
        return Unknown(f"{self._path}: {error}")

    def _open(self) -> sqlite3.Connection:
        """The connection to the file that has the name now.

        Errors: Corrupt when that is another file than before, or none that firn made.
        """
        if self._broken is not None:
            raise Corrupt(self._broken)
        identity = self._stat()
        if self._identity is not None and identity != self._identity:
            raise Corrupt(
                "another file was put in its place; restart on it only if no older state came with it"
            )
        if self._connection is not None:
            return self._connection
        connection = sqlite3.connect(
            f"{Path(self._path).absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=self._busy_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            _prepare(connection)
            if self._stat() != identity:
                raise Corrupt("it was replaced while it was opened")
        except BaseException:
            connection.close()
            raise
        self._connection, self._identity = connection, identity
        return connection

    def _stat(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            raise Corrupt("there is no such file") from None
        return found.st_dev, found.st_ino

    def _select(self, connection: sqlite3.Connection, group_id: GroupId) -> GroupRecord | None:
        """The stored record. Errors: Corrupt, also when this handle has seen a newer one."""
        row = connection.execute(
            "SELECT version, document, crc FROM record WHERE group_id = ?", (group_id,)
        ).fetchone()
        found = None if row is None else _parse(group_id, *row)
        if (why := self._seen.meet(group_id, found)) is not None:
            raise Corrupt(why)
        return found


def _parse(group_id: GroupId, version: object, document: object, crc: object) -> GroupRecord:
    """Errors: Corrupt."""
    if not isinstance(document, bytes) or crc != crc32c(document):
        raise Corrupt(f"group {group_id}: the record's checksum does not match")
    record = from_document(json.loads(document))
    if (record.group_id, record.version) != (group_id, version):
        raise Corrupt(
            f"group {group_id}, version {version}: the record is of {record.group_id}, {record.version}"
        )
    return record


def _prepare(connection: sqlite3.Connection) -> None:
    """Settings of a new connection, and a look at the whole (small) file. Errors: Corrupt."""
    connection.execute("PRAGMA synchronous = NORMAL")  # checkpoints sync; swaps are synced by their handle
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    if application_id != APPLICATION_ID:
        raise Corrupt(f"not a coordinator's file: application id {application_id:#x}")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT:
        raise Corrupt(f"format {version} is unknown; this firn reads {FORMAT}")
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise Corrupt(f"damaged: {verdict}")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def _flocked(path: str, wait_s: float) -> Iterator[None]:
    """An exclusive lock among processes and handles. Errors: _Busy."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise _Busy from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(lock)


def _sync_wal(path: str) -> None:
    """fdatasync of the WAL and, for its name, fsync of its folder. Locks are on other files: closing drops none."""
    try:
        wal = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # all of it is in the file itself, synced by the checkpoint
    try:
        os.fdatasync(wal)
    finally:
        os.close(wal)
    _sync(os.path.dirname(path) or ".")


def _code(error: Exception) -> int | None:
    """SQLite's primary error code."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _create(path: str) -> None:
    """1. make a whole file under another name, 2. sync it, 3. link it to its name, 4. sync the folder.

    A crash leaves the temporary file at most; of several who create at once one links.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.exists(path):
        handle, temporary = tempfile.mkstemp(prefix=".coordinator-", dir=folder)
        os.close(handle)
        try:
            with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(_SCHEMA)
                connection.execute("PRAGMA journal_mode = WAL")  # stays in the file's header
            _sync(temporary)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            for name in (temporary, f"{temporary}-wal", f"{temporary}-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
    _sync(folder)


def _sync(path: str) -> None:
    """fsync of a folder, or of a file that no connection has open: closing it would drop SQLite's locks."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
