"""Finding the raw records of a key: fingerprints narrow the search, the real bytes decide.

A sealed segment has a keys file (``keysfile``), built in the background once its bytes are durable and dispatched, of
what was gathered until then (``keysgather``) or else of the segment itself. A segment without a usable one, and
the active one, are searched by the keys parts of their batches: slower, same answer.

Invariants: nothing is returned before its topic id and key bytes were compared; a keys file that is missing,
damaged, of another extent or under another secret is never an error, it is built anew.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from firn.batch import HEADER_BYTES, Batch, Columns, corrupt, parse_header
from firn.errors import Corrupt, MalformedBatch, OffsetExpired
from firn_node import failpoints
from firn_node.disk import Disk, File
from firn_node.filecache import FileCache
from firn_node.kernels import Fault, Group, fault_error, fingerprint, inspect_group
from firn_node.log.commitlog import CommitLog
from firn_node.log.headpage import HEAD_BYTES
from firn_node.log.keysbuild import Pairs, ascending, pages_of
from firn_node.log.keysfile import PAGE_BYTES, KeysHeader, positions_of, read_header
from firn_node.log.keysgather import Gathered, GatheredRecord, Times
from firn_node.log.segment import keys_path, segment_path

WINDOW = 1 << 20
_NO_KEY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class _Wanted:
    topic_id: int
    key: bytes
    since_ms: int
    until_ms: int

    def rows(self, batch: Batch) -> list[int]:
        """The rows of a batch of this topic that have the key and a time in range."""
        rows = rows_of(batch.columns, self.key)
        stamps = batch.columns.timestamps[rows]
        return [int(r) for r in rows[(stamps >= self.since_ms) & (stamps < self.until_ms)]]

    def may_have(self, batch: Batch) -> bool:
        h = batch.header
        return (
            h.topic_id == self.topic_id
            and h.max_timestamp >= self.since_ms
            and h.min_timestamp < self.until_ms
        )


class KeyQueryIndex:
    def __init__(
        self, log: CommitLog, disk: Disk, cache: FileCache, folder: str, secret: NDArray[np.uint64]
    ) -> None:
        self._log = log
        self._disk = disk
        self._cache = cache
        self._folder = folder
        self._secret = secret
        # Headers of usable files, and the log's truncations before they were read: a segment that was cut may grow
        # to the same end again.
        self._known: dict[int, tuple[int, KeysHeader]] = {}
        self._lock = threading.Lock()  # one build at a time
        self._gathered = Gathered()

    @cached_property
    def _probe(self) -> int:
        """What a keys file of this folder's secret holds; made at the first look, as a start needs no kernel."""
        return int(fingerprint(_NO_KEY, np.zeros(1, np.int32), 0, self._secret)[0][0])

    def gather(self, group: Group, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Remember the keys of batches ``rows``, in log order and durable: their keys file is made of them."""
        self._gathered.add(group, rows, positions, starts=self._log.starts, truncations=self._log.truncations)

    def gather_records(self, records: "Sequence[GatheredRecord]") -> None:
        """As ``gather``, of batches of one record each."""
        self._gathered.add_records(records, starts=self._log.starts, truncations=self._log.truncations)

    def missing(self, before: int | None = None) -> list[int]:
        """Starts of the sealed, durable segments (that end at ``before``, or below) without a usable keys file.

        *Shape*: oldest first.
        """
        truncations, durable = self._log.truncations, self._log.durable_end
        limit = durable if before is None else min(before, durable)
        sealed = [(start, end) for start, end in self._log.extents()[:-1] if end <= limit]
        for start in [s for s in list(self._known) if s < self._log.start]:
            self._known.pop(start, None)
        return [start for start, end in sealed if self._usable(start, end, truncations) is None]

    def build_missing(self, limit: int | None = None, before: int | None = None) -> int:
        """Build the keys files of up to ``limit`` segments; how many were built.

        ``before``: what is dispatched. What lies beyond is not gathered yet, and might be cut.
        """
        starts = self.missing(before)[:limit]
        for start in starts:
            self.build(start)
        return len(starts)

    def build(self, segment_start: int) -> None:
        """Build the keys file of a sealed segment. *Effects*: durable on return; may be repeated.

        1. take what was gathered of the segment, else read and hash it, 2. write a temporary file, its header
        last, 3. sync it, 4. drop what is known of the old file, 5. rename, 6. sync the folder. *Errors*:
        Corrupt, naming the segment and the position, when a batch that is read is damaged.
        """
        with self._lock:
            truncations = self._log.truncations
            end = dict(self._log.extents()[:-1]).get(segment_start)
            if end is None or end > self._log.durable_end:
                return  # released, or not sealed and durable yet: nothing derived is ahead of the log
            try:
                self._write(segment_start, end)
            except (FileNotFoundError, OffsetExpired):
                return
            failpoints.step("log.keys.built")
            if self._log.truncations != truncations or segment_start < self._log.start:
                self._forget(segment_start)  # the segment went, or changed, meanwhile

    def find(
        self, topic_id: int, key: bytes, since_ms: int, until_ms: int
    ) -> Iterator[tuple[int, bytes, list[int]]]:
        """(position, batch, rows) of the records of a key with a timestamp in ``[since_ms, until_ms)``.

        *Shape*: oldest first; every batch has at least one row. Up to the written end: the caller stops at the
        committed position. Segments that expire meanwhile are passed over. *Errors*: Corrupt, naming the
        segment.
        """
        wanted = _Wanted(topic_id, key, since_ms, until_ms)
        length = np.array([len(key)], np.int32)
        hi = int(fingerprint(np.frombuffer(key, np.uint8), length, topic_id, self._secret)[0][0])
        truncations, extents = self._log.truncations, self._log.extents()
        for start, end in extents:
            try:
                header = None if start == extents[-1][0] else self._usable(start, end, truncations)
                positions = self._candidates(start, end, hi, wanted, header)
                for position in positions:
                    found = self._matches(position, wanted)
                    if found is not None:
                        yield found
            except (OffsetExpired, FileNotFoundError):
                if start >= self._log.start:
                    raise

    def _candidates(
        self, start: int, end: int, hi: int, wanted: _Wanted, header: KeysHeader | None
    ) -> Iterator[int]:
        """Positions of batches that may hold the key, ascending; ``header``: of the keys file, if there is one."""
        if header is not None:
            if header.max_timestamp < wanted.since_ms or header.min_timestamp >= wanted.until_ms:
                return
            try:
                with self._cache.reading(keys_path(self._folder, start)) as file:
                    positions = positions_of(file, header, hi)
            except (Corrupt, FileNotFoundError):
                self._forget(start)
            else:
                yield from (p for p in positions if start <= p < end)
                return
        with self._cache.reading(segment_path(self._folder, start)) as file:
            for position, batch in keys_parts(file, start, end, topic_id=wanted.topic_id):
                if wanted.may_have(batch) and wanted.rows(batch):
                    yield position

    def _matches(self, position: int, wanted: _Wanted) -> tuple[int, bytes, list[int]] | None:
        """The batch at a position, if it has rows that are wanted."""
        head = self._log.read(position, HEADER_BYTES)
        path = segment_path(self._folder, self._segment_of(position))
        try:
            header = parse_header(head)
            if header.topic_id != wanted.topic_id:
                return None
            batch = Batch(self._log.read(position, header.size), header)
            batch.verify()
            rows = wanted.rows(batch) if wanted.may_have(batch) else []
        except MalformedBatch as error:
            raise corrupt(error, file=path, position=position) from error
        return (position, bytes(batch.data), rows) if rows else None

    def _segment_of(self, position: int) -> int:
        return max((start for start, _ in self._log.extents() if start <= position), default=0)

    def _usable(self, start: int, end: int, truncations: int) -> KeysHeader | None:
        """The header of a segment's keys file, None when there is no file that can be trusted.

        ``truncations``: of the log, before it told this extent.
        """
        known = self._known.get(start)
        if known is not None and known[0] == truncations and known[1].end == end:
            return known[1]
        try:
            with self._cache.reading(keys_path(self._folder, start)) as file:
                header = read_header(file)
        except (Corrupt, FileNotFoundError):
            return None
        if (header.start, header.end, header.probe) != (start, end, self._probe):
            return None
        self._known[start] = truncations, header
        return header

    def _forget(self, start: int) -> None:
        """Drop a keys file, so that it is built anew."""
        self._known.pop(start, None)
        self._cache.retire(keys_path(self._folder, start))

    def _write(self, start: int, end: int) -> None:
        path = keys_path(self._folder, start)
        temporary = f"{path}.tmp"
        pairs = Pairs(self._disk, f"{path}.scratch.tmp")
        file = None
        try:
            gathered = self._gathered.take(start, end, truncations=self._log.truncations)
            if gathered is None:
                times, buckets = self._collect(start, end, pairs), pairs.ascending()
            else:
                times, buckets = gathered.times, ascending(gathered)
            failpoints.step("log.keys.collected")
            self._disk.unlink(temporary)
            file = self._disk.open(temporary, "create")
            count, at = 0, PAGE_BYTES
            for more, pages in pages_of(buckets):
                at += file.pwrite([pages.reshape(-1).data], at)
                count += more
            header = KeysHeader(
                start=start, end=end, pairs=count, probe=self._probe, min_timestamp=times.min_timestamp,
                max_timestamp=times.max_timestamp, min_append=times.min_append, max_append=times.max_append,
            )  # fmt: skip
            file.pwrite([header.encode()], 0)
            file.sync()
        finally:
            pairs.close()
            if file is not None:
                file.close()
        failpoints.step("log.keys.written")
        self._forget(start)
        self._disk.rename(temporary, path)
        self._disk.sync_folder(self._folder)

    def _collect(self, start: int, end: int, pairs: Pairs) -> Times:
        """Add the pairs of a segment that is read; the times of its batches."""
        times = Times()
        for position, data in self._log.scan(start, end):
            group = inspect_group(data, self._secret, is_produce=False)
            for i in np.flatnonzero(group.fault != Fault.OK).tolist():
                path = segment_path(self._folder, start)
                raise Corrupt(
                    f"{path} at byte {position + int(group.start[i])}: {fault_error(group, i).message}",
                    file=path, position=position + int(group.start[i]),
                )  # fmt: skip
            pairs.add(group.hi, np.repeat((position + group.start).astype(np.uint64), group.records))
            times.add(group, slice(None))
        return times


def rows_of(columns: Columns, key: bytes) -> NDArray[np.int64]:
    """The rows that have exactly this key, ascending; by whole arrays, a slice of the key at a time."""
    rows = np.flatnonzero(columns.key_lengths == len(key))
    starts = columns.key_starts()
    wanted = np.frombuffer(key, np.uint8)
    for first in range(0, len(key), 32):
        part = wanted[first : first + 32]
        places = starts[rows][:, None] + np.arange(first, first + len(part))
        rows = rows[(columns.keys[places] == part).all(axis=1)]
        if not len(rows):
            break
    return rows


def keys_parts(
    file: File, start: int, end: int, *, topic_id: int | None = None, window: int = WINDOW
) -> Iterator[tuple[int, Batch]]:
    """(position, keys projection) of every batch of a segment; values larger than the window are not read.

    With ``topic_id``: of that topic's batches. The payloads of others are not looked at, so that damage in them
    stops nobody else's query. *Errors*: Corrupt, naming file and position.
    """
    at, base, data = start, start, b""
    while at < end:
        try:
            if at - base + HEADER_BYTES > len(data):
                base, data = at, file.pread(min(window, end - at), HEAD_BYTES + at - start)
            header = parse_header(data, at - base)
            if topic_id is not None and header.topic_id != topic_id:
                at += header.size
                continue
            need = HEADER_BYTES + header.keys_bytes
            if at - base + need > len(data):
                base, data = at, file.pread(min(max(window, need), end - at), HEAD_BYTES + at - start)
            batch = Batch(memoryview(data)[at - base : at - base + need], header)
            batch.verify()
        except MalformedBatch as error:
            raise corrupt(error, file=file.path, position=at) from error
        yield at, batch
        at += header.size
