"""Gives the space of large removed files back in steps, in a thread of its own, beside what must not wait for it.

A file system frees all blocks of a file in the call that ends its last name or descriptor. Mounted with ``discard`` it
tells the device of each, and without a journal it waits for that: 0.4 s for 256 MiB that were synced, in which every
``fdatasync`` waits too. So a large file loses its name at once, and is then cut from its end, piece by piece. Between two
pieces the disk is left alone for longer than one took; where that is nothing, as on most, there is nothing to wait for.

Invariants:

- a file that anybody else has open, or that has another name, is not cut: it goes with its last user;
- more than ``BACKLOG_BYTES_MAX`` are given back without pauses: whoever removes much needs the room.

A process that ends leaves the rest to the file system. *Rejected*: a rate in bytes: what a disk can take is not known.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

STEP_BYTES = 8 << 20  # of synced bytes that are discarded: 15-20 ms
LARGE_BYTES_MIN = 2 * STEP_BYTES
PAUSE_STEPS = 3  # so that the disk has three quarters of the time for others
BACKLOG_BYTES_MAX = 1 << 30


class SpaceFreer:
    def __init__(
        self,
        *,
        cut: Callable[[int, int], None] = os.ftruncate,
        sleep: Callable[[float], None] = time.sleep,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        self._cut_to = cut
        self._sleep = sleep
        self._backlog_bytes_max = backlog_bytes_max
        self._lock = threading.Lock()
        self._files: deque[tuple[int, int]] = deque()  # descriptor and size; the first one is being cut
        self._bytes = 0  # of all of them
        self._thread: threading.Thread | None = None

    @property
    def backlog_bytes(self) -> int:
        """Of removed files; 0 once all are closed."""
        return self._bytes

    def unlink(self, path: str) -> None:
        """Remove a name; the space of a large file follows. *Errors*: OSError; the name is there then."""
        fd = _opened_if_large(path)
        try:
            os.unlink(path)
        except OSError:
            if fd is not None:
                os.close(fd)
            raise
        if fd is not None:
            self._take(fd)

    def _take(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="firn-freeing", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a machine without room for one: in one piece, then
                    log.warning("a removed file cannot be cut: %s", error)
                    os.close(fd)
                    return
                self._thread = thread
            self._files.append((fd, size))
            self._bytes += size

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._files:
                    self._thread = None
                    return
                fd, size = self._files[0]
            try:
                if _is_ours_alone(fd):
                    self._cut(fd, size)
            except OSError as error:  # its space comes back all the same, in one piece
                log.warning("a removed file cannot be cut: %s", error)
            finally:
                with contextlib.suppress(OSError):
                    os.close(fd)
                with self._lock:
                    self._files.popleft()
                    self._bytes = sum(size for _, size in self._files)

    def _cut(self, fd: int, size: int) -> None:
        for end in range(size - STEP_BYTES, 0, -STEP_BYTES):
            began = time.monotonic()
            self._cut_to(fd, end)
            took = time.monotonic() - began
            with self._lock:
                self._bytes -= STEP_BYTES
                is_pressed = self._bytes > self._backlog_bytes_max
            if not is_pressed:
                self._sleep(took * PAUSE_STEPS)


def _opened_if_large(path: str) -> int | None:
    try:
        if os.stat(path, follow_symlinks=False).st_size < LARGE_BYTES_MIN:
            return None
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # unlinked as it is; what is wrong with it shows there


def _is_ours_alone(fd: int) -> bool:
    """Whether a file without a name has no other user: only then does the kernel give a lease for writing."""
    if os.fstat(fd).st_nlink:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
