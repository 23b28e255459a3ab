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
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from aiohttp import web

from firn import limits
from firn.errors import FirnError, Invalid, LimitExceeded
from firn.values import KEYS_MAX
from firn.websocket import Opcode, WebSocket, accept_key
from firn.wire import (
    EMPTY_META,
    SMALL_BYTES_MAX,
    STREAM_VERSION,
    Assembler,
    Message,
    Op,
    frames,
    small_frame,
)  # fmt: skip
from firn_node.security.decision import Action
from firn_node.server.context import Context
from firn_node.server.fetch import Fetch, floor_of
from firn_node.server.outbox import Outbox
from firn_node.server.params import Call
from firn_node.server.produce import Produced, Producing, parse_conditions
from firn_node.server.routes import Route
from firn_node.server.values import found_values, value_now

log = logging.getLogger("firn.server")

# One frame, and the head that msgpack and the sender's `meta` may add to it.
_MESSAGE_BYTES_MAX = limits.FRAME_BYTES_MAX + 1024
_OUTBOX_BYTES_MAX = 256 << 10
_FETCHES_MAX = 1024  # not counted as unanswered: a FETCH has no end of its own
_NAMES = {op.value: op.name for op in Op}

Work = Coroutine[Any, Any, None]


class _Assembler(Assembler):
    """Says how much is unfinished, and lets go of a message for which there is no room."""

    @property
    def pending(self) -> int:
        return self._bytes

    def newest(self) -> int:
        return next(reversed(self._open))

    def drop(self, id: int) -> None:
        self._drop(id)


class _Link:
    """The connection as the outbox writes to it."""

    def __init__(self, socket: WebSocket, request: web.BaseRequest) -> None:
        self._socket = socket
        self._protocol = request.protocol
        self._writer = request.writer
        self.send = socket.send

    @property
    def is_full(self) -> bool:
        return self._protocol.writing_paused

    @property
    def is_open(self) -> bool:
        return self._socket.is_open

    def room(self) -> Coroutine[Any, Any, None]:
        return self._writer.drain()


class Stream:
    """One connection, from its handshake to its end.

    Frames are handled as they arrive (``_take``). One for which there is no room yet, and all behind it, wait in
    ``_behind``, unread ones in their socket, until ``run`` has caught up.
    """

    def __init__(self, context: Context, call: Call, transport: asyncio.Transport) -> None:
        self._context = context
        self._access = call.access
        request = call.http
        self._settings = context.settings
        self.socket = WebSocket(
            transport, is_client=False, take=self._take, ended=self._ended,
            message_bytes_max=_MESSAGE_BYTES_MAX, heartbeat_s=context.settings.heartbeat_seconds,
        )  # fmt: skip
        self._outbox = Outbox(
            _Link(self.socket, request),
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
        self._behind: deque[tuple[Opcode, bytes]] = deque()
        self._waiting: Work | None = None  # what the newest frame waits for
        self._stirred = asyncio.Event()  # ``run`` has something to do
        self._gone = asyncio.Event()

    async def run(self) -> None:
        try:
            while self.socket.is_open and not self._outbox.is_lost:
                await self._stirred.wait()
                self._stirred.clear()
                await self._catch_up()
        finally:
            await self._end()

    def _ended(self, why: str) -> None:
        """Nothing more arrives, and nothing can leave."""
        self._outbox.lose()
        self._answered.set()
        self._stirred.set()
        self._gone.set()

    def _take(self, kind: Opcode, frame: bytes | memoryview) -> None:
        if self._waiting is None and not self._behind and self._has_room():
            try:
                self._waiting = self._handled(kind, frame)
            except Exception:  # the boundary: no task stands between the socket and what is handled
                log.exception("stream failed")
                self._context.counts.failures += 1
                self.socket.cut("an unforeseen error; the broker's log has it")
                return
            if self._waiting is None:
                return
        else:
            self._behind.append((kind, bytes(frame)))
        self.socket.pause()
        self._stirred.set()

    def _has_room(self) -> bool:
        return self._unanswered < self._settings.unanswered_max and self._outbox.has_room

    async def _catch_up(self) -> None:
        """Handle what waits, until nothing does; then read on."""
        while self.socket.is_open and (self._waiting is not None or self._behind):
            if self._waiting is not None:
                waiting, self._waiting = self._waiting, None
                await waiting
                continue
            while self._unanswered >= self._settings.unanswered_max and not self._outbox.is_lost:
                self._answered.clear()
                await self._answered.wait()
            await self._outbox.room()
            if self._outbox.is_lost:
                return
            self._waiting = self._handled(*self._behind.popleft())
        self.socket.resume()

    def _handled(self, kind: Opcode, frame: bytes | memoryview) -> Work | None:
        """Handle a frame; what must be awaited before the next one, None when nothing must."""
        if kind != Opcode.BINARY:
            self._fail(0, Invalid("frame: expected a binary WebSocket message, found text"))
            return None
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
            return None
        if message is None:
            if assembler.pending > before:
                return self._hold_unfinished(assembler.newest(), assembler.pending - before)
            return None
        held = 0
        if assembler.pending < before:
            held = self._unfinished.pop(message.id, 0)
            if not self._unfinished:
                self.socket.bound_silence(None)
        return self._message(message, held)

    async def _hold_unfinished(self, id: int, size: int) -> None:
        try:
            self._unfinished[id] = await self._context.in_flight.take(size)
            self.socket.bound_silence(self._settings.stall_seconds)
        except FirnError as error:
            self._assembler.drop(id)  # its other frames are then passed over
            self._fail(id, error)

    def _let_go(self, id: int) -> None:
        held = self._unfinished.pop(id, 0)
        if held:
            self._context.in_flight.give(held)
        if not self._unfinished:
            self.socket.bound_silence(None)

    def _message(self, message: Message, held: int) -> Work | None:
        """Begin what one whole message asks for. ``held``: what it has of the in-flight budget already."""
        self._context.counts.stream_messages[_NAMES[message.op]] += 1
        if message.op == Op.PRODUCE:
            held = held or self._context.in_flight.try_take(len(message.data)) or 0
            if not held:
                return self._wait_and_produce(message)
            self._produce(message, held)
            return None
        if held:
            self._context.in_flight.give(held)
        try:
            self._begin(message)
        except FirnError as error:
            self._fail(message.id, error)
        return None

    async def _wait_and_produce(self, message: Message) -> None:
        try:
            held = await self._context.in_flight.take(len(message.data))
        except FirnError as error:
            self._fail(message.id, error)
            return
        self._produce(message, held)

    def _produce(self, message: Message, held: int) -> None:
        try:
            if self._access is not None:
                self._access.check_batches(message.data, what="PRODUCE")
            produced = Produced(message.id, message.data, parse_conditions(message.meta), held)
        except FirnError as error:
            self._context.in_flight.give(held)
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
        if op == Op.GET:
            self._begin_get(message)
        elif op == Op.HELLO:
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
            fetch = Fetch(self._context, self._outbox, id, meta, self._access)
            self._fetches[id] = fetch
            fetch.task = self._spawn(id, fetch.run)
            fetch.task.add_done_callback(lambda _: self._fetches.pop(id, None))
        else:
            raise Invalid(f"op {Op(op).name} is the broker's to send")

    def _hello(self, meta: dict[str, Any]) -> dict[str, Any]:
        version = meta.get("version", STREAM_VERSION)
        if version != STREAM_VERSION:
            raise Invalid(
                f"HELLO: version {version!r} is not spoken here; this broker speaks {STREAM_VERSION}"
            )
        settings = self._context.broker.settings
        return {
            "version": STREAM_VERSION,
            "node": settings.node,
            "groups": 1 if settings.group is None else settings.group.groups,
            "limits": {
                "frame_bytes": limits.FRAME_BYTES_MAX,
                "message_bytes": self._message_bytes_max,
                "batch_bytes": limits.BATCH_BYTES_MAX,
                "batch_records": limits.BATCH_RECORDS_MAX,
                "unanswered": self._context.settings.unanswered_max,
                "get_keys": KEYS_MAX,
            },
        }

    def _begin_get(self, message: Message) -> None:
        """One key is answered at once where nothing has to be waited for; the rest by a task."""
        topic = message.meta.get("topic")
        if not isinstance(topic, str):
            raise Invalid(f"GET: topic: expected a name, found {topic!r}")
        if self._access is not None:
            self._access.check(Action.READ, topic, what="GET")
        floor = floor_of(self._context.broker, message.meta)
        data = value_now(self._context.broker, topic, message) if floor is None else None
        if data is not None and len(data) <= SMALL_BYTES_MAX:
            self._outbox.put_now(small_frame(Op.VALUES, message.id, EMPTY_META, data))
            return
        if data is not None and len(data) <= limits.FRAME_BYTES_MAX:
            for frame in frames(Op.VALUES, message.id, {}, data):
                self._outbox.put_now(frame)
            return
        self._unanswered += 1
        answering = self._spawn(message.id, lambda: self._get(topic, message, floor))
        answering.add_done_callback(self._count_answer)

    async def _get(self, topic: str, message: Message, floor: int | None) -> None:
        data = await found_values(self._context.broker, topic, message, floor)
        meta = {} if floor is None else {"shown": self._context.broker.shown}
        for frame in frames(Op.VALUES, message.id, meta, data):
            await self._outbox.put(frame)

    def _tell(self, op: Op, id: int, meta: dict[str, Any]) -> None:
        for frame in frames(op, id, meta):
            self._outbox.put_now(frame)

    def _fail(self, id: int, error: FirnError) -> None:
        self._context.counts.stream_errors[error.code] += 1
        self._tell(Op.ERROR, id, error.document())

    def _spawn(self, id: int, work: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
        """Begin an exchange's work, unless it is cancelled in this very turn."""
        task = asyncio.create_task(self._guarded(id, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _count_answer(self, _: "asyncio.Task[None]") -> None:
        self._unanswered -= 1
        self._answered.set()

    async def _guarded(self, id: int, work: Callable[[], Awaitable[None]]) -> None:
        """The boundary of one exchange: its error is its answer."""
        try:
            await work()
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
        self.socket.ask_to_close("the broker is stopping")
        await self._gone.wait()

    async def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.close()
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
    request = call.http
    if not web.WebSocketResponse().can_prepare(request).ok:
        raise Invalid("/v1/stream is a WebSocket: connect with Upgrade: websocket")
    key = request.headers["Sec-WebSocket-Key"]
    response = web.StreamResponse(
        status=101,
        headers={"Upgrade": "websocket", "Connection": "upgrade", "Sec-WebSocket-Accept": accept_key(key)},
    )
    await response.prepare(request)
    response.force_close()
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the connection is lost")
    stream = Stream(context, call, transport)
    context.streams.add(stream)
    try:
        # What aiohttp's own WebSocket does: from here on it hands on what arrives, as it arrives.
        request.protocol.set_parser(cast(Any, stream.socket))
        await stream.run()
    finally:
        context.streams.discard(stream)
    return response


async def close_all(context: Context) -> None:
    """Close every stream; each gets ``stop_seconds`` for its answers."""
    closing = [asyncio.create_task(stream.close()) for stream in list(context.streams)]
    if closing:
        _, late = await asyncio.wait(closing, timeout=context.settings.stop_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)


ROUTES = [Route("GET", "/v1/stream", get_stream, Action.KNOWN)]
