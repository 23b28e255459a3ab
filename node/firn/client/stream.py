"""One WebSocket to one broker: exchanges by number, several at a time.

Messages leave whole, one after another, so that pipelined produces arrive in the order they were given. When the
connection ends, every open exchange ends with ``Unavailable``; who asked decides whether to ask again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from firn.batch import Buffer
from firn.errors import FirnError, InvariantBroken, NotMaster, Timeout, Unavailable, from_document
from firn.wire import STREAM_VERSION, Assembler, Message, Op, frames

log = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
# Answers under way: pages of readers, and values of `get_many`.
ANSWER_BYTES_MAX = 512 << 20
OPEN_ANSWERS_MAX = 1 << 16
FRAME_READ_MAX = 4 << 20

Handler = Callable[["Message | FirnError"], None]


class Stream:
    """An open connection. ``is_open`` turns false for good when it ends."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self.address = address
        self._socket = socket
        self._handlers: dict[int, Handler] = {}
        self._next_id = 1
        self._sending = asyncio.Lock()
        self._assembler = Assembler(bytes_max=ANSWER_BYTES_MAX, open_max=OPEN_ANSWERS_MAX)
        self._reason: FirnError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"firn stream {address}")

    @classmethod
    async def connect(
        cls, session: aiohttp.ClientSession, address: str, *, timeout: float, client: str
    ) -> "Stream":
        """A connection that has been greeted.

        Errors: Unavailable (nobody there), Timeout, or what the broker answered.
        """
        try:
            async with asyncio.timeout(timeout):
                socket = await session.ws_connect(
                    f"ws://{address}/v1/stream",
                    heartbeat=HEARTBEAT_S,
                    max_msg_size=FRAME_READ_MAX,
                    compress=0,
                )
                stream = cls(socket, address)
                try:
                    await stream.ask(Op.HELLO, {"version": STREAM_VERSION, "client": client})
                except BaseException:
                    await stream.close()
                    raise
                return stream
        except TimeoutError:
            raise Timeout(f"{address}: no answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{address}: cannot connect: {error}") from error

    @property
    def is_open(self) -> bool:
        return self._reason is None

    async def ask(self, op: int, meta: dict[str, Any] | None = None, data: Buffer = b"") -> Message:
        """The one answer to one message. Errors: what the broker answered, Unavailable when the connection ends."""
        return await (await self.post(op, meta, data))

    async def post(
        self, op: int, meta: dict[str, Any] | None = None, data: Buffer = b""
    ) -> "asyncio.Future[Message]":
        """Sends a message; what is returned awaits its answer."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        id = self._new_id()

        def settle(found: Message | FirnError) -> None:  # perhaps before the message has left: it failed to
            self._handlers.pop(id, None)
            if answer.done():
                return
            if isinstance(found, FirnError):
                answer.set_exception(found)
                answer.exception()  # who asked may have been cancelled: that is no reason for a warning
            else:
                answer.set_result(found)

        await self._begin(id, op, meta, data, settle)
        return answer

    async def start(self, op: int, meta: dict[str, Any] | None, data: Buffer, handler: Handler) -> int:
        """Sends a message whose answers go to ``handler``: any number, the last one being an error.

        Errors: Unavailable when the connection has ended; when it ends meanwhile, ``handler`` is told so too.
        """
        id = self._new_id()
        await self._begin(id, op, meta, data, handler)
        return id

    def _new_id(self) -> int:
        id = self._next_id
        self._next_id += 1
        return id

    async def _begin(
        self, id: int, op: int, meta: dict[str, Any] | None, data: Buffer, handler: Handler
    ) -> None:
        if self._reason is not None:
            raise self._reason
        self._handlers[id] = handler
        try:
            await self._send(op, id, meta, data)
        except BaseException:
            self._handlers.pop(id, None)
            raise

    async def tell(self, op: int, id: int, meta: dict[str, Any] | None = None) -> None:
        """Sends a message of an open exchange that has no answer of its own."""
        await self._send(op, id, meta, b"")

    def forget(self, id: int) -> None:
        """Answers to ``id`` are no longer wanted."""
        self._handlers.pop(id, None)

    async def _send(self, op: int, id: int, meta: dict[str, Any] | None, data: Buffer) -> None:
        if self._reason is not None:
            raise self._reason
        # A message that stops half way would leave the broker waiting for its rest: so it is sent to its end even
        # when the task that asked for it is cancelled.
        sending = asyncio.ensure_future(self._send_frames(op, id, meta, data))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def _send_frames(self, op: int, id: int, meta: dict[str, Any] | None, data: Buffer) -> None:
        async with self._sending:
            try:
                for frame in frames(op, id, meta, data):
                    await self._socket.send_bytes(frame)
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                reason = Unavailable(f"{self.address}: the connection ended while sending: {error}")
                self._end(reason)
                raise reason from error

    async def _read(self) -> None:
        reason: FirnError = Unavailable(f"{self.address}: the connection was closed")
        try:
            async for frame in self._socket:
                if frame.type is aiohttp.WSMsgType.BINARY:
                    self._take(frame.data)
                elif frame.type is aiohttp.WSMsgType.ERROR:
                    reason = Unavailable(f"{self.address}: the connection broke: {frame.data}")
                    break
        except FirnError as error:
            reason = Unavailable(f"{self.address}: sent a frame that cannot be understood: {error.message}")
            log.warning("%s", reason.message)
        finally:
            self._end(reason)

    def _take(self, frame: bytes) -> None:
        message = self._assembler.feed(frame)
        if message is None or (handler := self._handlers.get(message.id)) is None:
            return
        if message.op == Op.ERROR:
            self._handlers.pop(message.id, None)
            handler(from_document(message.meta))
        else:
            handler(message)

    def _end(self, reason: FirnError) -> None:
        if self._reason is None:
            self._reason = reason
        handlers, self._handlers = list(self._handlers.values()), {}
        for handler in handlers:
            handler(self._reason)

    async def close(self) -> None:
        """Ends the connection; open exchanges end with Unavailable."""
        self._end(Unavailable(f"{self.address}: the client closed the connection"))
        await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def address_in(error: FirnError) -> str | None:
    """The address of the master, when the error names one."""
    found = error.details.get("address")
    return found if isinstance(error, NotMaster) and isinstance(found, str) and found else None


def expect(message: Message, op: Op) -> Message:
    """``message`` when it is of the kind asked for. Errors: InvariantBroken."""
    if message.op != op:
        raise InvariantBroken(f"the broker answered with op {message.op} where {op.name} belongs")
    return message
