"""The partitions in use: opened lazily, parked when one has trouble, dropped when idle."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from firn.batch import HEADER_BYTES, Batch, corrupt, iterate, parse_header
from firn.errors import Corrupt, FirnError, InvariantBroken, MalformedBatch, PartitionParked, UnknownPartition
from firn_node.compaction.log import CompactedLog
from firn_node.compaction.manifest import Manifest
from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.partition import DirtyState, Partition, unpack_state
from firn_node.engine.producers import ProducerRow, unpack_row
from firn_node.engine.rawbytes import RawBytes
from firn_node.index import Entry
from firn_node.kernels import ActiveIndex, Group, fingerprint, inspect_group

_log = logging.getLogger(__name__)

OPEN_PARTITIONS_MAX = 20_000
PARKED_RETRY_S = 5.0
_LOAD_ENTRIES = 4096


class Partitions:
    """All open partitions, the least recently used first."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: OrderedDict[tuple[int, int], Partition] = OrderedDict()
        # Partitions whose state row differs from the stored one; written with the next index flush.
        self.touched: set[tuple[int, int]] = set()
        # Every partition with something to schedule, open or not: scanned after start, kept up by the engine.
        self.states: dict[tuple[int, int], DirtyState] = {}
        self._is_evicting = False
        self.raw_bytes = RawBytes(core.index)

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, topic_id: int, number: int) -> Partition | None:
        return self._open.get((topic_id, number))

    @property
    def root(self) -> str:
        return f"{self._core.settings.data}/compacted"

    def folder(self, topic_id: int, number: int | None = None) -> str:
        top = f"{self.root}/{topic_id}"
        return top if number is None else f"{top}/{number}"

    def get(self, topic: TopicInfo, number: int) -> Partition:
        """The partition, opened at first use.

        Errors: UnknownPartition; NotMaster for one that lives in another broker group; PartitionParked, with the
        reason, while its files cannot be used.
        """
        found = self._open.get((topic.topic_id, number))
        if found is None:
            if not 0 <= number < topic.spec.partitions:
                raise UnknownPartition(
                    f"topic {topic.name!r} has partitions 0 to {topic.spec.partitions - 1}, not {number}"
                )
            if (group := topic.group_of(number)) != self._core.group:
                raise self._core.elsewhere(f"{topic.name}/{number} lives in", group)
            found = self._make(topic, number)
        else:
            self._open.move_to_end(found.key)
            found.topic = self._core.catalogue.by_id.get(topic.topic_id, found.topic)  # its newest spec
        if found.parked is not None:
            self._retry_parked(found)
        return found

    def open_for_dispatch(self, topic: TopicInfo, number: int) -> Partition:
        """The partition, parked or not: what is in the log is indexed all the same."""
        found = self._open.get((topic.topic_id, number))
        if found is None:
            found = self._make(topic, number)
        found.topic = topic
        return found

    def _make(self, topic: TopicInfo, number: int) -> Partition:
        core, key = self._core, (topic.topic_id, number)
        state = self.states.get(key)
        if state is None:
            stored = core.index.state(*key)
            begun = DirtyState(forced=core.catalogue.forced.get(topic.topic_id, 0))
            state = unpack_state(stored) if stored else begun
        reason = None
        try:
            log = self._open_log(topic, number)
        except (FirnError, OSError) as error:
            reason = f"its compacted log cannot be opened: {error}"
            _log.error("%s/%d parked: %s", topic.name, number, reason)
            nothing = Manifest(topic_id=topic.topic_id, partition=number)
            log = CompactedLog(core.disk, core.cache, self.folder(*key), nothing)
        bounds = core.index.bounds(*key, core.log.start)
        indexed_end = bounds[1] if bounds else 0
        end = max(indexed_end, log.manifest.horizon, state.next_offset)
        made = Partition(
            topic, number, log, state, next_offset=end, dispatched_end=end, indexed_end=indexed_end
        )
        if reason is not None:
            self.park(made, reason)
        self._open[key] = made
        self._adopt_manifest(made)
        if len(self._open) > OPEN_PARTITIONS_MAX and not self._is_evicting:
            # Not now: who asked for this partition may hold others that look unused.
            self._is_evicting = True
            asyncio.get_running_loop().call_soon(self.evict, 16 + OPEN_PARTITIONS_MAX // 10)
        return made

    def _adopt_manifest(self, partition: Partition) -> None:
        """After a crash the stored row may be older than the last compaction: the manifest knows better."""
        state, manifest = partition.state, partition.log.manifest
        if manifest.horizon <= state.horizon:
            return
        entries = self.entries(partition, manifest.horizon, partition.indexed_end)
        state.dirty_bytes = sum(e.size for e in entries if e.position < state.position)
        state.horizon = manifest.horizon
        note_clean(partition)
        note_oldest(self._core, partition)
        self.touch(partition)

    def entries(self, partition: Partition, start: int, end: int) -> Iterator[Entry]:
        """The index entries of the offsets [start, end), read in portions."""
        while start < end:
            entries = self._core.index.scan(*partition.key, start, end=end, limit=1024)
            if not entries:
                return
            yield from entries
            start = entries[-1].end_offset

    def _open_log(self, topic: TopicInfo, number: int) -> CompactedLog:
        core, key = self._core, (topic.topic_id, number)
        return CompactedLog.open(
            core.disk,
            core.cache,
            self.folder(*key),
            topic_id=topic.topic_id,
            partition=number,
            secret=core.secret,
            dirty_source=lambda start, end: (b.data for b in self.raw_batches(*key, start, end)),
        )

    def park(self, partition: Partition, reason: str) -> None:
        """Refuse this partition's work, with the reason, until a retry succeeds; the others go on."""
        partition.parked = reason
        partition.parked_until = self._core.machine_clock.monotonic() + PARKED_RETRY_S
        self._core.metrics["partitions_parked"] += 1

    def _retry_parked(self, partition: Partition) -> None:
        now = self._core.machine_clock.monotonic()
        if now >= partition.parked_until and partition.is_unused:
            self._open.pop(partition.key, None)
            fresh = self._make(partition.topic, partition.number)
            if fresh.parked is None:
                return
            partition = fresh
        raise PartitionParked(f"{partition.topic.name}/{partition.number} is parked: {partition.parked}")

    def producer(self, partition: Partition, producer_id: int) -> ProducerRow | None:
        """What is known of a producer, appended batches included."""
        known = partition.producers.get(producer_id)
        if known is None:
            stored = self._core.index.producer(*partition.key, producer_id)
            if stored:
                known = partition.producers[producer_id] = unpack_row(stored)
        return known

    def active(self, partition: Partition) -> ActiveIndex:
        """The in-memory key index of the unsealed rows; rebuilt through the partition index at first use.

        Errors: Corrupt, when the commit log's bytes are damaged.
        """
        if partition.active is None:
            start = partition.sealing[-1].end if partition.sealing else partition.unsealed_start
            loaded = _Loaded(ActiveIndex(start))
            self._index(partition, loaded, start, partition.dispatched_end)
            for pending in partition.pending:
                if pending.end > loaded.index.end:
                    batch = Batch(self._core.log.read(pending.position, pending.size))
                    self._index_batch(partition, loaded, batch)
            partition.active, partition.active_bytes = loaded.index, loaded.bytes
            partition.active_since_ms = loaded.since_ms
        return partition.active

    def load(self, partition: Partition, start: int, end: int) -> ActiveIndex:
        """A key index of the dispatched offsets [start, end), or more, of the caller's own; from any thread.

        Errors: Corrupt.
        """
        loaded = _Loaded(ActiveIndex(start))
        self._index(partition, loaded, start, end)
        return loaded.index

    def _index(self, partition: Partition, loaded: "_Loaded", start: int, end: int) -> None:
        """Index dispatched offsets: a run of batches in one call of a kernel, which checks them; whatever it would
        not index as it is, batch by batch.
        """
        for entry, data in self._raw_runs(*partition.key, start, end):
            group = inspect_group(data, self._core.secret, is_produce=False)
            if not loaded.add(group, *partition.key):
                for batch in _checked(data, entry.position, partition.key[0], start):
                    self._index_batch(partition, loaded, batch)

    def _index_batch(self, partition: Partition, loaded: "_Loaded", batch: Batch) -> None:
        columns, index, base = batch.columns, loaded.index, batch.header.base_offset
        if base > index.end:
            raise Corrupt(
                f"{partition.topic.name}/{partition.number}: expected the records from offset {index.end} on in "
                f"the commit log, found offset {base}"
            )
        hi, lo = fingerprint(columns.keys, columns.key_lengths, batch.header.topic_id, self._core.secret)
        skip = index.end - base
        if skip < batch.header.records:
            index.append(hi[skip:], lo[skip:], np.ascontiguousarray(columns.tombstones[skip:]))
            loaded.bytes += batch.header.size
            loaded.since_ms = loaded.since_ms or batch.header.append_timestamp

    def raw_batches(self, topic_id: int, number: int, start: int, end: int) -> Iterator[Batch]:
        """The batches that hold offsets [start, end), from the commit log, checked. Dispatched offsets only."""
        for entry, data in self._raw_runs(topic_id, number, start, end):
            yield from _checked(data, entry.position, topic_id, start)

    def _raw_runs(self, topic_id: int, number: int, start: int, end: int) -> Iterator[tuple[Entry, bytes]]:
        """The index entries that hold offsets [start, end), with their bytes."""
        core = self._core
        while start < end:
            entries = core.index.scan(topic_id, number, start, end=end, limit=_LOAD_ENTRIES)
            if not entries:
                return
            for entry in entries:
                yield entry, core.log.read(entry.position, entry.size)
            start = entries[-1].end_offset

    def forget_all(self) -> None:
        """Be as after a start: nothing was dispatched, and other files have taken the place of those that are known."""
        if not all(partition.is_unused for partition in self._open.values()):
            raise InvariantBroken("partitions are in use while their files are replaced")
        self._open.clear()
        self.states.clear()
        self.touched.clear()

    def drop_topic(self, topic: TopicInfo) -> list[Partition]:
        """Forget a deleted topic's partitions; their waiters wake up to an unknown topic."""
        gone = [p for key, p in self._open.items() if key[0] == topic.topic_id]
        for partition in gone:
            partition.deleted = True
            del self._open[partition.key]
            partition.wake()
        for key in [key for key in self.states if key[0] == topic.topic_id]:
            del self.states[key]
        self.touched = {key for key in self.touched if key[0] != topic.topic_id}
        return gone

    def state_of(self, topic_id: int, number: int) -> DirtyState:
        """The partition's state row, whether it is open, scanned after the start, or neither."""
        opened = self._open.get((topic_id, number))
        known = opened.state if opened is not None else self.states.get((topic_id, number))
        if known is None:
            stored = self._core.index.state(topic_id, number)
            known = unpack_state(stored) if stored else DirtyState()
        return known

    def touch(self, partition: Partition) -> None:
        """The state row has changed. A deleted topic's stays away: it would hold back retention for ever."""
        if partition.deleted:
            return
        self.touched.add(partition.key)
        self.states[partition.key] = partition.state

    def active_bytes(self) -> int:
        return sum(p.active.nbytes for p in self._open.values() if p.active is not None)

    def evict(self, looked: int | None = None) -> None:
        """Drop idle partitions until no more than OPEN_PARTITIONS_MAX are open; ``looked``: at so many at most.

        What a state row or a producer has to tell the index keeps a partition until the next checkpoint.
        """
        self._is_evicting = False
        over = len(self._open) - OPEN_PARTITIONS_MAX
        if over <= 0:
            return
        for key, partition in list(islice(self._open.items(), looked)):
            if partition.is_idle and not partition.producers_touched and key not in self.touched:
                del self._open[key]
                over -= 1
                if over <= 0:
                    return
            else:
                self._open.move_to_end(key)  # so that the next attempt looks at others


@dataclass(slots=True)
class _Loaded:
    """An active index in the making, the bytes of its batches and the append time of the first."""

    index: ActiveIndex
    bytes: int = 0
    since_ms: int = 0

    def add(self, group: Group, topic_id: int, number: int) -> bool:
        """Index the batches of a run, if they are sound, of this partition, without gaps and not ahead of the index."""
        bases, ends, index_end = group.base_offset, group.last_offset + 1, self.index.end
        if (
            group.fault.any()
            or (group.topic_id != topic_id).any() or (group.partition != number).any()
            or (ends - bases != group.records).any() or (bases[1:] != ends[:-1]).any()
            or bases[0] > index_end
        ):  # fmt: skip
            return False
        is_new = ends > index_end
        if is_new.any():
            skip = index_end - int(bases[0])
            self.index.append(group.hi[skip:], group.lo[skip:], group.tombstone[skip:])
            self.bytes += int(group.size[is_new].sum())
            self.since_ms = self.since_ms or int(group.append_timestamp[is_new][0])
        return True


def _checked(data: bytes, position: int, topic_id: int, start: int) -> Iterator[Batch]:
    """The batches of a run of the commit log that reach offset ``start``. *Errors*: Corrupt."""
    try:
        for batch in iterate(data):
            if batch.header.last_offset < start:
                continue
            if batch.header.topic_id != topic_id:
                raise Corrupt(
                    f"commit log position {position}: expected topic id {topic_id}, "
                    f"found {batch.header.topic_id}",
                    position=position,
                )
            batch.verify()
            yield batch
    except MalformedBatch as error:
        raise corrupt(error, file="commit log", position=position) from error


def note_clean(partition: Partition) -> None:
    """Copy the manifest's figures into the state row."""
    state, manifest, stats = partition.state, partition.log.manifest, partition.log.stats()
    delete_retention = partition.topic.spec.compaction.delete_retention_ms
    covered, masked = stats.next_tombstone_ms, stats.oldest_masked_ms
    state.clean_bytes, state.clean_rows = stats.bytes, stats.live
    state.next_tombstone_ms = -1 if covered is None or not stats.tombstones else covered + delete_retention
    state.oldest_masked_ms = -1 if masked is None else masked
    state.sealed_bytes = sum(d.bytes for d in manifest.dirty)


def note_oldest(core: Core, partition: Partition) -> None:
    """Find the first dirty batch that is dispatched: its position holds back retention, its age makes due."""
    state = partition.state
    entry = core.index.find(*partition.key, partition.horizon)
    state.oldest_position, state.oldest_ms, partition.active_since_ms = -1, -1, 0
    if entry is None:
        state.dirty_bytes = 0
        return
    state.oldest_position = entry.position
    try:
        state.oldest_ms = parse_header(core.log.read(entry.position, HEADER_BYTES)).append_timestamp
    except (FirnError, OSError):
        state.oldest_ms = core.clock.now_ms()
    partition.active_since_ms = state.oldest_ms
