"""Rows that are wanted one here, one there: read together, a call for each file in place of three for each row.

Only of batches whose keys all have one length, and whose values do: where a row lies is a product then.
"""

from typing import NamedTuple, Protocol

import numpy as np

from firn.errors import Corrupt
from firn_node.compaction.answers import I64, Answers, Wanted
from firn_node.disk import gather
from firn_node.filecache import FileRange
from firn_node.kernels.taking import AGAIN, NONE, same_keys

_BYTES_AT_ONCE = 1 << 20  # of values: then it is looked again whether the answer is full
_ROWS_AT_ONCE = 4096


class Even(NamedTuple):
    """Where the rows of an even batch lie, from its first byte on; ``deltas_at`` is -1 when offsets are dense."""

    keys_at: int
    key_size: int
    values_at: int
    value_size: int  # -1: tombstones
    stamps_at: int
    deltas_at: int
    base: int


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
        start = found[0].start + position - found[1]
        found[2].extend(
            [(start, *even, row, pick) for row, pick in zip(rows.tolist(), picks.tolist(), strict=True)]
        )
        self._count += len(rows)
        self._bytes += len(rows) * max(even.value_size, 0)
        if self._bytes >= _BYTES_AT_ONCE or self._count >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Answer what is left. Whatever cannot be read, or has another key, is AGAIN."""
        try:
            for part, _, rows in self._files.values():
                self._take(part, np.array(rows, np.int64))
        finally:
            self._release()

    def _take(self, part: FileRange, table: I64) -> None:
        wanted, answers = self.wanted, self.answers
        picks = table[:, -1]
        is_fit = wanted.starts[picks + 1] - wanted.starts[picks] == table[:, 2]
        if not is_fit.all():
            answers.lengths[picks[~is_fit]] = AGAIN
            table = table[is_fit]
        start, keys_at, key_size, values_at, value_size, stamps_at, deltas_at, base, row, picks = table.T
        sparse = np.flatnonzero(deltas_at >= 0)
        value_bytes = np.maximum(value_size, 0)
        places = [
            start + keys_at + row * key_size, start + stamps_at + 8 * row,
            (start + deltas_at + 4 * row)[sparse], start + values_at + row * value_bytes,
        ]  # fmt: skip
        lengths = [key_size, np.full(len(row), 8), np.full(len(sparse), 4), value_bytes]
        data = gather(part.lease.file, np.concatenate(places), np.concatenate(lengths))
        if data is None:
            answers.lengths[picks] = AGAIN
            return
        keys, stamps, deltas, values = np.split(data, np.cumsum([int(n.sum()) for n in lengths])[:-1])
        offsets = base + row
        if len(sparse):
            offsets[sparse] = base[sparse] + np.frombuffer(deltas.tobytes(), "<u4")
        first = answers.add_values(values)
        answers.offsets[picks] = offsets
        answers.timestamps[picks] = np.frombuffer(stamps.tobytes(), "<i8")
        answers.starts[picks] = first + np.cumsum(value_bytes) - value_bytes
        is_same = np.empty(len(picks), np.bool_)
        same_keys(keys, wanted.keys, wanted.starts, np.ascontiguousarray(picks), is_same)
        answers.lengths[picks] = np.where(is_same, np.where(value_size >= 0, value_size, NONE), AGAIN)

    def _release(self) -> None:
        files, self._files, self._count, self._bytes = self._files, {}, 0, 0
        for part, _, _ in files.values():
            part.lease.release()
