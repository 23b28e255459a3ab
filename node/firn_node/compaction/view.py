"""One generation of a compacted log, for reading: its segments with their masks.

Invariants: a view never changes; its files stay as long as it is pinned; a masked row is served to nobody.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.batch import HEADER_BYTES
from firn.errors import Corrupt
from firn.wire import mask_block
from firn_node.compaction import mask as masks
from firn_node.compaction.answers import I64, Answers, FoundRow, Wanted
from firn_node.compaction.keyindex import newest_rows
from firn_node.compaction.manifest import CleanSegment, Manifest
from firn_node.compaction.rows import by_batch
from firn_node.compaction.segment import SegmentReader
from firn_node.compaction.taking import Taking
from firn_node.disk import read_file
from firn_node.filecache import FileCache, FileRange
from firn_node.kernels.taking import AGAIN

Part = bytes | FileRange


class SegmentView:
    """A clean segment with the mask of one generation, loaded when first needed."""

    def __init__(
        self, info: CleanSegment, reader: SegmentReader, load_mask: Callable[[CleanSegment], masks.Bits]
    ) -> None:
        self.info = info
        self.reader = reader
        self._load_mask = load_mask
        self._mask: masks.Bits | None = None
        self._masked_rows: NDArray[np.int64] | None = None

    @property
    def mask(self) -> masks.Bits | None:
        """The bits, or None when no row is masked."""
        if self.info.mask is None:
            return None
        if self._mask is None:
            self._mask = self._load_mask(self.info)
        return self._mask

    def is_masked(self, row: int) -> bool:
        bits = self.mask
        return bits is not None and bool(bits[row >> 3] >> (row & 7) & 1)

    @property
    def masked_rows(self) -> NDArray[np.int64]:
        """The number of masked rows of each batch."""
        if self._masked_rows is None:
            batches = self.reader.batches
            bits = self.mask
            if bits is None:
                self._masked_rows = np.zeros(len(batches), np.int64)
            else:
                before = np.zeros(self.info.rows + 1, np.int32)
                np.cumsum(masks.rows_of(bits, 0, self.info.rows), out=before[1:])
                ends = batches["first_row"].astype(np.int64) + batches["rows"]
                self._masked_rows = (before[ends] - before[batches["first_row"]]).astype(np.int64)
        return self._masked_rows

    def served(self, offset: int) -> NDArray[np.int64]:
        """Numbers of the batches that have an unmasked row and end at or past ``offset``."""
        batches = self.reader.batches
        first = int(np.searchsorted(batches["last_offset"], offset, "left"))
        found = np.flatnonzero(self.masked_rows[first:] < batches["rows"][first:]) + first
        return found.astype(np.int64)

    def mask_of(self, number: int) -> bytes:
        """The mask block of a batch with masked rows."""
        bits, entry = self.mask, self.reader.batches[number]
        assert bits is not None
        first = int(entry["first_row"])
        return mask_block(masks.rows_of(bits, first, first + int(entry["rows"])))

    def find(self, key: bytes, hi: int, lo: int) -> FoundRow | None:
        """The newest unmasked row whose real key is ``key``; tombstones count."""
        for row in self.reader.keys.find(hi, lo):
            if not self.is_masked(row) and (found := self._row(row, key)) is not None:
                return found
        return None

    def find_many(self, wanted: Wanted, picks: I64, answers: Answers) -> I64:
        """As ``find``, for many keys: a block and a batch are taken once for all that need them.

        What the newest row alone does not decide is AGAIN: rows in several blocks, masked rows, other keys' rows.
        *Shape*: the picks that have no row here come back.
        """
        rows = newest_rows(self.reader.keys, wanted.hi[picks], wanted.lo[picks])
        left: I64 = picks[rows == -1]
        answers.lengths[picks[rows == -2]] = AGAIN
        rows, picks = rows[rows >= 0], picks[rows >= 0]
        bits = self.mask
        if bits is not None:
            masked = (bits[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).astype(np.bool_)
            answers.lengths[picks[masked]] = AGAIN
            rows, picks = rows[~masked], picks[~masked]
        order = np.argsort(rows)
        rows, picks = rows[order], picks[order]
        numbers = np.searchsorted(self.reader.first_rows, rows, "right") - 1
        rows = rows - self.reader.first_rows[numbers]
        with Taking(wanted, answers) as taking:
            is_left = taking.known(self.reader, self.reader.places, numbers, rows, picks)
            for number, within, some in by_batch(numbers[is_left], rows[is_left], picks[is_left]):
                self.reader.rows(number).take(within, some, taking)
            taking.flush()
        return left

    def _row(self, row: int, key: bytes) -> FoundRow | None:
        first_rows = self.reader.first_rows
        number = bisect_right(first_rows.data, row) - 1
        return self.reader.rows_of_one(number).row(row - int(first_rows[number]), key)


class View:
    """What one manifest serves."""

    def __init__(self, manifest: Manifest, segments: Sequence[SegmentView]) -> None:
        self.manifest = manifest
        self.segments = tuple(segments)

    def read(self, offset: int, max_bytes: int, *, keys_only: bool) -> tuple[list[Part], int]:
        """Whole batches from ``offset`` on, and the offset to go on at.

        *Shape*: at least one batch, however large, when one is left. Runs of unmasked batches are one
        FileRange; a batch with some masked rows follows its mask block; fully masked ones are left out.
        """
        parts = _Parts(max_bytes, keys_only=keys_only)
        try:
            for segment in self.segments:
                if segment.info.end <= offset:
                    continue
                batches, masked = segment.reader.batches, segment.masked_rows
                for number in segment.served(offset).tolist():
                    if not parts.add(segment, number, batches[number], is_masked=bool(masked[number])):
                        parts.flush()
                        return parts.found, max(offset, int(batches[number]["first_offset"]))
                parts.flush()
        except BaseException:
            parts.release()
            raise
        return parts.found, max(offset, self.manifest.horizon)

    def find(self, key: bytes, hi: int, lo: int) -> FoundRow | None:
        for segment in reversed(self.segments):
            if (found := segment.find(key, hi, lo)) is not None:
                return found
        return None

    def find_many(self, wanted: Wanted, picks: I64, answers: Answers) -> None:
        """Answers the picks of keys that have a row; AGAIN where ``find`` has to tell."""
        for segment in reversed(self.segments):
            if not len(picks):
                return
            picks = segment.find_many(wanted, picks, answers)


class _Parts:
    """Puts a response together: joins neighbouring batches of a file into one range."""

    def __init__(self, max_bytes: int, *, keys_only: bool) -> None:
        self.found: list[Part] = []
        self._left = max_bytes
        self._keys_only = keys_only
        self._run: tuple[SegmentReader, int, int] | None = None  # reader, start, end
        self._count = 0

    def add(self, segment: SegmentView, number: int, entry: Any, *, is_masked: bool) -> bool:
        """False when the batch does not fit any more; nothing is added then."""
        position = int(entry["position"])
        size = HEADER_BYTES + int(entry["keys_bytes"]) if self._keys_only else int(entry["size"])
        block = segment.mask_of(number) if is_masked else b""
        if self._count and size + len(block) > self._left:
            return False
        self._count += 1
        self._left -= size + len(block)
        if block:
            self.flush()
            self.found.append(block)
        if self._run is not None and self._run[0] is segment.reader and self._run[2] == position:
            self._run = (segment.reader, self._run[1], position + size)
        else:
            self.flush()
            self._run = (segment.reader, position, position + size)
        return True

    def flush(self) -> None:
        if self._run is not None:
            reader, start, end = self._run
            self._run = None
            self.found.append(reader.range(start, end - start))

    def release(self) -> None:
        for part in self.found:
            if not isinstance(part, bytes):
                part.lease.release()
        self.found = []


def load_mask(cache: FileCache, path: str, info: CleanSegment) -> masks.Bits:
    """The bits of a mask file. *Errors*: Corrupt; a file that is missing counts as damaged."""
    try:
        data = read_file(cache.disk, path)
    except FileNotFoundError as error:
        raise Corrupt(f"{path}: the mask is missing", file=path, position=0) from error
    return masks.decode(data, file=path, rows=info.rows, masked=info.masked)
