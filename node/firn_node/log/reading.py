"""Reading the commit log: any thread, no lock, whole batches by position.

Invariants: readers take one reference to an immutable ``View`` and so see one state of the log; they never see
past its end; they open segments through the ``FileCache``, by leases, so that retention waits for them.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from firn.batch import HEADER_BYTES
from firn.errors import BadOffset, Corrupt, OffsetExpired
from firn_node.filecache import FileCache, FileRange
from firn_node.log.segment import Segment
from firn_node.log.walk import announced_size, headers


class View(NamedTuple):
    """What readers see: replaced as a whole."""

    starts: tuple[int, ...]
    segments: tuple[Segment, ...]
    end: int

    def index_of(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def end_of(self, index: int) -> int:
        return self.starts[index + 1] if index + 1 < len(self.starts) else self.end


class LogReader:
    """The reading half of ``CommitLog``, which alone replaces ``_view``."""

    def __init__(self, cache: FileCache) -> None:
        self._cache = cache
        self._view = View((), (), 0)

    @property
    def start(self) -> int:
        return self._view.starts[0]

    @property
    def written_end(self) -> int:
        return self._view.end

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each segment starts, oldest first."""
        return self._view.starts

    def extents(self) -> list[tuple[int, int]]:
        """(start, end) of all segments, oldest first; the last one is active. No file is touched."""
        view = self._view
        return [(start, view.end_of(index)) for index, start in enumerate(view.starts)]

    def segment_start(self, position: int) -> int:
        """Where the segment that holds ``position`` starts; a position below ``start`` is the first segment's."""
        view = self._view
        return view.starts[max(view.index_of(position), 0)]

    def range(self, position: int, size: int) -> FileRange:
        """Bytes at ``position``, leased: as many of ``size`` as its segment holds; the taker releases.

        *Errors*: OffsetExpired below ``start``; BadOffset past the written end.
        """
        view = self._view
        if position < view.starts[0]:
            raise self._expired(position)
        if position + size > view.end or size <= 0:
            raise BadOffset(
                f"commit log: [{position}, {position + size}) is not within [{view.starts[0]}, {view.end})"
            )
        index = view.index_of(position)
        segment = view.segments[index]
        try:
            lease = self._cache.lease(segment.path)
        except FileNotFoundError:
            if position < self.start:
                raise self._expired(position) from None
            raise Corrupt(
                f"{segment.path}: expected a segment file, found none", file=segment.path, position=position
            ) from None
        return FileRange(lease, segment.byte_of(position), min(size, view.end_of(index) - position))

    def read(self, position: int, size: int) -> bytes:
        """The bytes ``[position, position + size)``. *Errors*: as ``range``; Corrupt for a file cut short."""
        parts: list[bytes] = []
        while size > 0:
            piece = self.range(position, size)
            try:
                data = piece.read()
                path = piece.lease.path
            finally:
                piece.lease.release()
            if len(data) != piece.size:
                raise Corrupt(
                    f"{path} at position {position}: expected {piece.size} bytes, found {len(data)}",
                    file=path, position=position,
                )  # fmt: skip
            parts.append(data)
            position += piece.size
            size -= piece.size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def ranges(self, position: int, size: int) -> list[FileRange]:
        """The bytes ``[position, position + size)`` as one leased range for each segment that they touch."""
        found: list[FileRange] = []
        try:
            while size > 0:
                piece = self.range(position, size)
                found.append(piece)
                position, size = position + piece.size, size - piece.size
        except BaseException:
            for piece in found:
                piece.lease.release()
            raise
        return found

    def scan(self, start: int, end: int, *, chunk: int = 4 << 20) -> Iterator[tuple[int, bytes]]:
        """(position, whole batches) for all batches that lie within ``[start, end)``, in order.

        *Shape*: at most ``chunk`` bytes a time, or one longer batch; never across segments. ``start`` is
        where a batch starts. *Errors*: Corrupt where no batch header is; CRCs are the taker's to check.
        """
        at, want = start, chunk
        end = min(end, self.written_end)
        while at < end:
            piece = self.range(at, min(want, end - at))
            try:
                data, path = piece.read(), piece.lease.path
            finally:
                piece.lease.release()
            whole = headers(data).end
            if whole:
                yield at, data if whole == len(data) else data[:whole]
                at, want = at + whole, chunk
                continue
            size = announced_size(data)
            if end - at < HEADER_BYTES or (size is not None and at + size > end):
                return
            if size is None or len(data) < piece.size or piece.size < min(want, end - at):
                raise Corrupt(
                    f"{path} at position {at}: expected a batch, found "
                    + (f"{len(data)} bytes of the {size} announced" if size else "no batch header"),
                    file=path, position=at,
                )  # fmt: skip
            want = size

    def _expired(self, position: int) -> OffsetExpired:
        return OffsetExpired(
            f"commit log: position {position} is below the start {self.start}", log_start=self.start
        )
