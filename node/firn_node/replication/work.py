"""What one replica has under way beside the event loop: tasks, and one thread for small durable writes and cuts."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from firn.errors import FirnError

log = logging.getLogger("firn.replication")


class Work:
    """``failed`` is told why, when a task fails: that ends the replica's part in its group."""

    def __init__(self, name: str, failed: Callable[[str], None]) -> None:
        self._name = name
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="firn-group")

    def in_thread(self, work: Callable[[], None]) -> "asyncio.Future[None]":
        """Done when the work is, which begins after all that was given before it."""
        return self._loop.run_in_executor(self._thread, work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = self._loop.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """The boundary of one task."""
        try:
            await work
        except Exception as error:
            log.exception("group %s", self._name)
            self._failed(error.message if isinstance(error, FirnError) else repr(error))

    async def end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end_thread(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
