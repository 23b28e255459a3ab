"""The frames that wait to leave on one stream: bounded, in order, written by one task.

Invariants: at most ``bytes_max`` and one message wait (plus what the transport buffers, 64 KiB); who wants to add
more waits, and so stops reading from this peer; frames of one ``put`` may be followed by frames of another only
between frames. Only the one writer ever waits for the transport: aiohttp shares one future among all who do, and
a cancelled exchange would break it for the others.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from aiohttp import web

from firn.limits import FRAME_BYTES_MAX
from firn_node.server.sendfile import guarded


class Outbox:
    def __init__(
        self,
        socket: "web.WebSocketResponse",
        *,
        bytes_max: int,
        stall_seconds: float,
        abort: Callable[[], None],
    ) -> None:
        self._abort = abort
        self._socket = socket
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
        """Queue a small frame without waiting; for answers whose number is bounded elsewhere."""
        if self.is_lost:
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

    async def room(self) -> None:
        """Wait until less than the bound waits, or the connection is lost."""
        while self.bytes >= self._bytes_max and not self.is_lost:
            turn = asyncio.get_running_loop().create_future()
            self._room.append(turn)
            await turn

    async def flushed(self) -> None:
        """Wait until everything queued is written or the connection is lost."""
        await self._idle.wait()

    async def _write(self) -> None:
        try:
            while True:
                while self._frames:
                    await guarded(self._burst(), self._stall_seconds)
                self._idle.set()
                self._something.clear()
                await self._something.wait()
        except (ConnectionError, RuntimeError):  # RuntimeError: aiohttp's word for a socket that was closed
            self._abort()
        finally:
            self._lose()

    async def _burst(self) -> None:
        """Write frames up to about one of full size: one watch over the peer for many small answers."""
        begun = self.bytes_sent
        while self._frames and self.bytes_sent - begun < FRAME_BYTES_MAX:
            frame = self._frames[0]
            await self._socket.send_bytes(frame)
            self._frames.popleft()
            self.bytes -= len(frame)
            self.bytes_sent += len(frame)
            if self._room and self.bytes < self._bytes_max:
                self._wake()

    def _wake(self) -> None:
        # All of them: each looks again, and a cancelled one must not keep its turn from the others.
        while self._room:
            turn = self._room.popleft()
            if not turn.done():
                turn.set_result(None)

    def _lose(self) -> None:
        self.is_lost = True
        self._frames.clear()
        self.bytes = 0
        self._idle.set()
        self._wake()

    async def close(self) -> None:
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
