"""The one door to files: everything the broker stores goes through a ``Disk`` (RocksDB's own files excepted).

Invariants that callers may rely on:

- a file's bytes are durable after ``sync``; its name is durable after ``sync_folder`` of its folder;
- ``replace_file`` leaves the old or the new content whole, whatever instruction a crash hits;
- every failure is an ``OSError`` with an errno; nothing is swallowed.

Tests use a second implementation (``tests/support``) that loses what was not synced, tears writes, flips bits
and fails on demand. Files are read by ``pread`` and never mapped: a bad sector is an error, not a signal.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from firn_node.freeing import SpaceFreer
from firn_node.kernels.gathering import pread_many

Data = bytes | bytearray | memoryview
Mode = Literal["read", "write", "create"]
IOV_MAX = 1024


class File(Protocol):
    """An open file. Methods may be called from any thread; positions are explicit."""

    @property
    def path(self) -> str: ...

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes; fewer at the end of the file only."""
        ...

    def pwrite(self, buffers: Sequence[Data], position: int) -> int:
        """Write all of the buffers, one after another. *Effects*: on an error any part may be there."""
        ...

    def sync(self) -> None:
        """fdatasync. *Errors*: after a failure the page cache cannot be trusted: stop using the file."""
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def fileno(self) -> int | None:
        """The descriptor for ``sendfile``, or None where there is none (simulated disks)."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    def open(self, path: str, mode: Mode = "read") -> File:
        """``read``: must exist. ``write``: read and write, must exist. ``create``: read and write, must not."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty when there is no such folder."""
        ...

    def make_folder(self, folder: str) -> None:
        """Make a folder and its parents; each new name is durable on return."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None:
        """Remove a file; one that is gone already is no error. *Effects*: a large one's space may come back later."""
        ...

    def remove_tree(self, folder: str) -> None: ...

    def sync_folder(self, folder: str) -> None: ...

    def free(self) -> tuple[int, int]:
        """Free and total bytes of the file system."""
        ...

    def lock(self, path: str) -> "contextlib.AbstractContextManager[None]":
        """An exclusive lock for the life of the process. *Errors*: BlockingIOError when another holds it."""
        ...


def gather(
    file: File, positions: NDArray[np.int64], sizes: NDArray[np.int64], out: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8] | None:
    """Many ranges of a file, one after another; None when one of them passes its end. *Errors*: OSError.

    ``out``: where they go, as long as they are. Memory that is used again costs no page faults, half of a large read.
    """
    ends = np.cumsum(sizes)
    if out is None:
        out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    fd, done = file.fileno(), 0
    if fd is not None:
        done = int(pread_many(fd, positions, sizes, out))
    for at in range(done, len(sizes)):  # no descriptor, or a range that cannot be read as a whole
        size = int(sizes[at])
        data = file.pread(size, int(positions[at]))
        if len(data) != size:
            return None
        out[int(ends[at]) - size : int(ends[at])] = np.frombuffer(data, np.uint8)
    return out


def is_in_memory(file: File, position: int, size: int) -> bool:
    """Whether a range can be read without a disk, by its two ends and its middle; False where nobody can tell."""
    fd = file.fileno()
    if fd is None or size <= 0:
        return False
    byte = bytearray(1)
    try:
        return all(
            os.preadv(fd, [byte], at, os.RWF_NOWAIT) == 1
            for at in (position, position + size // 2, position + size - 1)
        )
    except OSError:  # EAGAIN: it is not; ENOTSUP: this file system does not say
        return False


def read_file(disk: Disk, path: str) -> bytes:
    """All bytes of a file. *Errors*: FileNotFoundError."""
    file = disk.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: Data | Sequence[Data]) -> None:
    """Put ``data`` at ``path`` atomically. *Effects*: durable on return; may be repeated.

    1. write a temporary name, 2. sync it, 3. rename, 4. sync the folder.
    """
    temporary = f"{path}.tmp"
    disk.unlink(temporary)
    file = disk.open(temporary, "create")
    try:
        file.pwrite([data] if isinstance(data, bytes | bytearray | memoryview) else data, 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_folder(os.path.dirname(path))


def is_full(error: OSError) -> bool:
    """Whether the write could succeed once there is room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class RealFile:
    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, size: int, position: int) -> bytes:
        data = os.pread(self._fd, size, position)
        if len(data) == size or not data:
            return data
        parts, got = [data], len(data)
        while got < size and (data := os.pread(self._fd, size - got, position + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def pwrite(self, buffers: Sequence[Data], position: int) -> int:
        total = 0
        for first in range(0, len(buffers), IOV_MAX):
            group = buffers[first : first + IOV_MAX]
            wanted = sum(map(len, group))
            done = os.pwritev(self._fd, group, position + total)
            while done < wanted:  # a short write: the rest at once, so that the error (ENOSPC) shows
                rest = memoryview(b"".join(group))[done:]
                more = os.pwrite(self._fd, rest, position + total + done)
                if more <= 0:
                    raise OSError(errno.EIO, "write made no progress", self.path)
                done += more
            total += wanted
        return total

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def fileno(self) -> int | None:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealDisk:
    """The machine's own file system; ``root`` only tells whose free space counts."""

    def __init__(self, root: str | Path) -> None:
        self._root = str(root)
        self._freer = SpaceFreer()

    def open(self, path: str, mode: Mode = "read") -> RealFile:
        flags = {"read": os.O_RDONLY, "write": os.O_RDWR, "create": os.O_RDWR | os.O_CREAT | os.O_EXCL}[mode]
        return RealFile(path, os.open(path, flags | os.O_CLOEXEC, 0o640))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def make_folder(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder) or "."
        self.make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o750)
        self.sync_folder(parent)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._freer.unlink(path)

    def remove_tree(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)

    def sync_folder(self, folder: str) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self) -> tuple[int, int]:
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    @contextlib.contextmanager
    def lock(self, path: str):  # type: ignore[no-untyped-def]
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)
