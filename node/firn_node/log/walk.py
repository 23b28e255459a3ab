"""Walking whole batches by their headers alone: where they start, whose they are, when they were appended.

``headers`` looks at magic and size only: bytes below the verified end were checked when they were written or
when the log was opened, and readers check CRCs. ``sound_bytes`` is the check of that opening.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firn.batch import HEADER_BYTES, MAGIC, Buffer
from firn.errors import Corrupt
from firn_node.disk import File
from firn_node.kernels.logwalk import sound, walk

WINDOW = 1 << 20


class Headers(NamedTuple):
    """One row a whole batch; ``end`` is the byte after the last one, 0 when there is none."""

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    topic_ids: NDArray[np.uint64]
    append_ms: NDArray[np.int64]
    end: int

    def rows(self, first: int, after: int) -> "Headers":
        """The rows ``[first, after)``, at least one."""
        starts, sizes = self.starts[first:after], self.sizes[first:after]
        end = int(starts[-1] + sizes[-1])
        return Headers(starts, sizes, self.topic_ids[first:after], self.append_ms[first:after], end)


def sound_bytes(data: Buffer) -> int:
    """Bytes of the whole batches that ``data`` begins with whose header and checksums hold."""
    return int(sound(np.frombuffer(data, np.uint8)))


_NO_I8, _NO_U8 = np.empty(0, np.int64), np.empty(0, np.uint64)


def headers(data: Buffer) -> Headers:
    """The headers of the whole batches at the beginning of ``data``; stops at the first byte that is none."""
    view = np.frombuffer(data, np.uint8)
    count = int(walk(view, _NO_I8, _NO_I8, _NO_U8, _NO_I8))
    starts, sizes, stamps = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    topics = np.empty(count, np.uint64)
    if count:
        walk(view, starts, sizes, topics, stamps)
    return Headers(starts, sizes, topics, stamps, int(starts[-1] + sizes[-1]) if count else 0)


def announced_size(data: bytes, at: int = 0) -> int | None:
    """The size of the batch whose header is at byte ``at``; None when there is no plausible header."""
    if len(data) - at < HEADER_BYTES or int.from_bytes(data[at : at + 4], "little") != MAGIC:
        return None
    size = int.from_bytes(data[at + 12 : at + 16], "little")
    return size if size >= HEADER_BYTES and size % 8 == 0 else None


class TopicBytes(NamedTuple):
    bytes: int
    newest_append_ms: int


def add_topics(topics: dict[int, TopicBytes], found: Headers) -> None:
    """Add the bytes and newest append times of ``found`` to ``topics``: a step per topic, not per batch."""
    if not len(found.starts):
        return
    if (found.topic_ids == found.topic_ids[0]).all():
        _add(topics, int(found.topic_ids[0]), int(found.sizes.sum()), int(found.append_ms.max()))
        return
    ids, rows = np.unique(found.topic_ids, return_inverse=True)
    sums = np.zeros(len(ids), np.int64)
    np.add.at(sums, rows, found.sizes)
    newest = np.full(len(ids), np.iinfo(np.int64).min)
    np.maximum.at(newest, rows, found.append_ms)
    for topic_id, size, stamp in zip(ids.tolist(), sums.tolist(), newest.tolist(), strict=True):
        _add(topics, topic_id, size, stamp)


def _add(topics: dict[int, TopicBytes], topic_id: int, size: int, stamp: int) -> None:
    before = topics.get(topic_id)
    if before is not None:
        size, stamp = before.bytes + size, max(before.newest_append_ms, stamp)
    topics[topic_id] = TopicBytes(size, stamp)


def walk_file(
    file: File, start: int, end: int, *, first_byte: int, window: int = WINDOW
) -> Iterator[tuple[int, Headers]]:
    """(position, headers of the batches that lie one after another from there), for all of ``[start, end)``.

    ``first_byte`` is where in the file ``start`` is. Values larger than the window are skipped, not read.
    Errors: Corrupt where no batch header is, or where a batch would cross ``end``.
    """
    at = start
    while at < end:
        data = file.pread(min(window, end - at), first_byte + at - start)
        found = headers(data)
        if found.end:
            yield at, found
            at += found.end
            if at >= end or len(data) - found.end < HEADER_BYTES:
                continue
        size = announced_size(data, found.end)
        if size is None or at + size > end:
            what = f"batch of {size} bytes" if size else "no batch header"
            raise Corrupt(
                f"{file.path} at position {at}: expected a whole batch before position {end}, found {what}",
                file=file.path, position=at,
            )  # fmt: skip
        yield at, _one(data[found.end : found.end + HEADER_BYTES], size)
        at += size


def _one(head: bytes, size: int) -> Headers:
    topic_id, stamp = (
        int.from_bytes(head[32:40], "little"),
        int.from_bytes(head[96:104], "little", signed=True),
    )
    return Headers(
        np.zeros(1, np.int64), np.array([size]), np.array([topic_id], np.uint64), np.array([stamp]), size
    )
