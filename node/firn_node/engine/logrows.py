"""Single rows of the commit log by partition and offset: what ``get`` reads of dirty records.

The partition index names runs of neighbouring batches; where the batches of the runs lie that were touched lately is
kept, what is needed to read their rows goes to the cache that all logs share, and where the rows of even batches lie to
a table of each partition (``taking``), for lists of keys. A run's CRCs are checked when it is
touched for the first time, and again once it was forgotten.

Any thread.
"""

from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, iterate
from firn.errors import Corrupt, MalformedBatch, OffsetExpired
from firn_node.compaction.ahead import AHEAD, BATCH_BYTES_MIN, BATCHES
from firn_node.compaction.answers import I64
from firn_node.compaction.log import BLOCK_CACHE
from firn_node.compaction.rows import BatchRows, open_rows
from firn_node.compaction.taking import PLACE_COLUMNS, Even, Taking
from firn_node.engine.core import Core
from firn_node.filecache import FileRange
from firn_node.log.walk import headers, sound_bytes

_BATCHES_MAX = 1 << 16  # whose places are kept, of all partitions together: 32 bytes each
_RUN_COSTS_BATCHES = 16  # what a run takes besides
_PLACES_MAX = 1 << 14  # even batches in the tables of all partitions: then they begin anew; 300 bytes each

PartitionKey = tuple[int, int]


class LogBatch(NamedTuple):
    """One batch: offsets ``[base, end)``, bytes ``[position, position + size)``."""

    base: int
    end: int
    position: int
    size: int


class _Run:
    """Neighbouring batches of one partition, checked."""

    __slots__ = ("_bases", "_ends", "_sizes", "_starts", "base", "cost", "end", "position")

    def __init__(self, data: bytes, position: int) -> None:
        """*Errors*: MalformedBatch, for anything but whole batches whose checksums hold."""
        if not data or sound_bytes(data) != len(data):
            for batch in iterate(data):
                batch.verify()
            raise MalformedBatch("expected whole batches")
        found = headers(data)
        words = np.frombuffer(data, "<i8")  # every batch begins at a multiple of 8
        self._starts, self._sizes = found.starts, found.sizes
        # Bytes 48 and 56 of a header: the base offset and the last one.
        self._bases: NDArray[np.int64] = words[found.starts // 8 + 6]
        self._ends: NDArray[np.int64] = words[found.starts // 8 + 7] + 1
        self.base, self.end, self.position = int(self._bases[0]), int(self._ends[-1]), position
        self.cost = len(self._starts) + _RUN_COSTS_BATCHES

    def batch(self, offset: int) -> LogBatch:
        at = bisect_right(self._bases.data, offset) - 1
        start = self.position + int(self._starts[at])
        return LogBatch(int(self._bases[at]), int(self._ends[at]), start, int(self._sizes[at]))


class _Places:
    """The even batches of one partition that were touched, and a table of them: made anew once an eighth as many
    times a batch was looked up that it did not have.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, ...]] = {}  # by base offset: its end, and columns of ``taking``
        self._missed = 0
        self.bases: NDArray[np.int64] = np.empty(0, np.int64)
        self.ends: NDArray[np.int64] = np.empty(0, np.int64)
        self.table: NDArray[np.int64] = np.empty((0, PLACE_COLUMNS), np.int64)

    def add(self, batch: LogBatch, even: Even) -> bool:
        """Whether it was not there."""
        self._missed += 1
        if batch.base in self._found:
            return False
        self._found[batch.base] = (batch.end, batch.position, batch.size, *even)
        return True

    def refresh(self) -> None:
        if 8 * self._missed > len(self._found):
            self._missed = 0
            bases = sorted(self._found)
            columns = np.array([self._found[base] for base in bases], np.int64)
            self.bases, self.ends = np.array(bases, np.int64), columns[:, 0]
            self.table = np.ascontiguousarray(columns[:, 1:])


class LogRows:
    """The rows of dispatched offsets."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = Lock()
        self._token = (
            object()
        )  # of what the cache has under this log's positions: another one after a truncation
        self._runs: OrderedDict[tuple[PartitionKey, int], _Run] = OrderedDict()
        self._bases: dict[PartitionKey, list[int]] = {}  # of the runs that are kept, ascending
        self._cost = 0
        self._places: dict[PartitionKey, _Places] = {}
        self._places_held = 0
        self._truncations = core.log.truncations

    def _ask_ahead(self, key: PartitionKey, batch: LogBatch) -> None:
        if batch.size >= BATCH_BYTES_MIN and self._is_real(batch):
            AHEAD.ask(partial(self._check_ahead, key, batch.end, BATCHES))

    def _is_real(self, batch: LogBatch) -> bool:
        """Whether the machine can say what of the log is in memory."""
        try:
            return self.range(batch.position, batch.size).is_real()
        except OffsetExpired:
            return False

    def _check_ahead(self, key: PartitionKey, offset: int, batches: int) -> None:
        """Touch the batches from ``offset`` on that are in memory, and were not touched before."""
        while batches:
            entry = self._core.index.find(*key, offset)
            if entry is None or entry.base_offset != offset or entry.size < BATCH_BYTES_MIN:
                return
            if self._known(key, offset) is None:
                if not self.range(entry.position, entry.size).is_in_memory():
                    return
                self.find(key, offset)
            offset, batches = entry.end_offset, batches - 1

    def find(
        self, key: PartitionKey, offset: int, *, of_one: bool = False
    ) -> tuple[LogBatch, BatchRows] | None:
        """The batch that holds an offset of a partition; None when it has expired. *Errors*: Corrupt.

        ``of_one``: for one key, so at a first touch the next batches are checked ahead.
        """
        truncations = self._core.log.truncations
        run, data = self._known(key, offset), b""
        try:
            if run is None:
                loaded = self._load(key, offset)
                if loaded is None:
                    return None
                run, data = loaded
            batch = run.batch(offset)
            if batch.position < self._core.log.start:
                return None
            start = batch.position - run.position
            rows = self._rows(batch, memoryview(data)[start : start + batch.size])
        except OffsetExpired:
            return None  # since a line ago
        if rows.even is not None:
            self._note_place(key, batch, rows.even, truncations)
        if of_one and data:
            self._ask_ahead(key, batch)
        return batch, rows

    def take_known(self, key: PartitionKey, offsets: I64, picks: I64, taking: Taking) -> NDArray[np.bool_]:
        """Answers the offsets (ascending) of batches that are known and best read row by row; True where one is left."""
        is_left = np.ones(len(offsets), np.bool_)
        with self._lock:
            self._check_truncations()
            places = self._places.get(key)
            if places is None:
                return is_left
            places.refresh()
            bases, ends, table = places.bases, places.ends, places.table
        numbers = np.searchsorted(bases, offsets, "right") - 1
        inside = np.flatnonzero(numbers >= 0)
        numbers = numbers[inside]
        is_known = (offsets[inside] < ends[numbers]) & (table[numbers, 0] >= self._core.log.start)
        inside, numbers = inside[is_known], numbers[is_known]
        is_left[inside] = taking.known(self, table, numbers, offsets[inside] - bases[numbers], picks[inside])
        return is_left

    def range(self, position: int, size: int) -> FileRange:
        return self._core.log.range(position, size)

    def file_of(self, position: int) -> int:
        return self._core.log.segment_start(position)

    def fault(self, position: int, what: str) -> Corrupt:
        return Corrupt(f"commit log position {position}: {what}", position=position)

    def _note_place(self, key: PartitionKey, batch: LogBatch, even: Even, truncations: int) -> None:
        """``truncations``: how many there had been before the batch was found."""
        with self._lock:
            if not truncations == self._core.log.truncations == self._truncations:
                return  # what was found may be gone
            if self._places_held >= _PLACES_MAX:
                self._places.clear()
                self._places_held = 0
            places = self._places.get(key)
            if places is None:
                places = self._places[key] = _Places()
            self._places_held += places.add(batch, even)

    def _check_truncations(self) -> None:
        """Under the lock: nothing that was known before a truncation is believed."""
        if self._truncations != self._core.log.truncations:
            self._truncations = self._core.log.truncations
            self._token = object()
            self._runs.clear()
            self._bases.clear()
            self._cost = 0
            self._places.clear()
            self._places_held = 0

    def _known(self, key: PartitionKey, offset: int) -> _Run | None:
        with self._lock:
            self._check_truncations()
            bases = self._bases.get(key)
            at = bisect_right(bases, offset) - 1 if bases else -1
            if bases is None or at < 0:
                return None
            run = self._runs[key, bases[at]]
            if offset >= run.end:
                return None
            self._runs.move_to_end((key, bases[at]))
            return run

    def _load(self, key: PartitionKey, offset: int) -> tuple[_Run, bytes] | None:
        """The checked run that holds an offset, and its bytes."""
        log = self._core.log
        entry = self._core.index.find(*key, offset)
        if entry is None or not entry.base_offset <= offset < entry.end_offset or entry.position < log.start:
            return None
        truncations = log.truncations
        data = log.read(entry.position, entry.size)
        try:
            run = _Run(data, entry.position)
        except MalformedBatch as error:
            raise self.fault(entry.position, error.message) from error
        if not run.base <= offset < run.end:
            raise self.fault(entry.position, f"expected offset {offset}, found [{run.base}, {run.end})")
        with self._lock:
            if truncations == log.truncations == self._truncations:
                self._keep(key, run)
        return run, data

    def _keep(self, key: PartitionKey, run: _Run) -> None:
        """Under the lock. A run that has grown takes the place of what was known of it."""
        bases = self._bases.setdefault(key, [])
        before = self._runs.pop((key, run.base), None)
        if before is None:
            bases.insert(bisect_right(bases, run.base), run.base)
        else:
            self._cost -= before.cost
        self._runs[key, run.base] = run
        self._cost += run.cost
        while self._cost > _BATCHES_MAX and len(self._runs) > 1:
            (old, base), gone = self._runs.popitem(last=False)
            self._cost -= gone.cost
            self._bases[old].remove(base)
            if not self._bases[old]:
                del self._bases[old]

    def _rows(self, batch: LogBatch, data: memoryview) -> BatchRows:
        """``data``: the batch's bytes, or nothing where they are not there."""

        def load() -> tuple[BatchRows, int]:
            try:
                found = open_rows(self, batch.position, batch.end - batch.base, Batch(data) if data else None)
            except MalformedBatch as error:
                raise self.fault(batch.position, error.message) from error
            return found, found.nbytes

        found: BatchRows = BLOCK_CACHE.get((self._token, batch.position), load)
        return found
