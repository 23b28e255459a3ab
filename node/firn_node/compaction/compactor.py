"""Compaction of one or many partitions at a time: a sweep.

Dirty batches of many partitions lie interleaved in the commit log. The jobs' entries are merged in position
order and the log is read once, forwards, in windows of up to ``WINDOW_BYTES``; each batch goes to its
partition's output. Entries without a survivor are not read. A partition whose dirty runs average
``ALONE_BYTES`` or more gains nothing from company and goes alone. At most ``SWEEP_JOBS`` go together: each may
hold 256 KiB of records that wait to be joined, and all of them ``SWEEP_SPILL_BYTES`` that wait to be written
(80 MiB at the very most, and far less when partitions are small).

An error ends its job alone: its files are removed, its old state stays, the reason is in its result.
"""

import heapq
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from firn.errors import Corrupt, FirnError, InvariantBroken
from firn_node import failpoints
from firn_node.clock import LogClock
from firn_node.compaction.agreement import Disagreement
from firn_node.compaction.keyindex import DamagedIndex
from firn_node.compaction.log import SwapUncertain
from firn_node.compaction.segment import SPILL_BYTES
from firn_node.compaction.throttle import Throttle
from firn_node.compaction.work import Cancelled, Entry, Job, Terms, Work

__all__ = ["Job", "compact"]

WINDOW_BYTES = 4 << 20
GAP_BYTES = 64 << 10  # reading over so much is cheaper than another read
ALONE_BYTES = 256 << 10
SWEEP_JOBS = 256
SWEEP_SPILL_BYTES = 16 << 20
REPAIRS_MAX = 1000

_log = logging.getLogger(__name__)


class Log(Protocol):
    """What compaction needs of the commit log."""

    def read(self, position: int, size: int) -> bytes: ...


def compact(
    jobs: Sequence[Job],
    *,
    commit_log: Log,
    clock: LogClock,
    min_dead_ratio: float,
    reclaim_age_ms: int,
    throttle: Throttle,
    is_cancelled: Callable[[], bool],
) -> None:
    """Compact the partitions of all jobs; each job's ``result`` says how it went.

    *Effects*: what is "done" is durable. *Errors*: InvariantBroken alone; others are in the results.
    """
    terms = Terms(
        now_ms=clock.now_ms(), min_dead_ratio=min_dead_ratio, reclaim_age_ms=reclaim_age_ms, throttle=throttle,
        is_cancelled=is_cancelled,
    )  # fmt: skip
    together: list[Job] = []
    for job in jobs:
        if len(jobs) > 1 and not _goes_alone(job):
            together.append(job)
        else:
            _Sweep([job], terms, commit_log).run()
    for at in range(0, len(together), SWEEP_JOBS):
        _Sweep(together[at : at + SWEEP_JOBS], terms, commit_log).run()


def _goes_alone(job: Job) -> bool:
    runs = size = 0
    end = -1
    try:
        for entry in job.entries(job.log.manifest.horizon, job.upto):
            runs += entry.position != end
            end = entry.position + entry.size
            size += entry.size
    except (FirnError, OSError):
        return False  # the job itself will meet the error and report it
    return size >= ALONE_BYTES * max(runs, 1)


class _Sweep:
    """Jobs that share one pass over the commit log."""

    def __init__(self, jobs: Sequence[Job], terms: Terms, commit_log: Log) -> None:
        self._jobs = list(jobs)
        self._terms = replace(terms, spill_bytes=min(SPILL_BYTES, SWEEP_SPILL_BYTES // len(jobs)))
        self._commit_log = commit_log
        self._works: dict[int, Work] = {}
        self._started: dict[int, float] = {}

    def run(self) -> None:
        for number, job in enumerate(self._jobs):
            job.result.state = "running"
            self._started[number] = time.monotonic()
            self._guard(number, lambda n=number, j=job: self._prepare(n, j))  # type: ignore[misc]
        for number, window in _windows(self._merged()):
            self._read(number, window)
        for number, work in list(self._works.items()):
            self._guard(number, lambda n=number, w=work: self._finish(n, w))  # type: ignore[misc]

    def _guard(self, number: int, step: Callable[[], None]) -> bool:
        """Run one step of a job; what it raises ends that job alone."""
        result = self._jobs[number].result
        try:
            step()
            return True
        except InvariantBroken:
            raise
        except Cancelled:
            result.state, result.reason = "cancelled", "cancelled"
        except Disagreement as error:
            result.state, result.reason = "disagreement", str(error)
        except Exception as error:  # the boundary of this job: logged, reported, retried by the scheduler
            _log.warning("compaction of partition %d failed", result.partition, exc_info=error)
            result.state, result.reason = "failed", f"{type(error).__name__}: {error}"
            self._clean_up(number, keep_files=isinstance(error, SwapUncertain))
            return False
        self._clean_up(number, keep_files=False)
        return False

    def _clean_up(self, number: int, *, keep_files: bool) -> None:
        job, work = self._jobs[number], self._works.pop(number, None)
        job.result.seconds = time.monotonic() - self._started[number]
        if work is None:
            return
        work.pin.release()
        if not keep_files:
            try:
                job.log.discard(work.names)
            except OSError as error:
                _log.warning("files of a failed compaction stay until the next start: %s", error)

    def _prepare(self, number: int, job: Job) -> None:
        for _ in range(REPAIRS_MAX):
            try:
                if self._terms.is_cancelled():
                    raise Cancelled
                work = Work.prepare(job, self._terms)
                break
            except DamagedIndex as error:
                _log.warning("a key index is damaged and is rebuilt: %s", error)
                if job.log.dirty_source is None:
                    job.log.dirty_source = lambda start, end: self._source(job, start, end)
                job.log.repair(error)
        else:
            raise Corrupt(
                f"{job.log.folder}: key indexes are damaged and could not be rebuilt",
                file=job.log.folder,
                position=0,
            )
        self._works[number] = work
        failpoints.step("compact.decided")
        work.write_clean()

    def _source(self, job: Job, start: int, end: int) -> Iterator[bytes]:
        for entry in job.entries(start, end):
            yield self._commit_log.read(entry.position, entry.size)

    def _finish(self, number: int, work: Work) -> None:
        work.finish()
        result = self._jobs[number].result
        result.state = "done"
        self._works.pop(number)
        work.pin.release()
        result.seconds = time.monotonic() - self._started[number]

    def _merged(self) -> Iterator[tuple[int, Entry]]:
        """(job number, entry) of all jobs in position order; a job that failed drops out."""

        def of_one(number: int, work: Work) -> Iterator[tuple[int, int, Entry]]:
            entries = work.entries()
            while number in self._works:
                found: list[Entry] = []
                if not self._guard(number, lambda: found.extend(_next(entries))) or not found:  # noqa: B023
                    return
                yield found[0].position, number, found[0]

        for _, number, entry in heapq.merge(
            *(of_one(n, w) for n, w in list(self._works.items())), key=lambda t: t[:2]
        ):
            yield number, entry

    def _read(self, start: int, window: list[tuple[int, Entry]]) -> None:
        """Read one window and hand its batches out."""
        end = window[-1][1].position + window[-1][1].size
        try:
            data = memoryview(self._commit_log.read(start, end - start))
        except (FirnError, OSError) as found:
            if len(window) > 1:  # find out whose bytes they are
                for number, entry in window:
                    self._read(entry.position, [(number, entry)])
                return
            error = found
            self._guard(window[0][0], lambda: _raise(error))
            return
        for number, entry in window:
            if (work := self._works.get(number)) is not None:
                at = entry.position - start
                piece = data[at : at + entry.size]
                self._guard(number, lambda w=work, p=piece, e=entry: w.take_entry(p, e.position))  # type: ignore[misc]


def _next(entries: Iterator[Entry]) -> Iterator[Entry]:
    found = next(entries, None)
    return iter(() if found is None else (found,))


def _raise(error: Exception) -> None:
    raise error


def _windows(entries: Iterator[tuple[int, Entry]]) -> Iterator[tuple[int, list[tuple[int, Entry]]]]:
    """(start, entries) of neighbouring entries that are read at once."""
    window: list[tuple[int, Entry]] = []
    for number, entry in entries:
        if window:
            start, last = window[0][1].position, window[-1][1]
            is_far = entry.position - (last.position + last.size) > GAP_BYTES
            if is_far or entry.position + entry.size - start > WINDOW_BYTES:
                yield start, window
                window = []
        window.append((number, entry))
    if window:
        yield window[0][1].position, window
