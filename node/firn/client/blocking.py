"""``Client`` without await: the same names, run by an event loop in a background thread.

``send`` still only appends to a list, under a lock; where the asyncio producer refuses because its buffer is full,
this one waits. Iterating a reader fetches pages through the loop and builds records in the caller's thread.
A client may be used by several threads; a reader by one at a time.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar

from firn.batch import Buffer
from firn.client import core, producer, reader, snapshot, table
from firn.client.chunks import Sent, SentMany
from firn.client.groups import GroupOffset
from firn.client.tablestate import Change
from firn.errors import LimitExceeded, Unavailable
from firn.record import Record

T = TypeVar("T")

__all__ = ["Client", "GroupOffset", "Producer", "Reader", "Record", "Snapshot", "Table"]


class _Call:
    """Work on its way through an event loop, for a thread that waits for it.

    ``asyncio.run_coroutine_threadsafe`` does the same with two futures chained to one another, which costs a small
    request a fifth of its time.
    """

    __slots__ = ("_loop", "_running", "_task", "_work")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> None:
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._running = threading.Lock()  # held until the work is done
        self._running.acquire()
        loop.call_soon_threadsafe(self._start)

    def result(self, timeout: float | None) -> Any:
        """What the work gives, or raises. Whatever ends the waiting before cancels the work. *Errors*: TimeoutError."""
        try:
            if not self._running.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                raise TimeoutError
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        assert self._task is not None, "it is done"
        if self._task.cancelled():
            raise CancelledError
        return self._task.result()

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # who waited may have gone: that is no reason for a warning
        self._running.release()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Runner:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="firn client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def __call__(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The result of ``work``, run in the loop. An interrupt of the caller cancels it."""
        if self.loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            raise Unavailable("this client is closed, or was called from its own callback")
        found: T = _Call(self.loop, work).result(timeout)
        return found

    def close(self) -> None:
        if self.loop.is_closed() or threading.current_thread() is self._thread:
            return
        self(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_tasks(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.loop.shutdown_asyncgens()


class Acknowledgement(tuple[Sent, _Runner]):
    """A record on its way."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> tuple[int, int]:
        """Partition and offset, once acknowledged. Errors: what the record failed with."""
        sent, run = self
        return run(sent[0].wait(sent[1]), timeout)


class Acknowledgements:
    """Records of one ``send_many`` on their way."""

    def __init__(self, sent: SentMany, run: _Runner) -> None:
        self._sent = sent
        self._run = run

    def result(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Two arrays, partitions and offsets, once all are acknowledged."""

        async def wait() -> tuple[Any, Any]:
            return await self._sent

        return self._run(wait(), timeout)


class Producer:
    """See ``firn.client.Producer``."""

    def __init__(self, inner: producer.Producer, run: _Runner, guard: Any) -> None:
        self._inner = inner
        self._run = run
        self._guard = guard

    def send(
        self,
        key: Buffer,
        value: Buffer | None = None,
        tag: str | None = None,
        timestamp: int | None = None,
        headers: Mapping[str, str] | None = None,
        queues: Sequence[str] | None = None,
        partition: int | None = None,
    ) -> Acknowledgement:
        """Queue a record, waiting while the buffer is full; ``.result()`` gives its partition and offset."""
        while True:
            try:
                with self._guard:
                    sent = self._inner.send(key, value, tag, timestamp, headers, queues, partition)
                return Acknowledgement((sent, self._run))
            except LimitExceeded:
                self._run(self._inner.wait_for_room())

    def send_many(self, keys: Any, values: Any, **columns: Any) -> Acknowledgements:
        return Acknowledgements(self._run(self._inner.send_many(keys, values, **columns)), self._run)

    def flush(self) -> None:
        self._run(self._inner.flush())

    def close(self) -> None:
        self._run(self._inner.close())

    def abort(self) -> None:
        self._run(self._inner.abort())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


class Reader:
    """See ``firn.client.Reader``."""

    def __init__(self, inner: reader.Reader, run: _Runner) -> None:
        self._inner = inner
        self._run = run

    @property
    def caught_up(self) -> asyncio.Event:
        """``caught_up.is_set()``: everything up to the mark has been handed out."""
        return self._inner.caught_up

    def __iter__(self) -> Iterator[Record]:
        inner = self._inner
        while True:
            yield from inner.rest_of_page()
            page = self._run(inner.next_page())
            if page is None:
                return
            inner.open_page(page)

    def pages(self) -> Iterator[list[Record]]:
        return self._each(self._inner.pages())

    def arrow(self) -> Iterator[Any]:
        return self._each(self._inner.arrow())

    def _each(self, source: Any) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(source, None)

        try:
            while (found := self._run(step())) is not None:
                yield found
        finally:
            if not self._run.loop.is_closed():
                self._run(source.aclose())

    def positions(self) -> dict[int, GroupOffset]:
        return self._inner.positions()

    def commit(self) -> None:
        self._run(self._inner.commit())

    def close(self) -> None:
        self._run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Table(Mapping[bytes, bytes]):
    """See ``firn.client.Table``. Callbacks run in the client's thread: they must not call this client."""

    def __init__(self, inner: table.Table, run: _Runner) -> None:
        self._inner = inner
        self._run = run

    def __getitem__(self, key: bytes) -> bytes:
        return self._inner[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, key: object) -> bool:
        return key in self._inner

    def __hash__(self) -> int:
        return id(self)

    def offset(self, key: bytes) -> int | None:
        return self._inner.offset(key)

    def on_change(self, callback: Change) -> Callable[[], None]:
        return self._inner.on_change(callback)

    def caught_up(self) -> None:
        self._run(self._inner.caught_up())

    def close(self) -> None:
        self._run(self._inner.close())


class Snapshot:
    """See ``firn.client.Snapshot``: ``with client.snapshot(topic) as snapshot``."""

    def __init__(self, inner: snapshot.Snapshot, run: _Runner) -> None:
        self.inner = inner
        self._run = run

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def ends(self) -> dict[int, int]:
        return self.inner.ends

    def renew(self) -> None:
        self._run(self.inner.renew())

    def close(self) -> None:
        self._run(self.inner.close())

    def __enter__(self) -> Self:
        self._run(self.inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """See ``firn.client.Client``; use it as ``with``."""

    def __init__(self, brokers: str | None = None, **settings: Any) -> None:
        self._run = _Runner()
        try:
            self._inner = self._run(_made(brokers, settings))
        except BaseException:
            self._run.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(flush=error is None)

    def close(self, *, flush: bool = True) -> None:
        try:
            self._run(self._inner.close(flush=flush))
        finally:
            self._run.close()

    def create_topic(self, name: str, partitions: int = 1, **spec: Any) -> dict[str, Any]:
        return self._run(self._inner.create_topic(name, partitions, **spec))

    def update_topic(self, name: str, **spec: Any) -> dict[str, Any]:
        return self._run(self._inner.update_topic(name, **spec))

    def delete_topic(self, name: str) -> None:
        self._run(self._inner.delete_topic(name))

    def topics(self) -> list[dict[str, Any]]:
        return self._run(self._inner.topics())

    def describe(self, name: str) -> dict[str, Any]:
        return self._run(self._inner.describe(name))

    def producer(
        self, topic: str, *, linger_ms: float = 5, batch_bytes: int = 1 << 20, **settings: Any
    ) -> Producer:
        guard = threading.RLock()

        async def make() -> producer.Producer:
            return self._inner.producer(
                topic, linger_ms=linger_ms, batch_bytes=batch_bytes, guard=guard, **settings
            )

        return Producer(self._run(make()), self._run, guard)

    def put(self, topic: str, key: Buffer, value: Buffer | None, **options: Any) -> tuple[int, int]:
        return self._run(self._inner.put(topic, key, value, **options))

    def delete(self, topic: str, key: Buffer, **options: Any) -> tuple[int, int]:
        return self._run(self._inner.delete(topic, key, **options))

    def get(self, topic: str, key: Buffer) -> Record | None:
        return self._run(self._inner.get(topic, key))

    def get_many(self, topic: str, keys: Sequence[Buffer]) -> list[Record | None]:
        return self._run(self._inner.get_many(topic, keys))

    def reader(self, topic: str, *, snapshot: Snapshot | None = None, **options: Any) -> Reader:
        async def make() -> reader.Reader:
            return self._inner.reader(topic, snapshot=None if snapshot is None else snapshot.inner, **options)

        return Reader(self._run(make()), self._run)

    def table(self, topic: str) -> Table:
        return Table(self._run(self._inner.table(topic)), self._run)

    def snapshot(self, topic: str) -> Snapshot:
        return Snapshot(self._run(self._inner.snapshot(topic)), self._run)

    def query(
        self, topic: str, key: bytes, *, since: int | None = None, until: int | None = None
    ) -> list[Record]:
        return self._run(self._inner.query(topic, key, since=since, until=until))

    def find(self, topic: str, id: str) -> Record | None:
        return self._run(self._inner.find(topic, id))

    def commit_offsets(
        self, group: str, topic: str, offsets: Mapping[int, GroupOffset | tuple[int, int | None] | int]
    ) -> None:
        self._run(self._inner.commit_offsets(group, topic, offsets))

    def fetch_offsets(self, group: str, topic: str) -> dict[int, GroupOffset]:
        return self._run(self._inner.fetch_offsets(group, topic))

    def compact(
        self, topic: str, *, force: bool = False, wait: bool = False, timeout: float | None = None
    ) -> dict[str, Any]:
        return self._run(self._inner.compact(topic, force=force, wait=wait, timeout=timeout))

    def compaction(self, topic: str) -> dict[str, Any] | None:
        return self._run(self._inner.compaction(topic))

    def cancel_compaction(self, topic: str) -> None:
        self._run(self._inner.cancel_compaction(topic))

    def open_plan(self, topic: str, *, run: str = "", slice_records: int | None = None) -> dict[str, Any]:
        return self._run(self._inner.open_plan(topic, run=run, slice_records=slice_records))

    def compaction_plan(self, topic: str) -> dict[str, Any] | None:
        return self._run(self._inner.compaction_plan(topic))

    def touch_plan(
        self, topic: str, ids: Sequence[str], progress: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._run(self._inner.touch_plan(topic, ids, progress))

    def cancel_plan(self, topic: str) -> None:
        self._run(self._inner.cancel_plan(topic))

    def status(self) -> dict[str, Any]:
        return self._run(self._inner.status())

    def switchover(
        self, group: int, *, to: str | None = None, accept_data_loss: bool = False
    ) -> dict[str, Any]:
        return self._run(self._inner.switchover(group, to=to, accept_data_loss=accept_data_loss))

    def rebuild(self, node: str, *, reason: str) -> dict[str, Any]:
        return self._run(self._inner.rebuild(node, reason=reason))

    def cluster_status(self) -> dict[str, Any]:
        return self._run(self._inner.cluster_status())


async def _made(brokers: str | None, settings: dict[str, Any]) -> core.Client:
    return core.Client(brokers, **settings)
