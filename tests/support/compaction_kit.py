"""One partition by hand: batches in a commit log of bytes, key rows, and the model that compaction is held to."""

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from firn.batch import Codecs, Identity, columns_of, encode, iterate
from firn.survivors import survivors, tombstones_end
from firn.wire import items
from firn_node.compaction import CompactedLog, Job, Throttle, compact
from firn_node.compaction.answers import Answers, Wanted, joined
from firn_node.disk import Disk, RealDisk
from firn_node.engine.api import PartitionCompaction
from firn_node.filecache import FileCache
from firn_node.kernels.active import KeyRows
from firn_node.kernels.hashing import fingerprint, secret_of
from firn_node.kernels.sorting import sort_key_index

TOPIC_ID = 4096
SECRET = secret_of(bytes(range(16)))


class Row(NamedTuple):
    offset: int
    timestamp: int
    key: bytes
    value: bytes | None
    tag: str | None
    headers: dict[str, str]
    queues: tuple[str, ...]


class Entry(NamedTuple):
    base_offset: int
    end_offset: int
    position: int
    size: int
    tag_hash: int = 0
    max_timestamp: int = 0


@dataclass
class MemoryLog:
    """A commit log: whole batches, one after another."""

    data: bytearray = field(default_factory=bytearray)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def read(self, position: int, size: int) -> bytes:
        self.reads.append((position, size))
        return bytes(self.data[position : position + size])


class Now:
    """A log clock set by hand."""

    def __init__(self, ms: int = 1_000_000) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms


def words(lo: np.ndarray, rows: np.ndarray, tombstones: np.ndarray) -> np.ndarray:
    one, half = np.uint64(1), np.uint64(32)
    return (lo.astype(np.uint64) << half) | (rows.astype(np.uint64) << one) | tombstones.astype(np.uint64)


class Partition:
    def __init__(
        self, folder: str, *, number: int = 0, disk: Disk | None = None, log: MemoryLog | None = None,
        now: Now | None = None,
    ) -> None:  # fmt: skip
        self.disk: Disk = disk or RealDisk(folder)
        self.folder = os.path.join(folder, str(TOPIC_ID), str(number))
        self.number = number
        self.log = log if log is not None else MemoryLog()
        self.now = now or Now()
        self.rows: list[Row] = []
        self.entry_list: list[Entry] = []
        self.hi = np.zeros(0, np.uint64)
        self.lo = np.zeros(0, np.uint32)
        self.tombstone = np.zeros(0, np.bool_)
        self.sealed = 0  # offsets below are in sealed dirty segments or clean
        self.covers: list[tuple[int, int]] = []
        self.floor = 0  # the model's tombstones_end
        self.open()

    @property
    def end(self) -> int:
        return len(self.rows)

    def open(self) -> None:
        """Also a restart: nothing of the old object is used."""
        self.cache = FileCache(self.disk, 16)
        weakref.finalize(self, self.cache.close)
        self.compacted = CompactedLog.open(
            self.disk, self.cache, self.folder, topic_id=TOPIC_ID, partition=self.number, secret=SECRET,
            dirty_source=lambda a, b: (self.log.read(e.position, e.size) for e in self.entries(a, b)),
        )  # fmt: skip

    def append(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], *, codec: int = 0, epoch: int = 1,
        tags: Sequence[str | None] | None = None, headers: Sequence[dict[str, str] | None] | None = None,
        queues: Sequence[Sequence[str]] | None = None, fingerprints: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        n, base = len(keys), self.end
        stamps = [1_000 + (base + i) * 7 % 1000 for i in range(n)]
        columns = columns_of(
            keys, values, stamps, tags=tags, headers=headers, queues=queues, base_offset=base
        )
        identity = Identity(
            topic_id=TOPIC_ID, partition=self.number, epoch=epoch, producer_id=7, sequence=len(self.entry_list),
            append_timestamp=self.now.ms,
        )  # fmt: skip
        data = encode(columns, identity, Codecs(codec, codec, codec))
        self.entry_list.append(Entry(base, base + n, len(self.log.data), len(data)))
        self.log.data += data
        hi, lo = fingerprints or fingerprint(columns.keys, columns.key_lengths, TOPIC_ID, SECRET)
        self.hi, self.lo = np.concatenate([self.hi, hi]), np.concatenate([self.lo, lo])
        self.tombstone = np.concatenate([self.tombstone, columns.tombstones])
        for i in range(n):
            self.rows.append(
                Row(
                    base + i,
                    stamps[i],
                    keys[i],
                    values[i],
                    tags[i] if tags else None,
                    (headers[i] if headers else None) or {},
                    tuple(queues[i]) if queues else (),
                )
            )

    def sorted_rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(end - start)
        return sort_key_index(
            self.hi[start:end].copy(), words(self.lo[start:end], rows, self.tombstone[start:end])
        )

    def seal(self) -> None:
        self.sealed = max(self.sealed, self.compacted.manifest.horizon)
        if self.sealed == self.end:
            return
        hi, word = self.sorted_rows(self.sealed, self.end)
        size = sum(e.size for e in self.entries(self.sealed, self.end))
        self.compacted.seal(self.sealed, self.end, [(hi, word)], bytes=size, max_append_ms=self.now.ms)
        self.sealed = self.end

    def entries(self, start: int, end: int) -> Iterator[Entry]:
        return (e for e in self.entry_list if e.end_offset > start and e.base_offset < end)

    def job(
        self, *, upto: int | None = None, retention: int = 1_000, segment_bytes: int = 1 << 20,
        memory: int = 1 << 20, force: bool = False,
    ) -> Job:  # fmt: skip
        upto = self.end if upto is None else max(upto, self.compacted.manifest.horizon)
        start = max(self.sealed, self.compacted.manifest.horizon)
        active = [KeyRows(start, upto, *self.sorted_rows(start, upto))] if upto > start else []
        return Job(
            log=self.compacted, upto=upto, active=active, entries=self.entries, delete_retention_ms=retention,
            segment_bytes=segment_bytes, memory_bytes=memory, force=force, result=PartitionCompaction(self.number),
        )  # fmt: skip

    def compact(self, **terms: object) -> PartitionCompaction:
        """Compact, and let the model follow; the state must be ``done``."""
        ratio = float(terms.pop("min_dead_ratio", 0.25))  # type: ignore[arg-type]
        age = int(terms.pop("reclaim_age", 1 << 60))  # type: ignore[call-overload]
        job = self.job(**terms)  # type: ignore[arg-type]
        run([job], self.log, self.now, min_dead_ratio=ratio, reclaim_age=age)
        assert job.result.state == "done", job.result.reason
        self.follow(job)
        return job.result

    def follow(self, job: Job) -> None:
        """The model after a compaction that is done."""
        if job.upto > (self.covers[-1][0] if self.covers else 0):
            self.covers.append((job.upto, self.now.ms))
        self.floor = tombstones_end(
            self.covers, now_ms=self.now.ms, delete_retention_ms=job.delete_retention_ms, floor=self.floor
        )

    def expected(self, horizon: int | None = None) -> list[Row]:
        horizon = self.compacted.manifest.horizon if horizon is None else horizon
        live = survivors(
            ((r.offset, r.key, r.value is None) for r in self.rows[:horizon]), tombstones_end=self.floor
        )
        return [self.rows[o] for o in live]

    def served(self, *, max_bytes: int = 1 << 20, start: int = 0) -> list[Row]:
        """All rows of the compacted view, as a client sees them."""
        with self.compacted.pin() as pin:
            found: list[Row] = []
            offset, horizon = start, pin.manifest.horizon
            while offset < horizon:
                parts, next_offset = self.compacted.read(offset, max_bytes, pin=pin)
                found += rows_of(parts, start=offset)
                assert next_offset > offset
                offset = next_offset
            return found

    def check(self) -> None:
        """The view is what the model says; every key's look-up too; the folder holds nothing else."""
        expected = self.expected()
        assert self.served() == expected
        assert self.served(max_bytes=1) == expected
        newest = {r.key: r for r in expected}
        keys = sorted({r.key for r in self.rows})
        hi, lo = fingerprint_of(keys)
        answers = Answers(len(keys))
        self.compacted.newest_many(Wanted(*joined(keys), hi, lo), np.arange(len(keys)), answers)
        doubtful = set(answers.doubtful())
        for pick, key in enumerate(keys):
            found, row = self.compacted.newest(key, int(hi[pick]), int(lo[pick])), newest.get(key)
            assert (found is None) == (row is None)
            if pick not in doubtful:
                served = None if found is None or found.value is None else found
                assert answers.row(pick) == served
            if found is not None and row is not None:
                assert (found.offset, found.timestamp, found.value, found.tag, found.headers) == (
                    row.offset, row.timestamp, row.value, row.tag, row.headers,
                )  # fmt: skip
        m = self.compacted.manifest
        assert set(self.disk.list(self.folder)) - {"MANIFEST"} == m.files()
        assert m.rows - m.masked == len(expected)


def fingerprint_of(keys: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(k) for k in keys], np.int32)
    return fingerprint(np.frombuffer(b"".join(keys), np.uint8), lengths, TOPIC_ID, SECRET)


def rows_of(parts: Sequence[object], *, start: int = 0) -> list[Row]:
    """The unmasked rows of a response from offset ``start`` on; leases are given back."""
    data = b""
    for part in parts:
        if isinstance(part, bytes):
            data += part
        else:
            data += part.read()  # type: ignore[attr-defined]
            part.lease.release()  # type: ignore[attr-defined]
    found = []
    for item in items(data):
        item.batch.verify()
        columns = item.batch.columns
        rows = zip(
            columns.offsets.tolist(), columns.timestamps.tolist(), item.batch.key_list(), item.batch.value_list(),
            item.batch.tag_list(), item.batch.header_list(), item.batch.queue_list(), strict=True,
        )  # fmt: skip
        for i, row in enumerate(rows):
            if row[0] >= start and not (item.masked is not None and item.masked[i]):
                found.append(Row(*row))
    return found


def run(
    jobs: Sequence[Job], log: MemoryLog, now: Now, *, min_dead_ratio: float = 0.25, reclaim_age: int = 1 << 60,
    throttle: Throttle | None = None, is_cancelled=lambda: False,
) -> None:  # fmt: skip
    compact(
        jobs, commit_log=log, clock=now, min_dead_ratio=min_dead_ratio, reclaim_age_ms=reclaim_age,
        throttle=throttle or Throttle(0), is_cancelled=is_cancelled,
    )  # type: ignore[arg-type]  # fmt: skip


def file_batches(partition: Partition) -> list[object]:
    """All batches of all clean segments."""
    found = []
    for s in partition.compacted.manifest.segments:
        file = partition.disk.open(os.path.join(partition.folder, s.name))
        found += list(iterate(file.pread(s.bytes, 0)))
        file.close()
    return found
