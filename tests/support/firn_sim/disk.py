"""A ``Disk`` in memory that forgets what was not made durable, and fails on demand.

The fault model:

- a file's bytes are durable after its ``sync``; of later writes, ``crash`` keeps a random subset of the
  sectors (512 B or whole 4 KiB pages, drawn per crash), and the size before, after, or in between
  (zero-filled);
- a name (create, rename, unlink) is durable after ``sync_folder``; of later ones, ``crash`` keeps a random
  prefix in their order, as a journal does; ``make_folder``, ``remove_tree`` and the rename of a folder are durable on
  return;
- a failed ``sync`` drops the dirty pages: the bytes are read until ``crash``, yet no later sync writes them;
- a failed ``pwrite`` leaves a random prefix of its bytes;
- ``kill`` ends the process alone: what was written stays readable, what was not durable stays not durable.

Operations that change something are counted (``operations``), so that a test runs once, reads the count and
then fails each one in turn (``fail``). Everything random comes from one seed.
"""

import contextlib
import errno
import os
import posixpath
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from firn_node.disk import Data, Mode

SECTOR = 512
PAGE = 4096
CHANGES = frozenset(
    {"create", "pwrite", "sync", "truncate", "rename", "unlink", "sync_folder", "make_folder"}
)


@dataclass(slots=True)
class _Inode:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: set[int] = field(default_factory=set)  # sectors written since the last sync
    is_resized: bool = False


@dataclass(slots=True)
class _Folder:
    live: dict[str, _Inode] = field(default_factory=dict)
    durable: dict[str, _Inode] = field(default_factory=dict)
    changes: list[tuple[str, _Inode | None]] = field(default_factory=list)  # since the last sync, in order

    def put(self, name: str, inode: _Inode | None) -> None:
        _apply(self.live, name, inode)
        self.changes.append((name, inode))


def _apply(names: dict[str, _Inode], name: str, inode: _Inode | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


@dataclass(slots=True)
class _Fault:
    left: int
    error: int
    kinds: Collection[str]
    path_ends: str


class SimFile:
    """An open file of a ``SimDisk``; dead after ``crash`` or ``kill``."""

    def __init__(self, disk: "SimDisk", path: str, inode: _Inode, *, is_writable: bool) -> None:
        self.path = path
        self._disk = disk
        self._inode = inode
        self._life = disk.life
        self._is_writable = is_writable
        self._is_open = True

    def pread(self, size: int, position: int) -> bytes:
        with self._disk.mutex:
            self._check()
            self._disk._slow("pread", self.path)
            return bytes(self._inode.live[position : position + size])

    def pwrite(self, buffers: Sequence[Data], position: int) -> int:
        data = b"".join(bytes(b) for b in buffers)
        with self._disk.mutex:
            self._check(write=True)
            if (code := self._disk._change("pwrite", self.path)) is not None:
                self._put(data[: self._disk.random.randint(0, len(data))], position)
                raise OSError(code, os.strerror(code), self.path)
            grown = max(0, position + len(data) - len(self._inode.live))
            if (room := self._disk._room()) < grown:
                self._put(data[: max(0, len(data) - grown + room)], position)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            self._put(data, position)
        return len(data)

    def _put(self, data: bytes, position: int) -> None:
        live = self._inode.live
        if len(live) < position:
            live += bytes(position - len(live))
        live[position : position + len(data)] = data
        if data:
            self._inode.dirty.update(range(position // SECTOR, (position + len(data) - 1) // SECTOR + 1))

    def sync(self) -> None:
        self._disk._slow("sync", self.path)
        with self._disk.mutex:
            self._check()
            code = self._disk._change("sync", self.path)
            self._inode.is_resized = False
            if code is not None:
                self._inode.dirty.clear()
                raise OSError(code, os.strerror(code), self.path)
            if len(self._inode.live) != len(self._inode.durable) or self._inode.dirty:
                self._inode.durable = _merged(self._inode, self._inode.dirty, len(self._inode.live))
                self._inode.dirty.clear()

    def truncate(self, size: int) -> None:
        with self._disk.mutex:
            self._check(write=True)
            self._disk._change_or_raise("truncate", self.path)
            live = self._inode.live
            if size < len(live):
                self._inode.dirty.update(range(size // SECTOR, (len(live) - 1) // SECTOR + 1))
                del live[size:]
            else:
                live += bytes(size - len(live))
            self._inode.is_resized = True

    def size(self) -> int:
        with self._disk.mutex:
            self._check()
            return len(self._inode.live)

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self._is_open = False

    def _check(self, *, write: bool = False) -> None:
        if not self._is_open or self._life != self._disk.life or (write and not self._is_writable):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)


def _merged(inode: _Inode, sectors: Collection[int], size: int) -> bytes:
    """The durable bytes with some sectors of the live ones, at a size; holes are zeros."""
    merged = bytearray(inode.durable[:size]) + bytes(max(0, size - len(inode.durable)))
    for sector in sectors:
        start, end = sector * SECTOR, min((sector + 1) * SECTOR, size)
        if start < end:
            piece = inode.live[start:end]
            merged[start:end] = piece + bytes(end - start - len(piece))
    return bytes(merged)


class SimDisk:
    def __init__(self, seed: int = 0, *, capacity: int = 1 << 40) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.delay: Callable[[str, str], None] | None = None  # called with operation and path, may sleep
        self.operations: list[tuple[str, str]] = []  # every change so far: what, path
        self.life = 0
        self.mutex = threading.RLock()
        self._folders: dict[str, _Folder] = {"/": _Folder(), "": _Folder()}
        self._faults: list[_Fault] = []
        self._locks: set[str] = set()

    # The Disk interface.

    def open(self, path: str, mode: Mode = "read") -> SimFile:
        with self.mutex:
            folder, name = self._split(path)
            inode = folder.live.get(name)
            if mode == "create":
                if inode is not None:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                self._change_or_raise("create", path)
                inode = _Inode()
                folder.put(name, inode)
            if inode is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return SimFile(self, path, inode, is_writable=mode != "read")

    def exists(self, path: str) -> bool:
        with self.mutex:
            if path in self._folders:
                return True
            folder = self._folders.get(posixpath.dirname(path))
            return folder is not None and posixpath.basename(path) in folder.live

    def list(self, folder: str) -> list[str]:
        with self.mutex:
            found = self._folders.get(folder.rstrip("/") or "/")
            if found is None:
                return []
            inner = {
                posixpath.basename(f)
                for f in self._folders
                if f not in ("", "/") and posixpath.dirname(f) == folder
            }
            return sorted(inner | set(found.live))

    def make_folder(self, folder: str) -> None:
        with self.mutex:
            if folder in self._folders:
                return
            self.make_folder(posixpath.dirname(folder))
            self._change_or_raise("make_folder", folder)
            self._folders[folder] = _Folder()

    def rename(self, source: str, target: str) -> None:
        with self.mutex:
            if source in self._folders:
                self._rename_folder(source, target)
                return
            (source_folder, source_name), (folder, name) = self._split(source), self._split(target)
            inode = source_folder.live.get(source_name)
            if inode is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            self._change_or_raise("rename", target)
            folder.put(name, inode)
            source_folder.put(source_name, None)

    def _rename_folder(self, source: str, target: str) -> None:
        """As with ``make_folder``, the names of folders are durable at once."""
        self._change_or_raise("rename", target)
        for name in [f for f in self._folders if f == source or f.startswith(f"{source}/")]:
            self._folders[target + name[len(source) :]] = self._folders.pop(name)

    def unlink(self, path: str) -> None:
        with self.mutex:
            folder = self._folders.get(posixpath.dirname(path))
            name = posixpath.basename(path)
            if folder is None or name not in folder.live:
                return
            self._change_or_raise("unlink", path)
            folder.put(name, None)

    def remove_tree(self, folder: str) -> None:
        with self.mutex:
            for name in [f for f in self._folders if f == folder or f.startswith(f"{folder}/")]:
                del self._folders[name]

    def sync_folder(self, folder: str) -> None:
        self._slow("sync_folder", folder)
        with self.mutex:
            found = self._folders.get(folder)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
            self._change_or_raise("sync_folder", folder)
            found.durable = dict(found.live)
            found.changes.clear()

    def free(self) -> tuple[int, int]:
        with self.mutex:
            return max(0, self._room()), self.capacity

    @contextlib.contextmanager
    def lock(self, path: str) -> Iterator[None]:
        with self.mutex:
            if path in self._locks:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
            self._locks.add(path)
        try:
            yield
        finally:
            self._locks.discard(path)

    # What tests do to it.

    def crash(self) -> None:
        """Power loss: the durable rest survives, torn where it was being written; open files are dead."""
        with self.mutex:
            self.kill()
            page_tears = self.random.random() < 0.5
            share = self.random.choice((0.0, 0.5, 0.5, 1.0))
            torn: set[int] = set()
            for folder in self._folders.values():
                for name, inode in folder.changes[: self.random.randint(0, len(folder.changes))]:
                    _apply(folder.durable, name, inode)
                folder.changes.clear()
                folder.live = dict(folder.durable)
            for inode in (i for f in self._folders.values() for i in f.live.values()):
                if id(inode) not in torn:
                    torn.add(id(inode))
                    self._tear(inode, share, page_tears=page_tears)

    def _tear(self, inode: _Inode, share: float, *, page_tears: bool) -> None:
        grain = PAGE // SECTOR if page_tears else 1
        chosen = {g for g in sorted({s // grain for s in inode.dirty}) if self.random.random() < share}
        sectors = {s for s in inode.dirty if s // grain in chosen}
        sizes = [len(inode.durable)]
        if inode.dirty or inode.is_resized:
            sizes.append(len(inode.live))
            if sectors:
                least, most = sorted((len(inode.durable), len(inode.live)))
                sizes.append(min(max((max(sectors) + 1) * SECTOR, least), most))
        size = self.random.choice(sizes)
        inode.durable = _merged(inode, sectors, size)
        inode.live = bytearray(inode.durable)
        inode.dirty.clear()
        inode.is_resized = False

    def kill(self) -> None:
        """The process ends, the machine goes on: open files are dead, unsynced bytes still readable."""
        with self.mutex:
            self.life += 1
            self._locks.clear()
            self._faults.clear()

    def fail(
        self, at: int, error: int = errno.EIO, *, kinds: Collection[str] = CHANGES, path_ends: str = ""
    ) -> None:
        """Fail the ``at``-th (from 1) change from now on, once; several faults may be pending."""
        self._faults.append(_Fault(at, error, kinds, path_ends))

    def heal(self) -> None:
        self._faults.clear()

    def flip(self, path: str, position: int, bit: int = 0) -> None:
        """Flip one bit, on the platter and in the cache."""
        with self.mutex:
            inode = self._inode(path)
            inode.live[position] ^= 1 << bit
            if position < len(inode.durable):
                durable = bytearray(inode.durable)
                durable[position] ^= 1 << bit
                inode.durable = bytes(durable)

    def content(self, path: str) -> bytes:
        with self.mutex:
            return bytes(self._inode(path).live)

    def put(self, path: str, data: bytes) -> None:
        """Durable content at a path, whatever was there."""
        with self.mutex:
            folder, name = self._split(path)
            inode = _Inode(bytearray(data), data)
            folder.put(name, inode)
            folder.durable[name] = inode

    def _inode(self, path: str) -> _Inode:
        folder, name = self._split(path)
        return folder.live[name]

    def _split(self, path: str) -> tuple[_Folder, str]:
        folder = self._folders.get(posixpath.dirname(path))
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return folder, posixpath.basename(path)

    def _room(self) -> int:
        return self.capacity - sum(len(i.live) for f in self._folders.values() for i in f.live.values())

    def _slow(self, kind: str, path: str) -> None:
        if self.delay is not None:
            self.delay(kind, path)

    def _change(self, kind: str, path: str) -> int | None:
        """Count a change; the errno to fail it with, if any."""
        self.operations.append((kind, path))
        if kind != "sync" and kind != "sync_folder":
            self._slow(kind, path)
        for fault in self._faults:
            if kind in fault.kinds and path.endswith(fault.path_ends):
                fault.left -= 1
                if fault.left == 0:
                    self._faults.remove(fault)
                    return fault.error
        return None

    def _change_or_raise(self, kind: str, path: str) -> None:
        if (code := self._change(kind, path)) is not None:
            raise OSError(code, os.strerror(code), path)
