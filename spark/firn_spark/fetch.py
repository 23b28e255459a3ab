"""Reading ranges of partitions: what a task does.

Asked are the brokers themselves, by the client's own parts: each partition's master is found and followed, requests are
repeated, every checksum is checked. A thread receives pages ahead while the caller's makes Arrow of those before.

Invariants: of a range exactly the rows with ``start <= offset < end`` are delivered, in offset order; a range is over
when the broker has said that it has nothing more below ``end``, never because an answer was short; a range of a snapshot
is read from that snapshot or not at all.
"""

import asyncio
import random
import threading
from collections.abc import Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np

from firn.client.cursor import Cursor, Page, Piece
from firn.client.feed import Caught, Feed, Source
from firn.client.routes import Routes, Target
from firn.client.snapshot import RENEW_S
from firn.client.transport import Transport, path_of
from firn.errors import BadOffset, FirnError, NotFound, SnapshotExpired, Unavailable
from firn_spark.columns import Joiner, Projection
from firn_spark.connection import Connection

T = TypeVar("T")
View = Literal["compacted", "raw"]
PAGE_BYTES = 8 << 20
AHEAD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Offsets ``[start, end)`` of a partition.

    ``snapshot``: as ``firn.client.Snapshot.id`` names it. ``since``: of the compacted view, the least horizon that was
    seen by who has read what lies before ``start``; None: nobody has.
    """

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    view: View = "compacted"
    projection: Projection = "records"
    snapshot: str | None = None
    since: int | None = None
    read_from: Literal["master", "any"] = "master"


def read(connection: Connection, ranges: Iterable[Range]) -> Iterator[Any]:
    """``pyarrow.RecordBatch`` es of about 100,000 rows or 16 MiB (``firn_spark.columns``), none of two ranges.

    Errors: SnapshotExpired (the snapshot is gone, the topic was made anew, a tombstone may have been missed),
    OffsetExpired (raw records that retention removed), UnknownTopic, Unavailable (nobody answers, or nobody has come as
    far as ``end`` within the connection's timeout).
    """
    with Link(connection) as link:
        for asked in ranges:
            joiner = Joiner(asked.topic, asked.projection)
            with closing(link.pages(asked)) as found:
                for page in found:
                    yield from joiner.add(page.pieces)
            yield from joiner.rest()


def pages(connection: Connection, asked: Range) -> Iterator[Page]:
    """The same as the columns of the format: ``page.pieces``, each a batch and a mask of its rows. Errors: as ``read``."""
    with Link(connection) as link, closing(link.pages(asked)) as found:
        yield from found


class Link:
    """One connection of a task: an event loop in a thread, and what is known of topics. Use it as ``with``."""

    def __init__(self, connection: Connection) -> None:
        """Errors: Invalid for an address, a certificate or a token that is none."""
        self.timeout = connection.timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="firn link", daemon=True)
        self._thread.start()
        try:
            credentials = connection.credentials()
            self._transport = Transport(
                connection.bootstrap, timeout=connection.timeout, randomness=random.SystemRandom(),
                credentials=credentials,
            )  # fmt: skip
        except BaseException:
            self._end_loop()
            raise
        self._routes = Routes(self._transport)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, run in the loop."""
        return self.submit(work).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """``work`` on its way in the loop; it does not outlive the link."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def target(self, topic: str, topic_id: int | None = None) -> Target:
        """Where a topic's partitions are. Errors: UnknownTopic; SnapshotExpired when it is another one by now."""

        async def attempt() -> Target:
            answer = await self._transport.request("GET", path_of("topics", topic))
            return self._routes.target(answer.document())

        found = await self._transport.retried(attempt, what=f"find topic {topic}")
        if topic_id is not None and found.topic_id != topic_id:
            raise SnapshotExpired(
                f"topic {topic} was deleted and created anew since this query began: start anew",
                topic_id=found.topic_id,
            )
        return found

    def pages(self, asked: Range) -> Generator[Page, None, None]:
        """The pages of a range, fetched ahead; closing it stops that. Errors: as ``read``."""
        target = self.run(self.target(asked.topic, asked.topic_id)) if asked.start < asked.end else None
        while target is not None and asked.start < asked.end:
            try:
                with closing(self._pages(asked, target)) as found:
                    for page in found:
                        asked = replace(asked, start=max(asked.start, page.next_offset), since=page.since)
                        yield _before(page, asked.end)
            except BadOffset:  # a standby that has not come as far as this range begins
                if asked.read_from == "master":
                    raise
                asked = replace(asked, read_from="master")

    def _pages(self, asked: Range, target: Target) -> Generator[Page, None, None]:
        feed, renewing = self.run(self._begin(asked, target))
        try:
            passed, until = asked.start, self._loop.time() + self.timeout
            while passed < asked.end:
                page = self.run(feed.next())
                if not isinstance(page, Page):
                    assert isinstance(page, Caught), (
                        "a feed ends behind the mark, which is the end of the range"
                    )
                    continue
                if page.next_offset > passed:
                    passed, until = page.next_offset, self._loop.time() + self.timeout
                elif self._loop.time() > until:
                    raise Unavailable(
                        f"{asked.topic}/{asked.partition}: no broker that answers has come from offset {passed} to "
                        f"{asked.end} within {self.timeout:g} s"
                    )
                yield page
        finally:
            self.run(_stop(feed, renewing))

    async def _begin(self, asked: Range, target: Target) -> tuple[Feed, "asyncio.Task[None] | None"]:
        ids = () if asked.snapshot is None else tuple(asked.snapshot.split(","))
        keys_only = asked.projection == "keys"
        renewing = None
        if ids:
            way = target.transport_of(asked.partition)
            path = path_of("topics", asked.topic, "snapshots", ids[asked.partition % len(ids)])
            try:
                await way.request("PUT", path)
            except NotFound as error:
                raise SnapshotExpired(
                    f"snapshot {asked.snapshot} of {asked.topic}: {error.message}"
                ) from None
            renewing = asyncio.create_task(_renew(way, path), name=f"firn renew {path}")
        is_any = asked.read_from == "any" and not ids
        source = Source(
            asked.topic, asked.view, until_end=True, snapshots=ids, keys_only=keys_only, page_bytes=PAGE_BYTES,
            prefetch_bytes=AHEAD_BYTES,
        )  # fmt: skip
        cursor = Cursor(
            asked.partition, offset=asked.start, since=asked.since, view=asked.view, target=asked.end,
            topic_id=asked.topic_id, keys_only=keys_only,
        )  # fmt: skip
        return Feed(self._routes.for_reading(target, is_any=is_any), source, [cursor]), renewing

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # of a caller that failed meanwhile
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._routes.close()
        await self._transport.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._close())
        finally:
            self._end_loop()


async def _renew(way: Transport, path: str) -> None:
    """Hold a snapshot's lease while a task reads; the reads themselves say so when it is gone."""
    while True:
        await asyncio.sleep(RENEW_S)
        with suppress(FirnError):
            await way.request("PUT", path)


async def _stop(feed: Feed, renewing: "asyncio.Task[None] | None") -> None:
    if renewing is not None:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
    await feed.close()


def _before(page: Page, end: int) -> Page:
    """The page without the rows from ``end`` on."""
    if page.next_offset <= end:
        return page
    found = []
    for piece in page.pieces:
        if piece.batch.header.last_offset < end:
            found.append(piece)
            continue
        inside = piece.batch.columns.offsets < end
        keep = inside if piece.keep is None else piece.keep & inside
        if np.any(keep):
            found.append(Piece(piece.batch, keep, piece.place))
    return replace(page, pieces=found)
