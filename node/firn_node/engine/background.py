"""The tasks and threads of one broker, none of which outlives it."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._in_threads: set[asyncio.Future[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it until it ends, or the broker does."""
        self._tasks = [t for t in self._tasks if not t.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))

    def start_thread(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        future = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return future

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function gives in a thread, which ``end`` waits for even when its caller was cancelled."""
        return await asyncio.shield(self.start_thread(function, *arguments))

    async def end(self) -> None:
        """Cancel the tasks, and wait for what they have begun in threads: nothing is closed under it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.threads_ended()

    async def threads_ended(self) -> None:
        await asyncio.gather(*self._in_threads, return_exceptions=True)
