"""Rows of a partition's dirty, unsealed part, in memory: which offsets has this fingerprint?

16 bytes a row. New rows go to an unsorted tail, whose block doubles from 16 rows to 1,024; a full tail is
sorted into a *run*. A run is merged into the one before it while that is not more than twice as long, so n
rows lie in about log2(n / 512) runs, each row was moved as often, and a lookup is one search in each. Rows of
one key lie side by side in a run: a hot key costs no more than others.

Bulk is written more often than looked up. So an append of more than 1,024 rows lets the tail grow to 131,072:
the next lookup, or its being full, sorts them at once, 2 ms of work at most. And runs that would become longer
than that are merged only once there are 16 of them: sealing merges all anyway.

Invariants:

- runs and tail cover ``[start, end)`` without gaps, in this order; rows are numbered from the run's own
  ``base``, below 2^31;
- what is published (``_state``) never changes: a change makes new blocks, or fills columns of the tail that no
  published state counts, and publishes with one assignment. So a reader takes the lock only to sort a large tail;
  writers (append, drop_before, truncate) exclude one another.

An index without rows holds no block: a broker has one of these for each partition that is written to. A dict
of newest rows was considered: it is ten times as big, and compare-and-set also asks for older rows.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn.errors import InvariantBroken
from firn_node.kernels import runs
from firn_node.kernels.jit import aligned
from firn_node.kernels.sorting import sorted_rows

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
TAIL_ROWS_MIN = 16
TAIL_ROWS_MAX = 1024  # of a tail that lookups scan
BULK_ROWS_MAX = 1 << 17  # of one that the next lookup sorts: 2 ms of work
RUNS_MAX = 16  # until then no run longer than BULK_ROWS_MAX is made
RUN_ROWS_MAX = 1 << 31
PORTION_ROWS = 1 << 15
# From so many lookups at once on, sorting the tail is cheaper than scanning it for each.
_SCANS_MAX = 8


class _Run(NamedTuple):
    """Sorted rows of ``[base, end)``; ``rows`` is ``u64[2, end - base]``."""

    base: int
    end: int
    rows: U64


class KeyRows(NamedTuple):
    """Key index columns of the offsets ``[base, end)``, sorted; the rows in ``word`` count from ``base``."""

    base: int
    end: int
    hi: U64
    word: U64


class _State(NamedTuple):
    """All that a reader needs: ``runs`` oldest first, then the tail's first ``end - tail_base`` columns."""

    start: int
    runs: tuple[_Run, ...]
    tail_base: int
    tail: U64
    end: int


_NO_ROWS: U64 = np.empty((2, 0), np.uint64)
_NO_ROWS.flags.writeable = False


class ActiveIndex:
    """The offsets of each fingerprint in ``[start, end)``; begins empty at offset ``base``."""

    __slots__ = ("_state", "_tabled", "_writing")

    def __init__(self, base: int) -> None:
        self._state = _State(base, (), base, _NO_ROWS, base)
        self._tabled: tuple[tuple[_Run, ...], I64] = _tabled(())
        self._writing = threading.Lock()

    @property
    def start(self) -> int:
        """The first offset that is held."""
        return self._state.start

    @property
    def end(self) -> int:
        """The offset that the next appended row gets."""
        return self._state.end

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, spare columns of the tail included."""
        state = self._state
        return int(sum(run.rows.nbytes for run in state.runs) + state.tail.nbytes)

    def append(self, hi: U64, lo: NDArray[np.uint32], tombstone: NDArray[np.bool_]) -> None:
        """Rows for the offsets from ``end`` on, in order."""
        hi, lo, tombstone = aligned(hi, np.uint64), aligned(lo, np.uint32), aligned(tombstone, np.bool_)
        with self._writing:
            state, done = self._state, 0
            while done < len(hi):
                state = _with_room(state, len(hi) - done)
                used = state.end - state.tail_base
                count = min(len(hi) - done, state.tail.shape[1] - used)
                runs.put_rows(hi, lo, tombstone, done, count, state.tail, used)
                state = state._replace(end=state.end + count)
                done += count
            self._state = _flushed(state, _rows_max(state))

    def append_one(self, hi: int, lo: int, is_tombstone: bool) -> None:
        """The row of offset ``end``: as ``append`` of one, without arrays."""
        with self._writing:
            start, runs, tail_base, tail, end = _with_room(self._state, 1)
            at = end - tail_base
            tail[0, at], tail[1, at] = hi, lo << 32 | at << 1 | is_tombstone
            self._state = state = _State(start, runs, tail_base, tail, end + 1)
            if at + 1 == tail.shape[1]:
                self._state = _flushed(state, _rows_max(state))

    def _searchable(self) -> _State:
        """The state with a tail that is short enough to be scanned."""
        state = self._state
        if state.end - state.tail_base > TAIL_ROWS_MAX:
            with self._writing:
                state = self._state = _flushed(self._state, TAIL_ROWS_MAX)
        return state

    def newest(self, hi: int, lo: int, *, below: int | None = None) -> Iterator[int]:
        """The offsets below ``below`` that have this fingerprint, newest first."""
        state, tabled = self._searchable(), self._tabled
        if tabled[0] is not state.runs:
            tabled = self._tabled = _tabled(state.runs)
        key, low = np.uint64(hi), np.uint64(lo)
        offset = state.end if below is None else below
        while True:
            offset = int(
                runs.newest_offset(state.tail, state.tail_base, state.end, tabled[1], key, low, offset)
            )
            if offset < 0:
                return
            yield offset

    def newest_many(self, hi: U64, lo: NDArray[np.uint32], *, below: int | None = None) -> NDArray[np.int64]:
        """The newest offset below ``below`` of each fingerprint, -1 where there is none.

        *Shape*: as ``hi`` and ``lo``.
        """
        state = self._searchable()
        hi, lo = aligned(hi, np.uint64), aligned(lo, np.uint32)
        found = np.full(len(hi), -1, np.int64)
        used = min(_limit(state, below), state.end) - state.tail_base
        if used > 0 and len(hi) <= _SCANS_MAX:
            for i in range(len(hi)):
                row = int(runs.newest_in_tail(state.tail, hi[i], np.uint64(lo[i]), used))
                found[i] = state.tail_base + row if row >= 0 else -1
        elif used > 0:
            runs.newest_many_in_run(_sorted(state.tail, used), hi, lo, used, state.tail_base, found)
        for run in reversed(state.runs):
            runs.newest_many_in_run(run.rows, hi, lo, _limit(state, below, run), run.base, found)
        return found

    def pieces(self, start: int, end: int) -> "list[KeyRows]":
        """The rows of the offsets in ``[start, end)``, as sorted pieces that follow one another.

        *Shape*: blocks of the index itself where they lie within the range: not to be written to.
        *Errors*: InvariantBroken when the range is not within ``[self.start, self.end)`` or passes 2^31 rows.
        """
        state = self._state
        if not (state.start <= start <= end <= state.end and end - start <= RUN_ROWS_MAX):
            raise InvariantBroken(f"active index of [{state.start}, {state.end}): asked for [{start}, {end})")
        parts = [run for run in state.runs if run.base < end and run.end > start]
        if state.tail_base < end:
            used = state.end - state.tail_base
            parts.append(_Run(state.tail_base, state.end, _sorted(state.tail, used)))
        cuts = [_cut(run, max(start, run.base), min(end, run.end)) for run in parts]
        return [KeyRows(run.base, run.end, run.rows[0], run.rows[1]) for run in cuts]

    def drop_before(self, offset: int) -> None:
        """Forget what is below ``offset`` (clamped to ``end``)."""
        with self._writing:
            state = self._state
            offset = min(offset, state.end)
            if offset > state.start:
                self._state = _between(state, offset, state.end)

    def truncate(self, offset: int) -> None:
        """Forget ``offset`` and all above; the next row appended gets this offset (clamped to ``start``)."""
        with self._writing:
            state = self._state
            offset = max(offset, state.start)
            if offset < state.end:
                self._state = _between(state, state.start, offset)


def ascending(pieces: Sequence[KeyRows]) -> Iterator[tuple[U64, U64]]:
    """(hi, word) of neighbouring pieces in key index order, in portions; rows count from the first one's base.

    About ``PORTION_ROWS`` at a time, so that merging takes no second copy of all of them.
    """
    if not pieces:
        return
    longest = max(pieces, key=lambda piece: len(piece.hi))
    fences = longest.hi[PORTION_ROWS::PORTION_ROWS]
    ends = [[0, *np.searchsorted(piece.hi, fences).tolist(), len(piece.hi)] for piece in pieces]
    for portion in range(len(fences) + 1):
        parts = []
        for piece, end in zip(pieces, ends, strict=True):
            rows = slice(end[portion], end[portion + 1])
            parts.append(_Run(piece.base, piece.end, np.stack((piece.hi[rows], piece.word[rows]))))
        whole = _joined(parts)
        yield whole[0], whole[1]


def _joined(parts: list[_Run]) -> U64:
    """The rows of neighbouring runs in key index order."""
    while len(parts) > 1:
        # The two neighbours with the fewest rows: long runs are moved as seldom as possible.
        sizes = [run.rows.shape[1] + after.rows.shape[1] for run, after in itertools.pairwise(parts)]
        at = sizes.index(min(sizes))
        parts[at : at + 2] = [_merged(parts[at], parts[at + 1])]
    return parts[0].rows


def _tabled(held: tuple[_Run, ...]) -> tuple[tuple[_Run, ...], I64]:
    """Runs, and the table of them that ``runs.newest_offset`` reads."""
    rows = [(run.rows.ctypes.data, run.base, run.end) for run in held]
    return held, np.array(rows, np.int64).reshape(len(rows), 3)


def _limit(state: _State, below: int | None, run: _Run | None = None) -> int:
    """``below`` as an offset within the state, or as a row within the run."""
    limit = state.end if below is None else min(below, state.end)
    return limit if run is None else min(limit, run.end) - run.base


def _sorted(tail: U64, used: int) -> U64:
    """The tail's first columns as a run."""
    return sorted_rows(tail[0, :used], tail[1, :used])


def _flushed(state: _State, rows_max: int) -> _State:
    """The state without a tail that has ``rows_max`` rows: that becomes a run."""
    used = state.end - state.tail_base
    if used < rows_max:
        return state
    run = _Run(state.tail_base, state.end, _sorted(state.tail, used))
    return _State(state.start, _pushed(state.runs, run), state.end, _NO_ROWS, state.end)


def _rows_max(state: _State) -> int:
    """How many rows the tail gets before it becomes a run."""
    return BULK_ROWS_MAX if state.tail.shape[1] > TAIL_ROWS_MAX else TAIL_ROWS_MAX


def _with_room(state: _State, more: int) -> _State:
    """The state with at least one free column in its tail; a full block becomes a bigger one, or a run."""
    if state.end - state.tail_base < state.tail.shape[1]:
        return state
    state = _flushed(state, _rows_max(state))
    used, capacity = state.end - state.tail_base, state.tail.shape[1]
    wanted = max(TAIL_ROWS_MIN, 2 * capacity, 1 << (used + more - 1).bit_length())
    if more <= TAIL_ROWS_MAX >= capacity:
        wanted = TAIL_ROWS_MAX if state.runs else min(wanted, TAIL_ROWS_MAX)
    tail = np.empty((2, min(wanted, BULK_ROWS_MAX)), np.uint64)
    tail[:, :used] = state.tail[:, :used]
    return state._replace(tail=tail)


def _pushed(held: tuple[_Run, ...], run: _Run) -> tuple[_Run, ...]:
    """The runs with one more; merged until each is more than twice as long as the next, or long enough."""
    while held:
        last, rows = held[-1], run.end - held[-1].base
        if last.end - last.base > 2 * (run.end - run.base) or rows > RUN_ROWS_MAX:
            break
        if rows > BULK_ROWS_MAX and len(held) < RUNS_MAX:
            break
        held, run = held[:-1], _merged(last, run)
    return (*held, run)


def _merged(older: _Run, newer: _Run) -> _Run:
    return _Run(older.base, newer.end, runs.merged(older.rows, 0, newer.rows, newer.base - older.base))


def _cut(run: _Run, start: int, end: int) -> _Run:
    """The part of a run in the offsets ``[start, end)``, which lies within it."""
    if (start, end) == (run.base, run.end):
        return run
    return _Run(start, end, runs.cut(run.rows, start - run.base, end - run.base))


def _between(state: _State, start: int, end: int) -> _State:
    """The state without what is outside of ``[start, end)``, which lies within it."""
    kept = tuple(
        _cut(run, max(start, run.base), min(end, run.end))
        for run in state.runs
        if run.base < end and run.end > start
    )
    first, last = min(max(start, state.tail_base), end), end
    if first >= last:
        return _State(start, kept, end, _NO_ROWS, end)
    # Whatever stays of the tail is copied: readers of the old state still look at the old block.
    rows = np.arange(last - first, dtype=np.uint64) << np.uint64(1)
    tail = np.empty((2, max(TAIL_ROWS_MIN, last - first)), np.uint64)
    columns = slice(first - state.tail_base, last - state.tail_base)
    tail[0, : last - first] = state.tail[0, columns]
    tail[1, : last - first] = state.tail[1, columns] & np.uint64(0xFFFFFFFF00000001) | rows
    return _State(start, kept, first, tail, end)
