"""``/v1/stream``: the WebSocket of clients. Frames are those of ``firn.wire``.

Invariants:

- an error in one exchange answers ERROR to that exchange alone; a frame that cannot be understood answers ERROR
  to exchange 0; the connection lives on;
- produces are handed to the engine in the order of their arrival, as soon as the loop turn that brought them is
  over, and do not wait for one another; the answers of one exchange leave in order;
- memory is bounded: unfinished messages and produces count against the broker's in-flight budget, answers
  against the outbox, exchanges against ``unanswered_max``. At a bound the stream stops reading, so that TCP slows
  the peer down.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from firn import limits
from firn.errors import FirnError, Invalid, LimitExceeded
from firn.values import KEYS_MAX
from firn.wire import STREAM_VERSION, Assembler, Message, Op, frames
from firn_node.server.context import Context
from firn_node.server.fetch import Fetch
from firn_node.server.outbox import Outbox
from firn_node.server.params import Call
from firn_node.server.produce import Produced, Producing, parse_conditions
from firn_node.server.routes import Route
from firn_node.server.values import found_values

log = logging.getLogger("firn.server")

# One frame, and the head that msgpack and the sender's `meta` may add to it.
_MESSAGE_BYTES_MAX = limits.FRAME_BYTES_MAX + 1024
_OUTBOX_BYTES_MAX = 256 << 10
_FETCHES_MAX = 1024  # not counted as unanswered: a FETCH has no end of its own


class _Assembler(Assembler):
    """Says how much is unfinished, and lets go of a message for which there is no room."""

    @property
    def pending(self) -> int:
        return self._bytes

    def newest(self) -> int:
        return next(reversed(self._open))

    def drop(self, id: int) -> None:
        self._drop(id)


class Stream:
    """One connection, from its handshake to its end."""

    def __init__(
        self, context: Context, socket: "web.WebSocketResponse", transport: asyncio.Transport
    ) -> None:
        self._context = context
        self._socket = socket
        self._outbox = Outbox(
            socket,
            bytes_max=_OUTBOX_BYTES_MAX,
            stall_seconds=context.settings.stall_seconds,
            abort=transport.abort,
        )
        most = max(limits.BATCH_BYTES_MAX, min(limits.PRODUCE_REQUEST_BYTES_MAX, context.in_flight.limit))
        self._message_bytes_max = most
        self._assembler = _Assembler(bytes_max=most)
        self._unfinished: dict[int, int] = {}  # exchange -> bytes held of the in-flight budget
        self._fetches: dict[int, Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        self._answered = asyncio.Event()
        self._producing = Producing(context, self._acknowledge)

    async def run(self) -> None:
        try:
            while (frame := await self._receive()) is not None:
                await self._frame(frame)
        finally:
            await self._end()

    async def _receive(self) -> bytes | None:
        """The next frame; None at the end of the connection, or when a message is left unfinished for long."""
        while True:
            while self._unanswered >= self._context.settings.unanswered_max and not self._outbox.is_lost:
                self._answered.clear()
                await self._answered.wait()
            await self._outbox.room()
            if self._outbox.is_lost:
                return None
            try:
                found = await self._socket.receive(
                    timeout=self._context.settings.stall_seconds if self._unfinished else None
                )
            except TimeoutError:
                return None
            if found.type is WSMsgType.BINARY:
                data: bytes = found.data
                return data
            if found.type is not WSMsgType.TEXT:
                return None
            self._fail(0, Invalid("frame: expected a binary WebSocket message, found text"))

    async def _frame(self, frame: bytes) -> None:
        self._context.counts.bytes_in += len(frame)
        assembler = self._assembler
        before = assembler.pending
        try:
            message = assembler.feed(frame)
        except FirnError as error:
            id = error.details.pop("id", 0)
            if assembler.pending < before:
                self._let_go(id)
            self._fail(id, error)
            return
        if message is None:
            if assembler.pending > before:
                await self._hold_unfinished(assembler.newest(), assembler.pending - before)
            return
        held = self._unfinished.pop(message.id, 0) if assembler.pending < before else 0
        await self._message(message, held)

    async def _hold_unfinished(self, id: int, size: int) -> None:
        try:
            self._unfinished[id] = await self._context.in_flight.take(size)
        except FirnError as error:
            self._assembler.drop(id)  # its other frames are then passed over
            self._fail(id, error)

    def _let_go(self, id: int) -> None:
        held = self._unfinished.pop(id, 0)
        if held:
            self._context.in_flight.give(held)

    async def _message(self, message: Message, held: int) -> None:
        """Begin what one whole message asks for. ``held``: what it has of the in-flight budget already."""
        self._context.counts.stream_messages[Op(message.op).name] += 1
        if message.op == Op.PRODUCE:
            await self._produce(message, held)
            return
        if held:
            self._context.in_flight.give(held)
        try:
            self._begin(message)
        except FirnError as error:
            self._fail(message.id, error)

    async def _produce(self, message: Message, held: int) -> None:
        in_flight = self._context.in_flight
        try:
            if not held:
                held = in_flight.try_take(len(message.data)) or await in_flight.take(len(message.data))
            produced = Produced(message.id, message.data, parse_conditions(message.meta), held)
        except FirnError as error:
            if held:
                in_flight.give(held)
            self._fail(message.id, error)
            return
        self._unanswered += 1
        self._producing.add(produced)

    def _acknowledge(self, id: int, found: "list[Any] | FirnError") -> None:
        self._unanswered -= 1
        self._answered.set()
        if isinstance(found, FirnError):
            self._fail(id, found)
            return
        for frame in frames(Op.ACK, id, {"results": found}):
            self._outbox.put_now(frame)

    def _begin(self, message: Message) -> None:
        """Every message but PRODUCE. *Errors*: Invalid; it is then this exchange's answer."""
        op, id, meta = message.op, message.id, message.meta
        if op == Op.HELLO:
            self._tell(Op.OK, id, self._hello(meta))
        elif op == Op.PING:
            self._tell(Op.OK, id, {})
        elif op == Op.CREDIT:
            if (fetch := self._fetches.get(id)) is not None:  # else: it crossed the end of its FETCH
                fetch.add_credit(meta)
        elif op == Op.CANCEL:
            if (fetch := self._fetches.get(id)) is not None:
                fetch.cancel()
            self._tell(Op.OK, id, {})
        elif op == Op.FETCH:
            if id in self._fetches:
                raise Invalid(f"FETCH: exchange {id} is a FETCH already; CANCEL it first")
            if len(self._fetches) >= _FETCHES_MAX:
                raise LimitExceeded(f"FETCH: {_FETCHES_MAX} are open on this stream; use another one")
            fetch = Fetch(self._context, self._outbox, id, meta)
            self._fetches[id] = fetch
            fetch.task = self._spawn(id, fetch.run())
            fetch.task.add_done_callback(lambda _: self._fetches.pop(id, None))
        elif op == Op.GET:
            self._unanswered += 1
            self._spawn(id, self._get(message)).add_done_callback(self._count_answer)
        else:
            raise Invalid(f"op {Op(op).name} is the broker's to send")

    def _hello(self, meta: dict[str, Any]) -> dict[str, Any]:
        version = meta.get("version", STREAM_VERSION)
        if version != STREAM_VERSION:
            raise Invalid(
                f"HELLO: version {version!r} is not spoken here; this broker speaks {STREAM_VERSION}"
            )
        return {
            "version": STREAM_VERSION,
            "node": self._context.broker.settings.node,
            "limits": {
                "frame_bytes": limits.FRAME_BYTES_MAX,
                "message_bytes": self._message_bytes_max,
                "batch_bytes": limits.BATCH_BYTES_MAX,
                "batch_records": limits.BATCH_RECORDS_MAX,
                "unanswered": self._context.settings.unanswered_max,
                "get_keys": KEYS_MAX,
            },
        }

    async def _get(self, message: Message) -> None:
        topic = message.meta.get("topic")
        if not isinstance(topic, str):
            raise Invalid(f"GET: topic: expected a name, found {topic!r}")
        data = await found_values(self._context.broker, topic, message)
        for frame in frames(Op.VALUES, message.id, {}, data):
            await self._outbox.put(frame)

    def _tell(self, op: Op, id: int, meta: dict[str, Any]) -> None:
        for frame in frames(op, id, meta):
            self._outbox.put_now(frame)

    def _fail(self, id: int, error: FirnError) -> None:
        self._context.counts.stream_errors[error.code] += 1
        self._tell(Op.ERROR, id, error.document())

    def _spawn(self, id: int, work: Awaitable[None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._guarded(id, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _count_answer(self, _: "asyncio.Task[None]") -> None:
        self._unanswered -= 1
        self._answered.set()

    async def _guarded(self, id: int, work: Awaitable[None]) -> None:
        """The boundary of one exchange: its error is its answer."""
        try:
            await work
        except FirnError as error:
            self._fail(id, error)
        except ConnectionError:
            pass  # the peer has gone, and with it whoever would be told
        except Exception:
            log.exception("stream exchange failed")
            self._context.counts.failures += 1
            self._fail(id, FirnError("an unforeseen error; the broker's log has it"))

    async def close(self) -> None:
        """End the connection after the answers of what was received."""
        await self._producing.settled()
        await self._outbox.flushed()
        await self._socket.close(code=WSCloseCode.GOING_AWAY, message=b"the broker is stopping")

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for id in list(self._unfinished):
            self._let_go(id)
        self._context.counts.bytes_out += self._outbox.bytes_sent
        await self._outbox.close()


async def get_stream(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    socket = web.WebSocketResponse(
        max_msg_size=_MESSAGE_BYTES_MAX, compress=False, heartbeat=context.settings.heartbeat_seconds
    )
    if not socket.can_prepare(call.http).ok:
        raise Invalid("/v1/stream is a WebSocket: connect with Upgrade: websocket")
    try:
        await socket.prepare(call.http)
    except web.HTTPException as refusal:
        raise Invalid(f"/v1/stream: {refusal.text or refusal.reason}") from None
    transport = call.http.transport
    if transport is None:
        raise ConnectionResetError("the connection is lost")
    stream = Stream(context, socket, transport)
    context.streams.add(stream)
    try:
        await stream.run()
    finally:
        context.streams.discard(stream)
    return socket


async def close_all(context: Context) -> None:
    """Close every stream; each gets ``stop_seconds`` for its answers."""
    closing = [asyncio.create_task(stream.close()) for stream in list(context.streams)]
    if closing:
        _, late = await asyncio.wait(closing, timeout=context.settings.stop_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)


ROUTES = [Route("GET", "/v1/stream", get_stream)]
