"""Pages of one or more partitions, fetched ahead: one task per partition fills one bounded queue.

Up to the mark (``Cursor.is_caught_up``) and whenever much is missing, pages come by HTTP: each is complete in
itself and may be asked of any broker. At the end of the partition the task follows it by a FETCH of the stream,
and goes back to pages when that breaks. What is fetched and not yet taken is bounded by ``prefetch_bytes``.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from firn.batch import Buffer
from firn.client.cursor import Cursor, Page, PageMeta
from firn.client.routes import Target
from firn.client.transport import path_of
from firn.errors import FirnError, InvariantBroken, OffsetExpired
from firn.wire import BATCHES_TYPE, Message, Op

PAGE_BYTES = 2 << 20
PREFETCH_BYTES = 16 << 20
WAIT_MS = 500  # a page asked for at the end of a partition that is known to be behind
PARTITIONS_AT_ONCE = 16  # with a page by HTTP under way


@dataclass(frozen=True, slots=True)
class Caught:
    """Every partition has been read to its mark."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is read."""

    topic: str
    view: str
    until_end: bool = False
    queue: str | None = None
    tag: str | None = None
    snapshots: tuple[str, ...] = ()  # one a transport of the topic's; none: no snapshot is read
    ids: bool = False  # records of the raw view come with their message ids
    keys_only: bool = False  # without values; its cursors say so too
    read_from: str | None = None  # the address of the only broker to read from; None: as the transport does
    page_bytes: int = PAGE_BYTES
    prefetch_bytes: int = PREFETCH_BYTES

    def snapshot_of(self, partition: int) -> str | None:
        return self.snapshots[partition % len(self.snapshots)] if self.snapshots else None


class Feed:
    """The pages of ``cursors``; ``next`` gives them as they come."""

    def __init__(self, target: Target, source: Source, cursors: Sequence[Cursor]) -> None:
        self._target = target
        self._source = source
        self._ready: deque[Page | Caught | FirnError] = deque()
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._buffered = 0
        self._at_once = asyncio.Semaphore(PARTITIONS_AT_ONCE)
        self._behind = {cursor.partition for cursor in cursors}
        self._tasks = {
            asyncio.create_task(self._follow(cursor), name=f"firn read {source.topic}/{cursor.partition}")
            for cursor in cursors
        }
        self._running = len(self._tasks)

    async def next(self) -> Page | Caught | None:
        """The next page of any partition; ``Caught`` once, behind all pages up to the mark; None at the end.

        Errors: what ended a partition; the others are stopped.
        """
        while not self._ready:
            if not self._running:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        found = self._ready.popleft()
        if isinstance(found, FirnError):
            await self.close()
            raise found
        if isinstance(found, Page):
            self._buffered -= found.size
            if self._buffered < self._source.prefetch_bytes:
                self._has_room.set()
        return found

    @property
    def is_idle(self) -> bool:
        """Whether ``next`` would wait."""
        return not self._ready

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stops fetching; what was not taken is dropped."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ready.clear()

    def _put(self, item: Page | Caught | FirnError) -> None:
        self._ready.append(item)
        self._arrived.set()

    def _deliver(self, cursor: Cursor, page: Page) -> None:
        self._buffered += page.size
        if self._buffered >= self._source.prefetch_bytes:
            self._has_room.clear()
        self._put(page)
        if cursor.is_caught_up:
            self._mark(cursor)

    def _mark(self, cursor: Cursor) -> None:
        if cursor.partition in self._behind:
            self._behind.discard(cursor.partition)
            if not self._behind:
                self._put(Caught())

    async def _follow(self, cursor: Cursor) -> None:
        try:
            if cursor.is_caught_up:
                self._mark(cursor)
            while not (cursor.is_caught_up and self._is_finite):
                await self._has_room.wait()
                if cursor.is_behind or self._is_finite or not cursor.is_caught_up:
                    await self._page(cursor)
                else:
                    await self._tail(cursor)
        except FirnError as error:
            self._put(error)
        except Exception as broken:  # the task's boundary: the reader must hear of it
            self._put(InvariantBroken(f"reading {self._source.topic}/{cursor.partition} broke: {broken!r}"))
        finally:
            self._running -= 1
            self._arrived.set()

    @property
    def _is_finite(self) -> bool:
        return self._source.until_end or bool(self._source.snapshots)

    async def _page(self, cursor: Cursor) -> None:
        wait_ms = 0 if cursor.is_behind else WAIT_MS
        async with self._at_once:
            meta, data = await read_page(self._target, self._source, cursor, wait_ms=wait_ms)
        self._deliver(cursor, cursor.accept(meta, data))

    async def _tail(self, cursor: Cursor) -> None:
        """Follow by FETCH until the connection ends; errors that a retry may help are passed over."""
        source, loop = self._source, asyncio.get_running_loop()
        transport = self._target.transport_of(cursor.partition)
        arrived: asyncio.Queue[Message | FirnError] = asyncio.Queue()
        meta: dict[str, Any] = {
            "topic": source.topic, "partition": cursor.partition, "view": source.view, "offset": cursor.offset,
            "since": cursor.since, "queue": source.queue, "tag": source.tag,
            "max_bytes": source.page_bytes, "credit": source.page_bytes, "positions": source.ids,
            "projection": "keys" if source.keys_only else None, **transport.reading(),
        }  # fmt: skip
        started = loop.time()
        try:
            stream = await transport.stream()
            id = await stream.start(Op.FETCH, meta, b"", arrived.put_nowait)
            try:
                while True:
                    message = await arrived.get()
                    if isinstance(message, FirnError):
                        raise message
                    if message.op != Op.DATA:
                        continue
                    transport.note_shown(message.meta.get("shown"))
                    self._deliver(cursor, cursor.accept(PageMeta.of_stream(message.meta), message.data))
                    await self._has_room.wait()
                    await stream.tell(Op.CREDIT, id, {"bytes": max(1, len(message.data))})
            finally:
                stream.forget(id)
                if stream.is_open:
                    await stream.tell(Op.CANCEL, id)
        except FirnError as error:
            if not error.retry:
                raise
            transport.follow(error)
            if loop.time() - started < 1.0:  # a broker that is just coming back is not to be hammered
                await asyncio.sleep(transport.back_off(3))
            cursor.end = None  # what is there now is unknown: ask


async def read_page(
    target: Target, source: Source, cursor: Cursor, *, wait_ms: int = 0, max_bytes: int | None = None
) -> tuple[PageMeta, Buffer]:
    """One answer of a bulk read from the cursor's offset. Errors: what the broker answered."""
    transport = target.transport_of(cursor.partition)
    answer = await transport.bulk(
        path_of("topics", source.topic, "partitions", cursor.partition),
        query={
            "view": source.view, "offset": cursor.offset, "since": cursor.since,
            "snapshot": source.snapshot_of(cursor.partition),
            "queue": source.queue, "tag": source.tag, "max_bytes": max_bytes or source.page_bytes,
            "wait_ms": wait_ms or None, "positions": "true" if source.ids else None,
            "projection": "keys" if source.keys_only else None, **transport.reading(),
        },
        headers={"Accept": BATCHES_TYPE},
        address=source.read_from,
    )  # fmt: skip
    transport.note_shown(answer.headers.get("Firn-Shown"))
    return PageMeta.of_headers(answer.headers), answer.body


async def end_of(target: Target, topic: str, partition: int, *, queue: str | None = None) -> int:
    """The offset that the next record of a partition, or of a light queue of it, will get."""
    source = Source(topic, "compacted" if queue is None else "raw", queue=queue)
    try:
        meta, _ = await read_page(target, source, Cursor(partition), max_bytes=1)
    except OffsetExpired as error:
        first = error.details.get("earliest")
        if not isinstance(first, int):
            raise
        meta, _ = await read_page(target, source, Cursor(partition, offset=first), max_bytes=1)
    return meta.end
