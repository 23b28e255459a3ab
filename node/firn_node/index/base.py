"""What a partition index stores and answers, whatever keeps it.

An index maps offsets of a partition to positions in the commit log. It is derived from the commit log and
rebuilt from its checkpoint on. Invariants of every kind of index:

- the entries of a partition have disjoint, rising ranges of offsets and rising positions, and are never changed;
- ``max_timestamp`` is the running maximum over the partition, computed here, so it never falls along offsets;
- the end of a partition is remembered when all of its entries are gone: offsets are never given twice;
- what a crash leaves is the state at one instant at or after the last ``flush``, whose checkpoint it carries;
- an append of what is known changes nothing. A replay may cut runs elsewhere than the first time did; a run that
  reaches over the known end is stored from that end on. So **the bytes of an entry may begin with batches below
  its base_offset**; readers pass over those.

Writes (``append``, ``flush``, ``trim``, ``sweep``, ``put_*``, ``delete_*``) come from one thread at a time; reads
from any thread, and they see an entry as soon as ``append`` has returned.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from firn.errors import Invalid

KINDS = ("rocksdb", "files", "mirrored")


class Entry(NamedTuple):
    """A run of neighbouring batches of one partition, at most 64 KiB or one batch."""

    base_offset: int
    end_offset: int
    position: int
    size: int
    tag_hash: int
    max_timestamp: int  # the running maximum of the partition


class NewEntry(NamedTuple):
    topic_id: int
    partition: int
    base_offset: int
    end_offset: int
    position: int
    size: int
    tag_hash: int
    max_timestamp: int  # of this run alone


class NewLight(NamedTuple):
    """A record that names a light queue. ``position`` is its batch's, ``row`` its place in the batch."""

    topic_id: int
    partition: int
    name: str
    position: int
    row: int
    offset: int
    max_timestamp: int


class LightEntry(NamedTuple):
    queue_offset: int
    position: int
    row: int
    offset: int


class PartitionEnd(NamedTuple):
    """What is remembered of a partition for ever: its end and the running maximum there."""

    topic_id: int
    partition: int
    end_offset: int
    max_timestamp: int


class ProducerRow(NamedTuple):
    topic_id: int
    partition: int
    producer_id: int
    row: bytes


class LightRow(NamedTuple):
    """A light queue's entry with everything that is stored of it."""

    topic_id: int
    partition: int
    name: str
    queue_offset: int
    position: int
    row: int
    offset: int
    max_timestamp: int


class Restorable(Protocol):
    """What a copy of an index needs besides ``append``, used before the copy is served."""

    def restore_end(self, end: PartitionEnd) -> None:
        """Remember the end of a partition whose newest entries are gone."""
        ...

    def restore_queue(self, topic_id: int, partition: int, name: str, count: int, timestamp: int) -> None:
        """Remember how far a light queue was counted, and its running maximum, when its entries are gone.

        *Errors*: Invalid where there are no light queues.
        """
        ...


class PartitionIndex(Restorable, Protocol):
    kind: str
    has_light_queues: bool

    @property
    def checkpoint(self) -> int:
        """The log position that ``flush`` last made durable; 0 for a new index."""
        ...

    @property
    def log_start(self) -> int:
        """Entries at positions below are never answered; raised by ``trim``."""
        ...

    def append(self, entries: Sequence[NewEntry], lights: Sequence[NewLight] = ()) -> None:
        """Add one group. *Shape*: per partition in offset order. *Effects*: idempotent; durable by ``flush``.

        An entry below the partition's known end is skipped, a light entry below the end known before the group.
        """
        ...

    def flush(self, checkpoint: int) -> None:
        """Make all of it and the checkpoint durable, as one step."""
        ...

    def find(self, topic_id: int, partition: int, offset: int) -> Entry | None:
        """The entry that covers ``offset``, or the next one."""
        ...

    def scan(
        self, topic_id: int, partition: int, offset: int, *, end: int | None = None, limit: int = 1024
    ) -> list[Entry]:
        """The entries from ``find(offset)`` on whose base offset is below ``end``, at most ``limit``."""
        ...

    def find_time(self, topic_id: int, partition: int, timestamp: int) -> Entry | None:
        """The first entry whose running maximum is at least ``timestamp``."""
        ...

    def bounds(self, topic_id: int, partition: int, log_start: int) -> tuple[int, int] | None:
        """``[first, end)`` of the offsets at or above ``log_start``; None for a partition never seen."""
        ...

    def trim(self, log_start: int) -> None:
        """Entries at positions below ``log_start`` are gone for readers at once, from the disk by and by."""
        ...

    def sweep(self, log_start: int, limit: int) -> int:
        """Remove trimmed entries of up to ``limit`` partitions and light queues; how many were looked at.

        0 means that nothing is left to remove below ``log_start``. *Effects*: durable by the next flush.
        """
        ...

    def delete_topic(self, topic_id: int) -> None: ...

    def put_state(self, topic_id: int, partition: int, state: bytes) -> None: ...

    def state(self, topic_id: int, partition: int) -> bytes | None: ...

    def states(self) -> Iterator[tuple[int, int, bytes]]:
        """*Shape*: sorted, read in portions; what is put meanwhile may or may not be among them."""
        ...

    def put_producer(self, topic_id: int, partition: int, producer_id: int, row: bytes) -> None: ...

    def producer(self, topic_id: int, partition: int, producer_id: int) -> bytes | None: ...

    def delete_producers(self, older_than_ms: int) -> None:
        """Forget rows last used before. Rows begin with that time, i64 little-endian, in ms."""
        ...

    def light_scan(
        self, topic_id: int, partition: int, name: str, queue_offset: int, *, limit: int
    ) -> list[LightEntry]: ...

    def light_bounds(self, topic_id: int, partition: int, name: str) -> tuple[int, int] | None:
        """``[first, end)`` of the queue's own offsets; None for a queue never seen."""
        ...

    def partitions(self) -> Iterator[PartitionEnd]:
        """*Shape*: sorted by topic id and partition."""
        ...

    def producers(self) -> Iterator[ProducerRow]: ...

    def lights(self) -> Iterator[LightRow]: ...

    def close(self) -> None:
        """Let go of files, without flush: what is not flushed may be lost."""
        ...


def refuse_light_queues(kind: str) -> Invalid:
    return Invalid(
        f"the {kind} index holds no light queues: use the index kind rocksdb, or write records without queues",
        kind=kind,
    )
