"""A bounded number of open files, shared by readers.

Invariants: a file with a lease stays open; beyond ``limit`` the file idle for longest is closed; a retired file
is unlinked when its last lease ends (at once when there is none), and opened no more, also while it is unlinked: kept
open by a name that is free, it would keep its space, and be read in place of the next file of that name.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from firn_node.disk import Disk, File, is_in_memory


@dataclass(slots=True)
class _Open:
    file: File
    leases: int = 0
    retired: bool = False


class Lease:
    """A file that stays open until ``release``; releasing twice is harmless."""

    __slots__ = ("_cache", "_held", "file", "path")

    def __init__(self, cache: "FileCache", path: str, file: File) -> None:
        self._cache = cache
        self._held = True
        self.path = path
        self.file = file

    def release(self) -> None:
        if self._held:
            self._held = False
            self._cache._release(self.path)

    def __enter__(self) -> File:
        return self.file

    def __exit__(self, *_: object) -> None:
        self.release()


class FileRange(NamedTuple):
    """Bytes ``[start, start + size)`` of a leased file, for ``pread`` or ``sendfile``. The taker releases."""

    lease: Lease
    start: int
    size: int

    def read(self) -> bytes:
        return self.lease.file.pread(self.size, self.start)

    def is_real(self) -> bool:
        """Whether the machine can say what of this file is in memory. Releases."""
        with self.lease as file:
            return file.fileno() is not None

    def is_in_memory(self) -> bool:
        """Whether it can be read without a disk; False where nobody can tell. Releases."""
        with self.lease as file:
            return is_in_memory(file, self.start, self.size)


class FileCache:
    def __init__(self, disk: Disk, limit: int) -> None:
        self.disk = disk
        self._limit = limit
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._going: set[str] = set()  # being unlinked
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def lease(self, path: str) -> Lease:
        """The file at ``path``, open for reading. *Errors*: FileNotFoundError, also for a retired file."""
        with self._lock:
            if path in self._going:
                raise FileNotFoundError(path)
            found = self._open.get(path)
            if found is None:
                found = self._open[path] = _Open(self.disk.open(path))
                self._shrink(keep=path)
            if found.retired:
                raise FileNotFoundError(path)
            found.leases += 1
            self._open.move_to_end(path)
            return Lease(self, path, found.file)

    @contextmanager
    def reading(self, path: str) -> Iterator[File]:
        lease = self.lease(path)
        try:
            yield lease.file
        finally:
            lease.release()

    def retire(self, path: str) -> None:
        """Unlink the file once nobody reads it. *Effects*: not durable; leftovers are removed at start."""
        with self._lock:
            found = self._open.get(path)
            if found is not None and found.leases:
                found.retired = True
                return
            if found is not None:
                del self._open[path]
                found.file.close()
            self._going.add(path)
        self._unlink(path)

    def _unlink(self, path: str) -> None:
        try:
            self.disk.unlink(path)
        finally:
            with self._lock:
                self._going.discard(path)

    def close(self) -> None:
        with self._lock:
            for found in self._open.values():
                found.file.close()
            self._open.clear()

    def _release(self, path: str) -> None:
        with self._lock:
            found = self._open.get(path)
            if found is None:
                return
            found.leases -= 1
            if found.leases or not found.retired:
                self._shrink(keep=None)
                return
            del self._open[path]
            found.file.close()
            self._going.add(path)
        self._unlink(path)

    def _shrink(self, *, keep: str | None) -> None:
        if len(self._open) <= self._limit:
            return
        for path in [p for p, o in self._open.items() if not o.leases and p != keep]:
            self._open.pop(path).file.close()
            if len(self._open) <= self._limit:
                return
