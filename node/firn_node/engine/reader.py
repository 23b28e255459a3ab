"""Bulk reads: whole batches from one side of the horizon, as byte ranges wherever nothing has to be left out.

Raw reads name runs of the commit log by the partition index; the compacted view is the compacted log below the
horizon and the raw view from it on. No Python per record.
"""

import asyncio
from dataclasses import dataclass

from firn.batch import HEADER_BYTES, iterate, parse_header
from firn.crc import crc32c
from firn.errors import BadOffset, Invalid, OffsetExpired, SnapshotExpired, Unavailable, UnknownTopic
from firn.wire import place_block
from firn_node.compaction.log import Pin
from firn_node.compaction.manifest import Manifest
from firn_node.engine.api import ReadRequest, ReadResult
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.dispatcher import RUN_BYTES_MAX
from firn_node.engine.lookup import Lookup
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.engine.snapshots import Pinned, Snapshots
from firn_node.filecache import FileRange
from firn_node.index import Entry
from firn_node.log.walk import headers

_SCAN_ENTRIES = 512
_LOOK_ENTRIES = 16_384
_LIGHT_ROWS = 1024
_LARGE_BYTES = 32 << 10  # of a batch whose keys are worth a call of their own


@dataclass(slots=True)
class Reader:
    core: Core
    partitions: Partitions
    commits: Commits
    lookup: Lookup
    snapshots: Snapshots
    is_closing: bool = False  # reads that wait end

    async def read(self, request: ReadRequest) -> ReadResult:
        """What the request asks for; at the end it waits up to ``wait_ms`` for more.

        Errors: UnknownTopic, UnknownPartition, BadOffset, OffsetExpired (raw), SnapshotExpired (compacted),
        PartitionParked, Corrupt.
        """
        self.core.health.check_serving()
        topic = self.core.catalogue.named(request.topic)
        partition = self.partitions.get(topic, request.partition)
        if request.snapshot is not None:
            self.commits.check_read()  # it is of the broker that made it
            return self._read_snapshot(request, partition)
        with partition.in_use():
            return await self._read(request, partition)

    async def _read(self, request: ReadRequest, partition: Partition) -> ReadResult:
        await self.settle(partition)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ms / 1000
        while True:
            if request.floor is None:
                self.commits.check_read()
            else:
                await self.commits.admit_read(request.floor)
            if self.is_closing:
                raise Unavailable("this broker is stopping; try again")
            if partition.deleted:
                raise UnknownTopic(f"topic {request.topic!r} was deleted", topic=request.topic)
            result = (
                self._light(request, partition)
                if request.queue is not None
                else self._now(request, partition)
            )
            left = deadline - loop.time()
            if result.parts or left <= 0 or result.next_offset > request.offset:
                return result
            await self._more(partition, left)

    async def settle(self, partition: Partition) -> None:
        """Wait until what was acknowledged in this partition before now is committed and dispatched."""
        if partition.pending:
            last = partition.pending[-1]
            await self.commits.wait(last.position + last.size)
            self.commits.check_read()

    async def _more(self, partition: Partition, seconds: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        partition.waiters.append(waiter)
        try:
            if partition.pending:  # written under `flush: interval`: a reader at the end hurries the sync
                last = partition.pending[-1]
                await asyncio.wait_for(self.commits.wait(last.position + last.size), seconds)
            else:
                await asyncio.wait_for(waiter, seconds)
        except TimeoutError:
            pass
        finally:
            if waiter in partition.waiters:
                partition.waiters.remove(waiter)

    def earliest(self, partition: Partition) -> int:
        """The first offset of the raw view."""
        bounds = self.core.index.bounds(*partition.key, self.core.log.start)
        return bounds[0] if bounds else partition.dispatched_end

    def _now(self, request: ReadRequest, partition: Partition) -> ReadResult:
        end = partition.dispatched_end
        if not 0 <= request.offset <= end:
            raise BadOffset(
                f"{request.topic}/{request.partition}: offset {request.offset} is outside 0 to {end} (the end)",
                end=end,
            )
        # A compaction swaps manifests in another thread: horizon and floor of the answer are those of the one
        # generation that its bytes come from. A newer horizon would claim that the reader has met its tombstones.
        manifest = partition.log.manifest
        if request.view == "compacted":
            if request.offset < manifest.horizon:
                with partition.log.pin() as pin:
                    return self._clean(request, partition, pin, end)
            _check_tombstones(request, manifest)
        else:
            self._check_retained(request, partition)
        try:
            parts, next_offset = self._raw(request, partition, request.offset, end)
        except OffsetExpired:
            self._check_retained(request, partition)  # the log was cut meanwhile: say where it begins now
            raise
        return _result(partition, manifest, parts, next_offset, end)

    def _clean(self, request: ReadRequest, partition: Partition, pin: Pin, end: int) -> ReadResult:
        """Below the horizon, from one generation."""
        _check_tombstones(request, pin.manifest)
        parts, next_offset = partition.log.read(
            request.offset, request.max_bytes, pin=pin, keys_only=request.keys_only
        )
        return _result(partition, pin.manifest, parts, next_offset, end)

    def _check_retained(self, request: ReadRequest, partition: Partition) -> None:
        earliest = self.earliest(partition)
        if request.offset < earliest:
            raise OffsetExpired(
                f"{request.topic}/{request.partition}: offset {request.offset} has expired; the earliest is {earliest}",
                earliest=earliest,
            )

    def _read_snapshot(self, request: ReadRequest, partition: Partition) -> ReadResult:
        pinned = self.snapshots.pinned(request.snapshot or "", partition)
        if not 0 <= request.offset <= pinned.end:
            raise BadOffset(
                f"offset {request.offset} is outside the snapshot's 0 to {pinned.end}", end=pinned.end
            )
        if request.offset < pinned.horizon:
            parts, next_offset = partition.log.read(
                request.offset, request.max_bytes, pin=pinned.pin, keys_only=request.keys_only
            )
        else:
            parts, next_offset = self._raw(request, partition, request.offset, pinned.end)
        return self._pinned_result(partition, pinned, parts, next_offset)

    def _raw(
        self, request: ReadRequest, partition: Partition, offset: int, end: int
    ) -> tuple[list[bytes | FileRange], int]:
        """Parts of the commit log from ``offset`` on, and the next offset."""
        tag_hash = crc32c(request.tag.encode()) if request.tag is not None else 0
        runs: list[tuple[int, int]] = []
        total, at, full, looked = 0, offset, False, 0
        # A tag may be rare: after a bounded number of entries the next request goes on.
        wanted = _SCAN_ENTRIES if tag_hash else min(_SCAN_ENTRIES, 2 + request.max_bytes // RUN_BYTES_MAX)
        while at < end and not full and looked < _LOOK_ENTRIES:
            entries = self.core.index.scan(*partition.key, at, end=end, limit=wanted)
            wanted = _SCAN_ENTRIES  # they are smaller than a full run
            if not entries:
                at = end
            looked += len(entries)
            for entry in entries:
                full = total > 0 and total + entry.size > request.max_bytes
                if full:
                    break
                at = min(entry.end_offset, end)
                if tag_hash and entry.tag_hash not in (0, tag_hash):
                    continue
                _add_run(runs, entry)
                total += entry.size
        if request.keys_only:
            return self._keys_parts(runs), at
        parts: list[bytes | FileRange] = []
        try:
            for position, size in runs:
                if request.positions:
                    parts.append(place_block(self.core.group, position))
                parts += self.core.log.ranges(position, size)  # a run may cross into the next segment
        except BaseException:
            for part in parts:
                if not isinstance(part, bytes):
                    part.lease.release()
            raise
        return parts, at

    def _keys_parts(self, runs: list[tuple[int, int]]) -> list[bytes | FileRange]:
        """Each batch's header and keys part; of a large batch as a range: its values are not even read."""
        log, parts = self.core.log, list[bytes | FileRange]()
        try:
            for position, size in runs:
                at, end = position, position + size
                while at < end:
                    header = parse_header(log.read(at, HEADER_BYTES))
                    if header.size >= _LARGE_BYTES:
                        parts += log.ranges(at, HEADER_BYTES + header.keys_bytes)
                        at += header.size
                        continue
                    data = memoryview(log.read(at, min(end - at, RUN_BYTES_MAX)))
                    whole = headers(data).end
                    parts += [
                        bytes(batch.data[: HEADER_BYTES + batch.header.keys_bytes])
                        for batch in iterate(data[: whole or len(data)])
                    ]
                    at += whole
        except BaseException:
            for part in parts:
                if not isinstance(part, bytes):
                    part.lease.release()
            raise
        return parts

    def _light(self, request: ReadRequest, partition: Partition) -> ReadResult:
        """Rows of a light queue: whole batches, and which of their rows are the queue's."""
        name = request.queue or ""
        bounds = self.core.index.light_bounds(*partition.key, name)
        first, end = bounds or (0, 0)
        if request.view == "compacted":
            raise Invalid(f"light queue {name!r} has no compacted view; read it with view=raw")
        if request.offset < first:
            raise OffsetExpired(
                f"queue {name!r}: offset {request.offset} has expired; the earliest is {first}",
                earliest=first,
            )
        if request.offset > end:
            raise BadOffset(f"queue {name!r}: offset {request.offset} is past the end {end}", end=end)
        entries = self.core.index.light_scan(*partition.key, name, request.offset, limit=_LIGHT_ROWS)
        parts: list[bytes | FileRange] = []
        rows: list[list[tuple[int, int]]] = []
        total, next_offset, position = 0, request.offset, -1
        for entry in entries:
            if entry.position != position:
                if total >= request.max_bytes:
                    break
                position = entry.position
                data = bytes(self.lookup.batches.at(position).data)
                parts.append(data)
                rows.append([])
                total += len(data)
            rows[-1].append((entry.queue_offset, entry.row))
            next_offset = entry.queue_offset + 1
        result = _result(partition, partition.log.manifest, parts, next_offset, end)
        result.queue_rows = rows
        return result

    def _pinned_result(
        self, partition: Partition, pinned: Pinned, parts: list[bytes | FileRange], next_offset: int
    ) -> ReadResult:
        return ReadResult(
            partition.topic.topic_id, parts, next_offset, pinned.end, pinned.horizon, pinned.tombstone_floor,
            pinned.generation,
        )  # fmt: skip

    def offset_of_time(self, partition: Partition, timestamp: int) -> int:
        """The first raw offset whose entry's running maximum of timestamps reaches ``timestamp``; else the end."""
        entry = self.core.index.find_time(*partition.key, timestamp)
        if entry is None:
            return partition.dispatched_end
        for batch in self.lookup.batches.run(entry.position, entry.size):
            stamps = batch.columns.timestamps
            later = (stamps >= timestamp).nonzero()[0]
            if len(later):
                return int(batch.columns.offsets[int(later[0])])
        return entry.base_offset


def _check_tombstones(request: ReadRequest, manifest: Manifest) -> None:
    """Errors: SnapshotExpired for a reader that may hold a value whose tombstone is gone."""
    floor = manifest.tombstone_floor
    if request.since is not None and floor > max(request.offset, request.since):
        raise SnapshotExpired(
            f"{request.topic}/{request.partition}: a reader at offset {request.offset} that began at horizon "
            f"{request.since} may have missed tombstones below {floor}; start anew",
            tombstone_floor=floor,
        )


def _result(
    partition: Partition, manifest: Manifest, parts: list[bytes | FileRange], next_offset: int, end: int
) -> ReadResult:
    return ReadResult(
        partition.topic.topic_id, parts, next_offset, end, manifest.horizon, manifest.tombstone_floor,
        manifest.generation,
    )  # fmt: skip


def _add_run(runs: list[tuple[int, int]], entry: Entry) -> None:
    if runs and runs[-1][0] + runs[-1][1] == entry.position:
        runs[-1] = (runs[-1][0], runs[-1][1] + entry.size)
    else:
        runs.append((entry.position, entry.size))
