"""One WebSocket to one broker: exchanges by number, several at a time.

Messages leave whole, one after another, so that pipelined produces arrive in the order they were given: a message
that does not fit into the transport at once waits in ``_leaving`` with all behind it, and goes on when there is
room again, whoever may have lost interest meanwhile. An answer is handled in the turn of the event loop that brought
it. When the connection ends, every open exchange ends with ``Unavailable``; who asked decides whether to ask again.

What arrives goes into memory of this connection that is used again: asyncio's loop would map 256 KiB anew for each
read, cut them to size and unmap them, which costs a small answer more than all that is done with it.
"""

import asyncio
import base64
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from firn.batch import Buffer
from firn.client.dialling import Dial, direct, host_and_port
from firn.errors import FirnError, InvariantBroken, NotMaster, Timeout, Unavailable, from_document
from firn.tls import refusal_of
from firn.websocket import CloseCode, Handshake, Opcode, WebSocket, handshake
from firn.wire import STREAM_VERSION, Assembler, Message, Op, frame_parts, small_frame

log = logging.getLogger(__name__)

HEARTBEAT_S = 20.0
# Answers under way: pages of readers, and values of `get_many`.
ANSWER_BYTES_MAX = 512 << 20
OPEN_ANSWERS_MAX = 1 << 16
FRAME_READ_MAX = 4 << 20
CLOSE_S = 1.0  # for the peer to take what was sent, and to end TLS; then the connection is cut
READ_BYTES = 256 << 10

Handler = Callable[["Message | FirnError"], None]
Parts = tuple[bytes] | tuple[bytes, memoryview]  # of one frame


class Stream(asyncio.BufferedProtocol):
    """A connection. ``is_open`` turns false for good when it ends."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.groups = 1  # of brokers, in the cluster that this one belongs to
        self.loop = asyncio.get_running_loop()
        self._askers: dict[int, Handler] = {}  # of exchanges with one answer
        self._handlers: dict[int, Handler] = {}  # of those with any number
        self._next_id = 1
        self._read_room = memoryview(bytearray(READ_BYTES))
        self._assembler = Assembler(bytes_max=ANSWER_BYTES_MAX, open_max=OPEN_ANSWERS_MAX)
        self._reason: FirnError | None = None
        self._transport: asyncio.Transport | None = None
        self._socket: WebSocket | None = None
        self._handshake: Handshake | None = None
        self._greeted: asyncio.Future[None] = self.loop.create_future()
        self._gone: asyncio.Future[None] = (
            self.loop.create_future()
        )  # the transport has let go of its descriptor
        self._is_full = False
        self._hint = ""
        # What has not left, and who waits for it: frames of one message an item.
        self._leaving: deque[tuple[Iterator[Parts], asyncio.Future[None]]] = deque()

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout: float,
        client: str,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        hint: str = "",
        dial: Dial = direct,
    ) -> "Stream":
        """A connection that has been greeted. ``hint``: what may be behind one that ends before.

        Errors: Unavailable (nobody there), Timeout, or what the broker answered.
        """
        name, _ = host_and_port(address)
        stream = cls(address)
        stream._hint = hint
        try:
            async with asyncio.timeout(timeout):
                try:
                    host, port = host_and_port(await dial(address))
                    await stream.loop.create_connection(
                        lambda: stream, host, port, ssl=tls, server_hostname=name if tls else None
                    )
                    await stream._shake_hands(dict(headers or {}))
                    greeting = await stream.ask(Op.HELLO, {"version": STREAM_VERSION, "client": client})
                    stream.groups = int(greeting.meta.get("groups", 1))
                except BaseException:
                    await stream.close(within=0)
                    raise
                return stream
        except TimeoutError:
            raise Timeout(f"{address}: no answer within {timeout:g} s") from None
        except (OSError, ValueError) as error:
            refusal = refusal_of(error, address)
            raise refusal or Unavailable(f"{address}: cannot connect: {error}") from error

    async def _shake_hands(self, headers: dict[str, str]) -> None:
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self._handshake = Handshake(key)
        assert self._transport is not None, "the connection was made"
        self._transport.write(handshake(self.address, "/v1/stream", key, headers))
        await self._greeted

    @property
    def is_open(self) -> bool:
        return self._reason is None

    @property
    def has_room(self) -> bool:
        """Whether a message would leave at once."""
        return not self._leaving and not self._is_full

    # Asking.

    async def ask(self, op: int, meta: dict[str, Any] | None = None, data: Buffer = b"") -> Message:
        """The one answer to one message. Errors: what the broker answered, Unavailable when the connection ends."""
        answer: asyncio.Future[Message] = self.loop.create_future()

        def settle(found: Message | FirnError) -> None:
            if answer.done():
                return
            if isinstance(found, FirnError):
                answer.set_exception(found)
                answer.exception()  # who asked may have been cancelled: that is no reason for a warning
            else:
                answer.set_result(found)

        left = self.post(op, meta, data, settle)
        if left is not None:
            await left
        return await answer

    def post(
        self, op: int, meta: dict[str, Any] | None, data: Buffer, handler: Handler
    ) -> "asyncio.Future[None] | None":
        """Send a message; its one answer goes to ``handler``, or the error that comes in its place.

        *Shape*: None when it has left; else what is done once it has, and ends as the connection does before.
        Errors: Unavailable when the connection has ended; ``handler`` is not called then.
        """
        return self._begin(self._new_id(), op, meta, data, handler, self._askers)

    def post_small(self, op: int, packed_meta: bytes, data: Buffer, handler: Handler) -> None:
        """As ``post``, of what ``small_frame`` takes, while the stream ``has_room``.

        It is written before anything is noted: the broker works on it meanwhile.
        """
        self._check_open()
        assert self._socket is not None, "a connection is greeted before it is used"
        id = self._new_id()
        self._socket.send(small_frame(op, id, packed_meta, data))
        self._askers[id] = handler

    async def start(self, op: int, meta: dict[str, Any] | None, data: Buffer, handler: Handler) -> int:
        """Sends a message whose answers go to ``handler``: any number, the last one being an error.

        Errors: Unavailable when the connection has ended; when it ends meanwhile, ``handler`` is told so too.
        """
        id = self._new_id()
        left = self._begin(id, op, meta, data, handler, self._handlers)
        if left is not None:
            try:
                await left
            except BaseException:
                self._handlers.pop(id, None)
                raise
        return id

    async def tell(self, op: int, id: int, meta: dict[str, Any] | None = None) -> None:
        """Sends a message of an open exchange that has no answer of its own."""
        left = self._send(op, id, meta, b"")
        if left is not None:
            await left

    def forget(self, id: int) -> None:
        """Answers to ``id`` are no longer wanted."""
        self._handlers.pop(id, None)

    def _new_id(self) -> int:
        id = self._next_id
        self._next_id += 1
        return id

    def _begin(
        self, id: int, op: int, meta: dict[str, Any] | None, data: Buffer, handler: Handler,
        waiting: dict[int, Handler],
    ) -> "asyncio.Future[None] | None":  # fmt: skip
        self._check_open()
        waiting[id] = handler
        try:
            return self._send(op, id, meta, data)
        except BaseException:
            waiting.pop(id, None)
            raise

    # Sending.

    def _send(
        self, op: int, id: int, meta: dict[str, Any] | None, data: Buffer
    ) -> "asyncio.Future[None] | None":
        self._check_open()
        parts = frame_parts(op, id, meta, data)
        if not self._leaving and self._write(parts):
            return None
        left: asyncio.Future[None] = self.loop.create_future()
        self._leaving.append((parts, left))
        return left

    def _write(self, parts: Iterator[Parts]) -> bool:
        """Write frames while the transport takes them; whether all have left."""
        assert self._socket is not None, "a connection is greeted before it is used"
        while not self._is_full:
            frame = next(parts, None)
            if frame is None:
                return True
            if len(frame) == 1:
                self._socket.send(frame[0])
            else:
                self._socket.send_parts(frame)
        return False

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        while self._leaving and self._write(self._leaving[0][0]):
            left = self._leaving.popleft()[1]
            if not left.done():
                left.set_result(None)

    def _check_open(self) -> None:
        if self._reason is not None:
            raise self._reason

    # Receiving.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_room

    def buffer_updated(self, nbytes: int) -> None:
        data = self._read_room[:nbytes]
        if self._socket is not None:
            self._socket.feed_data(data)
        elif self._handshake is not None:
            self._shaking(self._handshake, bytes(data))

    def _shaking(self, answer: Handshake, data: bytes) -> None:
        assert self._transport is not None, "data come after the connection was made"
        try:
            rest = answer.feed(data)
        except FirnError as error:
            is_mute = isinstance(error, Unavailable)
            self._end(Unavailable(f"{self.address}: cannot connect: {error.message}") if is_mute else error)
            self._transport.abort()
            return
        if rest is None:
            return
        self._socket = WebSocket(
            self._transport, is_client=True, take=self._take, ended=self._socket_ended,
            message_bytes_max=FRAME_READ_MAX, heartbeat_s=HEARTBEAT_S, is_awaited=lambda: bool(self._askers),
        )  # fmt: skip
        if not self._greeted.done():
            self._greeted.set_result(None)
        if rest:
            self._socket.feed_data(rest)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
        if self._socket is not None:
            self._socket.feed_eof()
        why = "was closed" if exc is None else f"broke: {exc}"
        refusal = None
        if self._socket is None:
            why, refusal = why + self._hint, refusal_of(exc, self.address)
        self._end(refusal or Unavailable(f"{self.address}: the connection {why}"))

    def _socket_ended(self, why: str) -> None:
        self._end(Unavailable(f"{self.address}: the connection ended: {why}"))

    def _take(self, kind: Opcode, frame: bytes | memoryview) -> None:
        if kind != Opcode.BINARY:
            return
        try:
            message = self._assembler.feed(frame)
        except FirnError as error:
            reason = Unavailable(f"{self.address}: sent a frame that cannot be understood: {error.message}")
            log.warning("%s", reason.message)
            self._end(reason)
            assert self._socket is not None, "it sent the frame"
            self._socket.close(CloseCode.PROTOCOL_ERROR)
            return
        if message is None:
            return
        handler = self._askers.pop(message.id, None) or self._handlers.get(message.id)
        if handler is None:
            return
        if message.op == Op.ERROR:
            self._handlers.pop(message.id, None)
            handler(from_document(message.meta))
        else:
            handler(message)

    # The end.

    def _end(self, reason: FirnError) -> None:
        """The first reason counts; who waits is told, those whose message has not left first."""
        if self._reason is None:
            self._reason = reason
        waiting = [self._greeted, *(left for _, left in self._leaving)]
        self._leaving.clear()
        for left in waiting:
            if not left.done():
                left.set_exception(self._reason)
                left.exception()  # who waited may have been cancelled: that is no reason for a warning
        handlers = [*self._askers.values(), *self._handlers.values()]
        self._askers, self._handlers = {}, {}
        for handler in handlers:
            handler(self._reason)

    def begin_close(self) -> None:
        """Ends the connection; open exchanges end with Unavailable, now."""
        self._end(Unavailable(f"{self.address}: the client closed the connection"))
        if self._socket is not None:
            self._socket.close(CloseCode.OK)

    async def close(self, *, within: float = CLOSE_S) -> None:
        """As ``begin_close``, and returns when the connection is gone: after ``within`` seconds it is cut."""
        self.begin_close()
        if self._transport is None:
            return
        try:
            if within and self._socket is not None:
                await asyncio.wait([self._gone], timeout=within)
        finally:
            self._transport.abort()
        await self._gone
        await asyncio.sleep(0)  # TLS: the transport below lets go in a turn of its own


def address_in(error: FirnError) -> str | None:
    """The address of the master, when the error names one."""
    found = error.details.get("address")
    return found if isinstance(error, NotMaster) and isinstance(found, str) and found else None


def expect(message: Message, op: Op) -> Message:
    """``message`` when it is of the kind asked for. Errors: InvariantBroken."""
    if message.op != op:
        raise InvariantBroken(f"the broker answered with op {message.op} where {op.name} belongs")
    return message
