"""``Reader``: the records of a topic, one by one, in pages, or as Arrow record batches.

Invariants: within a partition records come in offset order, each at most once; a position never passes a record
that was not handed out, so that ``commit`` inside the loop covers exactly what the loop has seen (of a light queue:
whole pages of it, because its records carry the partition's offsets and not the queue's).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from firn.client.cursor import Cursor, Page
from firn.client.feed import Caught, Feed, Source, end_of, read_page
from firn.client.groups import GroupOffset, commit_offsets, fetch_offsets
from firn.client.routes import Target
from firn.client.transport import Transport, path_of
from firn.errors import Invalid, OffsetExpired, UnknownPartition
from firn.record import Record

FindTarget = Callable[[str], Awaitable[Target]]
Reading = Callable[[Target], Target]
Start = str | int | datetime | Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """``start``: earliest, latest, committed, an offset, a time (datetime, RFC 3339 or ``@MILLISECONDS``), or an
    offset for each partition."""

    source: Source
    start: Start
    partitions: Sequence[int] | None = None
    group: str | None = None
    targets: Mapping[int, int] | None = None  # partition -> where to stop: a snapshot's ends


def time_ms(start: str | datetime) -> int | None:
    """The time that ``start`` names, in ms since 1970; None when it names none."""
    if isinstance(start, datetime):
        return int(start.timestamp() * 1000)
    if start.startswith("@"):
        digits = start[1:].removeprefix("-")
        return int(start[1:]) if digits.isascii() and digits.isdigit() else None
    try:
        found = datetime.fromisoformat(start)
    except ValueError:
        return None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


class Reader:
    """Iterate it once: ``async for record in reader``, ``reader.pages()`` or ``reader.arrow()``.

    ``caught_up`` is set when everything up to the mark has been handed out: the mark is, per partition, the end
    at the start or the greatest horizon seen since, whichever is later. Leave its ``async with``, or read it to its
    end, or drop it, to stop what it fetches ahead.
    """

    def __init__(
        self, transport: Transport, settings: ReaderSettings, find_target: FindTarget, reading: Reading
    ) -> None:
        """``reading``: the ways to who may answer reads; they may be others than those for the rest."""
        self.topic = settings.source.topic
        self.caught_up = asyncio.Event()
        self._transport = transport
        self._reading = reading
        self._settings = settings
        self._find_target = find_target
        self._target: Target  # known, as the ways for reads, before anything is asked
        self._reads: Target
        self._feed: Feed | None = None
        self._is_closed = False
        self._positions: dict[int, GroupOffset] = {}
        self._page: Page | None = None
        self._rest: Iterator[Record] = iter(())
        self._last: Record | None = None
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> Record:
        for record in self._rest:
            self._last = record
            return record
        return await self._first_of_next_page()

    async def _first_of_next_page(self) -> Record:
        while (page := await self.next_page()) is not None:
            for record in self.open_page(page):
                self._last = record
                return record
        raise StopAsyncIteration

    def rest_of_page(self) -> Iterator[Record]:
        """The records of the open page that were not handed out yet."""
        for record in self._rest:
            self._last = record
            yield record

    def open_page(self, page: Page) -> Iterator[Record]:
        """The records of the page, which is the open one from now on."""
        with self._ending_at_a_fault():
            self._rest = page.each_record(self.topic)
        self._page = page
        return self._rest

    @contextmanager
    def _ending_at_a_fault(self) -> Iterator[None]:
        """What cannot be decoded was not handed out: nothing behind it is, so that no position passes it."""
        try:
            yield
        except Exception:
            self._is_closed = True
            if self._feed is not None:
                self._feed.cancel()
            raise

    async def pages(self) -> AsyncIterator[list[Record]]:
        """Lists of records, as they come from the broker: faster than one by one."""
        self._refuse_a_second_way()
        while (page := await self.next_page()) is not None:
            with self._ending_at_a_fault():
                records = page.records(self.topic)
            self._passed(page)
            if records:
                yield records

    async def arrow(self) -> AsyncIterator[Any]:
        """``pyarrow.RecordBatch`` es of about 100,000 rows or 16 MiB; smaller ones when no more is there yet.

        Errors: Invalid when pyarrow is not installed.
        """
        from firn.client.arrow import Collector, pyarrow

        pyarrow()
        self._refuse_a_second_way()
        collector = Collector()
        gathered: list[Page] = []
        while (page := await self.next_page()) is not None:
            with self._ending_at_a_fault():
                full = collector.add(page)
            for batch in full:
                self._passed(*gathered)
                gathered = []
                yield batch
            gathered.append(page)
            if not self._settings.source.until_end and self._feed is not None and self._feed.is_idle:
                self._passed(*gathered)
                gathered = []
                for batch in collector.rest():
                    yield batch
        self._passed(*gathered)
        for batch in collector.rest():
            yield batch

    def _refuse_a_second_way(self) -> None:
        if self._page is not None:
            raise Invalid("this reader is being read record by record already")

    async def next_page(self) -> Page | None:
        """The next page of any partition; None at the end. The open page is passed."""
        if self._page is not None:
            self._passed(self._page)
            self._page = self._last = None
        if self._is_closed:
            return None
        if self._feed is None:
            self._feed = await self._begin()
        while True:
            found = await self._feed.next()
            if isinstance(found, Caught):
                self.caught_up.set()
                continue
            return found

    def _passed(self, *pages: Page) -> None:
        for page in pages:
            self._positions[page.partition] = GroupOffset(page.next_offset, page.since)

    def positions(self) -> dict[int, GroupOffset]:
        """Per partition the offset behind what was handed out, and ``since``."""
        found = dict(self._positions)
        page, last = self._page, self._last
        if page is not None and last is not None and self._settings.source.queue is None:
            found[page.partition] = GroupOffset(last.offset + 1, page.since)
        return found

    async def commit(self) -> None:
        """Keep the group's positions at the broker: ``start="committed"`` goes on there.

        Errors: Invalid for a reader without a group.
        """
        if self._settings.group is None:
            raise Invalid("this reader has no group: give group= to commit its offsets")
        if found := self.positions():
            await commit_offsets(self._transport, self._settings.group, self.topic, found)

    async def _begin(self) -> Feed:
        self._target = await self._find_target(self.topic)
        self._reads = self._reading(self._target)
        count = self._target.partitions
        chosen = range(count) if self._settings.partitions is None else sorted(set(self._settings.partitions))
        for partition in chosen:
            if not 0 <= partition < count:
                raise UnknownPartition(f"{self.topic}: partition {partition}: the topic has {count}")
        cursors = await self._cursors(list(chosen))
        self._positions = {c.partition: GroupOffset(c.offset, c.since) for c in cursors}
        return Feed(self._reads, self._settings.source, cursors)

    async def _cursors(self, partitions: list[int]) -> list[Cursor]:
        starts = await self._starts(partitions)
        source, targets = self._settings.source, self._settings.targets or {}
        return [
            Cursor(
                partition, offset=starts[partition].offset, since=starts[partition].since, view=source.view,
                tag=source.tag, queue=source.queue, target=targets.get(partition),
            )
            for partition in partitions
        ]  # fmt: skip

    async def _starts(self, partitions: list[int]) -> dict[int, GroupOffset]:
        start = self._settings.start
        if isinstance(start, Mapping):
            missing = [p for p in partitions if p not in start]
            if missing:
                raise Invalid(f"start: no offset for partition {missing[0]}")
            return {p: GroupOffset(start[p], None) for p in partitions}
        if isinstance(start, int):
            if start < 0:
                raise Invalid(f"start: an offset is 0 or more, found {start}")
            return {p: GroupOffset(start, None) for p in partitions}
        if start == "committed":
            return await self._committed(partitions)
        finders = {"earliest": self._earliest, "latest": self._latest}
        if isinstance(start, str) and start in finders:
            return {p: GroupOffset(await finders[start](p), None) for p in partitions}
        stamp = time_ms(start)
        if stamp is None:
            raise Invalid(
                f"start: expected earliest, latest, committed, an offset or a time, found {start!r}"
            )
        return {p: GroupOffset(await self._at_time(p, stamp), None) for p in partitions}

    async def _committed(self, partitions: list[int]) -> dict[int, GroupOffset]:
        if self._settings.group is None:
            raise Invalid('start="committed" needs a group')
        known = await fetch_offsets(self._transport, self._settings.group, self.topic)
        return {p: known.get(p) or GroupOffset(await self._earliest(p), None) for p in partitions}

    async def _earliest(self, partition: int) -> int:
        """0, or of the raw view the first offset that retention left."""
        if self._settings.source.view != "raw":
            return 0
        try:
            await read_page(self._reads, self._settings.source, Cursor(partition), max_bytes=1)
        except OffsetExpired as error:
            earliest = error.details.get("earliest")
            if not isinstance(earliest, int):
                raise
            return earliest
        return 0

    async def _latest(self, partition: int) -> int:
        return await end_of(self._reads, self.topic, partition, queue=self._settings.source.queue)

    async def _at_time(self, partition: int, stamp: int) -> int:
        answer = await self._target.transport_of(partition).request(
            "GET",
            path_of("topics", self.topic, "partitions", partition, "offset"),
            query={"timestamp": stamp},
        )
        return int(answer.document()["offset"])

    async def close(self) -> None:
        """Stop reading; the positions stay as they are and may still be committed."""
        self._is_closed = True
        if self._feed is not None:
            await self._feed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None and not self._is_closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(feed.cancel)
