"""One partition's compaction, step by step: ``prepare``, ``write_clean``, ``take`` for each dirty batch, ``finish``.

The steps and what is durable after each:

1. prepare: pin the generation, decide, compare with what Spark has said where it was asked (memory only);
2. write_clean: clean segments that are written anew, up to the group that the dirty part belongs to;
3. take: dirty survivors;
4. finish: key indexes and footers, each new file synced; masks, each synced;
5. swap: folder synced, manifest replaced (one rename), folder synced; old files retired.

A crash before the rename leaves files that nothing names: deleted at the next open. What goes wrong before it
removes the new files and leaves the old state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, corrupt, parse_header
from firn.errors import Corrupt, Invalid, MalformedBatch
from firn.survivors import tombstones_end
from firn_node import failpoints
from firn_node.compaction import mask as masks
from firn_node.compaction.agreement import Agreement
from firn_node.compaction.decide import Decision, Source, decide, settle_held
from firn_node.compaction.keyindex import ArrayKeyIndex, KeyIndex
from firn_node.compaction.log import CompactedLog, Pin
from firn_node.compaction.manifest import CleanSegment, Manifest
from firn_node.compaction.mask import Bits, bits_bytes, rows_of
from firn_node.compaction.plan import Thresholds, Unit, plan_groups, plan_rewrites
from firn_node.compaction.rebuild import Piece
from firn_node.compaction.segment import SPILL_BYTES, SegmentWriter
from firn_node.compaction.throttle import Throttle
from firn_node.compaction.write import COPY_BYTES, Output, ranks_of, write_keys
from firn_node.engine.api import PartitionCompaction
from firn_node.kernels.active import KeyRows
from firn_node.kernels.compact import count_bits, readonly
from firn_node.kernels.smallrun import AT, STATE_COLUMNS, take_small

CHUNK_ROWS = 1 << 19


class Entry(Protocol):
    """What compaction needs of an index entry: a run of neighbouring batches of one partition."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(slots=True)
class Job:
    """One partition of a compaction; ``result`` is updated while it runs."""

    log: CompactedLog
    upto: int  # dirty offsets [horizon, upto) are covered
    active: Sequence[KeyRows]  # of the unsealed rows below upto, without a gap
    entries: Callable[[int, int], Iterator[Entry]]  # (start, end) offsets -> index entries
    delete_retention_ms: int
    segment_bytes: int
    memory_bytes: int  # bounds the decision: pool, masks and a block, see ``decide``
    force: bool
    result: PartitionCompaction
    agreement: Agreement | None = None  # what the decision must agree with before anything is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for all jobs of a run."""

    now_ms: int
    min_dead_ratio: float
    reclaim_age_ms: int
    throttle: Throttle
    is_cancelled: Callable[[], bool]
    spill_bytes: int = SPILL_BYTES  # what an output may hold back before it goes to its file


class Cancelled(Exception):
    """The run was cancelled; the job's files go, its old state stays."""


@dataclass(slots=True)
class _Group:
    """Neighbouring units that become one output."""

    units: list[int]
    output: Output


@dataclass(slots=True)
class Work:
    job: Job
    terms: Terms
    pin: Pin
    horizon: int
    now_ms: int
    names: list[str] = field(default_factory=list)  # files made so far
    sources: list[Source] = field(default_factory=list)  # clean ones, then dirty ones
    dirty_base: int = 0  # bit of the horizon's row
    cover_times: list[tuple[int, int]] = field(default_factory=list)
    decision: Decision = field(default_factory=lambda: Decision(np.zeros(0, np.uint8), np.zeros(0, np.uint8)))
    kept: Bits = field(default_factory=lambda: np.zeros(0, np.uint8))
    units: list[Unit] = field(default_factory=list)
    is_rewritten: list[bool] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)

    # 1. Decide.

    @classmethod
    def prepare(cls, job: Job, terms: Terms) -> "Work":
        """*Errors*: Invalid, DamagedIndex (repair, then prepare again), Corrupt, Disagreement, Cancelled."""
        pin = job.log.pin()
        try:
            m = pin.manifest
            now = max(terms.now_ms, m.cover_times[-1][1] if m.cover_times else 0)
            work = cls(job, terms, pin, m.horizon, now)
            work._decide()
            work._agree()
            work._plan()
        except BaseException:
            pin.release()
            raise
        return work

    @property
    def manifest(self) -> Manifest:
        return self.pin.manifest

    @property
    def dirty_rows(self) -> int:
        return self.job.upto - self.horizon

    def check(self) -> None:
        if self.terms.is_cancelled():
            raise Cancelled

    def _decide(self) -> None:
        m, job = self.manifest, self.job
        if job.upto < m.horizon:
            raise Invalid(f"compaction up to {job.upto}: the horizon is at {m.horizon} and never goes back")
        self.cover_times = list(m.cover_times)
        if self.dirty_rows:
            self.cover_times.append((job.upto, self.now_ms))
        cut = tombstones_end(
            self.cover_times,
            now_ms=self.now_ms,
            delete_retention_ms=job.delete_retention_ms,
            floor=m.tombstone_floor,
        )
        masked = self._clean_sources(cut)
        self._dirty_sources(cut)
        bits = self.dirty_base + self.dirty_rows
        self.decision = decide(
            self.sources, bits, job.memory_bytes, masked=masked, check=self.check,
            tells_over=job.agreement is not None,
        )  # fmt: skip
        job.result.rounds = self.decision.rounds
        job.result.tombstones_dropped = self.decision.tombstones_over

    def _clean_sources(self, cut: int) -> list[tuple[int, Bits]]:
        """Adds the clean segments; their masks come back, each with its first bit."""
        masked = []
        for segment in self.pin.view.segments:
            reader, rows = segment.reader, segment.info.rows
            covers = [reader.row_of(h) for h, _ in self.cover_times]
            source = Source(
                index=reader.keys, base=self.dirty_base, row_start=0, row_end=rows, cut_row=reader.row_of(cut),
                cover_rows=covers,
            )  # fmt: skip
            self.sources.append(source)
            if (bits := segment.mask) is not None:
                masked.append((self.dirty_base, bits))
            self.dirty_base += 8 * bits_bytes(rows)
        return masked

    def _dirty_sources(self, cut: int) -> None:
        """Adds sealed dirty segments and the active rows. *Errors*: Invalid when an offset has no key row."""
        job, at = self.job, self.horizon
        indexes: list[tuple[int, int, Callable[[], KeyIndex]]] = [
            (d.start, d.end, partial(job.log.dirty_index, d))
            for d in self.manifest.dirty
            if d.start < job.upto
        ]
        indexes += [(rows.base, rows.end, partial(ArrayKeyIndex, rows.hi, rows.word)) for rows in job.active]
        for start, end, open_index in indexes:
            if end <= at:
                continue
            if start > at:
                break
            upto = min(end, job.upto)
            covers = [h - start for h, _ in self.cover_times]
            source = Source(
                index=open_index(), base=self.dirty_base + start - self.horizon, row_start=at - start,
                row_end=upto - start, cut_row=cut - start, cover_rows=covers,
            )  # fmt: skip
            self.sources.append(source)
            at = upto
        if at < job.upto:
            raise Invalid(f"compaction up to {job.upto}: the key rows of offset {at} are missing")

    def _agree(self) -> None:
        if self.job.agreement is not None:
            self.job.agreement.check(
                self.pin.view.segments, self.sources, self.decision, horizon=self.horizon,
                dirty_base=self.dirty_base, check=self.check,
            )  # fmt: skip

    def _plan(self) -> None:
        """Which segments are written anew, and which of their rows."""
        job, decision, m = self.job, self.decision, self.manifest
        dirty_bytes = sum(e.size for e in job.entries(self.horizon, job.upto)) if self.dirty_rows else 0
        for info, source in zip(m.segments, self.sources, strict=False):
            self.units.append(self._unit(source.base, info.rows, info.bytes, info.masked_since_ms))
        if self.dirty_rows:
            self.units.append(self._unit(self.dirty_base, self.dirty_rows, dirty_bytes, None, is_dirty=True))
        thresholds = Thresholds(
            min_dead_ratio=self.terms.min_dead_ratio, reclaim_age_ms=self.terms.reclaim_age_ms,
            segment_bytes=job.segment_bytes, force=job.force, now_ms=self.now_ms,
        )  # fmt: skip
        self.is_rewritten = plan_rewrites(self.units, thresholds)
        clean = len(m.segments)
        is_rewritten = self.is_rewritten[:clean] + [True] * (len(self.sources) - clean)
        settle_held(self.sources, is_rewritten, decision)
        self._keep()
        for units in plan_groups(self.is_rewritten):
            output = Output(
                self._new_writer, segment_bytes=job.segment_bytes, topic_id=m.topic_id, partition=m.partition
            )
            self.groups.append(_Group(units, output))
        result = job.result
        result.records_before = m.rows - m.masked + self.dirty_rows
        result.bytes_before = m.clean_bytes + dirty_bytes
        result.rows_total = sum(
            u.rows for u, rewritten in zip(self.units, self.is_rewritten, strict=True) if rewritten
        )

    def _unit(self, base: int, rows: int, size: int, since: int | None, *, is_dirty: bool = False) -> Unit:
        dead, held = readonly(self.decision.dead), readonly(self.decision.held)
        return Unit(
            rows=rows, masked=int(count_bits(dead, base, base + rows)), held=int(count_bits(held, base, base + rows)),
            bytes=size, masked_since_ms=since, is_dirty=is_dirty,
        )  # fmt: skip

    def _keep(self) -> None:
        """``kept``: rows of segments written anew that are not dead, and masked tombstones that must stay."""
        decision = self.decision
        self.kept = np.zeros_like(decision.dead)
        for unit, rewritten in zip(range(len(self.units)), self.is_rewritten, strict=True):
            if not rewritten:
                continue
            start, end = self._bits_of(unit)
            a, b = start >> 3, (start >> 3) + bits_bytes(end - start)
            self.kept[a:b] = ~decision.dead[a:b] | decision.held[a:b]
            whole = a + (end - start >> 3)
            self.kept[whole + 1 : b] = 0
            if whole < b:
                self.kept[whole] &= (1 << (end - start & 7)) - 1

    def _bits_of(self, unit: int) -> tuple[int, int]:
        base = self.dirty_base if self.units[unit].is_dirty else self.sources[unit].base
        return base, base + self.units[unit].rows

    def _new_writer(self) -> SegmentWriter:
        log = self.job.log
        log.disk.make_folder(log.folder)
        name = log.new_name("segment")
        self.names.append(name)
        m = self.manifest
        return SegmentWriter(
            log.disk,
            log.path(name),
            topic_id=m.topic_id,
            partition=m.partition,
            spill_bytes=self.terms.spill_bytes,
        )

    # 2. Clean segments.

    def write_clean(self) -> None:
        """*Errors*: Corrupt, OSError, Cancelled."""
        for group in self.groups:
            for unit in group.units:
                if not self.units[unit].is_dirty:
                    self._write_segment(unit, group.output)
            if not self.units[group.units[-1]].is_dirty:
                group.output.flush()

    def _write_segment(self, unit: int, output: Output) -> None:
        reader, base = self.pin.view.segments[unit].reader, self.sources[unit].base
        entries = reader.batches
        for number in range(len(entries)):
            self.check()
            first = base + int(entries["first_row"][number])
            keep = rows_of(self.kept, first, first + int(entries["rows"][number]))
            if keep.any():
                batch = reader.read(number)
                self._write(output, batch, keep)
            self.job.result.rows_done += len(keep)

    def _write(self, output: Output, batch: Batch, keep: NDArray[np.bool_]) -> None:
        result, before = self.job.result, output.bytes
        output.add(batch, keep)
        result.bytes_read += batch.header.size
        result.bytes_written += output.bytes - before
        self.terms.throttle.take(batch.header.size + output.bytes - before, self.terms.is_cancelled)

    # 3. Dirty batches.

    def entries(self) -> Iterator[Entry]:
        """The entries of the dirty part that hold a survivor, in order."""
        if not self.dirty_rows:
            return
        kept = readonly(self.kept)
        for entry in self.job.entries(self.horizon, self.job.upto):
            a, b = max(entry.base_offset, self.horizon), min(entry.end_offset, self.job.upto)
            base = self.dirty_base - self.horizon
            if a < b and count_bits(kept, base + a, base + b):
                yield entry
            else:
                self.job.result.rows_done += max(b - a, 0)

    def take(self, batch: Batch, *, position: int) -> None:
        """A batch of the commit log at ``position``, not checked yet. *Errors*: Corrupt, OSError, Cancelled."""
        h, m = batch.header, self.manifest
        if (h.topic_id, h.partition) != (m.topic_id, m.partition):
            raise Corrupt(
                f"commit log at position {position}: expected a batch of topic {m.topic_id} partition {m.partition}, "
                f"found topic {h.topic_id} partition {h.partition}",
                file="commit log", position=position,
            )  # fmt: skip
        a, b = max(h.base_offset, self.horizon), min(h.last_offset + 1, self.job.upto)
        self.job.result.rows_done += max(b - a, 0)
        if a >= b:
            return
        base = self.dirty_base - self.horizon
        keep = np.zeros(h.last_offset + 1 - h.base_offset, np.bool_)
        keep[a - h.base_offset : b - h.base_offset] = rows_of(self.kept, base + a, base + b)
        if not keep.any():
            return
        try:
            batch.verify()
            if h.is_sparse:
                keep = keep[batch.columns.offsets - h.base_offset]
            self._write(self.groups[-1].output, batch, keep)
        except MalformedBatch as error:
            raise corrupt(error, file="commit log", position=position) from error

    def take_entry(self, data: memoryview, position: int) -> None:
        """All batches of an index entry at ``position``. *Errors*: Corrupt, OSError, Cancelled."""
        at = 0
        while at < len(data):
            self.check()
            if int.from_bytes(data[at + 12 : at + 16], "little") < COPY_BYTES:
                at = self._take_small(data, at)
                if at == len(data):
                    return
            try:
                header = parse_header(data, at)
                batch = Batch(data[at : at + header.size], header)
            except MalformedBatch as error:
                raise corrupt(error, file="commit log", position=position + at) from error
            self.take(batch, position=position + at)
            at += header.size

    def _take_small(self, data: memoryview, at: int) -> int:
        """Take small plain batches by the kernel; where the first one lies that is not of them."""
        m, size = self.manifest, len(data)
        cap = (size - at) // 16 + 1
        state = np.zeros(STATE_COLUMNS, np.int64)
        state[AT] = at
        lengths, sizes = np.empty(cap, np.int32), np.empty(cap, np.int32)
        times, offsets = np.empty(cap, np.int64), np.empty(cap, np.int64)
        keys, values = np.empty(size - at, np.uint8), np.empty(size - at, np.uint8)
        take_small(
            readonly(np.frombuffer(data, np.uint8)), COPY_BYTES, np.uint64(m.topic_id), m.partition,
            readonly(self.kept), self.dirty_base - self.horizon, self.horizon, self.job.upto,
            lengths, sizes, times, offsets, keys, values, state,
        )  # fmt: skip
        stop, rows, key_bytes, value_bytes, epoch, appended, seen = state.tolist()
        result = self.job.result
        result.rows_done += seen
        result.bytes_read += stop - at
        output = self.groups[-1].output
        before = output.bytes
        if rows:
            piece = Piece(
                lengths[:rows].copy(), sizes[:rows].copy(), times[:rows].copy(), offsets[:rows].copy(),
                keys[:key_bytes].copy(), values[:value_bytes].copy(), None, None, None,
            )  # fmt: skip
            output.add_plain(piece, epoch=epoch, append_timestamp=appended)
        result.bytes_written += output.bytes - before
        self.terms.throttle.take(stop - at + output.bytes - before, self.terms.is_cancelled)
        return int(stop)

    # 4. and 5. Finish.

    def finish(self) -> None:
        """*Effects*: the new state is durable and served on return. *Errors*: as the steps before."""
        m, now = self.manifest, self.now_ms
        ranks = ranks_of(self.kept)
        made: dict[int, list[CleanSegment]] = {}
        for group in self.groups:
            group.output.flush()
            made[group.units[0]] = self._finish_group(group, ranks)
            failpoints.step("compact.segments_synced")
        segments: list[CleanSegment] = []
        for unit, rewritten in enumerate(self.is_rewritten):
            segments += made.get(unit, []) if rewritten else [self._masked(m.segments[unit], unit, now)]
        failpoints.step("compact.masks_synced")
        cover_times = tuple(p for p, n in zip(self.cover_times, self.decision.covered, strict=True) if n)
        floor = self._tombstone_floor()
        if (tuple(segments), cover_times, self.job.upto, floor) != (
            m.segments, m.cover_times, m.horizon, m.tombstone_floor,
        ):  # fmt: skip
            self._swap(segments, cover_times, floor)
        result, new = self.job.result, self.job.log.manifest
        result.records_after, result.bytes_after = new.rows - new.masked, new.clean_bytes
        result.rows_done = result.rows_total

    def _swap(
        self, segments: list[CleanSegment], cover_times: tuple[tuple[int, int], ...], floor: int
    ) -> None:
        upto = self.job.upto

        def change(current: Manifest) -> Manifest:
            keys = {s.name: s.keys for s in current.segments}  # a key index may have been rebuilt meanwhile
            return replace(
                current, horizon=upto, tombstone_floor=floor, cover_times=cover_times,
                segments=tuple(replace(s, keys=keys.get(s.name, s.keys)) for s in segments),
                dirty=tuple(d for d in current.dirty if d.end > upto),
            )  # fmt: skip

        self.job.log.swap(change)

    def _finish_group(self, group: _Group, ranks: NDArray[np.int64]) -> list[CleanSegment]:
        start, end = self._bits_of(group.units[0])[0], self._bits_of(group.units[-1])[1]
        first_rank = int(count_bits(readonly(self.kept), 0, start))
        expected = int(count_bits(readonly(self.kept), start, end))
        output = group.output
        if output.rows != expected:
            raise Corrupt(
                f"{self.job.log.folder}: its key indexes name {expected} survivors, the batches held {output.rows}",
                file=self.job.log.folder, position=0, expected=str(expected), found=str(output.rows),
            )  # fmt: skip
        write_keys(
            self._sources_of(group), output.writers, first_rank=first_rank, kept=self.kept, ranks=ranks,
            memory_bytes=self.job.memory_bytes, check=self.check,
        )  # fmt: skip
        bits = self._held_rows(start, end, [w.rows for w in output.writers])
        since = [
            u.masked_since_ms for u in (self.units[i] for i in group.units) if u.masked_since_ms is not None
        ]
        found = []
        for writer, held in zip(output.writers, bits, strict=True):
            footer = writer.finish()
            self.job.result.bytes_written += writer.file_bytes - writer.bytes
            info = CleanSegment(
                name=writer.path.rpartition("/")[2], start=footer.start, end=footer.end, rows=footer.rows,
                tombstones=footer.tombstones, bytes=footer.batches_bytes, batches=footer.batches,
            )  # fmt: skip
            found.append(
                self._with_mask(info, held, min([*since, self.now_ms])) if held is not None else info
            )
        return found

    def _sources_of(self, group: _Group) -> list[Source]:
        clean = len(self.manifest.segments)
        found = [self.sources[i] for i in group.units if i < clean]
        return found + (self.sources[clean:] if self.units[group.units[-1]].is_dirty else [])

    def _held_rows(self, start: int, end: int, sizes: list[int]) -> list[Bits | None]:
        """Per output file the bits of the masked tombstones that stayed; None when there is none."""
        held = readonly(self.decision.held)
        if not count_bits(held, start, end):
            return [None] * len(sizes)
        bounds = np.cumsum([0, *sizes])
        found = [np.zeros(bits_bytes(n), np.uint8) for n in sizes]
        rank = 0
        for at in range(start, end, CHUNK_ROWS):
            stop = min(at + CHUNK_ROWS, end)
            keep = rows_of(self.kept, at, stop)
            ranks = rank + np.flatnonzero(rows_of(held, at, stop)[keep])
            rank += int(np.count_nonzero(keep))
            for file in np.unique(np.searchsorted(bounds, ranks, "right") - 1).tolist():
                rows = ranks[(ranks >= bounds[file]) & (ranks < bounds[file + 1])] - bounds[file]
                np.bitwise_or.at(found[file], rows >> 3, (1 << (rows & 7)).astype(np.uint8))
        return [bits if bits.any() else None for bits in found]

    def _masked(self, info: CleanSegment, unit: int, now: int) -> CleanSegment:
        """A segment that stays, with its new mask where it lost rows."""
        count = self.units[unit].masked
        if count == info.masked:
            return info
        start = self.sources[unit].base
        bits = self.decision.dead[start >> 3 : (start >> 3) + bits_bytes(info.rows)]
        return self._with_mask(info, bits, now if info.masked_since_ms is None else info.masked_since_ms)

    def _with_mask(self, info: CleanSegment, bits: Bits, since: int) -> CleanSegment:
        """1. write the mask, 2. sync it; the name is durable with the swap."""
        log = self.job.log
        name = log.new_name("mask")
        self.names.append(name)
        data = masks.encode(bits, info.rows)
        file = log.disk.open(log.path(name), "create")
        try:
            file.pwrite([data], 0)
            file.sync()
        finally:
            file.close()
        self.job.result.bytes_written += len(data)
        masked = int(count_bits(readonly(bits), 0, info.rows))
        return replace(info, mask=name, masked=masked, masked_since_ms=since)

    def _tombstone_floor(self) -> int:
        floor = self.manifest.tombstone_floor
        for number, row in enumerate(self.decision.newest_over):
            if row < 0:
                continue
            if number < len(self.manifest.segments):
                offset = self.pin.view.segments[number].reader.offset_of(row)
            else:
                offset = self.horizon + self.sources[number].base - self.dirty_base + row
            floor = max(floor, offset + 1)
        return floor
