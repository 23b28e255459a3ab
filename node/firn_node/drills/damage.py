"""What drills do to files: of stopped replicas, and of the coordinator."""

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

_SIDE_FILES = ("", "-wal", "-shm")
_HEAD_BYTES = 4096  # of a commit log file, before its first batch


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive transaction on an SQLite file."""
    with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")


def copy_coordinator(path: Path, target: Path) -> None:
    """A whole copy of an SQLite file that is in use."""
    with (
        contextlib.closing(sqlite3.connect(path, timeout=30)) as source,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)


@contextlib.contextmanager
def put_aside(path: Path) -> Iterator[None]:
    """Take an SQLite file, with its side files, from its name, and put it back at the end."""
    names = [Path(f"{path}{suffix}") for suffix in _SIDE_FILES]
    aside = [(name, name.with_name(f"aside-{name.name}")) for name in names if name.exists()]
    for name, kept in aside:
        name.rename(kept)
    try:
        yield
    finally:
        for name in names:
            name.unlink(missing_ok=True)
        for name, kept in aside:
            kept.rename(name)


def _log_files(data: Path) -> list[Path]:
    """The commit log's files, oldest first."""
    return sorted((data / "log").glob("*.log"))


def append_torn_tail(data: Path, chance: random.Random) -> str:
    """Put something behind the end of a log that a power loss may leave there; says what."""
    if not (files := _log_files(data)):
        return "nothing behind the end of its log, which was not begun"
    last = files[-1]
    content = last.read_bytes()
    kind = chance.choice(("half a batch", "noise", "zeros"))
    size = chance.randint(1, 6000)
    if kind == "half a batch":
        tail = content[_HEAD_BYTES : _HEAD_BYTES + min(size, 150)]
    else:
        tail = chance.randbytes(size) if kind == "noise" else bytes(size)
    with open(last, "ab") as file:
        file.write(tail)
    return f"{len(tail)} bytes of {kind} behind the end of its log"


def flip_bit(data: Path, chance: random.Random) -> str:
    """Flip one bit in the older half of the commit log; says where."""
    path = chance.choice(_log_files(data))
    with open(path, "r+b") as file:
        size = file.seek(0, 2)
        at = _HEAD_BYTES + chance.randrange(max(1, (size - _HEAD_BYTES) // 2))
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
    return f"a bit flipped in {path.name} at byte {at}"
