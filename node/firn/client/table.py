"""``Table``: a topic as a live mapping from key to value.

One task per partition applies its records as they come. When the broker says that tombstones may have been missed
(SnapshotExpired), the partition is read anew beside the map, which shows the old state until the new one is
complete; then the differences are applied and reported. ``Unavailable`` is waited out; any other error ends the
table: ``caught_up`` raises it, and ``error`` holds it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self

from firn.client.cursor import Cursor, Page
from firn.client.feed import Caught, Feed, Source, read_page
from firn.client.routes import Target
from firn.client.tablestate import Change, TableState
from firn.errors import FirnError, InvariantBroken, SnapshotExpired

log = logging.getLogger(__name__)

ENDS_AT_ONCE = 16


class Table(Mapping[bytes, bytes]):
    """Made by ``Client.table``, which it lives as long as; ``close`` ends it earlier."""

    def __init__(self, topic: str, target: Target, reads: Target) -> None:
        """``target``: to the masters, who know what is acknowledged; ``reads``: to who may answer reads."""
        self.topic = topic
        self.error: FirnError | None = None
        self._target = target
        self._reads = reads
        self._source = Source(topic, "compacted")
        self._callbacks: list[Change] = []
        self._state = TableState(self._changed)
        self._state.is_watched = False
        self._shown = dict.fromkeys(
            range(target.partitions), 0
        )  # the map holds everything below these offsets
        self._read = dict(
            self._shown
        )  # as far as it was read; ahead of ``_shown`` while a partition is read anew
        self._progress = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._run(partition), name=f"firn table {topic}/{partition}")
            for partition in range(target.partitions)
        ]

    def __getitem__(self, key: bytes) -> bytes:
        found = self._state.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._state))

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, key: object) -> bool:
        return key in self._state

    def __hash__(self) -> int:
        return id(self)

    def offset(self, key: bytes) -> int | None:
        """The offset of the key's newest record, for ``if_offset``; None when it is absent."""
        return self._state.offset(key)

    def on_change(self, callback: Change) -> Callable[[], None]:
        """Call ``callback(key, old, new)`` at every change from now on (None: absent); what is returned ends that.

        It is called in the client's event loop, after the change shows in the table; what it raises is logged.
        """
        self._callbacks.append(callback)
        self._state.is_watched = True

        def end() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
            self._state.is_watched = bool(self._callbacks)

        return end

    def _changed(self, key: bytes, old: bytes | None, new: bytes | None) -> None:
        for callback in tuple(self._callbacks):
            try:
                callback(key, old, new)
            except Exception:  # the boundary to code of others: one callback's fault is not the table's
                log.exception("a callback of table %s failed", self.topic)

    async def caught_up(self) -> None:
        """Returns when the table shows everything that was acknowledged before the call.

        Errors: what ended the table; Unavailable when the broker cannot be asked.
        """
        at_once = asyncio.Semaphore(ENDS_AT_ONCE)

        async def end(partition: int) -> int:
            async with at_once:
                meta, _ = await read_page(
                    self._target,
                    self._source,
                    Cursor(partition, offset=self._shown[partition]),
                    max_bytes=1,
                )
                return meta.end

        partitions = list(self._shown)
        self._raise_error()
        ends = await asyncio.gather(*(end(partition) for partition in partitions))
        while any(self._shown[p] < end for p, end in zip(partitions, ends, strict=True)):
            self._raise_error()
            self._progress.clear()
            await self._progress.wait()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    async def _run(self, partition: int) -> None:
        try:
            await self._follow(partition)
        except FirnError as error:
            self.error = error
            log.warning("table %s ends: %s", self.topic, error.message)
        except Exception as broken:  # the task's boundary: who waits must hear of it
            log.exception("table %s broke", self.topic)
            self.error = InvariantBroken(f"the table of {self.topic} broke: {broken!r}")
        finally:
            self._progress.set()

    async def _follow(self, partition: int) -> None:
        cursor = Cursor(partition)
        failures = 0
        while True:
            feed = Feed(self._reads, self._source, [cursor])
            try:
                while (found := await feed.next()) is not None:
                    failures = 0
                    self._take(partition, found)
                    await asyncio.sleep(0)  # others go on between pages
            except SnapshotExpired as error:
                log.info("table %s reads partition %d anew: %s", self.topic, partition, error.message)
                cursor = self._begin_anew(partition, error)
            except FirnError as error:
                if not error.retry:
                    raise
                failures += 1
                await asyncio.sleep(self._target.transport_of(partition).back_off(failures))
                cursor = self._resumed(cursor)
            finally:
                await feed.close()

    def _begin_anew(self, partition: int, error: SnapshotExpired) -> Cursor:
        cursor = Cursor(partition)
        if "topic_id" in error.details:  # another creation: its offsets begin at 0 again
            self._state.forget_offsets(partition)
            self._shown[partition] = 0
        else:
            cursor.raise_target(self._shown[partition])
        self._state.begin_pass(partition)
        return cursor

    def _resumed(self, cursor: Cursor) -> Cursor:
        """Where to go on after a feed ended: pages that it had fetched ahead are fetched again."""
        partition = cursor.partition
        if self._state.is_in_pass(partition):
            self._state.begin_pass(partition)
            fresh = Cursor(partition)
            fresh.raise_target(self._shown[partition])
            return fresh
        return Cursor(partition, offset=self._shown[partition], since=cursor.since, topic_id=cursor.topic_id)

    def _take(self, partition: int, found: Page | Caught) -> None:
        if isinstance(found, Caught):
            if self._state.is_in_pass(partition):
                self._state.end_pass(partition)
                self._shown[partition] = max(self._shown[partition], self._read[partition])
        else:
            for piece in found.pieces:
                self._state.apply_piece(partition, piece)
            self._read[partition] = found.next_offset
            if not self._state.is_in_pass(partition):
                self._shown[partition] = found.next_offset
        self._progress.set()

    async def close(self) -> None:
        """Stop following; the map stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.error is None:
            self.error = FirnError(f"the table of {self.topic} is closed")
        self._progress.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
