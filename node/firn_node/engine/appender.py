"""The one appender: checks, orders and numbers batches, and acknowledges them as their topics' ``flush`` asks.

It runs on the event loop, whole requests at a time, so that nothing has to be locked:

1. walk and check the request (one kernel call);
2. per batch: topic, partition, producer sequence, ``if_offset`` - each refusal is that batch's alone;
3. number the accepted ones (header fields and CRC, one kernel call);
4. one write into the page cache;
5. remember them: next offsets, active key index, producer rows, pending dispatch;
6. what was appended may be acknowledged when ``Commits`` says so: a single broker's ``flush: sync`` once the flusher
   thread has synced past it, ``interval`` at once.

A failed write changes nothing but the broker's health; every later request sees the state before it.

A request of one plain record has a path of its own (``_append_record``): the same steps without lists and arrays. It
goes ahead only where nothing is to be refused, opened or told, and leaves everything else to the steps above.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import numpy as np

from firn.batch import HEADER, HEADER_BYTES, Batch, Buffer, Flag
from firn.errors import (
    Conflict,
    Corrupt,
    FirnError,
    Invalid,
    MalformedBatch,
    PartitionParked,
    ReadOnly,
    Unavailable,
    UnknownTopic,
)
from firn.limits import UNACKNOWLEDGED_BATCHES_MAX
from firn.topicspec import DurabilitySpec
from firn_node.disk import is_full
from firn_node.engine.api import Appended, Outcome
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.lookup import Lookup
from firn_node.engine.partition import Partition, Pending
from firn_node.engine.partitions import Partitions
from firn_node.engine.producers import ProducerRow, first_offset
from firn_node.failpoints import step
from firn_node.kernels import Group, Head, admit_record, fault_error, inspect_group, stamp_group

_log = logging.getLogger(__name__)
# Plain numbers: an operator of an enum costs a microsecond a batch.
_BROKERS_FLAGS = int(Flag.OFFSETS_SPARSE | Flag.REBUILT | Flag.CONTROL)
_NOTHING_SPECIAL = DurabilitySpec(min_in_sync=0)  # who may write at all, asked before the topic is known
_HAS_QUEUES = int(Flag.HAS_QUEUES)


@dataclass(slots=True)
class Written:
    """Batches of one write, waiting for dispatch: rows ``chosen`` of ``group``, at ``positions``."""

    data: Buffer
    group: Group
    chosen: list[int]
    positions: list[int]
    end: int

    @property
    def start(self) -> int:
        return self.positions[0]


class WrittenRecord(NamedTuple):
    """The batch of one plain record, waiting for dispatch; ``hi`` is of its key's fingerprint."""

    topic_id: int
    partition: int
    base: int
    position: int
    size: int
    end: int  # of its bytes in the log
    timestamp: int
    append_ms: int
    hi: int

    @property
    def start(self) -> int:
        return self.position


@dataclass(slots=True)
class _Plan:
    """What a request will change, until its write has succeeded."""

    outcomes: list[Outcome | None]
    chosen: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    next_offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    producers: dict[tuple[int, int, int], ProducerRow] = field(default_factory=dict)  # as they will be


@dataclass(slots=True)
class _Told:
    """What decides when a request's outcomes may be told."""

    durabilities: list[DurabilitySpec] = field(
        default_factory=list
    )  # of what was appended; neighbours differ
    names_older: bool = False


Writable = bytearray | memoryview


def _is_writable(data: Buffer) -> TypeGuard[Writable]:
    """Whether these bytes can be stamped in place: whoever gave them keeps no others' view of them."""
    return isinstance(data, bytearray) or (isinstance(data, memoryview) and not data.readonly)


class Appender:
    def __init__(self, core: Core, partitions: Partitions, commits: Commits, lookup: Lookup) -> None:
        self._core = core
        self._partitions = partitions
        self._commits = commits
        self._lookup = lookup
        self._secret = (core.secret[0], core.secret[1])
        self.written: deque[Written | WrittenRecord] = deque()  # in log order, for the dispatcher

    def begin(
        self, data: Buffer, conditions: Sequence[int | None] | None = None
    ) -> tuple[list[Outcome], Awaitable[None] | None]:
        """One outcome a batch, in order; and what must be awaited, if anything, before they are told: an Appended
        one is durable then as its topic asks.
        """
        self._core.health.check_serving()
        writable = data if _is_writable(data) else bytearray(data)
        if conditions is None and (found := self._append_record(writable)) is not None:
            return [found[0]], self._commits.promise(found[1], names_older=False)
        view = np.frombuffer(writable, np.uint8)
        group = inspect_group(view, self._core.secret)
        heads = group.heads()
        told = _Told()
        if conditions is not None and any(c is not None for c in conditions):
            outcomes = self._append_conditional(writable, group, heads, conditions, told)
        else:
            outcomes = self._append(writable, group, heads, range(len(heads)), told)
        names_older = told.names_older or any(isinstance(o, Conflict) for o in outcomes)
        return outcomes, self._commits.promise(told.durabilities, names_older=names_older)

    def _append_record(self, data: Writable) -> tuple[Outcome, list[DurabilitySpec]] | None:
        """The outcome of a request that is one batch of one plain record, and what it asks for if it was appended.

        None, and nothing is changed, where ``_append`` has to look: any other request, and one whose topic,
        partition or producer is not in memory, in use and in order.
        """
        core, size = self._core, len(data)
        if size < HEADER_BYTES or core.health.read_only is not None:
            return None
        head = HEADER.unpack_from(data)
        flags, announced, records, topic_id, number = head[2], head[4], head[6], head[9], head[10]
        topic = core.catalogue.by_id.get(topic_id)
        partition = self._partitions.opened(topic_id, number)
        if flags or announced != size or records != 1 or topic is None or topic.name.startswith("__"):
            return None
        durability = topic.spec.durability
        if self._commits.refusal(durability) is not None:
            return None
        if partition is None or partition.parked is not None or (active := partition.active) is None:
            return None
        producer_id, epoch, sequence, timestamp = head[14], head[15], head[16], head[18]
        known = partition.producers.get(producer_id)
        if producer_id and (known is None or known.epoch != epoch or known.next_sequence() != sequence):
            return None
        now, base = core.clock.now_ms(), partition.next_offset
        row = admit_record(data, self._secret, base, self._commits.epoch, now)
        if row is None:
            return None
        step("append.stamped")
        try:
            position = core.log.append_one(data, topic_id, now)
        except OSError as error:
            return self._write_failed(error), []
        step("append.written")
        self._partitions.get(topic, number)  # it was used
        partition.next_offset = base + 1
        partition.pending.append(Pending(base, base + 1, position, size))
        if active.end <= base:
            active.append_one(*row)
        partition.active_bytes += size
        partition.active_since_ms = partition.active_since_ms or now
        if known is not None and producer_id:
            known.last_use_ms = now
            known.add(sequence, base, 1, dispatched_end=partition.dispatched_end)
            partition.producers_touched.add(producer_id)
        self.written.append(
            WrittenRecord(topic_id, number, base, position, size, position + size, timestamp, now, row[0])
        )
        metrics = core.metrics
        metrics["append_records"] += 1
        metrics["append_batches"] += 1
        metrics["append_bytes"] += size
        return Appended(topic_id, number, base, 1), [durability]

    def append_internal(self, batch: Buffer, *, frees: bool = False) -> Awaitable[None]:
        """Append one batch of an internal topic, now; what comes back is done once it is committed and dispatched.

        ``frees``: what it says makes room, so it is appended on a disk that takes no other records.
        """
        writable = bytearray(batch)
        group = inspect_group(np.frombuffer(writable, np.uint8), self._core.secret)
        told, heads, rows = _Told(), group.heads(), range(len(group))
        outcomes = self._append(writable, group, heads, rows, told, is_internal=True, frees=frees)
        if frees and any(isinstance(o, ReadOnly) for o in outcomes) and self._core.reserve.give_back():
            outcomes = self._append(writable, group, heads, rows, told, is_internal=True, frees=True)
        promise = self._commits.promise(told.durabilities, names_older=False)
        for outcome in outcomes:
            if isinstance(outcome, FirnError):
                raise outcome
        return self._dispatched(promise, self._core.log.written_end)

    async def _dispatched(self, promise: Awaitable[None] | None, end: int) -> None:
        if promise is not None:
            await promise
        await self._commits.wait(end)

    def _append_conditional(
        self, data: Writable, group: Group, heads: list[Head], conditions: Sequence[int | None], told: _Told
    ) -> list[Outcome]:
        """One batch after another: each condition sees what was appended before it in the same request."""
        if len(conditions) != len(group):
            raise Invalid(f"if_offset: {len(conditions)} conditions for {len(group)} batches")
        outcomes: list[Outcome] = []
        for i, condition in enumerate(conditions):
            outcomes += self._append(data, group, heads, [i], told, condition)
        return outcomes

    def _append(
        self,
        data: Writable,
        group: Group,
        heads: list[Head],
        rows: Sequence[int],
        told: _Told,
        condition: int | None = None,
        *,
        is_internal: bool = False,
        frees: bool = False,
    ) -> list[Outcome]:
        plan = _Plan([None] * len(rows))
        durabilities: list[DurabilitySpec] = []
        writable = self._refusal(frees=frees)
        for at, i in enumerate(rows):
            try:
                if writable is not None:
                    raise writable
                durability = self._plan_batch(
                    data, group, heads[i], i, at, plan, condition, is_internal=is_internal
                )
                if durability is None:
                    told.names_older = True  # a duplicate: answered once what it names is committed
                elif not durabilities or durabilities[-1] is not durability:
                    durabilities.append(durability)
            except FirnError as error:
                plan.outcomes[at] = error
            except OSError as error:  # reading what is known of its partition; the others go on
                plan.outcomes[at] = Unavailable(f"nothing was appended: {error}")
        if plan.chosen:
            try:
                self._write(data, group, heads, plan)
                told.durabilities += durabilities
            except OSError as error:
                refused = self._write_failed(error)
                plan.outcomes = [
                    o if o is not None and isinstance(o, FirnError) else refused for o in plan.outcomes
                ]
        return [o for o in plan.outcomes if o is not None]

    def _refusal(self, *, frees: bool) -> FirnError | None:
        health = self._core.health
        if health.failed is not None:
            return Unavailable(f"this broker stopped serving: {health.failed}")
        if health.read_only is not None and not frees:
            return ReadOnly(f"this broker is read-only: {health.read_only}")
        return self._commits.refusal(_NOTHING_SPECIAL)

    def _plan_batch(
        self,
        data: Writable,
        group: Group,
        head: Head,
        i: int,
        at: int,
        plan: _Plan,
        condition: int | None,
        *,
        is_internal: bool,
    ) -> DurabilitySpec | None:
        """What an accepted batch asks for; None for one that is there already."""
        if head.fault:
            raise fault_error(group, i)
        if head.flags & _BROKERS_FLAGS:
            raise MalformedBatch(
                "batch flags: sparse offsets, rebuilt and control batches are the broker's to write"
            )
        topic = self._core.catalogue.by_id.get(head.topic_id)
        if topic is None:
            raise self._core.catalogue.unknown(head.topic_id)
        if topic.name.startswith("__") and not is_internal:
            raise UnknownTopic(f"topic {topic.name!r} is internal; it cannot be written to", topic=topic.name)
        if head.flags & _HAS_QUEUES and not self._core.index.has_light_queues:
            raise Invalid(
                f"light queues need the index kind rocksdb; this broker's is {self._core.index.kind}, so write the "
                "records without queues, or migrate with `firn index migrate --to rocksdb`"
            )
        durability = topic.spec.durability
        if (refused := self._commits.refusal(durability)) is not None:
            raise refused
        partition = self._partitions.get(topic, head.partition)
        records = head.records
        if head.producer_id:
            known = self._check_sequence(partition, head, plan)
            if known is not None:
                plan.outcomes[at] = Appended(topic.topic_id, partition.number, known, records)
                return None
        try:
            if condition is not None:
                self._check_condition(partition, data, group, head, condition)
            self._partitions.active(partition)
        except (Corrupt, OSError) as error:
            raise park_on_damage(self._partitions, partition, error) from error
        key = partition.key
        base = plan.next_offsets.get(key, partition.next_offset)
        plan.next_offsets[key] = base + records
        plan.outcomes[at] = Appended(topic.topic_id, partition.number, base, records)
        plan.chosen.append(i)
        plan.bases.append(base)
        plan.partitions.append(partition)
        if head.producer_id:
            self._plan_sequence(partition, head, plan, base)
        return durability

    def _check_sequence(self, partition: Partition, head: Head, plan: _Plan) -> int | None:
        row = plan.producers.get((*partition.key, head.producer_id))
        if row is None:
            row = self._partitions.producer(partition, head.producer_id)
        return first_offset(row, epoch=head.producer_epoch, sequence=head.sequence)

    def _plan_sequence(self, partition: Partition, head: Head, plan: _Plan, base: int) -> None:
        """Later batches of the request see this one; the partition's own row waits for the write."""
        producer_id, epoch = head.producer_id, head.producer_epoch
        key = (*partition.key, producer_id)
        row = plan.producers.get(key)
        if row is None:
            row = ProducerRow(epoch)
            known = self._partitions.producer(partition, producer_id)
            if known is not None and known.epoch == epoch:
                row.batches.extend(list(known.batches)[-UNACKNOWLEDGED_BATCHES_MAX:])
        elif row.epoch != epoch:
            row = ProducerRow(epoch)
        row.batches.append((head.sequence, base, head.records))
        plan.producers[key] = row

    def _check_condition(
        self, partition: Partition, data: Writable, group: Group, head: Head, condition: int
    ) -> None:
        if head.records != 1:
            raise Invalid(f"if_offset needs a batch of one record, not of {head.records}")
        key = Batch(memoryview(data)[head.start : head.start + head.size]).key_list()[0]
        row = head.first_row
        newest = self._lookup.newest(partition, key, int(group.hi[row]), int(group.lo[row]))
        offset = -1 if newest is None else newest.offset
        absent = newest is None or newest.value is None
        if (condition == -1 and absent) or (condition >= 0 and condition == offset):
            return
        expected = "no record" if condition == -1 else f"offset {condition}"
        raise Conflict(
            f"{partition.topic.name}/{partition.number}: expected {expected} as the newest of this key, found "
            f"{'none' if offset < 0 else f'offset {offset}'}; read it again and decide anew",
            newest_offset=offset,
        )

    def _write(self, data: Writable, group: Group, heads: list[Head], plan: _Plan) -> None:
        core = self._core
        now = core.clock.now_ms()
        view = memoryview(data)
        bases = np.full(len(group), -1, np.int64)
        bases[plan.chosen] = plan.bases
        stamp_group(data, group, bases, self._commits.epoch, now)
        chosen = [heads[i] for i in plan.chosen]
        batches = [view[head.start : head.start + head.size] for head in chosen]
        step("append.stamped")
        positions = core.log.append(batches)
        step("append.written")
        for partition, head, base, position in zip(
            plan.partitions, chosen, plan.bases, positions, strict=True
        ):
            self._remember(partition, group, head, base, position, now)
        self.written.append(Written(data, group, plan.chosen, positions, core.log.written_end))
        core.metrics["append_batches"] += len(plan.chosen)
        core.metrics["append_bytes"] += sum(map(len, batches))

    def _remember(
        self, partition: Partition, group: Group, head: Head, base: int, position: int, now: int
    ) -> None:
        records, size, row = head.records, head.size, head.first_row
        end = base + records
        partition.next_offset = end
        partition.pending.append(Pending(base, end, position, size))
        active = self._partitions.active(partition)
        if active.end < end:
            active.append(
                group.hi[row : row + records],
                group.lo[row : row + records],
                group.tombstone[row : row + records],
            )
        partition.active_bytes += size
        partition.active_since_ms = partition.active_since_ms or now
        self._core.metrics["append_records"] += records
        producer_id = head.producer_id
        if producer_id:
            epoch = head.producer_epoch
            known = partition.producers.get(producer_id)
            if known is None or known.epoch != epoch:
                known = partition.producers[producer_id] = ProducerRow(epoch, before=known)
            known.last_use_ms = now
            known.add(head.sequence, base, records, dispatched_end=partition.dispatched_end)
            partition.producers_touched.add(producer_id)

    def _write_failed(self, error: OSError) -> FirnError:
        """Nothing of the request was appended; tell the operator why, and whether it goes away by itself."""
        health = self._core.health
        _log.error("append failed: %s", error)
        if self._core.log.is_broken:
            health.fail(f"the commit log is broken: {error}; restart the broker, it recovers from its disk")
            return Unavailable(f"nothing was appended: {error}")
        if is_full(error):
            health.read_only = f"the disk is full ({error.strerror}); free some space, compaction goes on"
        else:
            health.read_only = f"a write failed ({error.strerror}); it is tried again every second"
        return ReadOnly(f"nothing was appended: this broker is read-only: {health.read_only}")


def park_on_damage(partitions: Partitions, partition: Partition, error: Corrupt | OSError) -> PartitionParked:
    """Park a partition whose bytes are damaged or cannot be read; what its callers get."""
    partitions.park(partition, str(error))
    return PartitionParked(f"{partition.topic.name}/{partition.number} is parked: {error}")
