"""What the engine takes and gives: the values that cross between engine and server."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from firn.errors import FirnError
from firn.topicspec import TopicSpec
from firn_node.filecache import FileRange

View = Literal["compacted", "raw"]
FIRST_GROUP = (
    0  # of the cluster's broker groups: it decides on topics, and keeps the offsets of consumer groups
)


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """``groups``: those of the cluster when the topic was created; they are dealt its partitions, one after another."""

    name: str
    topic_id: int
    spec: TopicSpec
    groups: tuple[int, ...] = (0,)

    def group_of(self, partition: int) -> int:
        """The broker group in whose log a partition lives."""
        return self.groups[partition % len(self.groups)]

    def partitions_in(self, group: int) -> range:
        """The partitions that live in a group, ascending."""
        if group not in self.groups:
            return range(0)
        return range(self.groups.index(group), self.spec.partitions, len(self.groups))


@dataclass(frozen=True, slots=True)
class Appended:
    """An acknowledged batch: durable as its topic's ``flush`` asks. ``base_offset`` is the first record's."""

    topic_id: int
    partition: int
    base_offset: int
    records: int


Outcome = Appended | FirnError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A bulk read. ``since``: the least horizon that this reader has seen (None: a fresh one)."""

    topic: str
    partition: int
    view: View = "compacted"
    offset: int = 0
    since: int | None = None
    snapshot: str | None = None
    queue: str | None = None  # a light queue; ``offset`` then counts the queue's own offsets
    tag: str | None = None
    keys_only: bool = False
    positions: bool = False  # raw view: say where each run of batches lies in the commit log
    max_bytes: int = 1 << 20
    wait_ms: int = 0
    floor: int | None = None  # any replica may answer that has dispatched so far; None: the master


@dataclass(slots=True)
class ReadResult:
    """Whole batches from one side of the horizon and one generation.

    ``parts`` are sent in order; each FileRange holds a lease that ``release`` gives back. A part is never an
    empty buffer. ``next_offset`` is past what is gone: readers go on there.
    """

    topic_id: int
    parts: list[bytes | FileRange]
    next_offset: int
    end: int
    horizon: int
    tombstone_floor: int
    generation: int = 0
    # For a light queue: the (queue offset, row) pairs that of each batch are to be delivered, in order.
    queue_rows: list[list[tuple[int, int]]] | None = None

    @property
    def size(self) -> int:
        return sum(len(p) if isinstance(p, bytes) else p.size for p in self.parts)

    def take(self) -> bytes:
        """All bytes, leases released."""
        try:
            return b"".join(p if isinstance(p, bytes) else p.read() for p in self.parts)
        finally:
            self.release()

    def release(self) -> None:
        for part in self.parts:
            if not isinstance(part, bytes):
                part.lease.release()


@dataclass(frozen=True, slots=True)
class Found:
    """The newest record of a key."""

    partition: int
    offset: int
    timestamp: int
    value: bytes
    tag: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    id: str
    topic: str
    partitions: dict[int, dict[str, int]]  # partition -> end, horizon, generation
    expires_ms: int
    renewals: int = 0


CompactionState = Literal["waiting", "running", "done", "disagreement", "failed", "cancelled"]
FINAL_STATES = ("done", "disagreement", "failed", "cancelled")


@dataclass(slots=True)
class PartitionCompaction:
    """Progress, then result, of one partition's compaction; ``document`` is the fixed JSON shape."""

    partition: int
    state: CompactionState = "waiting"
    records_before: int = 0
    records_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    tombstones_dropped: int = 0
    records_kept_by_min_lag: int = 0
    rounds: int = 0
    seconds: float = 0.0
    rows_done: int = 0
    rows_total: int = 0
    reason: str | None = None

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class CompactionRun:
    """A requested compaction of a topic."""

    id: str
    topic: str
    topic_id: int
    force: bool
    partitions: list[PartitionCompaction]
    engine: str = "broker"
    # False from the request until status, reads and `get` know of the last partition's swap.
    is_settled: bool = True

    @property
    def is_done(self) -> bool:
        return self.is_settled and all(p.state in FINAL_STATES for p in self.partitions)

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id, "topic": self.topic, "engine": self.engine, "force": self.force,
            "state": self.state, "partitions": [p.document() for p in self.partitions],
        }  # fmt: skip

    @property
    def state(self) -> str:
        states = {p.state for p in self.partitions}
        for state in ("running", "waiting", "disagreement", "failed", "cancelled"):
            if state in states:
                return state if self.is_settled or state == "waiting" else "running"
        return "done" if self.is_settled else "running"


def outcomes_or_raise(outcomes: Sequence[Outcome]) -> list[Appended]:
    """All appended, or the first error raised."""
    for outcome in outcomes:
        if isinstance(outcome, FirnError):
            raise outcome
    return [o for o in outcomes if isinstance(o, Appended)]
