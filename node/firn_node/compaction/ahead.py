"""Checks batches, and blocks of key indexes, that are likely to be asked for next, in a thread of its own.

The first touch of a batch since its file was opened reads and checks all of it: 0.3 ms of a MiB, more than all else that
a look-up of one key does. Who looks up keys one by one comes back for other batches of the same file; so a first touch
has those behind it checked meanwhile, as far as they are in the machine's memory: nothing is read from a disk for it.

Invariants: only what passed the checks of a first touch counts as touched; what fails them here is told to whoever asks
for it; at most ``WAITING_MAX`` checks wait, and further ones are not made: nobody depends on one.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from firn.errors import FirnError

log = logging.getLogger(__name__)

BATCHES = 2  # behind one that was touched: then two thirds of all first touches are made here
BLOCKS = 4  # of a key index, the same: 64 KiB each
BATCH_BYTES_MIN = 128 << 10  # smaller ones are checked in less time than asking for it costs
WAITING_MAX = 64

Check = Callable[[], object]


class Ahead:
    """Runs checks one after another; its thread ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Check] = deque()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition(self._lock)

    def settle(self, *, drops: bool) -> None:
        """Return when nothing is being checked; ``drops``: what waits is not checked at all."""
        with self._idle:
            if drops:
                self._waiting.clear()
            self._idle.wait_for(lambda: self._thread is None)

    def ask(self, check: Check) -> None:
        """Have something checked, some time. It may raise FirnError and OSError; nobody is told."""
        with self._lock:
            if len(self._waiting) >= WAITING_MAX:
                return
            self._waiting.append(check)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="firn-ahead", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a machine without room for one: whoever asks goes on
                    self._waiting.clear()
                    log.debug("nothing is checked ahead: %s", error)
                    return
                self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    self._idle.notify_all()
                    return
                check = self._waiting.popleft()
            try:
                check()
            except (FirnError, OSError) as error:  # a file that is gone, or damage that a touch will tell
                log.debug("a batch was not checked ahead: %s", error)
            except Exception:  # the boundary of this thread: nobody depends on it
                log.exception("checking batches ahead")


AHEAD = Ahead()  # of this process, as the cache of batches
