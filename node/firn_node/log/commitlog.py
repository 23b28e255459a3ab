"""The broker's one write-ahead log: batches of all partitions in arrival order, in segments.

Invariants:

- positions have no gaps: a segment ends where the next one starts; a batch never spans two segments;
- ``start <= durable_end <= written_end``; readers never see past the written end;
- after a failed append the written end is where it was and the tail is cut; after a failed sync the log
  ``is_broken``: every later append and sync raises, reads go on;
- nothing that the folder holds by name alone counts: ``sync`` syncs the folder before a new segment's bytes.

Threads: one appender, one flusher, readers anywhere. ``_append_lock`` is held while bytes are written,
``_sync_lock`` while they are synced, ``_lock`` for the few instructions that publish a state, never during
I/O. Order: ``_shape_lock``, ``_sync_lock``, ``_append_lock``, ``_lock``. ``append`` takes no lock that ``sync``
holds during an fdatasync, so it is never blocked by one. Readers take one reference, ``_view``, and no lock at
all; they open segments through the ``FileCache``, by leases.

What a head page holds and when it is written: ``headpage``. What opening decides: ``recovery``.
"""

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence

from firn.batch import Buffer
from firn.errors import Corrupt, Invalid, InvariantBroken, Unavailable
from firn_node import failpoints
from firn_node.disk import Disk
from firn_node.filecache import FileCache
from firn_node.log.headpage import Slot, first_page, write_slot
from firn_node.log.reading import LogReader, View
from firn_node.log.recovery import Check, check_batches, recover
from firn_node.log.runs import Plan, Run, count_batch, plan_batches, plan_copy
from firn_node.log.segment import (
    Segment,
    SegmentInfo,
    Topics,
    count_topics,
    keys_path,
    load_summary,
    store_summary,
    summary_path,
)

READER_WAIT_SECONDS = 10.0  # how long a truncation waits for readers of the bytes that it removes


class Hold:
    """Keeps the log's bytes from ``position`` on; ``release`` may be called twice."""

    __slots__ = ("_log", "position")

    def __init__(self, log: "CommitLog", position: int) -> None:
        self._log = log
        self.position = position

    def move(self, position: int) -> None:
        """From now on only bytes from ``position`` on are kept."""
        self.position = max(self.position, position)

    def release(self) -> None:
        self._log._drop_hold(self)


class CommitLog(LogReader):
    def __init__(
        self, disk: Disk, cache: FileCache, folder: str, segment_bytes: int, check: Check = check_batches
    ) -> None:
        super().__init__(cache)
        self._disk = disk
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._check = check
        self._shape_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._append_lock = threading.Lock()
        self._lock = threading.Lock()
        self._unsynced: dict[int, Segment] = {}  # by start: bytes or slots written since the last sync
        self._names_unsynced = False
        self._holds: set[Hold] = set()
        self._reason: str | None = None
        self._counter = 0
        self._slot: Slot | None = None  # the newest slot of the log, if an append that succeeded wrote it
        self._durable_end = 0
        self._append_ms = 0
        self.truncations = 0  # grows by one whenever bytes are cut: what was read of them is void

    @classmethod
    def open(
        cls, disk: Disk, cache: FileCache, folder: str, *, segment_bytes: int, verify_from: int,
        create_at: int = 0, check: Check = check_batches,
    ) -> "CommitLog":  # fmt: skip
        """The log of a folder, repaired (``recovery``); a new one begins at position ``create_at``.

        ``verify_from``: all batches from there on are checked; the caller vouches for those below it, as the
        index's checkpoint does. *Errors*: Corrupt: rebuild from a peer.
        """
        found = recover(disk, folder, verify_from=verify_from, create_at=create_at, check=check)
        log = cls(disk, cache, folder, segment_bytes, check)
        segments = tuple(Segment(folder, start) for start in found.starts)
        active = segments[-1]
        active.file = disk.open(active.path, "write")
        active.topics = load_summary(disk, folder, active.start, found.end)
        if active.topics is None:
            active.topics = count_topics(active.file, active.start, found.end)
        log._view = View(found.starts, segments, found.end)
        log._durable_end, log._append_ms, log._counter = found.end, found.append_ms, found.counter
        return log

    @property
    def durable_end(self) -> int:
        return self._durable_end

    @property
    def last_append_ms(self) -> int:
        """The newest append time in the log; for the log clock, which must not start below it."""
        return self._append_ms

    @property
    def is_broken(self) -> bool:
        return self._reason is not None

    # Writing.

    def plan(self, sizes: Sequence[int]) -> list[int]:
        """The positions that the next append would give to batches of these sizes."""
        positions, at = [], self.written_end
        for size in sizes:
            positions.append(at)
            at += size
        return positions

    def append(self, batches: Sequence[Buffer]) -> list[int]:
        """The batches' positions. *Effects*: in the page cache, visible to readers; durable after ``sync``.

        1. write the slot of the last segment touched, unless the newest one says the same (``headpage``), 2. write
        the batches, segment by segment, 3. publish. *Errors*: OSError: nothing was appended, the tail is cut.
        Unavailable: the log is broken.
        """
        if not batches:
            return []
        with self._append_lock:
            self._check_usable()
            positions = self.plan([len(batch) for batch in batches])
            start = self._view.starts[-1]
            self._write(
                plan_batches(batches, positions, segment_start=start, segment_bytes=self._segment_bytes)
            )
            return positions

    def append_one(self, batch: Buffer, topic_id: int, append_ms: int) -> int:
        """The position of a batch whose topic and append time are given: as ``append`` of it, without a plan."""
        with self._append_lock:
            self._check_usable()
            view = self._view
            segment, position = view.segments[-1], view.end
            end = position + len(batch)
            if end - segment.start > self._segment_bytes and position > segment.start:
                self._write(
                    plan_batches(
                        [batch], [position], segment_start=segment.start, segment_bytes=self._segment_bytes
                    )
                )
                return position
            file, topics = segment.file, segment.topics
            assert file is not None, "the active segment has a write handle"
            assert topics is not None, "the active segment's topics are loaded"
            slot = self._next_slot(segment.start, end=end, append_ms=append_ms)
            try:
                if slot is not None:
                    write_slot(file, slot)
                    failpoints.step("log.append.slot_written")
                file.pwrite((batch,), segment.byte_of(position))
                failpoints.step("log.append.run_written")
            except OSError as error:
                self._undo(view, slot, [], error)
                raise
            failpoints.step("log.append.written")
            with self._lock:
                count_batch(topics, topic_id, len(batch), append_ms)
                self._unsynced[segment.start] = segment
                self._append_ms = max(self._append_ms, append_ms)
                self._view = View(view.starts, view.segments, end)
                self._slot = slot or self._slot
            return position

    def append_copy(self, position: int, data: Buffer, *, after: int) -> tuple[tuple[int, int], ...]:
        """Append batches as another replica's log has them from ``position`` on, behind epoch ``after``.

        *Shape*: (epoch, position) of the epochs that begin in them. Byte-identical by position; segments are cut
        here as this log cuts them. *Effects* and further errors: as of ``append``. *Errors*: MalformedBatch unless
        all of ``data`` is whole batches whose checksums hold, Corrupt for epochs that go back, InvariantBroken
        unless ``position`` is the written end; nothing is appended then.
        """
        with self._append_lock:
            self._check_usable()
            if position != self.written_end:
                raise InvariantBroken(
                    f"commit log: a copy of position {position} cannot go to the end, {self.written_end}"
                )
            start = self._view.starts[-1]
            plan = plan_copy(
                data, position, after=after, segment_start=start, segment_bytes=self._segment_bytes,
                check=self._check,
            )  # fmt: skip
            self._write(plan)
            return plan.epochs

    def _write(self, plan: Plan) -> None:
        """The steps of an append, under ``_append_lock``."""
        view = self._view
        slot = self._next_slot(plan.runs[-1].start, end=plan.end, append_ms=plan.append_ms)
        segments = list(view.segments)
        try:
            for run in plan.runs:
                self._write_run(segments, run, slot)
                failpoints.step("log.append.run_written")
        except OSError as error:
            self._undo(view, slot, segments[len(view.segments) :], error)
            raise
        failpoints.step("log.append.written")
        self._publish(view, segments, plan, slot)

    def _undo(self, view: View, slot: Slot | None, created: Sequence[Segment], error: OSError) -> None:
        """Undo a failed append, whose slot or none may be in place."""
        if slot is not None:
            self._counter = slot.counter - 1  # so that the next slot goes where this one went
        self._cut(view, created, error)

    def _write_run(self, segments: list[Segment], run: Run, slot: Slot | None) -> None:
        """One write of the batches; a new segment begins with its head page."""
        start = run.start
        if segments[-1].start != start:
            assert slot is not None, "no slot speaks for a new segment yet"
            segment = Segment(self._folder, start, topics={})
            page = first_page(slot if slot.start == start else self._slot_for(start, slot))
            segments.append(segment)
            segment.file = self._disk.open(segment.path, "create")
            segment.file.pwrite([page, *run.parts], 0)
            return
        segment = segments[-1]
        assert segment.file is not None, "the active segment has a write handle"
        if slot is not None and slot.start == start:
            write_slot(segment.file, slot)
            failpoints.step("log.append.slot_written")
        segment.file.pwrite(run.parts, segment.byte_of(self._view.end))

    def _slot_for(self, start: int, slot: Slot) -> Slot:
        return Slot(slot.counter, start, slot.log_start, slot.durable_end, slot.end, slot.append_ms)

    def _next_slot(self, start: int, *, end: int, append_ms: int) -> Slot | None:
        """The slot of an append that ends at ``end``, in the segment at ``start``; under ``_append_lock``.

        None when the newest slot speaks for it too: it lies there, and neither the durable end nor the start of
        the log have moved since.
        """
        durable_end, newest = min(self._durable_end, end), self._slot
        if (
            newest is not None
            and newest.start == start
            and newest.durable_end == durable_end
            and newest.log_start == self.start
        ):
            return None
        return Slot(self._count_slot(), start, self.start, durable_end, end, max(self._append_ms, append_ms))

    def _count_slot(self) -> int:
        """The counter of a slot that is about to be written: until it is in place none is known to be the newest."""
        self._counter += 1
        self._slot = None
        return self._counter

    def _publish(self, before: View, segments: list[Segment], plan: Plan, slot: Slot | None) -> None:
        """Make an append visible, and known to the next sync, at one instant."""
        by_start = {segment.start: segment for segment in segments[len(before.segments) - 1 :]}
        with self._lock:
            for run in plan.runs:
                segment = by_start[run.start]
                assert segment.topics is not None, "the active segment's topics are loaded"
                run.add_to(segment.topics)
                self._unsynced[run.start] = segment
            if len(segments) > len(before.segments):
                self._names_unsynced = True
                self._unsynced.setdefault(
                    before.starts[-1], before.segments[-1]
                )  # its handle is closed by sync
            self._append_ms = max(self._append_ms, plan.append_ms)
            self._view = View(tuple(s.start for s in segments), tuple(segments), plan.end)
            self._slot = slot or self._slot

    def _cut(self, view: View, created: Sequence[Segment], error: OSError) -> None:
        """Undo a failed append.

        1. unlink new segments, 2. sync the folder, 3. cut the active one, 4. sync it. Synced, because a name
        or a batch that came back after a power loss would lie on top of later appends.
        """
        active = view.segments[-1]
        assert active.file is not None, "the active segment has a write handle"
        try:
            for segment in reversed(created):
                if segment.file is not None:
                    segment.file.close()
                self._disk.unlink(segment.path)
            if created:
                self._disk.sync_folder(self._folder)
            active.file.truncate(active.byte_of(view.end))
            active.file.sync()
        except OSError as second:
            self._break(f"append failed ({error}) and its tail could not be cut ({second})")

    def sync(self) -> int:
        """The new durable end: all that was written when it was called.

        1. fdatasync each segment with new bytes, 2. sync the folder if a segment is new, 3. publish.
        *Errors*: OSError, after which the log is broken: nothing more is acknowledged, restart from disk.
        """
        with self._sync_lock:
            return self._sync()

    def _sync(self) -> int:
        """``sync`` under ``_sync_lock``; ``append`` may go on meanwhile."""
        self._check_usable()
        with self._lock:
            target, view = self._view.end, self._view
            pending = sorted(self._unsynced.values(), key=lambda segment: segment.start)
            has_names = self._names_unsynced
            self._unsynced, self._names_unsynced = {}, False
        try:
            for segment in pending:
                if segment.file is not None:
                    segment.file.sync()
                failpoints.step("log.sync.file_synced")
            if has_names:
                self._disk.sync_folder(self._folder)
                failpoints.step("log.sync.folder_synced")
        except OSError as error:
            self._break(f"sync failed: {error}")
            raise
        with self._lock:
            self._durable_end = max(self._durable_end, target)
            sealed = [s for s in pending if s.start < view.starts[-1] and s.start not in self._unsynced]
        for segment in sealed:
            self._finish(segment, view.end_of(view.index_of(segment.start)))
        return self._durable_end

    def _finish(self, segment: Segment, end: int) -> None:
        """A segment is sealed and synced: close its write handle, remember its topics."""
        if segment.file is not None:
            segment.file.close()
            segment.file = None
        try:
            store_summary(self._disk, self._folder, segment.start, end, segment.topics or {})
        except OSError:
            return  # derived: counted again when it is missing; the bytes themselves are durable

    def _break(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _check_usable(self) -> None:
        if self._reason is not None:
            raise Unavailable(f"commit log {self._folder} is broken until a restart: {self._reason}")

    # Retention.

    def hold(self, position: int) -> Hold:
        """Keep the bytes from ``position`` on until the hold is released."""
        found = Hold(self, position)
        with self._lock:
            self._holds.add(found)
        return found

    def _drop_hold(self, held: Hold) -> None:
        with self._lock:
            self._holds.discard(held)

    def segments(self) -> list[SegmentInfo]:
        """All segments, oldest first. *Errors*: Corrupt when a lost summary cannot be counted again."""
        with self._lock:
            view = self._view
            active = dict(view.segments[-1].topics or {})
        infos = []
        for index, segment in enumerate(view.segments[:-1]):
            end = view.end_of(index)
            infos.append(SegmentInfo(segment.start, end, True, dict(self._load_topics(segment, end))))
        infos.append(SegmentInfo(view.starts[-1], view.end, False, active))
        return infos

    def _load_topics(self, segment: Segment, end: int) -> Topics:
        """The topics of a sealed segment; remembered, unless a truncation made it the active one meanwhile."""
        truncations, topics = self.truncations, segment.topics
        if topics is not None:
            return topics
        topics = load_summary(self._disk, self._folder, segment.start, end)
        is_counted = topics is None
        if topics is None:
            with self._cache.reading(segment.path) as file:
                topics = count_topics(file, segment.start, end)
        with self._lock:
            if self.truncations != truncations:
                return topics
            segment.topics = topics
        if is_counted:
            with contextlib.suppress(OSError):  # derived: counted again at the next start
                store_summary(self._disk, self._folder, segment.start, end, topics)
        return topics

    def release(self, before: int) -> int:
        """Unlink whole sealed segments below ``before``, as far as no hold keeps them; the new start.

        1. write a slot with the new start, 2. sync it, 3. publish, 4. unlink; so a segment that is missing on
        disk although its bytes are not below the recorded start is damage, never a leftover of this.
        """
        with self._shape_lock:
            with self._append_lock:
                view = self._view
                with self._lock:
                    limit = min([before, *(hold.position for hold in self._holds)])
                gone = sum(1 for index in range(len(view.starts) - 1) if view.end_of(index) <= limit)
                if gone == 0:
                    return view.starts[0]
                self._check_usable()
                active, new_start = view.segments[-1], view.starts[gone]
                assert active.file is not None, "the active segment has a write handle"
                slot = Slot(
                    self._count_slot(), active.start, new_start, self._durable_end, view.end, self._append_ms
                )
                try:
                    write_slot(active.file, slot)
                except OSError:
                    self._counter -= 1  # the next slot goes where this one is torn, never over the other one
                    raise
                with self._lock:
                    self._unsynced[active.start] = active
                    self._view = View(view.starts[gone:], view.segments[gone:], view.end)
            failpoints.step("log.release.recorded")
            self.sync()
            failpoints.step("log.release.synced")
            for segment in view.segments[:gone]:
                self._unlink(segment)
                failpoints.step("log.release.unlinked")
            return new_start

    def _unlink(self, segment: Segment) -> None:
        """Remove a segment and what was derived from it, each once its last reader leaves."""
        if segment.file is not None:
            segment.file.close()
            segment.file = None
        start = segment.start
        for path in (segment.path, summary_path(self._folder, start), keys_path(self._folder, start)):
            self._cache.retire(path)

    # Truncation and end.

    def truncate(self, position: int) -> None:
        """Remove all bytes from ``position`` on, which is where a batch starts. *Effects*: durable on return.

        1. sync what stays, 2. write and sync a marker: from here on a crash ends in the cut log, 3. publish,
        4. unlink later segments and derived files, sync the folder, 5. cut the last segment, sync it.
        *Errors*: Invalid for a position within a batch; OSError, or Unavailable when a reader does not let
        go of removed bytes: the log is then broken until a restart.
        """
        with self._shape_lock, self._sync_lock:
            self._sync()
            with self._append_lock:
                view = self._view
                if position < view.starts[0]:
                    raise self._expired(position)
                if position > view.end:
                    raise Invalid(f"commit log: cannot truncate to {position}, beyond the end {view.end}")
                self._sync()
                if position < view.end:
                    self._truncate(view, position)

    def _truncate(self, view: View, position: int) -> None:
        kept = max(bisect_left(view.starts, position), 1)
        last, dropped = view.segments[kept - 1], view.segments[kept:]
        topics = self._topics_below(last, position)
        try:
            if last.file is None:
                last.file = self._disk.open(last.path, "write")
            write_slot(
                last.file,
                Slot(self._count_slot(), last.start, view.starts[0], position, position, self._append_ms),
            )
            last.file.sync()
            failpoints.step("log.truncate.marked")
            with self._lock:
                last.topics = topics
                self._durable_end = position
                self._view = View(view.starts[:kept], view.segments[:kept], position)
                # Last: who reads it, and then the extents, has none that are older than what it stands for.
                self.truncations += 1
            for segment in reversed(dropped):
                self._unlink(segment)
                failpoints.step("log.truncate.unlinked")
            for path in (summary_path(self._folder, last.start), keys_path(self._folder, last.start)):
                self._cache.retire(path)
            self._wait_for_readers(dropped)
            self._disk.sync_folder(self._folder)
            failpoints.step("log.truncate.folder_synced")
            last.file.truncate(last.byte_of(position))
            last.file.sync()
        except OSError as error:
            self._break(f"truncation to {position} failed: {error}")
            raise

    def _topics_below(self, segment: Segment, position: int) -> Topics:
        """The topics of what stays of a segment; Invalid when ``position`` is within a batch."""
        with self._cache.reading(segment.path) as file:
            try:
                return count_topics(file, segment.start, position)
            except Corrupt as error:
                raise Invalid(f"commit log: cannot truncate to {position}: {error.message}") from error

    def _wait_for_readers(self, dropped: Sequence[Segment]) -> None:
        """A later segment may get a dropped one's name, so wait until that is gone.

        Readers read committed bytes and a truncation removes others: in practice nothing is waited for.
        """
        paths = [s.path for s in dropped]
        deadline = time.monotonic() + READER_WAIT_SECONDS
        while any(self._disk.exists(path) for path in paths):
            if time.monotonic() > deadline:
                self._break("truncation: a reader does not let go of a removed segment")
                raise Unavailable(f"commit log: {paths[0]} was truncated away and is still being read")
            time.sleep(0.005)

    def begin_at(self, position: int) -> None:
        """Let an empty log begin at ``position``, wherever it does now. *Effects*: durable on return.

        1. write and sync the new first segment, whose slot is a marker, 2. sync the folder: from here on a crash
        ends in the moved log, 3. publish, 4. unlink the old segment, sync the folder. *Errors*: InvariantBroken
        for a log with batches; OSError: the log is then broken until a restart.
        """
        with self._shape_lock, self._sync_lock, self._append_lock:
            self._check_usable()
            view = self._view
            if view.end != view.starts[0]:
                raise InvariantBroken(
                    f"commit log [{view.starts[0]}, {view.end}) is not empty: it cannot begin at {position}"
                )
            if position != view.end:
                self._begin_at(position, view.segments[0])

    def _begin_at(self, position: int, old: Segment) -> None:
        segment = Segment(self._folder, position, topics={})
        try:
            segment.file = self._disk.open(segment.path, "create")
            slot = Slot(self._count_slot(), position, position, position, position, self._append_ms)
            segment.file.pwrite([first_page(slot)], 0)
            segment.file.sync()
            failpoints.step("log.begin.written")
            self._disk.sync_folder(self._folder)
            failpoints.step("log.begin.folder_synced")
            with self._lock:
                self._durable_end = position
                self._unsynced, self._names_unsynced = {}, False
                self._view = View((position,), (segment,), position)
            self._unlink(old)
            failpoints.step("log.begin.unlinked")
            self._disk.sync_folder(self._folder)
        except OSError as error:
            self._break(f"moving the empty log to {position} failed: {error}")
            raise

    def close(self) -> None:
        """Stop cleanly: 1. sync, 2. write and sync a marker, 3. store the active segment's summary.

        A broken log is closed without a marker. *Errors*: OSError; the log is closed all the same.
        """
        with self._shape_lock, self._sync_lock, self._append_lock:
            view = self._view
            active = view.segments[-1]
            try:
                if self._reason is None and active.file is not None:
                    self._sync()
                    failpoints.step("log.close.synced")
                    end, file = view.end, active.file
                    write_slot(
                        file,
                        Slot(self._count_slot(), active.start, view.starts[0], end, end, self._append_ms),
                    )
                    file.sync()
                    failpoints.step("log.close.marked")
                    self._finish(active, end)
            finally:
                self._break("it is closed")
                for segment in view.segments:
                    if segment.file is not None:
                        segment.file.close()
                        segment.file = None
