"""The partition index in RocksDB: any number of partitions and light queues in one database.

Invariants, beyond those of `base.py`:

- one ``append`` is one WriteBatch: entries, the partition's end and light entries stand or fall together, also
  when RocksDB writes a full memtable to disk on its own;
- no WAL: what is on disk is a prefix of the writes, and ``flush`` puts the checkpoint last of them;
- opening reads three keys, whatever the number of partitions; caches are bounded;
- only the writing thread fills the cache of ends, after the database: a reader's miss is never wrong;
- a light queue's newest entry stays when it expires (readers do not see it): it holds the queue's count, so that a
  queue offset is never given twice.

Trimming writes one number. Readers correct it lazily, and what they find dead is deleted by the next append;
``sweep`` walks the rest in small steps. Above 500 lines because all of it works on one database, one lock and the
same two caches; keys, opening and errors are in `rockskeys.py` and `rocksdoor.py`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rocksdict import WriteBatch

from firn.errors import Corrupt
from firn_node import failpoints
from firn_node.index import rockskeys as k
from firn_node.index.base import Entry, LightEntry, LightRow, NewEntry, NewLight, PartitionEnd, ProducerRow
from firn_node.index.lru import BoundedMap
from firn_node.index.rocksdoor import Guarded, guarded, open_database, without_wal

NEVER = -(2**63)  # the running maximum of nothing
SWEEP_PER_FLUSH = 1024  # partitions and queues looked at by each flush: about 10 ms
PORTION = 4096  # rows per step of a walk over a family; no iterator lives longer
EXPIRED_MAX = 4096

Partition = tuple[int, int]
End = tuple[int, int, Entry | None]  # end offset, running maximum, the newest entry if known
NO_END: End = (0, NEVER, None)


class RocksIndex(Guarded):
    kind = "rocksdb"
    has_light_queues = True

    def __init__(self, folder: str, *, memory_bytes: int) -> None:
        self.folder = folder
        self._db = open_database(folder, memory_bytes)
        self._is_closed = False
        self._unlogged = without_wal()
        self._write_lock = threading.RLock()
        cached = max(1024, memory_bytes // 4096)  # about 250 bytes each: a sixteenth of the budget
        self._ends: BoundedMap[Partition, End] = BoundedMap(cached)
        self._queues: BoundedMap[bytes, tuple[int, int]] = BoundedMap(cached)
        self._expired: dict[Partition, int] = {}  # found by readers: no live offset below
        self._expired_lock = threading.Lock()
        self._cursor = k.BOUNDS
        self._round = 0  # the log start of the sweep under way
        self._swept = 0
        self._check_format()
        self._checkpoint = self._number(k.CHECKPOINT_KEY)
        self._log_start = self._number(k.LOG_START_KEY)

    @property
    def checkpoint(self) -> int:
        return self._checkpoint

    @property
    def log_start(self) -> int:
        return self._log_start

    # -- writing ---------------------------------------------------------------------------------------------

    @guarded
    def append(self, entries: Sequence[NewEntry], lights: Sequence[NewLight] = ()) -> None:
        """See the protocol. Steps: 1. one WriteBatch into the memtable, 2. the caches. Nothing is synced."""
        with self._write_lock:
            batch = WriteBatch(raw_mode=True)
            known = self._known_ends(entries, lights)
            ends = dict(known)
            _put_entries(batch, entries, ends)
            queues = self._put_lights(batch, lights, known) if lights else {}
            for key, end in ends.items():
                if end is not known[key]:
                    batch.put(k.pack_partition_key(k.BOUNDS, *key), k.pack_bounds(end[0], end[1]))
            self._put_expired(batch)
            if len(batch) == 0:
                return
            failpoints.step("index.append.batched")
            self._db.write(batch, self._unlogged)
            for key, end in ends.items():
                if end is not NO_END:
                    self._ends.put(key, end)
            for prefix, queue in queues.items():
                self._queues.put(prefix, queue)

    @guarded
    def flush(self, checkpoint: int) -> None:
        """Steps: 1. the checkpoint into the memtable, last, 2. memtable to a synced SST and manifest, by RocksDB."""
        with self._write_lock:
            self._sweep(SWEEP_PER_FLUSH)
            self._db.put(k.CHECKPOINT_KEY, k.pack_number(checkpoint), self._unlogged)
        failpoints.step("index.flush.checkpointed")
        self._db.flush(True)  # without the lock: what others write meanwhile may be in it, which is harmless
        failpoints.step("index.flush.synced")
        self._checkpoint = checkpoint

    @guarded
    def trim(self, log_start: int) -> None:
        with self._write_lock:
            if log_start > self._log_start:
                self._db.put(k.LOG_START_KEY, k.pack_number(log_start), self._unlogged)
                self._log_start = log_start

    @guarded
    def sweep(self, log_start: int, limit: int) -> int:
        self.trim(log_start)
        with self._write_lock:
            return self._sweep(limit)

    @guarded
    def delete_topic(self, topic_id: int) -> None:
        with self._write_lock:
            batch = WriteBatch(raw_mode=True)
            for family in k.FAMILIES_OF_TOPIC:
                batch.delete_range(k.pack_topic_key(family, topic_id), k.next_topic_key(family, topic_id))
            self._db.write(batch, self._unlogged)
            self._ends.clear()
            self._queues.clear()
            with self._expired_lock:
                self._expired = {key: first for key, first in self._expired.items() if key[0] != topic_id}

    @guarded
    def put_state(self, topic_id: int, partition: int, state: bytes) -> None:
        self._db.put(k.pack_partition_key(k.STATE, topic_id, partition), state, self._unlogged)

    @guarded
    def put_producer(self, topic_id: int, partition: int, producer_id: int, row: bytes) -> None:
        self._db.put(k.pack_producer_key(k.PRODUCERS, topic_id, partition, producer_id), row, self._unlogged)

    @guarded
    def delete_producers(self, older_than_ms: int) -> None:
        for rows in self._portions(k.PRODUCERS):
            with self._write_lock:
                batch = WriteBatch(raw_mode=True)
                for key, row in rows:
                    if (
                        int.from_bytes(row[:8], "little", signed=True) < older_than_ms
                        and self._db.get(key) == row
                    ):
                        batch.delete(key)
                if len(batch):
                    self._db.write(batch, self._unlogged)

    @guarded
    def restore_end(self, end: PartitionEnd) -> None:
        key = k.pack_partition_key(k.BOUNDS, end.topic_id, end.partition)
        with self._write_lock:
            self._db.put(key, k.pack_bounds(end.end_offset, end.max_timestamp), self._unlogged)
            self._ends.clear()

    @guarded
    def restore_queue(self, topic_id: int, partition: int, name: str, count: int, timestamp: int) -> None:
        """As one entry, the newest, which lies before every log."""
        if count:
            key = k.light_prefix(topic_id, partition, name) + k.pack_offset(count - 1)
            with self._write_lock:
                self._db.put(key, k.pack_light(0, 0, 0, timestamp), self._unlogged)
                self._queues.clear()

    # -- reading ---------------------------------------------------------------------------------------------

    @guarded
    def find(self, topic_id: int, partition: int, offset: int) -> Entry | None:
        known = self._ends.get((topic_id, partition)) or self._load_end(topic_id, partition)
        if known is None or offset >= known[0]:
            return None
        newest = known[2]
        if newest is not None and newest.base_offset <= offset and newest.position >= self._log_start:
            return newest
        return self._live(self._db.iter(), topic_id, partition, max(offset, 0), known[0])

    @guarded
    def scan(
        self, topic_id: int, partition: int, offset: int, *, end: int | None = None, limit: int = 1024
    ) -> list[Entry]:
        known = self._ends.get((topic_id, partition)) or self._load_end(topic_id, partition)
        if known is None or offset >= known[0] or limit <= 0:
            return []
        until = known[0] if end is None else min(end, known[0])
        iterator = self._db.iter()
        entry = self._live(iterator, topic_id, partition, max(offset, 0), known[0])
        if entry is None or entry.base_offset >= until:
            return []
        found = [entry]
        prefix = k.pack_partition_key(k.ENTRIES, topic_id, partition)
        iterator.seek(prefix + k.pack_offset(entry.end_offset))
        while len(found) < limit and entry.end_offset < until:
            next_entry = _entry_here(iterator, prefix)
            if next_entry is None or next_entry.base_offset >= until:
                break
            found.append(next_entry)
            entry = next_entry
            iterator.next()
        return found

    @guarded
    def find_time(self, topic_id: int, partition: int, timestamp: int) -> Entry | None:
        known = self._ends.get((topic_id, partition)) or self._load_end(topic_id, partition)
        if known is None or known[1] < timestamp:
            return None
        prefix = k.pack_partition_key(k.ENTRIES, topic_id, partition)
        log_start = self._log_start
        return _first_entry(
            self._db.iter(),
            prefix,
            0,
            known[0],
            lambda entry: entry.max_timestamp >= timestamp and entry.position >= log_start,
        )

    @guarded
    def bounds(self, topic_id: int, partition: int, log_start: int) -> tuple[int, int] | None:
        known = self._ends.get((topic_id, partition)) or self._load_end(topic_id, partition)
        if known is None:
            return None
        first = self._live(self._db.iter(), topic_id, partition, 0, known[0], log_start)
        return (known[0] if first is None else first.base_offset), known[0]

    @guarded
    def state(self, topic_id: int, partition: int) -> bytes | None:
        return _bytes(self._db.get(k.pack_partition_key(k.STATE, topic_id, partition)))

    @guarded
    def producer(self, topic_id: int, partition: int, producer_id: int) -> bytes | None:
        return _bytes(self._db.get(k.pack_producer_key(k.PRODUCERS, topic_id, partition, producer_id)))

    @guarded
    def light_scan(
        self, topic_id: int, partition: int, name: str, queue_offset: int, *, limit: int
    ) -> list[LightEntry]:
        prefix = k.light_prefix(topic_id, partition, name)
        iterator = self._db.iter()
        found: list[LightEntry] = []
        iterator.seek(prefix + k.pack_offset(max(queue_offset, 0)))
        here = _light_here(iterator, prefix)
        if here is not None and here.position < self._log_start:
            newest = self._queue_end(iterator, prefix)[0] - 1
            first = self._first_live_light(prefix, here.queue_offset, newest)
            iterator.seek(prefix + k.pack_offset(first))
            here = _light_here(iterator, prefix)
        while here is not None and len(found) < limit:
            found.append(here)
            iterator.next()
            here = _light_here(iterator, prefix)
        return found

    @guarded
    def light_bounds(self, topic_id: int, partition: int, name: str) -> tuple[int, int] | None:
        prefix = k.light_prefix(topic_id, partition, name)
        iterator = self._db.iter()
        end = self._queue_end(iterator, prefix)[0]
        if end == 0:
            return None
        iterator.seek(prefix)
        first = _light_here(iterator, prefix)
        if first is None:
            return end, end
        if first.position >= self._log_start:
            return first.queue_offset, end
        return self._first_live_light(prefix, first.queue_offset, end - 1), end

    def states(self) -> Iterator[tuple[int, int, bytes]]:
        for rows in self._portions(k.STATE):
            for key, value in rows:
                _, topic_id, partition = k.unpack_partition_key(key)
                yield topic_id, partition, value

    def partitions(self) -> Iterator[PartitionEnd]:
        for rows in self._portions(k.BOUNDS):
            for key, value in rows:
                _, topic_id, partition = k.unpack_partition_key(key)
                yield PartitionEnd(topic_id, partition, *k.unpack_bounds(value))

    def producers(self) -> Iterator[ProducerRow]:
        for rows in self._portions(k.PRODUCERS):
            for key, value in rows:
                _, topic_id, partition, producer_id = k.unpack_producer_key(key)
                yield ProducerRow(topic_id, partition, producer_id, value)

    def lights(self) -> Iterator[LightRow]:
        for rows in self._portions(k.LIGHT):
            for key, value in rows:
                _, topic_id, partition = k.unpack_partition_key(key[: k.PARTITION_KEY_BYTES])
                name = key[k.PARTITION_KEY_BYTES + 1 : -8].decode()
                yield LightRow(
                    topic_id, partition, name, k.unpack_offset(key[-8:])[0], *k.unpack_light(value)
                )

    def close(self) -> None:
        """See the protocol. RocksDB writes its memtable, whole, beside the old checkpoint. Twice is harmless."""
        with self._write_lock:
            if not self._is_closed:
                self._is_closed = True
                self._db.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _check_format(self) -> None:
        found = self._number(k.FORMAT_KEY)
        if found not in (0, k.FORMAT):
            raise Corrupt(
                f"the index in {self.folder} has format {found}, this version knows {k.FORMAT}",
                file=self.folder,
                expected=k.FORMAT,
                found=found,
            )
        if not found:
            self._db.put(k.FORMAT_KEY, k.pack_number(k.FORMAT), self._unlogged)

    def _number(self, key: bytes) -> int:
        value = _bytes(self._db.get(key))
        return int(k.unpack_number(value)[0]) if value else 0

    def _load_end(self, topic_id: int, partition: int) -> End | None:
        value = _bytes(self._db.get(k.pack_partition_key(k.BOUNDS, topic_id, partition)))
        return (*k.unpack_bounds(value), None) if value else None

    def _known_ends(self, entries: Sequence[NewEntry], lights: Sequence[NewLight]) -> dict[Partition, End]:
        """The ends before this group of all its partitions; those not cached by one multi-get."""
        wanted = {entry[:2] for entry in entries}
        if lights:
            wanted.update([light[:2] for light in lights])
        found: dict[Partition, End] = {}
        missing: list[Partition] = []
        for key in wanted:
            end = self._ends.get(key)
            if end is None:
                missing.append(key)
            else:
                found[key] = end
        if missing:
            rows: Any = self._db.get([k.pack_partition_key(k.BOUNDS, *key) for key in missing])
            for key, row in zip(missing, rows, strict=True):
                found[key] = (*k.unpack_bounds(row), None) if row else NO_END
        return found

    def _put_lights(
        self, batch: Any, lights: Sequence[NewLight], known: dict[Partition, End]
    ) -> dict[bytes, tuple[int, int]]:
        """Count the queues on; what was counted in an earlier append (its offset is below the end) is skipped."""
        queues: dict[bytes, tuple[int, int]] = {}
        iterator = self._db.iter()
        put, pack_light, pack_offset, cached = batch.put, k.pack_light, k.pack_offset, self._queues.get
        partition_of, heads = (-1, -1), (b"", 0)
        for topic_id, partition, name, position, row, offset, timestamp in lights:
            if partition_of != (topic_id, partition):
                partition_of = (topic_id, partition)
                heads = (k.pack_partition_key(k.LIGHT, topic_id, partition), known[partition_of][0])
            if offset < heads[1]:
                continue
            encoded = name.encode()
            prefix = heads[0] + k.BYTE[len(encoded)] + encoded
            queue = queues.get(prefix) or cached(prefix) or self._queue_end(iterator, prefix)
            count, running = queue
            if timestamp > running:
                running = timestamp
            put(prefix + pack_offset(count), pack_light(position, row, offset, running))
            queues[prefix] = (count + 1, running)
        return queues

    def _queue_end(self, iterator: Any, prefix: bytes) -> tuple[int, int]:
        """The next offset of a light queue and its running maximum; (0, NEVER) for a new one."""
        iterator.seek_for_prev(k.after(prefix))
        if iterator.valid():
            key = iterator.key()
            if key.startswith(prefix) and len(key) == len(prefix) + 8:
                return k.unpack_offset(key[-8:])[0] + 1, k.unpack_light(iterator.value())[3]
        return 0, NEVER

    def _first_live_light(self, prefix: bytes, low: int, newest: int) -> int:
        """The first queue offset at or above the log start; ``newest + 1`` when all have expired."""
        high = newest + 1
        while low < high:
            middle = (low + high) // 2
            value = _bytes(self._db.get(prefix + k.pack_offset(middle)))
            if value is None or k.unpack_light(value)[0] < self._log_start:
                low = middle + 1
            else:
                high = middle
        return low

    def _live(
        self, iterator: Any, topic_id: int, partition: int, offset: int, end: int, log_start: int = 0
    ) -> Entry | None:
        """The entry that covers ``offset`` or the next, at or above the log start; O(log n) seeks."""
        prefix = k.pack_partition_key(k.ENTRIES, topic_id, partition)
        entry = _entry_at(iterator, prefix, offset)
        kept = self._log_start
        floor = max(log_start, kept)
        if entry is None or entry.position >= floor:
            return entry
        live = _first_entry(iterator, prefix, entry.end_offset, end, lambda found: found.position >= floor)
        if floor == kept:
            self._found_expired((topic_id, partition), end if live is None else live.base_offset)
        return live

    def _found_expired(self, key: Partition, first: int) -> None:
        with self._expired_lock:
            if len(self._expired) < EXPIRED_MAX:
                self._expired[key] = first

    def _put_expired(self, batch: Any) -> None:
        if not self._expired:
            return
        with self._expired_lock:
            expired, self._expired = self._expired, {}
        for key, first in expired.items():
            prefix = k.pack_partition_key(k.ENTRIES, *key)
            batch.delete_range(prefix, prefix + k.pack_offset(first))

    def _sweep(self, limit: int) -> int:
        """One step of the walk over partitions, then light queues; a round ends swept up to its first log start."""
        if self._swept >= self._log_start:
            return 0
        if self._cursor == k.BOUNDS:
            self._round = self._log_start
        batch = WriteBatch(raw_mode=True)
        looked = 0
        iterator = self._db.iter()
        if self._cursor.startswith(k.BOUNDS):
            looked = self._sweep_partitions(batch, iterator, limit)
        if self._cursor.startswith(k.LIGHT) and looked < limit:
            looked += self._sweep_queues(batch, iterator, limit - looked)
        if len(batch):
            self._db.write(batch, self._unlogged)
        return looked

    def _sweep_partitions(self, batch: Any, iterator: Any, limit: int) -> int:
        rows = self._portion(self._cursor, k.BOUNDS, limit)
        for key, value in rows:
            prefix = k.ENTRIES + key[1:]
            end = k.unpack_bounds(value)[0]
            oldest = _entry_at(iterator, prefix, 0)
            if oldest is not None and oldest.position < self._log_start:
                live = _first_entry(
                    iterator, prefix, oldest.end_offset, end, lambda found: found.position >= self._log_start
                )
                batch.delete_range(prefix, prefix + k.pack_offset(end if live is None else live.base_offset))
        self._cursor = rows[-1][0] + b"\0" if len(rows) == limit else k.LIGHT
        return len(rows)

    def _sweep_queues(self, batch: Any, iterator: Any, limit: int) -> int:
        for looked in range(limit):
            iterator.seek(self._cursor)
            if not iterator.valid() or not iterator.key().startswith(k.LIGHT):
                self._cursor, self._swept = k.BOUNDS, self._round
                return looked
            key = iterator.key()
            prefix = key[:-8]
            if k.unpack_light(iterator.value())[0] < self._log_start:
                oldest = k.unpack_offset(key[-8:])[0]
                newest = self._queue_end(iterator, prefix)[0] - 1
                live = min(self._first_live_light(prefix, oldest, newest), newest)
                if live > oldest:
                    batch.delete_range(key, prefix + k.pack_offset(live))
            self._cursor = k.after(prefix)
        return limit

    def _portions(self, family: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
        start = family
        while rows := self._portion(start, family, PORTION):
            yield rows
            start = rows[-1][0] + b"\0"

    @guarded
    def _portion(self, start: bytes, family: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        iterator = self._db.iter()
        iterator.seek(start)
        while len(rows) < limit and iterator.valid():
            key = iterator.key()
            if not key.startswith(family):
                return rows
            rows.append((key, iterator.value()))
            iterator.next()
        iterator.status()
        return rows


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def _put_entries(batch: Any, entries: Sequence[NewEntry], ends: dict[Partition, End]) -> None:
    """Put what lies above the known ends, which move on in ``ends``."""
    put, pack_key, pack_entry, family = batch.put, k.pack_entry_key, k.pack_entry, k.ENTRIES
    for topic_id, partition, base, end, position, size, tag_hash, timestamp in entries:
        key = (topic_id, partition)
        known_end, running, _ = ends[key]
        if end <= known_end:
            continue
        base, running = max(base, known_end), max(running, timestamp)
        put(
            pack_key(family, topic_id, partition, end - 1),
            pack_entry(base, position, size, tag_hash, running),
        )
        ends[key] = (end, running, Entry(base, end, position, size, tag_hash, running))


def _entry_here(iterator: Any, prefix: bytes) -> Entry | None:
    if not iterator.valid():
        iterator.status()
        return None
    key = iterator.key()
    if not key.startswith(prefix):
        return None
    return k.entry_of(key, iterator.value())


def _entry_at(iterator: Any, prefix: bytes, offset: int) -> Entry | None:
    iterator.seek(prefix + k.pack_offset(offset))
    return _entry_here(iterator, prefix)


def _light_here(iterator: Any, prefix: bytes) -> LightEntry | None:
    if not iterator.valid():
        iterator.status()
        return None
    key = iterator.key()
    if not key.startswith(prefix):
        return None
    position, row, offset, _ = k.unpack_light(iterator.value())
    return LightEntry(k.unpack_offset(key[-8:])[0], position, row, offset)


def _first_entry(
    iterator: Any, prefix: bytes, low: int, end: int, is_wanted: Callable[[Entry], bool]
) -> Entry | None:
    """The first entry of ``[low, end)`` for which ``is_wanted``, which never turns false again along offsets."""
    found: Entry | None = None
    high = end
    while low < high:
        middle = (low + high) // 2
        entry = _entry_at(iterator, prefix, middle)
        if entry is None:
            high = middle
        elif is_wanted(entry):
            found, high = entry, min(middle, entry.base_offset)
        else:
            low = entry.end_offset
    return found
