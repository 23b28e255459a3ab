"""One open connection between two replicas: messages both ways, log frames to the one who dialled.

Invariants: messages never wait for the peer, the oldest that does not fit is dropped; who sends log bytes waits for
room, so that TCP slows it down; a message goes ahead of log bytes that have not been handed to the transport yet.
What arrives is handed on in the turn of the event loop that brought it.
"""

import asyncio
import base64
import logging
from collections import deque
from collections.abc import Callable, Mapping
from ssl import SSLContext
from typing import Protocol

from firn.batch import Buffer
from firn.errors import FirnError, Invalid, Unavailable
from firn.websocket import CloseCode, Handshake, Opcode, WebSocket, handshake
from firn_node.clock import Randomness
from firn_node.replication.doors.codec import MESSAGE_BYTES_MAX, Arrived, Assembler, encode
from firn_node.replication.messages import Message

log = logging.getLogger("firn.replication")

WAITING_MAX = 64  # messages that wait for room
HEARTBEAT_S = 2.0  # of the connection alone; whether a peer is well is the core's to decide
_MESSAGE_BYTES = 16 << 10  # what is unfinished and larger is of the log
_BUFFER_BYTES = 1 << 20  # of the transport: one piece of the log is being sent while the next is read


class Flow(Protocol):
    """Whether the transport takes more."""

    @property
    def is_full(self) -> bool: ...

    async def room(self) -> None:
        """Wait until it does. *Errors*: ConnectionError when the connection is lost."""
        ...


class Connection:
    """``take`` gets each message that arrives; ``ended``, once, why there will be no more."""

    def __init__(
        self, transport: asyncio.Transport, flow: Flow, *, is_client: bool, take: Callable[[Arrived], None],
        ended: Callable[["Connection", str], None],
    ) -> None:  # fmt: skip
        transport.set_write_buffer_limits(high=_BUFFER_BYTES, low=_BUFFER_BYTES // 4)
        self.socket = WebSocket(
            transport, is_client=is_client, take=self._arrived, ended=self._lost,
            message_bytes_max=MESSAGE_BYTES_MAX, heartbeat_s=HEARTBEAT_S,
        )  # fmt: skip
        self._flow = flow
        self._take = take
        self._told = ended
        self._assembler = Assembler()
        self._waiting: deque[bytes] = deque(maxlen=WAITING_MAX)
        self._flushing: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self.socket.is_open

    @property
    def log_bytes(self) -> int:
        """Bytes of the log that have come so far; other than before: some have come."""
        unfinished = self.socket.unfinished_bytes
        return self._assembler.log_bytes + (unfinished if unfinished > _MESSAGE_BYTES else 0)

    def send(self, message: Message) -> None:
        """Send a message, or drop it."""
        if not self.is_open:
            return
        if self._waiting or self._flow.is_full:
            self._waiting.append(encode(message))
            if self._flushing is None:
                self._flushing = asyncio.create_task(self._flush(), name="firn replica messages")
        else:
            self.socket.send(encode(message))

    async def send_parts(self, parts: tuple[Buffer, ...]) -> None:
        """Send log bytes once there is room. *Errors*: ConnectionError when the connection is lost."""
        while self._flow.is_full or self._waiting:
            if self._flushing is not None:
                await asyncio.wait([self._flushing])
            else:
                await self._flow.room()
        if not self.is_open:
            raise ConnectionResetError("the connection is lost")
        self.socket.send_parts(parts)

    async def _flush(self) -> None:
        try:
            while self._waiting and self.is_open:
                await self._flow.room()
                self.socket.send(self._waiting.popleft())
        except ConnectionError:
            pass
        finally:
            self._waiting.clear()
            self._flushing = None

    def _arrived(self, kind: Opcode, payload: bytes | memoryview) -> None:
        try:
            if kind != Opcode.BINARY:
                raise Invalid("replica message: expected a binary WebSocket message, found text")
            found = self._assembler.feed(bytes(payload))  # which it keeps
        except Invalid as error:
            self.close(error.message, CloseCode.PROTOCOL_ERROR)
            return
        if found is not None:
            self._take(found)

    def _lost(self, why: str) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        self.gone.set()
        self._told(self, why)

    def close(self, why: str, code: CloseCode = CloseCode.GOING_AWAY) -> None:
        """End it; what was handed to the transport still leaves."""
        self.socket.close(code, why)

    def cut(self, why: str) -> None:
        """End it at once."""
        self.socket.cut(why)


class _Dialled(asyncio.Protocol):
    """The dialling side's transport: its handshake, then its socket and its flow."""

    def __init__(self, key: str) -> None:
        self._handshake = Handshake(key)
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room = asyncio.Event()
        self._room.set()
        self._is_lost = False
        self._behind = bytearray()  # what came with the handshake's answer, and after it
        self._socket: WebSocket | None = None

    def data_received(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.feed_data(data)
        elif self._greeted.done():
            self._behind += data
        else:
            try:
                rest = self._handshake.feed(data)
            except FirnError as error:  # what the peer answered
                self._greeted.set_exception(error)
                return
            if rest is not None:
                self._behind += rest
                self._greeted.set_result(None)

    def hand_over(self, socket: WebSocket) -> None:
        """From here on ``socket`` gets what arrives."""
        self._socket = socket
        if self._behind:
            socket.feed_data(bytes(self._behind))
        if self._is_lost:
            socket.feed_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._room.set()
        if not self._greeted.done():
            self._greeted.set_exception(Unavailable(f"the connection was lost: {exc or 'closed'}"))
        if self._socket is not None:
            self._socket.feed_eof()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def greeted(self) -> None:
        """Return once the peer has agreed. *Errors*: what it answered; Unavailable."""
        await self._greeted

    @property
    def is_full(self) -> bool:
        return not self._room.is_set()

    async def room(self) -> None:
        await self._room.wait()
        if self._is_lost:
            raise ConnectionResetError("the connection is lost")


async def dial(
    address: str, target: str, *, headers: Mapping[str, str], ssl: SSLContext | None, timeout: float,
    randomness: Randomness, take: Callable[[Arrived], None], ended: Callable[[Connection, str], None],
) -> Connection:  # fmt: skip
    """An open connection to the replica at ``address``. *Errors*: Unavailable, or what the replica answered."""
    host, _, port = address.rpartition(":")
    key = base64.b64encode(randomness.bytes(16)).decode()
    loop = asyncio.get_running_loop()
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout):
            made, protocol = await loop.create_connection(
                lambda: _Dialled(key), host.strip("[]"), int(port), ssl=ssl
            )
            transport = made
            transport.write(handshake(address, target, key, dict(headers)))
            await protocol.greeted()
    except BaseException as error:
        if transport is not None:
            transport.abort()
        if isinstance(error, TimeoutError | OSError | ValueError):
            reason = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise Unavailable(f"{address}: {reason}") from error
        raise
    connection = Connection(transport, protocol, is_client=True, take=take, ended=ended)
    protocol.hand_over(connection.socket)
    return connection
