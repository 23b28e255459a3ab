"""Rows that are wanted one here, one there: read together, a call for each file in place of three for each row.

Only of batches whose keys all have one length, and whose values do: where a row lies is a product then. Where such
batches lie is kept in a table, so that the rows of all that are known are taken without a step for each batch.
"""

from bisect import bisect_right
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from firn.errors import Corrupt, OffsetExpired
from firn.values import LATER
from firn_node.compaction.answers import I64, Answers, Wanted
from firn_node.disk import gather
from firn_node.filecache import FileRange
from firn_node.kernels.jit import aligned
from firn_node.kernels.taking import AGAIN, ranges_of_rows, take_ranges

_BYTES_AT_ONCE = 1 << 20  # of values: then it is looked again whether the answer is full
_ROWS_AT_ONCE = 4096
# One row by itself costs about as much as so many bytes of the batch read and walked over.
ROW_COSTS_BYTES = 16 << 10


class Even(NamedTuple):
    """Where the rows of an even batch lie, from its first byte on; ``deltas_at`` is -1 when offsets are dense."""

    keys_at: int
    key_size: int
    values_at: int
    value_size: int  # -1: tombstones
    stamps_at: int
    deltas_at: int
    base: int


# Of a batch in a table: position, size, and its ``Even``. A size of 0: nothing is known of it.
PLACE_COLUMNS = 2 + len(Even._fields)


class Source(Protocol):
    """Where batches lie: a segment file, or the files of the commit log."""

    def range(self, position: int, size: int) -> FileRange:
        """So many bytes of a file, leased. *Errors*: OffsetExpired."""
        ...

    def file_of(self, position: int) -> int:
        """The first position of the file that holds ``position``."""
        ...

    def fault(self, position: int, what: str) -> Corrupt: ...


class Taking:
    """Takes rows of batches of one source into answers. To be flushed at the end: until then files are leased."""

    def __init__(self, wanted: Wanted, answers: Answers) -> None:
        self.wanted = wanted
        self.answers = answers
        self._files: dict[int, tuple[FileRange, int, list[tuple[int, ...]]]] = {}  # range, its position, rows
        self._count = self._bytes = 0
        self._room = np.empty(0, np.uint8)

    def __enter__(self) -> "Taking":
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def scattered(self, source: Source, position: int, size: int, even: Even, rows: I64, picks: I64) -> None:
        """A few rows of the batch at ``position``. *Errors*: OffsetExpired."""
        file = source.file_of(position)
        found = self._files.get(file)
        if found is None:
            found = self._files[file] = (source.range(position, size), position, [])
        found[2].extend(
            [
                (position, size, *even, row, pick)
                for row, pick in zip(rows.tolist(), picks.tolist(), strict=True)
            ]
        )
        self._count += len(rows)
        self._bytes += len(rows) * max(even.value_size, 0)
        if self._bytes >= _BYTES_AT_ONCE or self._count >= _ROWS_AT_ONCE:
            self.flush()

    def known(self, source: Source, places: I64, numbers: I64, rows: I64, picks: I64) -> NDArray[np.bool_]:
        """Answers those rows of batches ``numbers`` (ascending) that a table knows and that are best read one by one.

        *Shape*: True where the row was left alone, for ``BatchRows.take``. What lies in a file that has expired
        is left alone, too. ``places`` is the table: a row of ``PLACE_COLUMNS`` a batch.
        """
        counts = np.searchsorted(numbers, numbers, "right") - np.searchsorted(numbers, numbers, "left")
        is_left: NDArray[np.bool_] = counts * ROW_COSTS_BYTES >= places[numbers, 1]
        few = np.flatnonzero(~is_left)
        positions: list[int] = places[numbers[few], 0].tolist()
        at = 0
        while at < len(few):
            end = bisect_right(positions, source.file_of(positions[at]), at, key=source.file_of)
            some = few[at:end]
            try:
                part = source.range(positions[at], int(places[numbers[some[0]], 1]))
            except OffsetExpired:
                is_left[some] = True
            else:
                with part.lease:
                    self._take_all(
                        part, part.start - positions[at], places, numbers[some], rows[some], picks[some]
                    )
            at = end
        return is_left

    def _take_all(
        self, part: FileRange, shift: int, places: I64, numbers: I64, rows: I64, picks: I64
    ) -> None:  # fmt: skip
        """As ``_take``, of any number of rows; LATER once the answer is full."""
        largest = int(places[numbers, 2 + Even._fields.index("value_size")].max())
        step = min(_ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // max(1, largest)))
        for at in range(0, len(rows), step):
            if self.answers.is_full:
                self.answers.lengths[picks[at:]] = LATER
                return
            some = slice(at, at + step)
            self._take(part, shift, places, numbers[some], rows[some], picks[some])

    def whole(self, source: Source, position: int, size: int) -> NDArray[np.uint8]:
        """The bytes of a batch, until the next one is asked for. *Errors*: Corrupt, OffsetExpired."""
        if len(self._room) < size:
            self._room = np.empty(size, np.uint8)
        part = source.range(position, size)
        with part.lease:
            found = gather(part.lease.file, np.array([part.start]), np.array([size]), self._room[:size])
        if found is None:
            raise source.fault(position, f"expected {size} bytes")
        return found

    def flush(self) -> None:
        """Answer what is left. Whatever cannot be read, or has another key, is AGAIN."""
        try:
            for part, position, found in self._files.values():
                table = np.array(found, np.int64)
                places = np.ascontiguousarray(table[:, :PLACE_COLUMNS])
                shift = part.start - position
                self._take(part, shift, places, np.arange(len(table)), table[:, -2], table[:, -1])
        finally:
            self._release()

    def _take(
        self, part: FileRange, shift: int, places: I64, numbers: I64, rows: I64, picks: I64
    ) -> None:  # fmt: skip
        """Answers rows of batches ``places[numbers]``, whose positions lie ``shift`` further in the file of ``part``."""
        wanted, answers = self.wanted, self.answers
        of_rows = (places, numbers, aligned(rows, np.int64), aligned(picks, np.int64))
        positions, sizes = np.empty(4 * len(rows), np.int64), np.empty(4 * len(rows), np.int64)
        n = int(ranges_of_rows(*of_rows, wanted.starts, shift, answers.lengths, positions, sizes))
        data = gather(part.lease.file, positions[:n], sizes[:n])
        if data is None:
            answers.lengths[picks] = AGAIN
            return
        answers.make_room(len(data))
        answers.used = int(
            take_ranges(
                *of_rows, wanted.keys, wanted.starts, data,
                answers.offsets, answers.timestamps, answers.lengths, answers.starts, answers.arena, answers.used,
            )
        )  # fmt: skip

    def _release(self) -> None:
        files, self._files, self._count, self._bytes = self._files, {}, 0, 0
        for part, _, _ in files.values():
            part.lease.release()
