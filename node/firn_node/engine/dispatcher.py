"""Dispatch: follows the committed position and makes batches findable.

Runs on the event loop, on whole groups: one index entry per run of neighbouring batches of a partition (at most
64 KiB, or one batch). Only bytes that are durable in the commit log are dispatched, so nothing derived is ever
ahead of it. Idempotent: the index passes over what it knows, a partition's state row says up to which position
it has counted, so a replay after a crash ends in the same state. A partition's end moves once the index has its
entries: when the index fails, readers wait, and the same groups are dispatched again.

What the index holds is not told by a partition's end: after a crash its compacted log may cover offsets that the
index's last flush did not have, and the raw view needs them all the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from firn.batch import Batch, Buffer, Flag
from firn.types import TOPICS_TOPIC_ID
from firn_node.engine.appender import Written, WrittenRecord
from firn_node.engine.core import Core
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.engine.producers import ProducerRow
from firn_node.failpoints import step
from firn_node.index import NewEntry, NewLight
from firn_node.kernels import Group, Head, inspect_group

RUN_BYTES_MAX = 64 << 10
_HAS_QUEUES = int(Flag.HAS_QUEUES)


class Dispatcher:
    def __init__(self, core: Core, partitions: Partitions, after: Callable[[Partition], None]) -> None:
        self._core = core
        self._partitions = partitions
        self._after = after  # called once for each partition that got batches

    def dispatch(self, written: Sequence[Written | WrittenRecord]) -> None:
        """Index the batches of some writes, in log order, and wake their readers."""
        run, gather = _Run(), self._core.key_query
        for is_record, writes in groupby(written, lambda write: type(write) is WrittenRecord):
            if is_record:
                records = [write for write in writes if isinstance(write, WrittenRecord)]
                for record in records:
                    self._collect_record(run, record)
                gather.gather_records(records)
                continue
            for write in writes:
                assert isinstance(write, Written)
                self._collect(run, write.data, write.group, write.chosen, write.positions, is_replay=False)
                gather.gather(write.group, write.chosen, write.positions)
        self._commit(run)
        self._core.dispatched_position = max(self._core.dispatched_position, written[-1].end)

    def replay(self, position: int, data: bytes) -> None:
        """Index whole batches found in the log at start."""
        group = inspect_group(data, self._core.secret, is_produce=False)
        rows = list(range(len(group)))
        positions = [position + int(group.start[i]) for i in rows]
        run = _Run()
        self._collect(run, data, group, rows, positions, is_replay=True)
        if not group.fault.any():  # else the keys file is made of the segment, and names what is damaged
            self._core.key_query.gather(group, rows, positions)
        self._commit(run)
        self._core.dispatched_position = max(self._core.dispatched_position, position + len(data))

    def _collect_record(self, run: "_Run", record: WrittenRecord) -> None:
        """As ``_collect``, of the batch of one plain record."""
        topic_id, number, base, position, size, _, timestamp, append_ms, _ = record
        topic = self._core.catalogue.by_id.get(topic_id)
        if topic is None:
            return
        key, end = (topic_id, number), base + 1
        partition = run.touched.get(key)
        if partition is None:
            partition = run.touched[key] = self._partitions.open_for_dispatch(topic, number)
        if end > partition.indexed_end:
            run.add(NewEntry(topic_id, number, base, end, position, size, 0, timestamp))
        run.batches.append((partition, end, position, size, append_ms))

    def _collect(
        self,
        run: "_Run",
        data: Buffer,
        group: Group,
        rows: Sequence[int],
        positions: Sequence[int],
        *,
        is_replay: bool,
    ) -> None:
        heads, tags = group.heads(), group.tag_hash.tolist()
        for at, i in enumerate(rows):
            head = heads[i]
            topic_id, number, base, size = head.topic_id, head.partition, head.base_offset, head.size
            topic = self._core.catalogue.by_id.get(topic_id)
            if topic is None:  # deleted meanwhile: its bytes are dead
                continue
            key, position, end = (topic_id, number), positions[at], head.last_offset + 1
            partition = run.touched.get(key)
            if partition is None:
                partition = run.touched[key] = self._partitions.open_for_dispatch(topic, number)
            if end > partition.indexed_end:  # else a replay of what the index holds
                run.add(NewEntry(topic_id, number, base, end, position, size, tags[i], head.max_timestamp))
            if head.flags & _HAS_QUEUES:
                run.lights.extend(_lights(_batch(data, head), position))
            run.batches.append((partition, end, position, size, head.append_timestamp))
            if is_replay:
                _replay_rows(partition, group, head, base, end)
                self._replay_producer(partition, head, end)
            if topic_id == TOPICS_TOPIC_ID and base >= self._core.catalogue.applied_end:
                # At once: the very next batch may be of the topic that this one creates. What lies before is
                # indexed first, or it would be added again after its topic's entries were deleted.
                self._commit(run)
                self._apply_topics(_batch(data, head), position + size)

    def _commit(self, run: "_Run") -> None:
        """Index what was collected, then move the partitions' ends; the run is empty afterwards."""
        step("dispatch.planned")
        self._core.index.append(run.entries, run.lights)
        step("dispatch.indexed")
        for partition, end, position, size, append_ms in run.batches:
            self._count(partition, end, position, size, append_ms)
            self._core.dispatched_position = max(self._core.dispatched_position, position + size)
        for partition in run.touched.values():
            partition.wake()
            self._after(partition)
        run.clear()

    def _count(self, partition: Partition, end: int, position: int, size: int, append_ms: int) -> None:
        while partition.pending and partition.pending[0].end <= end:
            partition.pending.popleft()
        partition.indexed_end = max(partition.indexed_end, end)
        partition.dispatched_end = max(partition.dispatched_end, end)
        partition.next_offset = max(partition.next_offset, end)
        state = partition.state
        if position < state.position:
            return  # a replay of what the stored row has counted
        state.position = position + size
        state.next_offset = end
        state.newest_ms = append_ms
        state.raw_bytes += size
        if end > partition.horizon:
            state.dirty_bytes += size
            if state.oldest_position < 0:
                state.oldest_position, state.oldest_ms = position, append_ms
        self._partitions.touch(partition)

    def _replay_producer(self, partition: Partition, head: Head, end: int) -> None:
        producer_id, epoch, base = head.producer_id, head.producer_epoch, head.base_offset
        if not producer_id:
            return
        row = self._partitions.producer(partition, producer_id)
        if row is None or row.epoch < epoch:
            row = partition.producers[producer_id] = ProducerRow(epoch)
        if row.epoch == epoch and head.sequence >= row.next_sequence():
            row.add(head.sequence, base, end - base, dispatched_end=end)
            row.last_use_ms = head.append_timestamp
            partition.producers_touched.add(producer_id)

    def _apply_topics(self, batch: Batch, end: int) -> None:
        catalogue = self._core.catalogue
        for key, value in zip(batch.key_list(), batch.value_list(), strict=True):
            name = key.decode()
            catalogue.apply(name, value)
            catalogue.changing.discard(name)
            catalogue.on_change(name, end)
        catalogue.applied_end = batch.header.last_offset + 1


@dataclass(slots=True)
class _Run:
    """What one call of the index takes: entries joined where a partition's batches are neighbours."""

    entries: list[NewEntry] = field(default_factory=list)
    lights: list[NewLight] = field(default_factory=list)
    touched: dict[tuple[int, int], Partition] = field(default_factory=dict)
    newest: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # each partition's last index in `entries`
    batches: list[tuple[Partition, int, int, int, int]] = field(
        default_factory=list
    )  # partition, end offset, position, bytes, append time

    def clear(self) -> None:
        for part in (self.entries, self.lights, self.touched, self.newest, self.batches):
            part.clear()

    def add(self, entry: NewEntry) -> None:
        key = (entry.topic_id, entry.partition)
        at = self.newest.get(key)
        if at is not None and _extends(self.entries[at], entry):
            self.entries[at] = _joined(self.entries[at], entry)
            return
        self.newest[key] = len(self.entries)
        self.entries.append(entry)


def _replay_rows(partition: Partition, group: Group, head: Head, base: int, end: int) -> None:
    """Keep the key index in memory, where there is one, up with what was not appended here."""
    active = partition.active
    if active is None or active.end >= end:
        return
    if active.end != base:
        partition.active, partition.active_bytes = None, 0  # loaded again at first use
        return
    rows = slice(head.first_row, head.first_row + head.records)
    active.append(group.hi[rows], group.lo[rows], group.tombstone[rows])
    partition.active_bytes += head.size


def _batch(data: Buffer, head: Head) -> Batch:
    return Batch(memoryview(data)[head.start : head.start + head.size])


def _lights(batch: Batch, position: int) -> Iterator[NewLight]:
    header, stamps = batch.header, batch.columns.timestamps.tolist()
    for row, names in enumerate(batch.queue_list()):
        for name in names:
            yield NewLight(
                header.topic_id, header.partition, name, position, row, header.base_offset + row, stamps[row]
            )


def _extends(entry: NewEntry, more: NewEntry) -> bool:
    return (
        entry.position + entry.size == more.position
        and entry.size + more.size <= RUN_BYTES_MAX
        and entry.tag_hash == more.tag_hash
    )


def _joined(entry: NewEntry, more: NewEntry) -> NewEntry:
    topic_id, number, base, _, position, size, tag_hash, newest = entry
    newest = max(newest, more.max_timestamp)
    return NewEntry(topic_id, number, base, more.end_offset, position, size + more.size, tag_hash, newest)
