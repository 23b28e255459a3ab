"""The key rows of one file, collected in row order and given back in key index order, in bounded memory.

Rows are sorted a run at a time; full runs go to a temporary file, and come back by ranges of ``hi``, which is evenly
distributed because it is a keyed hash: each run has about the same share in a range, and all of them are sorted
together. Temporary file: each run's ``hi`` u64[], then its ``word`` u64[]; nothing reads it after a crash.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firn_node.disk import Disk, File
from firn_node.kernels.sorting import sort_key_index

U64 = NDArray[np.uint64]
RUN_ROWS = 1 << 20  # 16 MiB, and as much again while it is sorted
RANGES = 64  # a portion has RUN_ROWS rows as long as there are no more than so many runs
_CUTS = np.array([at << 58 for at in range(1, RANGES)], np.uint64)


@dataclass(frozen=True, slots=True)
class _Run:
    position: int
    rows: int
    bounds: list[int]  # where each range begins, and the last one ends


class KeyRuns:
    """``close`` it at the end, however that comes about."""

    def __init__(self, disk: Disk, path: str, *, run_rows: int = RUN_ROWS) -> None:
        self._disk = disk
        self._path = path
        self._run_rows = run_rows
        self._held: list[tuple[U64, U64]] = []
        self._held_rows = 0
        self._runs: list[_Run] = []
        self._file: File | None = None
        self._size = 0
        self.rows = 0

    def add(self, hi: U64, word: U64) -> None:
        """The next rows, which the caller does not change any more."""
        self._held.append((hi, word))
        self._held_rows += len(hi)
        self.rows += len(hi)
        if self._held_rows >= self._run_rows:
            self._spill()

    def portions(self) -> Iterator[tuple[U64, U64]]:
        """All rows, in key index order. *Errors*: OSError."""
        if not self._runs:
            if self._held:
                yield self._sorted()
            return
        if self._held:
            self._spill()
        at = 0
        while at < RANGES:
            end = at + 1
            while end < RANGES and self._rows_of(at, end + 1) <= self._run_rows:
                end += 1
            pieces = [self._piece(run, run.bounds[at], run.bounds[end]) for run in self._runs]
            yield sort_key_index(
                np.concatenate([hi for hi, _ in pieces]), np.concatenate([word for _, word in pieces])
            )
            at = end

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._disk.unlink(self._path)

    def _rows_of(self, at: int, end: int) -> int:
        return sum(run.bounds[end] - run.bounds[at] for run in self._runs)

    def _sorted(self) -> tuple[U64, U64]:
        found = sort_key_index(
            np.concatenate([hi for hi, _ in self._held]), np.concatenate([word for _, word in self._held])
        )
        self._held.clear()
        self._held_rows = 0
        return found

    def _spill(self) -> None:
        hi, word = self._sorted()
        if self._file is None:
            self._disk.unlink(self._path)
            self._file = self._disk.open(self._path, "create")
        self._file.pwrite([hi.data.cast("B"), word.data.cast("B")], self._size)
        self._runs.append(_Run(self._size, len(hi), [0, *np.searchsorted(hi, _CUTS).tolist(), len(hi)]))
        self._size += 16 * len(hi)

    def _piece(self, run: _Run, start: int, end: int) -> tuple[U64, U64]:
        return self._column(run.position, start, end), self._column(run.position + 8 * run.rows, start, end)

    def _column(self, position: int, start: int, end: int) -> U64:
        assert self._file is not None, "there are runs, so there is a file"
        return np.frombuffer(self._file.pread(8 * (end - start), position + 8 * start), np.uint64)
