"""Syncs of the log for the core: one ``fdatasync`` at a time, in a thread of its own, for all written before it.

Each is told with the number of cuts before it began, because one that began before a cut proves nothing (rule 15).
"""

import asyncio
import logging
import threading
from collections.abc import Callable

from firn.types import Position
from firn_node.log import CommitLog

log = logging.getLogger("firn.replication")


class Syncer:
    """``cuts`` is read in the thread when a sync begins; ``durable`` and ``failed`` are called on the event loop."""

    def __init__(
        self, commit_log: CommitLog, *, cuts: Callable[[], int], durable: Callable[[Position, int], None],
        failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._log = commit_log
        self._cuts = cuts
        self._durable = durable
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Event()
        self._is_busy = False
        self._era = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="firn-replica-sync", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Sync what is written now; durable is told when it is."""
        if self._log.durable_end < self._log.written_end:
            self._begin()

    def void(self) -> None:
        """Positions have another meaning from here on, the log having been moved: what is under way proves nothing."""
        self._era += 1

    def _begin(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._wanted.set()

    async def stop(self) -> None:
        """End the thread; a sync under way ends first."""
        self._is_stopping = True
        self._wanted.set()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_stopping:
                return
            era, cuts = self._era, self._cuts()
            try:
                end = self._log.sync()
            except (
                Exception
            ) as error:  # the boundary of this thread; a log whose sync failed is broken for good
                log.exception("sync of the commit log")
                self._tell(self._failed, f"fsync failed: {error}; the page cache cannot be trusted")
                return
            self._tell(self._synced, Position(end), cuts, era)

    def _tell(self, callback: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *values)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            self._is_stopping = True

    def _synced(self, end: Position, cuts: int, era: int) -> None:
        self._is_busy = False
        if era == self._era:
            self._durable(end, cuts)
        if era != self._era or cuts != self._cuts():
            self._begin()  # what this one covered, if it came after the cut, has to be told
        else:
            self.request()
