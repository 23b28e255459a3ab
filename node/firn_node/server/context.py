"""What every handler is given: the broker, the budgets, the counters; and the broker as the server sees it."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from firn.batch import Buffer
from firn.errors import FirnError, Timeout, Unavailable
from firn.record import Record
from firn.topicspec import TopicSpec
from firn_node.clock import Clock
from firn_node.compaction.answers import Answers
from firn_node.engine.api import (
    CompactionRun,
    Found,
    Outcome,
    ReadRequest,
    ReadResult,
    SnapshotInfo,
    TopicInfo,
)
from firn_node.server.budget import Budget
from firn_node.settings import BrokerSettings

if TYPE_CHECKING:
    from firn_node.plans.upload import Upload
    from firn_node.rebuild.source import Source
    from firn_node.replication.doors.peers import Peers
    from firn_node.replication.driver import GroupDriver
    from firn_node.security.guard import Guard
    from firn_node.server.door import Door

T = TypeVar("T")
Positions = dict[int, tuple[int, int | None]]  # partition -> (offset, since)


class ServedBroker(Protocol):
    """The calls of ``firn_node.engine.broker.Broker`` that the server makes."""

    settings: BrokerSettings
    metrics: Counter[str]
    group: "GroupDriver | None"

    @property
    def default_min_in_sync(self) -> int: ...
    async def produce(
        self, data: Buffer, *, conditions: Sequence[int | None] | None = None
    ) -> list[Outcome]: ...
    def begin_produce(
        self, data: Buffer, *, conditions: Sequence[int | None] | None = None
    ) -> tuple[list[Outcome], Awaitable[None] | None]: ...
    @property
    def shown(self) -> str: ...
    def floor_in(self, shown: str) -> int: ...
    async def read(self, request: ReadRequest) -> ReadResult: ...
    async def get(
        self, topic: str, keys: Sequence[bytes], *, partition: int | None = None, floor: int | None = None
    ) -> list[Found | None]: ...
    def get_now(self, topic: str, key: bytes) -> list[Found | None] | None: ...
    async def get_many(
        self, topic: str, keys: NDArray[np.uint8], starts: NDArray[np.int64], *, floor: int | None = None
    ) -> Answers: ...
    async def create_topic(self, name: str, spec: TopicSpec) -> TopicInfo: ...
    async def update_topic(self, name: str, spec: TopicSpec) -> TopicInfo: ...
    async def delete_topic(self, name: str) -> None: ...
    def topic(self, name: str) -> TopicInfo: ...
    def topic_of_id(self, topic_id: int) -> TopicInfo | None: ...
    def unknown_id(self, topic_id: int) -> FirnError: ...
    def topics(self, *, after: str = "", limit: int = 1000) -> list[TopicInfo]: ...
    async def tell_topics(self, group: int, has: tuple[int, int], wait_s: float) -> dict[str, Any]: ...
    async def describe(self, name: str, *, after: int = -1, limit: int = 1000) -> dict[str, Any]: ...
    async def offset_of_time(self, topic: str, partition: int, timestamp_ms: int) -> int: ...
    async def query(self, topic: str, key: bytes, since_ms: int, until_ms: int) -> list[Record]: ...
    async def find_id(self, topic: str, id: str) -> Record | None: ...
    async def compact(self, topic: str, *, force: bool) -> CompactionRun: ...
    def compaction(self, topic: str) -> CompactionRun | None: ...
    def cancel_compaction(self, topic: str) -> CompactionRun: ...
    async def open_plan(self, topic: str, *, run: str, slice_records: int) -> tuple[dict[str, Any], bool]: ...
    def plan(self, topic: str) -> dict[str, Any]: ...
    def touch_plan(self, topic: str, id: str, progress: dict[str, Any] | None) -> dict[str, Any]: ...
    def planned_partition(self, topic: str, id: str, partition: int) -> dict[str, Any]: ...
    async def cancel_plan(self, topic: str, id: str) -> dict[str, Any]: ...
    def upload_to_plan(self, topic: str, id: str, partition: int, slice: int) -> "Upload": ...
    async def snapshot(self, topic: str) -> SnapshotInfo: ...
    def renew(self, id: str) -> SnapshotInfo: ...
    def close_snapshot(self, id: str) -> None: ...
    async def commit_offsets(self, group: str, topic: str, offsets: Positions) -> None: ...
    async def fetch_offsets(self, group: str, topic: str) -> Positions: ...
    async def rebuild(self, reason: str) -> None: ...
    async def switch_over(self, group: int, to: str | None) -> dict[str, Any]: ...
    async def accept_data_loss(self, group: int, node: str, by: str) -> dict[str, Any]: ...
    async def rebuild_source(self, start: int) -> "Source": ...
    def pinned_source(self) -> "Source": ...
    def status(self, *, limit: int = 1000) -> dict[str, Any]: ...
    def is_ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Bounds of the server alone; those that operators may change are in ``BrokerSettings``."""

    budget_wait_seconds: float = 10.0  # a produce waits so long for room, then is refused
    stall_seconds: float = 60.0  # a peer that takes no byte for so long is cut off
    first_request_seconds: float = 60.0  # a connection that says nothing for so long is closed
    heartbeat_seconds: float = 30.0  # WebSocket pings; half of it without an answer ends the connection
    proof_seconds: float = 5.0  # with authentication: for a handshake, and then to prove who it is
    unproven_per_address_max: int = 256  # connections of an address that have not proven anything yet
    unproven_max: int = 2048  # of all addresses
    stop_seconds: float = 5.0  # running requests get so long at stop
    unanswered_max: int = 1024  # exchanges of one stream; beyond it, its frames wait in its own socket


@dataclass(slots=True)
class Counts:
    """Plain numbers for /metrics; all counted on the event loop."""

    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # method, route, status
    request_seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    stream_messages: Counter[str] = field(default_factory=Counter)  # op
    stream_errors: Counter[str] = field(default_factory=Counter)  # code
    failures: int = 0  # unforeseen exceptions: each is a bug and in the log
    connections: int = 0
    connections_refused: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    sendfile_bytes: int = 0


@dataclass(slots=True)
class Context:
    broker: ServedBroker
    clock: Clock
    settings: ServerSettings
    in_flight: Budget  # produce requests received and not yet answered
    reads: Budget  # bulk reads in memory
    guard: "Guard | None" = None  # None: everybody may everything
    door: "Door | None" = None  # None: the port is not open yet
    counts: Counts = field(default_factory=Counts)
    peers: "Peers | None" = None  # the other replicas of the broker's group
    is_stopping: bool = False
    waiting: "set[asyncio.Task[Any]]" = field(default_factory=set)  # long polls, cut short at stop
    streams: set[Any] = field(default_factory=set)  # open WebSockets
    kept: "set[asyncio.Task[Any]]" = field(default_factory=set)  # appends whose caller has gone

    async def wait_for_bytes(self, request: ReadRequest) -> ReadResult:
        """A read that may wait; cut short when the broker stops.

        Errors: those of ``read``; Unavailable at stop.
        """
        if not request.wait_ms:
            return await self.broker.read(request)
        task = asyncio.ensure_future(self.broker.read(request))
        self.waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(_release_unread)
            if self.is_stopping and not _is_cancelled(asyncio.current_task()):
                raise Unavailable("this broker is stopping; ask again, or another one") from None
            raise
        finally:
            self.waiting.discard(task)

    async def until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """What work that may wait comes to; cut short when the broker stops. *Errors*: Unavailable at stop."""
        task = asyncio.ensure_future(work)
        self.waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self.is_stopping and not _is_cancelled(asyncio.current_task()):
                raise Unavailable("this broker is stopping; ask again, or another one") from None
            raise
        finally:
            self.waiting.discard(task)

    async def outcome_within(self, task: "asyncio.Task[T]", timeout_ms: int | None) -> T:
        """The task's result. It is never cancelled: an append goes on when nobody waits for it any more.

        Errors: Timeout, the outcome being unknown.
        """
        self.kept.add(task)
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait([task], timeout=None if timeout_ms is None else timeout_ms / 1000)
        if not done:
            raise Timeout(f"no outcome within {timeout_ms} ms; the record may be written or not")
        return task.result()

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self.kept.discard(task)
        if not task.cancelled():
            task.exception()  # taken here, so that a caller that has gone leaves no warning


def _release_unread(task: "asyncio.Task[ReadResult]") -> None:
    """A read that ended in the same turn as its reader: nobody else gives its leases back."""
    if not task.cancelled() and task.exception() is None:
        task.result().release()


def _is_cancelled(task: "asyncio.Task[Any] | None") -> bool:
    return task is not None and task.cancelling() > 0
