"""One partition at work: what is appended and not yet dispatched, dirty and not yet sealed.

Invariants: ``horizon <= unsealed start <= dispatched_end <= next_offset``; every row from the unsealed start on is
in ``active`` (or in one of ``sealing``) once ``active`` is loaded; ``pending`` holds exactly the appended batches
that are not dispatched, in offset order.

Objects are made at first use and dropped when idle: a partition that nobody touches costs its index rows only.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from firn_node.compaction.log import CompactedLog
from firn_node.engine.api import TopicInfo
from firn_node.engine.producers import ProducerRow
from firn_node.kernels import ActiveIndex


class Pending(NamedTuple):
    """An appended batch: offsets [base, end), bytes [position, position + size) of the commit log."""

    base: int
    end: int
    position: int
    size: int


@dataclass(slots=True)
class DirtyState:
    """What scheduling must know of a partition without opening it; stored with the index's flush.

    ``position``: appends below it are counted (a replay passes over them). ``oldest_*`` are of the first dirty
    batch (-1: none). Clean figures are copies of the manifest's. ``forced``: up to which of the compactions by force
    that its topic was asked for this partition is done.

    Stored: a msgpack list of the fields in this order. Fields are only ever added, at the end and with a default: who
    knows fewer passes over the rest, and who knows more finds the default.
    """

    position: int = 0
    next_offset: int = 0
    horizon: int = 0
    dirty_bytes: int = 0
    raw_bytes: int = 0
    oldest_position: int = -1
    oldest_ms: int = -1
    newest_ms: int = -1
    sealed_bytes: int = 0
    clean_bytes: int = 0
    clean_rows: int = 0
    next_tombstone_ms: int = -1
    oldest_masked_ms: int = -1
    last_started_ms: int = -1
    last_seconds: float = 0.0
    last_result: str = ""
    last_reason: str = ""
    failures: int = 0
    retry_ms: int = 0
    forced: int = 0

    def pack(self) -> bytes:
        return bytes(msgpack.packb([getattr(self, name) for name in self.__slots__]))

    @property
    def is_dirty(self) -> bool:
        return self.oldest_position >= 0


def unpack_state(data: bytes) -> DirtyState:
    """The state that a row holds, an older or a newer firn's too."""
    return DirtyState(*msgpack.unpackb(data)[: len(DirtyState.__slots__)])


@dataclass(slots=True, eq=False)
class Partition:
    topic: TopicInfo
    number: int
    log: CompactedLog
    state: DirtyState
    next_offset: int
    dispatched_end: int
    indexed_end: int  # of the entries in the partition index; after a crash it may be below the horizon
    active: ActiveIndex | None = None
    active_bytes: int = 0
    active_since_ms: int = 0
    sealing: list[ActiveIndex] = field(default_factory=list)
    pending: deque[Pending] = field(default_factory=deque)
    producers: dict[int, ProducerRow] = field(default_factory=dict)
    producers_touched: set[int] = field(default_factory=set)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    parked: str | None = None
    parked_until: float = 0.0
    compacting: bool = False
    deleted: bool = False
    users: int = 0  # coroutines that go on with this object after waiting for something

    @property
    def key(self) -> tuple[int, int]:
        return self.topic.topic_id, self.number

    @property
    def horizon(self) -> int:
        return self.log.manifest.horizon

    @property
    def unsealed_start(self) -> int:
        """The first offset that no segment, clean or sealed dirty, holds."""
        manifest = self.log.manifest
        return max(manifest.horizon, manifest.dirty[-1].end if manifest.dirty else 0)

    @property
    def is_idle(self) -> bool:
        return self.is_unused and not self.parked

    @property
    def is_unused(self) -> bool:
        """Nobody holds on to this object or to its compacted log: another one may take its place.

        Two objects of one partition would be two views of its folder, each deleting the other's files.
        """
        return not (
            self.pending
            or self.waiters
            or self.sealing
            or self.compacting
            or self.users
            or self.log.is_pinned
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    def forget_undispatched(self) -> None:
        """Be as if what is not dispatched had never been appended: it may be cut off the log."""
        end = self.dispatched_end
        if not self.pending and self.next_offset == end:
            return
        self.pending.clear()
        self.next_offset = end
        sealing = [index for index in self.sealing if index.end <= end]
        if self.active is not None and (self.active.end > end or len(sealing) < len(self.sealing)):
            self.active, self.active_bytes, self.active_since_ms = None, 0, 0  # loaded again at first use
        self.sealing[:] = sealing
        kept = {id: row.without(end) for id, row in self.producers.items()}
        self.producers = {id: row for id, row in kept.items() if row is not None}
        self.producers_touched &= self.producers.keys()

    def pending_batch(self, offset: int) -> Pending | None:
        """The undispatched batch that holds ``offset``."""
        at = bisect_right(self.pending, offset, key=lambda p: p.base) - 1
        return self.pending[at] if at >= 0 and offset < self.pending[at].end else None

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
