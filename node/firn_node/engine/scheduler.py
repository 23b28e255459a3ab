"""Runs compactions, one group of partitions at a time, in a thread of its own: forced ones first, then what is due.

Partitions that are due together go together, so that the commit log is read once for all of them. A failure is
its partition's alone: counted, shown in status with its reason, tried again with back-off.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from firn.batch import parse_header
from firn.errors import FirnError, Unavailable
from firn_node.compaction import Job, Throttle, compact
from firn_node.compaction.agreement import Agreement
from firn_node.engine.api import FINAL_STATES, CompactionRun, PartitionCompaction, TopicInfo
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.due import Due, when_due
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions, note_clean, note_oldest
from firn_node.index import Entry
from firn_node.kernels import ActiveIndex, KeyRows
from firn_node.memory import trim

_log = logging.getLogger(__name__)
_SWEEP_PARTITIONS_MAX = 256
_BACKOFF_MS = 2_000
_BACKOFF_MAX_MS = 300_000
_DISAGREED_MS = (
    24 * 3_600_000
)  # a partition whose key index was proven wrong is not compacted because it is due
_PRESSING = 2.0  # the urgency of what waits for no plan: maxLag, retention, a large backlog
_SPACING_MS = 5_000  # between two automatic compactions of one partition
_DISPATCH_WAIT_S = 10.0  # for what was appended before; then a compaction covers what is dispatched


@dataclass(slots=True)
class Request:
    """A compaction that was asked for; ``ended`` once its rows are final."""

    run: CompactionRun
    forced: int  # how many compactions by force its topic had been asked for, of which it does the last
    is_cancelled: bool = False
    agreements: Mapping[int, Agreement] = field(default_factory=dict)  # by partition
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Work:
    """One partition of a running compaction."""

    partition: Partition
    result: PartitionCompaction
    with_active: bool
    force: bool
    forced: int = 0
    is_automatic: bool = False
    agreement: Agreement | None = None
    upto: int = 0
    dirty_before: int = 0
    dirty_left: int = 0
    # As they are on the event loop when the work is handed over; the thread looks at nothing that moves.
    start: int = 0  # the first offset that no segment holds
    end: int = 0  # dispatched
    unsealed: tuple[ActiveIndex, ...] = ()  # the rows from ``start`` on, as far as they are in memory


@dataclass(slots=True)
class Scheduler:
    core: Core
    partitions: Partitions
    commits: Commits
    held_back: set[tuple[int, int]] = field(default_factory=set)  # partitions that hold back retention
    # Whether a partition is about to be compacted by a plan: what is merely due would do the same work before it.
    is_planned: Callable[[int, int], bool] = lambda topic_id, number: False
    requests: dict[int, Request] = field(default_factory=dict)  # the newest asked-for run of each topic
    _queue: deque[Request] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "firn-compactor"))
    _task: "asyncio.Task[None] | None" = None
    _stopping: bool = False
    _cursor: int = 0
    _waiting: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Cancel what runs (the old state stays) and end."""
        self._stopping = True
        self._wake.set()
        if self._waiting is not None:
            self._waiting.cancel()
        if self._task is not None:
            await self._task
        self._threads.shutdown(wait=True)

    def request(self, topic: TopicInfo, *, force: bool) -> CompactionRun:
        """Ask for a compaction of all partitions that live in this group.

        A run that is under way is returned as it is, unless force is asked for and it does not force: then
        another one follows it.
        """
        known = self.requests.get(topic.topic_id)
        if known is not None and not known.run.is_done and (known.run.force or not force):
            return known.run
        rows = [PartitionCompaction(number) for number in topic.partitions_in(self.core.group)]
        run = CompactionRun(self.core.randomness.bytes(4).hex(), topic.name, topic.topic_id, force, rows)
        run.is_settled = False
        request = Request(run, self.core.catalogue.forced.get(topic.topic_id, 0))
        self.requests[topic.topic_id] = request
        self._queue.append(request)
        self._wake.set()
        return run

    def request_agreed(
        self, topic: TopicInfo, rows: list[PartitionCompaction], agreements: Mapping[int, Agreement]
    ) -> Request:
        """Ask for partitions to be compacted by force, up to where their agreements reach and only as these say."""
        run = CompactionRun("", topic.name, topic.topic_id, True, rows, engine="spark", is_settled=False)
        request = Request(run, 0, agreements=agreements)
        self._queue.append(request)
        self._wake.set()
        return request

    def count_forced(self, topic: TopicInfo, count: int) -> None:
        """A compaction by force that the topic was asked for is done here already."""
        for number in topic.partitions_in(self.core.group):
            state = self.partitions.states.get((topic.topic_id, number))
            if state is not None and state.forced < count:
                state.forced = count
                self.partitions.touched.add((topic.topic_id, number))

    def request_forgotten(self) -> None:
        """Ask again for the compactions by force that this broker was asked for and died before it had done them."""
        states = self.partitions.states
        for topic_id, count in self.core.catalogue.forced.items():
            topic = self.core.catalogue.by_id[topic_id]
            keys = [(topic_id, number) for number in topic.partitions_in(self.core.group)]
            if any(states[key].forced < count for key in keys if key in states):
                self.request(topic, force=True)

    def cancel(self, topic_id: int) -> CompactionRun | None:
        request = self.requests.get(topic_id)
        if request is None:
            return None
        request.is_cancelled = True
        return request.run

    def forget(self, topic_id: int) -> None:
        """A topic is gone: cancel its run and remember nothing of it."""
        self.cancel(topic_id)
        self.requests.pop(topic_id, None)
        self.held_back = {key for key in self.held_back if key[0] != topic_id}

    async def _run(self) -> None:
        while not self._stopping:
            try:
                if self._queue:
                    await self._run_request(self._queue.popleft())
                elif not await self._run_due():
                    await self._pause()
            except Exception:
                # The scheduler's task boundary: no partition's trouble ends it.
                _log.exception("compaction scheduler")
                self.core.metrics["scheduler_errors"] += 1
                await asyncio.sleep(1.0)

    async def _pause(self) -> None:
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), self.core.settings.compaction_check_ms / 1000)
        except TimeoutError:
            pass

    async def _run_request(self, request: Request) -> None:
        run = request.run
        try:
            for first in range(0, len(run.partitions), _SWEEP_PARTITIONS_MAX):
                await self._run_group(request, run.partitions[first : first + _SWEEP_PARTITIONS_MAX])
        finally:
            for row in run.partitions:  # whoever waits for the run learns that it is over
                if row.state not in FINAL_STATES:
                    row.state = "cancelled"
            run.is_settled = True
            request.ended.set()

    async def _run_group(self, request: Request, rows: list[PartitionCompaction]) -> None:
        run, works = request.run, []
        topic = self.core.catalogue.by_id.get(run.topic_id)
        for row in rows:
            if topic is None or request.is_cancelled or self._stopping:
                row.state = "cancelled"
                continue
            try:
                partition = self.partitions.get(topic, row.partition)
            except (FirnError, OSError) as error:
                row.state, row.reason = "failed", str(error)
                continue
            works.append(
                _Work(
                    partition, row, with_active=run.force, force=run.force, forced=request.forced,
                    agreement=request.agreements.get(row.partition),
                )
            )  # fmt: skip
        await self._compact(works, lambda: request.is_cancelled)

    async def _run_due(self) -> bool:
        works = []
        for due, topic, number in self._due()[:_SWEEP_PARTITIONS_MAX]:
            try:
                partition = self.partitions.get(topic, number)
            except (FirnError, OSError):
                continue  # parked: its own retry tells
            _log.info("compacting %s/%d: %s", topic.name, number, due.reason)
            works.append(
                _Work(partition, PartitionCompaction(number), due.with_active, force=False, is_automatic=True)
            )
        await self._compact(works, lambda: False)
        return bool(works)

    def _due(self) -> list[tuple[Due, TopicInfo, int]]:
        """Due partitions, the most urgent first; looks at a bounded number a call, in turn."""
        core, now = self.core, self.core.clock.now_ms()
        keys = list(self.partitions.states)
        if self._cursor >= len(keys):
            self._cursor = 0
        chosen = keys[self._cursor : self._cursor + 20_000]
        self._cursor += len(chosen)
        found = []
        for key in chosen:
            topic = core.catalogue.by_id.get(key[0])
            if topic is None:
                continue
            opened = self.partitions.opened(*key)
            due = when_due(
                self.partitions.states[key],
                topic.spec.compaction,
                now_ms=now,
                reclaim_age_ms=core.settings.reclaim_age_ms,
                holds_retention=key in self.held_back,
                active_since_ms=opened.active_since_ms if opened is not None else 0,
            )
            if due is None or (opened is not None and opened.compacting):
                continue
            if due.urgency >= _PRESSING or not self.is_planned(*key):
                found.append((due, topic, key[1]))
        return sorted(found, key=lambda item: -item[0].urgency)

    async def _compact(self, works: list[_Work], is_cancelled: Callable[[], bool]) -> None:
        if not works:
            return
        for work in works:
            work.partition.compacting = True
            work.partition.state.last_started_ms = self.core.clock.now_ms()
            work.result.state = "running"
        try:
            await self._dispatched(works)
            for work in works:
                self._take(work)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, self._work, works, is_cancelled)
        except Exception as error:
            # A bug, or a broken index: these partitions keep their old state and are tried again with back-off.
            _log.exception("compaction")
            self.core.metrics["scheduler_errors"] += 1
            for work in works:
                if work.result.state not in FINAL_STATES:
                    work.result.state, work.result.reason = "failed", f"{type(error).__name__}: {error}"
        finally:
            for work in works:
                if work.result.state not in FINAL_STATES:
                    work.result.state, work.result.reason = "cancelled", "cancelled"
                work.partition.compacting = False
                try:
                    self._finish(work)
                except (FirnError, OSError) as error:
                    _log.error("after a compaction of %s: %s", work.partition.topic.name, error)

    async def _dispatched(self, works: list[_Work]) -> None:
        """Wait, for a bounded time, until what was appended before now is dispatched."""
        pending = [work.partition.pending[-1] for work in works if work.partition.pending]
        if not pending or self._stopping:
            return
        position = max(last.position + last.size for last in pending)
        self._waiting = asyncio.get_running_loop().create_task(self.commits.wait(position))
        await asyncio.wait([self._waiting], timeout=_DISPATCH_WAIT_S)
        self._waiting.cancel()
        await asyncio.gather(self._waiting, return_exceptions=True)
        self._waiting = None

    def _take(self, work: _Work) -> None:
        """Note what only the event loop may look at: appends and seals go on while the thread works."""
        partition = work.partition
        work.start, work.end = partition.unsealed_start, partition.dispatched_end
        work.dirty_before = partition.state.dirty_bytes
        active = () if partition.active is None else (partition.active,)
        work.unsealed = (*partition.sealing, *active)

    def _work(self, works: list[_Work], is_cancelled: Callable[[], bool]) -> None:
        """In the compactor thread."""
        jobs = []
        for work in works:
            try:
                jobs.append(self._job(work))
            except Exception as error:  # this partition's alone, whatever it is
                _log.warning(
                    "%s/%d: not compacted", work.partition.topic.name, work.partition.number, exc_info=error
                )
                work.result.state, work.result.reason = "failed", f"{type(error).__name__}: {error}"
        settings = self.core.settings
        compact(
            jobs,
            commit_log=self.core.log,
            clock=self.core.clock,
            min_dead_ratio=settings.min_dead_ratio,
            reclaim_age_ms=settings.reclaim_age_ms,
            throttle=Throttle(settings.io_bytes_per_second),
            is_cancelled=lambda: self._stopping or is_cancelled(),
        )
        jobs.clear()
        trim()

    def _job(self, work: _Work) -> Job:
        partition, spec = work.partition, work.partition.topic.spec.compaction
        end = work.end if work.with_active else min(work.start, work.end)
        if work.agreement is None:
            upto = self.old_enough(partition, end, spec.min_lag_ms)
        elif work.agreement.plan_end <= end:
            upto = work.agreement.plan_end
        else:
            raise Unavailable(f"offsets below {work.agreement.plan_end} are not dispatched here yet")
        work.upto = max(upto, partition.horizon)
        work.result.records_kept_by_min_lag = max(end - work.upto, 0) if spec.min_lag_ms else 0
        active = self._unsealed_rows(work) if work.upto > work.start else []
        work.dirty_left = sum(e.size for e in self.partitions.entries(partition, work.upto, work.end))
        return Job(
            log=partition.log,
            upto=work.upto,
            active=active,
            entries=lambda first, last: self.partitions.entries(partition, first, last),
            delete_retention_ms=spec.delete_retention_ms,
            segment_bytes=spec.segment_bytes,
            memory_bytes=spec.memory_bytes,
            force=work.force,
            result=work.result,
            agreement=work.agreement,
        )

    def _unsealed_rows(self, work: _Work) -> list[KeyRows]:
        """The key rows of [start, upto).

        From memory, where an active index and those being sealed cover the range without a gap; else from the
        commit log, into an index of this compaction's own: the partition's belongs to the event loop.
        """
        start, upto = work.start, work.upto
        found: list[KeyRows] = []
        at = start
        for index in work.unsealed:
            first, last = max(index.start, at), min(index.end, upto)
            if first == at and at < last:
                found += index.pieces(at, last)
                at = last
        if at < upto:
            return self.partitions.load(work.partition, start, upto).pieces(start, upto)
        return found

    def old_enough(self, partition: Partition, end: int, min_lag_ms: int) -> int:
        """The end of the offsets whose batches were appended at least ``min_lag_ms`` ago: append times ascend."""
        if min_lag_ms == 0:
            return end
        limit = self.core.clock.now_ms() - min_lag_ms
        low, high = partition.horizon, end
        while low < high:
            entry = self.core.index.find(*partition.key, (low + high) // 2)
            if entry is None or entry.base_offset >= high:
                high = (low + high) // 2
                continue
            young = self._first_young(entry, limit)
            if young is None:
                low = max(entry.end_offset, low + 1)
            else:
                high = min(high, young)
                if young > entry.base_offset:
                    low = young
        return max(min(low, end), partition.horizon)

    def _first_young(self, entry: Entry, limit: int) -> int | None:
        at = 0
        data = self.core.log.read(entry.position, entry.size)
        while at < len(data):
            header = parse_header(data, at)
            if header.append_timestamp > limit:
                return header.base_offset
            at += header.size
        return None

    def _finish(self, work: _Work) -> None:
        """Back on the event loop: what the swap changed in memory and in the state row."""
        partition, result, state, now = (
            work.partition,
            work.result,
            work.partition.state,
            self.core.clock.now_ms(),
        )
        if partition.deleted:
            return
        manifest = partition.log.manifest
        if partition.active is not None:
            partition.active.drop_before(manifest.horizon)
        state.last_result, state.last_reason = result.state, result.reason or ""
        state.last_seconds = result.seconds
        if work.force and (result.state == "done" or (result.state == "cancelled" and not self._stopping)):
            state.forced = max(state.forced, work.forced)
        note_clean(partition)
        self.core.metrics[f"compactions_{result.state}"] += 1
        self.core.metrics["compaction_bytes_written"] += result.bytes_written
        self.core.metrics["compaction_bytes_read"] += result.bytes_read
        if result.state == "disagreement":
            # By itself it would do soon what it was kept from: first somebody has to look.
            state.retry_ms = now + _DISAGREED_MS
            _log.error("compaction of %s/%d: %s", partition.topic.name, partition.number, result.reason)
        elif result.state == "done" and work.agreement is not None:
            state.retry_ms = 0
        if result.state == "failed":
            state.failures += 1
            state.retry_ms = now + min(_BACKOFF_MS << min(state.failures, 10), _BACKOFF_MAX_MS)
            _log.error(
                "compaction of %s/%d failed: %s", partition.topic.name, partition.number, result.reason
            )
        else:
            state.failures = 0
            if work.is_automatic:  # one that was asked for does not put off what is due
                state.retry_ms = now + _SPACING_MS
        if manifest.horizon > state.horizon:
            state.horizon = manifest.horizon
            state.dirty_bytes = max(0, state.dirty_bytes - work.dirty_before + work.dirty_left)
            note_oldest(self.core, partition)
            self.held_back.discard(partition.key)
        partition.active_bytes = max(0, state.dirty_bytes - state.sealed_bytes)
        self.partitions.touch(partition)
