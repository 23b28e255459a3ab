"""The asynchronous producer: ``send`` appends to a list, everything else is done once a chunk.

``send`` -> open chunk -> (linger, or full) -> closed chunks -> cut into batches -> ``Outbox`` -> pipelined PRODUCE
requests -> acknowledgements. One task, the *pump*, does all of it but the first step. Where it rests and a few plain
records are all there is, ``_send_small`` does the same without waking it: that is the fast path of one record. Without
a linger a record waits for what else is sent in this turn of the loop; after a few in a row that were alone, one that
finds nothing unacknowledged does not (``_send_alone``).

Invariants: at most ``buffer_bytes`` of closed, unacknowledged chunks (and one open one); requests of one producer
leave in order on one stream; a request that was sent is answered, or fails, before its batches are sent again.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from firn.batch import Buffer
from firn.client.chunks import (
    FIELDS,
    PENDING,
    PLAIN_FIELDS,
    Chunk,
    Cut,
    Fields,
    Lengths,
    Sent,
    SentMany,
    bytes_of,
    codecs,
    cut,
    cut_small,
    faults_of,
    fields_of,
    plain_bytes,
    plain_lengths,
)  # fmt: skip
from firn.client.even import Even, even_parts
from firn.client.outbox import OutBatch, Outbox
from firn.client.routes import Target
from firn.client.small import RECORDS_MAX, small_bytes
from firn.client.stream import Stream
from firn.client.transport import Transport
from firn.errors import (
    FirnError,
    Invalid,
    InvariantBroken,
    LimitExceeded,
    NotMaster,
    Unavailable,
    UnknownTopic,
    from_document,
)
from firn.limits import BATCH_RECORDS_MAX
from firn.wire import EMPTY_META, SMALL_BYTES_MAX, Message, Op

log = logging.getLogger(__name__)

FIRST_CHUNK_RECORDS = 256
REQUEST_BYTES = 1 << 20
UNDER_WAY_BYTES_MAX = 8 << 20
BATCH_BYTES_LARGEST = 16 << 20  # with one record of the largest size more, a batch stays below its limit
LEAST_SLEEP_S = 0.005  # a retry that is due but finds no room must not spin
_ALONE_MIN = 4  # chunks of one record in a row that are taken for a habit


def wall_ms() -> int:
    """Now, in ms since 1970: the timestamp of records that were sent without one."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    linger_ms: float = (
        5  # how long a record may wait for company: far below a person's notice, and a full fsync
    )
    batch_bytes: int = 1 << 20  # aimed at; the broker's indexes and compression work best from 256 KiB on
    buffer_bytes: int = 128 << 20  # waiting for acknowledgement: a second of the broker's best rate
    delivery_timeout: float = 120.0  # seconds from the cut to giving up; longer than a failover
    compression: str = "none"  # none, lz4, zstd
    clock_ms: Callable[[], int] = wall_ms

    def __post_init__(self) -> None:
        if not 1 <= self.batch_bytes <= BATCH_BYTES_LARGEST:
            raise Invalid(f"batch_bytes: expected 1 to {BATCH_BYTES_LARGEST}, found {self.batch_bytes}")
        if self.linger_ms < 0 or self.buffer_bytes < 1 or self.delivery_timeout <= 0:
            raise Invalid("linger_ms must be 0 or more, buffer_bytes and delivery_timeout more than 0")
        codecs(self.compression)


@dataclass(slots=True, eq=False)
class _Lane:
    """What goes to one broker group, and the way there."""

    outbox: Outbox
    transport: Transport
    sending: "asyncio.Task[None] | None" = None  # where there are several lanes
    is_missed: bool = False  # it has had more to send since ``sending`` began


class Producer:
    """Sends the records of one topic. Made by ``Client.producer``; close it, or leave its ``async with``."""

    def __init__(
        self,
        topic: str,
        transport: Transport,
        target: Callable[[str, float], Awaitable[Target]],
        settings: ProducerSettings,
        *,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        """``guard`` is held while chunks change hands, for a caller whose ``send`` runs in another thread."""
        self.topic = topic
        self._transport = transport
        self._find_target = target
        self._settings = settings
        self._guard = guard or nullcontext()
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        # The open chunk's rows behind one another: a tuple each would keep the collector of Python busy. They are
        # keys and values until the first record that has more.
        self._rows: list[Any] = []
        self._width = PLAIN_FIELDS
        self._chunk = Chunk(self._loop, 0)
        self._limit = 0  # the open chunk is closed at this length of ``_rows``; 0: none is open
        self._chunk_records = FIRST_CHUNK_RECORDS
        self._chunk_bytes = settings.batch_bytes
        self._alone = 0  # chunks of one record since a larger one
        self._closed: deque[Chunk] = deque()  # not cut yet
        self._open: deque[Chunk] = deque()  # cut, not complete
        self._buffered = 0
        self._failure: FirnError | None = None  # the first since the last flush
        self._target: Target | None = None
        # One for each broker group of the topic, which are dealt its partitions; none before the first record is cut.
        self._lanes: list[_Lane] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._is_resting = False  # the pump waits for ``_wake``
        self._broken: Exception | None = None  # in ``_send_small``
        self._thread = get_ident()
        self._is_plain = settings.compression == "none"
        self._progress = asyncio.Event()
        self._is_ended = False
        self._pump = asyncio.create_task(self._run(), name=f"firn producer {topic}")

    def send(
        self,
        key: Buffer,
        value: Buffer | None = None,
        tag: str | None = None,
        timestamp: int | None = None,
        headers: Mapping[str, str] | None = None,
        queues: Sequence[str] | None = None,
        partition: int | None = None,
    ) -> Sent:
        """Queue a record; awaiting what is returned gives its partition and offset. ``value`` None: a tombstone.

        Keys and values are read when the chunk is cut: leave a mutable buffer as it is until then. The record is
        also checked then: a faulty one fails on its own.
        Errors: LimitExceeded when the buffer is full: await something that was sent, or ``flush``.
        """
        rows = self._rows
        if self._width == PLAIN_FIELDS:
            if tag is None and timestamp is None and headers is None and queues is None and partition is None:
                n = len(rows)
                if n >= self._limit:
                    if self._alone >= _ALONE_MIN and self._may_go_alone():
                        return self._send_alone(key, value)
                    rows = self._next_chunk()
                    n = 0
                rows.extend((key, value))  # whole, or not at all
                return Sent((self._chunk, n >> 1))
            rows = self._next_chunk(FIELDS)
        n = len(rows)
        if n >= self._limit:
            rows = self._next_chunk()
            n = 0
        rows.extend((key, value, tag, timestamp, headers, queues, partition))
        return Sent((self._chunk, n // FIELDS))

    async def send_many(
        self,
        keys: Sequence[Buffer] | Any,
        values: Sequence[Buffer | None] | Any,
        *,
        tags: Sequence[str | None] | None = None,
        timestamps: Sequence[int] | int | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        queues: Sequence[Sequence[str]] | None = None,
        partition: int | None = None,
    ) -> SentMany:
        """Queue many records, waiting for room; awaiting what is returned gives their partitions and offsets.

        ``keys`` and ``values`` are lists, or Arrow arrays of binaries or strings; a value None is a tombstone.
        Errors: Invalid and LimitExceeded naming the first faulty record's index; nothing was queued then.
        """
        fields = fields_of_many(keys, values, tags, timestamps, headers, queues, partition)
        if not len(fields[0]):
            return SentMany([])
        if self._target is None:
            fields = _copies(fields)  # others may change what they gave meanwhile
            await self._resolve()
        chunks = []
        for chunk in self._parted(fields, (await self._resolve()).partitions):
            while self._buffered >= self._settings.buffer_bytes:
                await self._wait_for_progress()
            self._check_open()
            with self._guard:
                self._close_chunk()
                self._enqueue(chunk)
            self._wake.set()
            chunks.append(chunk)
            await asyncio.sleep(0)  # the pump may cut what is there
        return SentMany(chunks)

    def _parted(self, fields: Fields, partitions: int) -> Iterator[Chunk]:
        """Chunks of the records of a ``send_many``. Nothing is read from the caller's lists later.

        Errors: Invalid and LimitExceeded naming the first faulty record's index, before there is a chunk.
        """
        if all(column is None for column in fields[PLAIN_FIELDS:]):
            evens = even_parts(*fields[:PLAIN_FIELDS], part_bytes=self._chunk_bytes)
            if evens is not None:
                return map(self._even_chunk, evens)
        fields = _copies(fields)
        lengths = plain_lengths(fields)
        if lengths is None and (faults := faults_of(fields, partitions, 0)):
            raise faults[min(faults)]
        count = len(fields[0])
        step = self._records_of_a_chunk(count, bytes_of(fields) if lengths is None else plain_bytes(lengths))
        return (self._part_of(fields, lengths, slice(at, at + step)) for at in range(0, count, step))

    def _even_chunk(self, even: Even) -> Chunk:
        chunk = Chunk(self._loop, self._sent)
        chunk.fill_even(even)
        return chunk

    def _part_of(self, fields: Fields, lengths: Lengths | None, rows: slice) -> Chunk:
        chunk = Chunk(self._loop, self._sent)
        chunk.fill(
            [column and column[rows] for column in fields], lengths and (lengths[0][rows], lengths[1][rows])
        )
        return chunk

    def _records_of_a_chunk(self, records: int, size: int) -> int:
        """How many records make a chunk, where so many have ``size`` bytes."""
        return max(1, min(BATCH_RECORDS_MAX, self._chunk_bytes // max(1, size // records)))

    def _next_chunk(self, width: int | None = None) -> list[Any]:
        """Close the open chunk, begin another; ``width``: its rows, and all later ones, have so many fields.

        Errors: LimitExceeded, Unavailable.
        """
        self._check_open()
        if self._limit:
            self._close_chunk()
            self._loop.call_soon_threadsafe(self._wake.set)
        self._width = width or self._width
        if self._buffered >= self._settings.buffer_bytes:
            raise LimitExceeded(
                f"{self._buffered} bytes wait for acknowledgement, buffer_bytes is {self._settings.buffer_bytes}: "
                "await a record that was sent, or flush"
            )
        self._limit = self._chunk_records * self._width
        if get_ident() == self._thread:
            self._start_linger(self._chunk)
        else:
            self._loop.call_soon_threadsafe(self._start_linger, self._chunk)
        return self._rows

    def _may_go_alone(self) -> bool:
        return (
            not self._settings.linger_ms and not self._limit and not self._closed and not self._is_ended
            and len(self._lanes) == 1 and not self._lanes[0].outbox.unsettled and get_ident() == self._thread
        )  # fmt: skip

    def _send_alone(self, key: Buffer, value: Buffer | None) -> Sent:
        """Queue a record and send it, in the caller's turn."""
        chunk = self._chunk
        self._rows.extend((key, value))
        self._linger_over(chunk)
        return Sent((chunk, 0))

    def _start_linger(self, chunk: Chunk) -> None:
        if self._settings.linger_ms:
            self._loop.call_later(self._settings.linger_ms / 1000, self._linger_over, chunk)
        else:  # all that is sent in this turn of the loop
            self._loop.call_soon(self._linger_over, chunk)

    def _linger_over(self, chunk: Chunk) -> None:
        with self._guard:
            if chunk is self._chunk:
                self._close_chunk()
        try:
            is_done = self._send_small()
        except Exception as broken:  # the pump's to handle: it is the boundary
            self._broken, is_done = broken, False
        if not is_done:
            self._wake.set()

    def _send_small(self) -> bool:
        """Cut and send the only chunk that waits, if it is a small one and nothing is to be waited for."""
        target = self._target
        if len(self._lanes) != 1 or target is None:
            return False
        lane = self._lanes[0]
        outbox, stream = lane.outbox, lane.transport.open_stream
        if not (
            self._is_resting and len(self._closed) == 1 and self._closed[0].is_small and self._is_plain
            and stream is not None and stream.has_room and not outbox.has_unsent
        ):  # fmt: skip
            return False
        with self._guard:
            chunk = self._closed.popleft()
        self._open.append(chunk)
        self._cut_chunk(chunk, target)
        batches = outbox.take(self._loop.time(), bytes_max=REQUEST_BYTES, under_way_max=UNDER_WAY_BYTES_MAX)
        if batches:
            try:
                self._post(stream, lane, batches)
            except FirnError as error:
                self._answered(lane, batches, error)
        return not outbox.has_unsent

    def _close_chunk(self) -> None:
        if not self._rows:
            return
        chunk, rows, width = self._chunk, self._rows, self._width
        size = small_bytes(rows, width) if len(rows) <= RECORDS_MAX * width else None
        if size is not None:
            chunk.fill_small(fields_of(rows, width), size)
        else:
            chunk.fill(fields_of(rows, width))
        self._rows, self._limit = [], 0
        self._alone = self._alone + 1 if chunk.records == 1 else 0
        self._enqueue(chunk)
        self._chunk_records = self._records_of_a_chunk(chunk.records, chunk.bytes)

    def _enqueue(self, chunk: Chunk) -> None:
        chunk.first = self._sent
        self._sent += chunk.records
        self._buffered += chunk.bytes
        self._closed.append(chunk)
        self._chunk = Chunk(self._loop, self._sent)

    def _check_open(self) -> None:
        if self._is_ended:
            raise Unavailable(f"the producer of {self.topic} is closed")

    async def flush(self) -> None:
        """Returns when everything sent before it is acknowledged.

        Errors: the first failure of a record since the last flush; the others have their outcome too by then.
        """
        with self._guard:
            self._close_chunk()
        self._wake.set()
        before = [*self._closed, *self._open]
        while any(not chunk.is_complete for chunk in before):
            await self._wait_for_progress()
        self._reap()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def wait_for_room(self) -> None:
        """Returns when ``send`` has room again."""
        while self._buffered >= self._settings.buffer_bytes and not self._is_ended:
            await self._wait_for_progress()

    async def close(self) -> None:
        """Flush, then stop. Errors: those of ``flush``."""
        if self._is_ended:
            return
        try:
            await self.flush()
        finally:
            await self.abort()

    async def abort(self) -> None:
        """Stop without waiting: what is not acknowledged fails with Unavailable, its outcome unknown."""
        self._is_ended = True
        with self._guard:
            self._close_chunk()
            self._limit = 0
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._fail_everything(Unavailable(f"the producer of {self.topic} was closed"))  # if it never ran

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.close() if error is None else self.abort())

    async def _wait_for_progress(self) -> None:
        self._progress.clear()
        if self._pump.done():
            raise Unavailable(f"the producer of {self.topic} has ended")
        await self._progress.wait()

    async def _run(self) -> None:
        error: FirnError = Unavailable(f"the producer of {self.topic} was closed; the outcome is unknown")
        try:
            while True:
                await self._cut()
                await self._send_ready()
                await self._sleep()
        except Exception as broken:  # the task's boundary: whoever waits must hear of it
            log.exception("the producer of %s broke", self.topic)
            error = InvariantBroken(f"the producer of {self.topic} broke: {broken!r}")
        finally:
            self._is_ended = True
            self._limit = 0
            self._fail_everything(error)

    def _fail_everything(self, error: FirnError) -> None:
        for lane in self._lanes:
            lane.outbox.fail_all(error)
        with self._guard:
            self._close_chunk()
        while self._closed:
            self._fail_chunk(self._closed.popleft(), error)
        for chunk in self._open:
            if not chunk.is_complete:  # cut, but not taken into the outbox
                chunk.fail([i for i, offset in enumerate(chunk.offsets) if offset == PENDING], error)
        self._settled()

    def _fail_chunk(self, chunk: Chunk, error: FirnError) -> None:
        if chunk.left < 0:
            chunk.opened()
            chunk.fail(range(chunk.records), error)
        self._open.append(chunk)

    async def _sleep(self) -> None:
        if self._closed:
            return
        now = self._loop.time()
        until = None
        for lane in self._lanes:
            # What is sent meanwhile (``_send_small``) has its deadline later than this.
            until = until or now + self._settings.delivery_timeout
            if (due := lane.outbox.next_time(now)) is not None:
                until = min(until, max(due, now + LEAST_SLEEP_S))
        self._is_resting = True
        try:
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._is_resting = False
        self._wake.clear()
        if self._broken is not None:
            raise self._broken
        for lane in self._lanes:
            lane.outbox.expire(self._loop.time())
            self._settled()

    async def _resolve(self) -> Target:
        if self._target is None:
            self._target = await self._find_target(self.topic, self._settings.delivery_timeout)
            # With many partitions a chunk is parted many times; let it be larger, so that batches are not small.
            self._chunk_bytes = self._settings.batch_bytes * min(self._target.partitions, 8)
        return self._target

    async def _cut(self) -> None:
        """Closed chunks become batches of the outbox, a few at a time: the loop must breathe."""
        for _ in range(min(4, len(self._closed))):
            try:
                target = await self._resolve()
            except FirnError as error:
                with self._guard:
                    self._fail_chunk(self._closed.popleft(), error)
                self._settled()
                continue
            if not self._lanes:
                self._lanes = [_Lane(self._make_outbox(target), way) for way in target.transports]
            with self._guard:
                chunk = self._closed.popleft()
            self._open.append(chunk)
            self._cut_chunk(chunk, target)
            self._settled()

    def _make_outbox(self, target: Target) -> Outbox:
        randomness, compression = self._transport.randomness, self._settings.compression
        return Outbox(target.topic_id, randomness=randomness, codecs=codecs(compression))

    def _cut_chunk(self, chunk: Chunk, target: Target) -> None:
        settings, lanes = self._settings, self._lanes
        deadline = self._loop.time() + settings.delivery_timeout
        now_ms = settings.clock_ms()
        if chunk.is_small and self._is_plain and chunk.bytes <= settings.batch_bytes:
            for few in cut_small(chunk, target.partitions):
                lanes[few[0] % len(lanes)].outbox.add_small(few, chunk, deadline, now_ms)
            return
        for part in cut(
            chunk,
            target.partitions,
            batch_bytes=settings.batch_bytes,
            now_ms=now_ms,
            is_plain=self._is_plain,
        ):
            if isinstance(part, Cut):
                lanes[part.partition % len(lanes)].outbox.add(part, chunk, deadline)
            else:
                lanes[part[0] % len(lanes)].outbox.add_small(part, chunk, deadline, now_ms)

    async def _send_ready(self) -> None:
        """Everything that may go now goes; a broker group that cannot be reached holds up no other."""
        if len(self._lanes) == 1:
            await self._send_lane(self._lanes[0])
            return
        for lane in self._lanes:
            if lane.sending is not None:
                lane.is_missed = True
            elif lane.outbox.has_unsent:
                lane.is_missed = False
                lane.sending = asyncio.create_task(self._send_lane(lane))
                self._sending.add(lane.sending)
                lane.sending.add_done_callback(partial(self._lane_sent, lane))

    def _lane_sent(self, lane: _Lane, task: "asyncio.Task[None]") -> None:
        lane.sending = None
        self._sending.discard(task)
        if not task.cancelled() and (broken := task.exception()) is not None:
            self._broken = broken if isinstance(broken, Exception) else InvariantBroken(repr(broken))
        if lane.is_missed or self._broken is not None:
            self._wake.set()

    async def _send_lane(self, lane: _Lane) -> None:
        """What may go to one group now, in requests of about 1 MiB."""
        while batches := lane.outbox.take(
            self._loop.time(), bytes_max=REQUEST_BYTES, under_way_max=UNDER_WAY_BYTES_MAX
        ):
            try:
                stream = await lane.transport.stream()
                left = self._post(stream, lane, batches)
            except FirnError as error:
                self._answered(lane, batches, error)
                return
            if left is not None:
                with contextlib.suppress(FirnError):  # the batches hear of it as well
                    await left

    def _post(
        self, stream: Stream, lane: _Lane, batches: Sequence[OutBatch]
    ) -> "asyncio.Future[None] | None":
        data = batches[0].data if len(batches) == 1 else b"".join([b.data for b in batches])
        answered = partial(self._answered, lane, batches)
        if len(data) <= SMALL_BYTES_MAX and stream.has_room:
            stream.post_small(Op.PRODUCE, EMPTY_META, data, answered)
            return None
        return stream.post(Op.PRODUCE, {}, data, answered)

    def _answered(self, lane: _Lane, batches: Sequence[OutBatch], found: Message | FirnError) -> None:
        now, outbox = self._loop.time(), lane.outbox
        results = found if isinstance(found, FirnError) else _results(found, len(batches))
        has_failed = False
        for at, batch in enumerate(batches):
            result = results if isinstance(results, FirnError) else results[at]
            if isinstance(result, FirnError):
                has_failed = True
                self._learn(lane, result)
                outbox.fail(batch, result, now)
            else:
                outbox.acknowledge(batch, result)
        self._settled()
        if has_failed or self._closed or outbox.has_unsent:
            self._wake.set()

    def _learn(self, lane: _Lane, error: FirnError) -> None:
        if isinstance(error, UnknownTopic):  # deleted; perhaps made anew: the next chunk asks
            self._target = None
            lanes, self._lanes = self._lanes, []
            for each in lanes:
                each.outbox.fail_all(error)
        elif isinstance(error, NotMaster):
            asyncio.get_running_loop().call_soon(lane.transport.follow, error)  # not within what it ends

    def _settled(self) -> None:
        self._reap()
        self._progress.set()

    def _reap(self) -> None:
        """Complete chunks leave; their failures are kept for ``flush``."""
        done = [chunk for chunk in self._open if chunk.is_complete]
        if not done:
            return
        self._open = deque(chunk for chunk in self._open if not chunk.is_complete)
        with self._guard:  # ``send`` may add to the count in another thread
            self._buffered -= sum(chunk.bytes for chunk in done)
        for chunk in done:
            self._failure = self._failure or chunk.failure


def _results(message: Message, count: int) -> list[int | FirnError] | FirnError:
    """The outcome of each batch, from an ACK."""
    results = message.meta.get("results")
    if message.op != Op.ACK or not isinstance(results, list) or len(results) != count:
        return InvariantBroken(
            f"the broker acknowledged {count} batches with op {message.op} and {results!r}"
        )
    return [from_document(r) if isinstance(r, dict) else int(r[1]) for r in results]


def fields_of_many(
    keys: Any, values: Any, tags: Any, timestamps: Any, headers: Any, queues: Any, partition: int | None
) -> Fields:
    """The records of columns given as lists or Arrow arrays. Errors: Invalid when lengths differ."""
    keys, values = _list_of(keys), _list_of(values)
    given = {"tags": tags, "timestamps": timestamps, "headers": headers, "queues": queues}
    if len(values) != len(keys):
        raise Invalid(f"values: {len(values)} of them for {len(keys)} keys")
    found: Fields = [keys, values]
    for name, column in given.items():
        if column is None:
            found.append(None)
            continue
        whole = [column] * len(keys) if isinstance(column, int) else _plain(column)
        if len(whole) != len(keys):
            raise Invalid(f"{name}: {len(whole)} of them for {len(keys)} keys")
        found.append(whole)
    return [*found, None if partition is None else [partition] * len(keys)]


def _copies(fields: Fields) -> Fields:
    return [column and list(column) for column in fields]


def _list_of(column: Any) -> list[Any]:
    """The column as a list: the caller's own, where it is one."""
    if hasattr(column, "buffers") or hasattr(
        column, "chunks"
    ):  # an Arrow array, or several behind one another
        from firn.client.arrow import list_of

        return list_of(column)
    return column if type(column) is list else list(column)


def _plain(column: Any) -> list[Any]:
    if hasattr(column, "buffers") or hasattr(column, "chunks"):
        from firn.client.arrow import plain_list_of

        return plain_list_of(column)
    return list(column)
