"""What leaves on one stream: bounded, in order, at once where the transport has room.

Invariants: at most ``bytes_max`` and one message wait (plus what the transport buffers, 64 KiB); who wants to add
more waits, and so stops reading from this peer; frames of one ``put`` may be followed by frames of another only
between frames. Only the one writer ever waits for the transport: aiohttp shares one future among all who do, and
a cancelled exchange would break it for the others.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from firn_node.server.sendfile import guarded


class Link(Protocol):
    """The connection as the outbox sees it."""

    @property
    def is_full(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    def send(self, frame: bytes) -> None: ...
    def room(self) -> Coroutine[Any, Any, None]:
        """Returns when it is no longer full. *Errors*: ConnectionError when it is lost."""
        ...


class Outbox:
    def __init__(
        self, link: Link, *, bytes_max: int, stall_seconds: float, abort: Callable[[], None]
    ) -> None:
        self._abort = abort
        self._link = link
        self._bytes_max = bytes_max
        self._stall_seconds = stall_seconds
        self._frames: deque[bytes] = deque()
        self._room: deque[asyncio.Future[None]] = deque()
        self._something = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.bytes = 0
        self.bytes_sent = 0
        self.is_lost = False
        self._writer = asyncio.create_task(self._write(), name="firn stream writer")

    def put_now(self, frame: bytes) -> None:
        """Send or queue a small frame without waiting; for answers whose number is bounded elsewhere."""
        if self.is_lost:
            return
        if not self._frames and not self._link.is_full:
            self._send(frame)
            return
        self._frames.append(frame)
        self.bytes += len(frame)
        self._idle.clear()
        self._something.set()

    async def put(self, frame: bytes) -> None:
        """Queue a frame once there is room. *Errors*: ConnectionResetError when the peer has gone."""
        await self.room()
        if self.is_lost:
            raise ConnectionResetError("the connection is lost")
        self.put_now(frame)

    @property
    def has_room(self) -> bool:
        return self.bytes < self._bytes_max

    async def room(self) -> None:
        """Wait until less than the bound waits, or the connection is lost."""
        while not self.has_room and not self.is_lost:
            turn = asyncio.get_running_loop().create_future()
            self._room.append(turn)
            await turn

    async def flushed(self) -> None:
        """Wait until everything queued is written or the connection is lost."""
        await self._idle.wait()

    def _send(self, frame: bytes) -> None:
        self._link.send(frame)
        self.bytes_sent += len(frame)

    async def _write(self) -> None:
        """Send what was queued because the link was full."""
        try:
            while True:
                while self._frames:
                    await guarded(self._link.room(), self._stall_seconds)
                    self._burst()
                self._idle.set()
                self._something.clear()
                await self._something.wait()
        except ConnectionError:
            self._abort()
        finally:
            self.lose()

    def _burst(self) -> None:
        if not self._link.is_open:
            raise ConnectionResetError("the connection is lost")
        while self._frames and not self._link.is_full:
            frame = self._frames.popleft()
            self.bytes -= len(frame)
            self._send(frame)
        if self._room and self.has_room:
            self._wake()

    def _wake(self) -> None:
        # All of them: each looks again, and a cancelled one must not keep its turn from the others.
        while self._room:
            turn = self._room.popleft()
            if not turn.done():
                turn.set_result(None)

    def lose(self) -> None:
        """Nothing more can leave: forget what waits, and tell those who wait."""
        self.is_lost = True
        self._frames.clear()
        self.bytes = 0
        self._idle.set()
        self._wake()

    async def close(self) -> None:
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
