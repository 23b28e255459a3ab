"""The partition index in plain files: fixed-size entries, one folder per partition, binary search by ``pread``.

``<folder>/CHECKPOINT`` and ``<folder>/<topic_id>/<partition>/<20 digits>``, entries by number. Invariants:

- nothing is written before ``flush``; what CHECKPOINT does not name does not exist: bytes past the end that it
  gives, torn or not, are written over, folders and files that it does not name are removed at open;
- a file that CHECKPOINT names entries in is never written at or below them;
- entry numbers of a partition are never used twice, also when a topic id is deleted and seen again;
- at most ``PARTITIONS_MAX`` partitions: each costs an object, and one fdatasync per flush in which it has entries.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from firn.errors import LimitExceeded
from firn_node import failpoints
from firn_node.disk import Disk, read_file, replace_file
from firn_node.filecache import FileCache
from firn_node.index.base import (
    Entry,
    LightEntry,
    LightRow,
    NewEntry,
    NewLight,
    PartitionEnd,
    ProducerRow,
    refuse_light_queues,
)
from firn_node.index.filesformat import (
    ENTRIES_PER_FILE,
    ENTRY_BYTES,
    PartitionRow,
    Snapshot,
    pack_entry,
    pack_snapshot,
    unpack_entry,
    unpack_snapshot,
)

PARTITIONS_MAX = 10_000
OPEN_FILES_MAX = 128

Key = tuple[int, int]


@dataclass(slots=True)
class _Partition:
    """``row`` counts pending entries too; ``pending`` are the entries from ``durable_end`` on, not yet written."""

    row: PartitionRow
    durable_end: int
    pending: bytearray = field(default_factory=bytearray)


class FilesIndex:
    kind = "files"
    has_light_queues = False

    def __init__(self, folder: str, disk: Disk) -> None:
        self.folder = folder
        self._disk = disk
        self._cache = FileCache(disk, OPEN_FILES_MAX)
        self._lock = threading.RLock()  # the state in memory; not held while flush does its I/O
        self._write_lock = threading.Lock()
        disk.make_folder(folder)
        path = f"{folder}/CHECKPOINT"
        snapshot = unpack_snapshot(read_file(disk, path), path) if disk.exists(path) else Snapshot()
        self._checkpoint, self._log_start = snapshot.checkpoint, snapshot.log_start
        self._partitions = {key: _Partition(row, row.end_entry) for key, row in snapshot.partitions.items()}
        self._states, self._producers = snapshot.states, snapshot.producers
        self._swept = 0
        self._deleted: dict[Key, int] = {}  # the first entry number that a partition seen again may use
        self._trimmed: dict[Key, int] = {}  # file numbers below go once the checkpoint is durable
        self._remove_leftovers()

    @property
    def checkpoint(self) -> int:
        return self._checkpoint

    @property
    def log_start(self) -> int:
        return self._log_start

    # -- writing ---------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[NewEntry], lights: Sequence[NewLight] = ()) -> None:
        """See the protocol. *Errors*: Invalid (light queues), LimitExceeded (partitions); nothing is added then."""
        if lights:
            raise refuse_light_queues(self.kind)
        with self._lock:
            new = {entry[:2] for entry in entries} - self._partitions.keys()
            if len(self._partitions) + len(new) > PARTITIONS_MAX:
                raise LimitExceeded(
                    f"the files index keeps at most {PARTITIONS_MAX} partitions: use the index kind rocksdb",
                    kind=self.kind,
                    limit=PARTITIONS_MAX,
                )
            for key in new:
                self._make_partition(key)
            for entry in entries:
                found = self._partitions[entry[:2]]
                row = found.row
                if entry.end_offset <= row.end_offset:
                    continue
                base = max(entry.base_offset, row.end_offset)
                row.max_timestamp = max(row.max_timestamp, entry.max_timestamp)
                row.end_offset = entry.end_offset
                row.end_entry += 1
                found.pending += pack_entry(
                    Entry(
                        base, entry.end_offset, entry.position, entry.size, entry.tag_hash, row.max_timestamp
                    )
                )

    def flush(self, checkpoint: int) -> None:
        """Steps: 1. new entries past the known ends, files and folders synced, 2. CHECKPOINT replaced, 3. removals.

        *Effects*: after an error or a crash before 2 the old checkpoint holds, and the same flush may be repeated.
        """
        self.sweep(self._log_start, PARTITIONS_MAX)
        with self._write_lock:
            with self._lock:
                written = {
                    key: (found.durable_end, bytes(found.pending))
                    for key, found in self._partitions.items()
                    if found.pending
                }
                snapshot = self._snapshot(checkpoint)
                deleted, trimmed = dict(self._deleted), dict(self._trimmed)
            for key, (start, data) in written.items():
                self._write(key, start, data)
                failpoints.step("index.flush.entries")
            replace_file(self._disk, f"{self.folder}/CHECKPOINT", pack_snapshot(snapshot))
            failpoints.step("index.flush.checkpointed")
            with self._lock:
                self._checkpoint = checkpoint
                for key, (start, data) in written.items():
                    found = self._partitions.get(key)
                    if found is not None and found.durable_end == start:
                        del found.pending[: len(data)]
                        found.durable_end += len(data) // ENTRY_BYTES
            self._remove(deleted, trimmed)

    def trim(self, log_start: int) -> None:
        with self._lock:
            self._log_start = max(self._log_start, log_start)

    def sweep(self, log_start: int, limit: int) -> int:
        """Leave out the expired entries that are in files; 0 always, because one call does them all."""
        with self._lock:
            self._log_start = log_start = max(self._log_start, log_start)
            if self._swept >= log_start:
                return 0
            self._swept = log_start
            for key, found in self._partitions.items():
                row = found.row
                if (
                    row.first_entry < found.durable_end
                    and self._read(key, found, row.first_entry).position < log_start
                ):
                    first = self._bisect(key, found, lambda entry: entry.position >= log_start)
                    row.first_entry = min(first, found.durable_end)
                    self._trimmed[key] = row.first_entry // ENTRIES_PER_FILE
        return 0

    def delete_topic(self, topic_id: int) -> None:
        with self._lock:
            for key in [key for key in self._partitions if key[0] == topic_id]:
                end = self._partitions.pop(key).row.end_entry
                self._deleted[key] = -(-end // ENTRIES_PER_FILE) * ENTRIES_PER_FILE  # the next file's first
            self._states = {key: value for key, value in self._states.items() if key[0] != topic_id}
            self._producers = {key: value for key, value in self._producers.items() if key[0] != topic_id}

    def put_state(self, topic_id: int, partition: int, state: bytes) -> None:
        with self._lock:
            self._states[topic_id, partition] = bytes(state)

    def put_producer(self, topic_id: int, partition: int, producer_id: int, row: bytes) -> None:
        with self._lock:
            self._producers[topic_id, partition, producer_id] = bytes(row)

    def delete_producers(self, older_than_ms: int) -> None:
        with self._lock:
            self._producers = {
                key: row
                for key, row in self._producers.items()
                if int.from_bytes(row[:8], "little", signed=True) >= older_than_ms
            }

    def restore_end(self, end: PartitionEnd) -> None:
        with self._lock:
            key = (end.topic_id, end.partition)
            if key not in self._partitions:
                self._make_partition(key)
            row = self._partitions[key].row
            row.end_offset, row.max_timestamp = end.end_offset, end.max_timestamp

    def restore_queue(self, topic_id: int, partition: int, name: str, count: int, timestamp: int) -> None:
        raise refuse_light_queues(self.kind)

    # -- reading ---------------------------------------------------------------------------------------------

    def find(self, topic_id: int, partition: int, offset: int) -> Entry | None:
        found = self.scan(topic_id, partition, offset, limit=1)
        return found[0] if found else None

    def scan(
        self, topic_id: int, partition: int, offset: int, *, end: int | None = None, limit: int = 1024
    ) -> list[Entry]:
        key = (topic_id, partition)
        with self._lock:
            found = self._partitions.get(key)
            if found is None:
                return []
            log_start = self._log_start
            first = self._bisect(
                key, found, lambda entry: entry.end_offset > offset and entry.position >= log_start
            )
            entries: list[Entry] = []
            for number in range(first, min(first + limit, found.row.end_entry)):
                entry = self._read(key, found, number)
                if end is not None and entry.base_offset >= end:
                    break
                entries.append(entry)
            return entries

    def find_time(self, topic_id: int, partition: int, timestamp: int) -> Entry | None:
        key = (topic_id, partition)
        with self._lock:
            found = self._partitions.get(key)
            if found is None:
                return None
            log_start = self._log_start
            number = self._bisect(
                key, found, lambda entry: entry.max_timestamp >= timestamp and entry.position >= log_start
            )
            return self._read(key, found, number) if number < found.row.end_entry else None

    def bounds(self, topic_id: int, partition: int, log_start: int) -> tuple[int, int] | None:
        key = (topic_id, partition)
        with self._lock:
            found = self._partitions.get(key)
            if found is None:
                return None
            floor = max(log_start, self._log_start)
            number = self._bisect(key, found, lambda entry: entry.position >= floor)
            end = found.row.end_offset
            return (self._read(key, found, number).base_offset if number < found.row.end_entry else end), end

    def state(self, topic_id: int, partition: int) -> bytes | None:
        return self._states.get((topic_id, partition))

    def states(self) -> Iterator[tuple[int, int, bytes]]:
        with self._lock:
            rows = sorted(self._states.items())
        for (topic_id, partition), state in rows:
            yield topic_id, partition, state

    def producer(self, topic_id: int, partition: int, producer_id: int) -> bytes | None:
        return self._producers.get((topic_id, partition, producer_id))

    def light_scan(
        self, topic_id: int, partition: int, name: str, queue_offset: int, *, limit: int
    ) -> list[LightEntry]:
        raise refuse_light_queues(self.kind)

    def light_bounds(self, topic_id: int, partition: int, name: str) -> tuple[int, int] | None:
        raise refuse_light_queues(self.kind)

    def partitions(self) -> Iterator[PartitionEnd]:
        with self._lock:
            ends = [
                PartitionEnd(*key, p.row.end_offset, p.row.max_timestamp)
                for key, p in self._partitions.items()
            ]
        yield from sorted(ends)

    def producers(self) -> Iterator[ProducerRow]:
        with self._lock:
            rows = [ProducerRow(*key, row) for key, row in self._producers.items()]
        yield from sorted(rows)

    def lights(self) -> Iterator[LightRow]:
        return iter(())

    def close(self) -> None:
        self._cache.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _make_partition(self, key: Key) -> None:
        first = self._deleted.get(key, 0)
        self._partitions[key] = _Partition(PartitionRow(first, first), first)

    def _snapshot(self, checkpoint: int) -> Snapshot:
        rows = {
            key: PartitionRow(row.first_entry, row.end_entry, row.end_offset, row.max_timestamp)
            for key, row in ((key, found.row) for key, found in self._partitions.items())
        }
        return Snapshot(checkpoint, self._log_start, rows, dict(self._states), dict(self._producers))

    def _path(self, key: Key, file_number: int) -> str:
        return f"{self.folder}/{key[0]}/{key[1]}/{file_number * ENTRIES_PER_FILE:020d}"

    def _write(self, key: Key, start: int, data: bytes) -> None:
        """Put packed entries at their numbers. *Effects*: files and names durable on return; may be repeated."""
        while data:
            within = start % ENTRIES_PER_FILE
            part = data[: (ENTRIES_PER_FILE - within) * ENTRY_BYTES]
            path = self._path(key, start // ENTRIES_PER_FILE)
            is_new = within == 0 and not self._disk.exists(path)
            if is_new:
                self._disk.make_folder(f"{self.folder}/{key[0]}/{key[1]}")
            file = self._disk.open(path, "create" if is_new else "write")
            try:
                file.pwrite([part], within * ENTRY_BYTES)
                file.sync()
            finally:
                file.close()
            if within == 0:
                self._disk.sync_folder(f"{self.folder}/{key[0]}/{key[1]}")
                if not is_new:  # a crash left it: its folders' names may not be durable either
                    self._disk.sync_folder(f"{self.folder}/{key[0]}")
                    self._disk.sync_folder(self.folder)
            start += len(part) // ENTRY_BYTES
            data = data[len(part) :]

    def _read(self, key: Key, found: _Partition, number: int) -> Entry:
        if number >= found.durable_end:
            start = (number - found.durable_end) * ENTRY_BYTES
            return unpack_entry(bytes(found.pending[start : start + ENTRY_BYTES]), "memory", start)
        path = self._path(key, number // ENTRIES_PER_FILE)
        position = number % ENTRIES_PER_FILE * ENTRY_BYTES
        with self._cache.reading(path) as file:
            return unpack_entry(file.pread(ENTRY_BYTES, position), path, position)

    def _bisect(self, key: Key, found: _Partition, is_wanted: Callable[[Entry], bool]) -> int:
        """The number of the first wanted entry, or the end; ``is_wanted`` never turns false again along entries."""
        low, high = found.row.first_entry, found.row.end_entry
        while low < high:
            middle = (low + high) // 2
            if is_wanted(self._read(key, found, middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _remove(self, deleted: dict[Key, int], trimmed: dict[Key, int]) -> None:
        """Unlink what the durable checkpoint no longer names. *Effects*: not durable; repeated at open."""
        for key, first in [
            *deleted.items(),
            *((key, file * ENTRIES_PER_FILE) for key, file in trimmed.items()),
        ]:
            folder = f"{self.folder}/{key[0]}/{key[1]}"
            for name in self._disk.list(folder):
                if int(name) < first:
                    self._cache.retire(f"{folder}/{name}")
        with self._lock:
            for key in deleted:
                del self._deleted[key]
                if key not in self._partitions:
                    self._disk.remove_tree(f"{self.folder}/{key[0]}/{key[1]}")
            alive = {key[0] for key in self._partitions}
            for topic_id in {key[0] for key in deleted} - alive:
                self._disk.remove_tree(f"{self.folder}/{topic_id}")
            for key, file in trimmed.items():
                if self._trimmed.get(key) == file:
                    del self._trimmed[key]

    def _remove_leftovers(self) -> None:
        """Remove the folders that CHECKPOINT does not name, left by a crash."""
        topics: dict[str, set[str]] = {}
        for topic_id, partition in self._partitions:
            topics.setdefault(str(topic_id), set()).add(str(partition))
        for name in self._disk.list(self.folder):
            folder = f"{self.folder}/{name}"
            if name == "CHECKPOINT.tmp":
                self._disk.unlink(folder)
            elif name != "CHECKPOINT" and name not in topics:
                self._disk.remove_tree(folder)
            elif name in topics:
                for partition_name in self._disk.list(folder):
                    if partition_name not in topics[name]:
                        self._disk.remove_tree(f"{folder}/{partition_name}")
