"""Simulated time for code of asyncio and threads: the same order of everything for the same seed.

``SimLoop`` waits for nothing: when no task can go on, its time is that of the next timer. What is given to a pool of
threads runs at once. A function that others are to interrupt runs in a ``Turn``: a thread that runs while the loop
stands still, and gives the turn back where it pauses.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
_current = threading.local()


class Died(Exception):
    """The process that ran this has ended."""


class _Skips(selectors.SelectSelector):
    """Passes over the time that it is to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left to happen")
        self.skipped += max(timeout, 0.0)
        return super().select(0)


class SimLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skips = _Skips()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.skipped

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # the pool's boundary: whoever awaits it gets it
            future.set_exception(error)
        return future


class Turn:
    """``future``: of what the function gives; the first turn is its own to ask for (``go``)."""

    def __init__(self, loop: SimLoop, function: Callable[..., Any], *arguments: Any) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()
        self._loop = loop
        self._function = function
        self._arguments = arguments
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._is_dead = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self) -> None:
        """In the loop: run it until it pauses or ends."""
        if self._is_over:
            return
        self._go.release()
        self._back.acquire()
        if not self._is_over:
            return
        self._thread.join()
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)

    def kill(self) -> None:
        """In the loop: end it where it pauses."""
        self._is_dead = True
        self.go()

    def pause(self, seconds: float) -> None:
        """In the thread: let everything else go on for so long. *Errors*: Died."""
        self._check()
        self._loop.call_later(seconds, self.go)
        self._give_back()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """In the thread: what a coroutine of the loop gives. *Errors*: its own; Died."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self.go())
        self._give_back()
        return task.result()

    def _give_back(self) -> None:
        self._back.release()
        self._go.acquire()
        self._check()

    def _check(self) -> None:
        if self._is_dead:
            raise Died("the process has ended")

    def _run(self) -> None:
        self._go.acquire()
        _current.turn = self
        try:
            self._check()
            self._result = self._function(*self._arguments)
        except Exception as error:  # the thread's boundary: the future has it
            self._error = error
        self._is_over = True
        self._back.release()


def current_turn() -> Turn | None:
    """Of the thread that asks."""
    return getattr(_current, "turn", None)
