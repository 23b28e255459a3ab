"""A reader's place in one partition: what to ask for next, what to deliver, when to stop. No I/O.

Invariants:

- the offset never goes back; a record is delivered at most once, and none that is masked, below the offset asked
  for, or of another tag;
- ``since`` is the least horizon seen; an answer whose ``tombstone_floor`` passes ``max(offset, since)`` may hide a
  value's tombstone, and ends the reader with SnapshotExpired (the broker checks the same; so does this, because
  the next answer may come from another replica);
- ``until_end`` stops at ``max(end at start, every horizon seen)``; gaps cannot hold it, because every answer, an
  empty one too, has a ``next_offset`` past what is gone;
- both payload CRCs of every batch are checked here, with topic, partition and order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, Buffer
from firn.errors import InvariantBroken, MalformedBatch, SnapshotExpired
from firn.record import Record, collector_at_rest, record_list, rows_of
from firn.wire import items


@dataclass(frozen=True, slots=True)
class PageMeta:
    """What comes with every answer of a bulk read."""

    topic_id: int
    next_offset: int
    end: int
    horizon: int
    tombstone_floor: int
    generation: int = 0

    @classmethod
    def of_stream(cls, meta: Mapping[str, Any]) -> "PageMeta":
        """From a DATA frame. Errors: InvariantBroken."""
        try:
            numbers = [
                int(meta[n])
                for n in ("topic_id", "next_offset", "end", "horizon", "tombstone_floor", "generation")
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise InvariantBroken(f"the broker's answer to a read lacks {error}: {dict(meta)!r}") from None
        return cls(*numbers)

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> "PageMeta":
        """From the headers of an HTTP read. Errors: InvariantBroken."""
        names = ("Topic-Id", "Next-Offset", "End", "Horizon", "Tombstone-Floor", "Generation")
        try:
            return cls(*(int(headers[f"Firn-{name}"]) for name in names))
        except (KeyError, ValueError) as error:
            raise InvariantBroken(f"the broker's answer to a read lacks the header {error}") from None


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch and which of its rows are to be delivered (None: all)."""

    batch: Batch
    keep: NDArray[np.bool_] | None
    place: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return self.batch.header.records if self.keep is None else int(self.keep.sum())

    def records(self, topic: str) -> list[Record]:
        return record_list(self.batch, topic, keep=self.keep, place=self.place)

    def each_record(self, topic: str) -> Iterator[Record]:
        return rows_of(self.batch, topic, keep=self.keep, place=self.place)


@dataclass(frozen=True, slots=True)
class Page:
    """What one answer to a request from ``start`` delivers; behind it the reader is at ``next_offset``."""

    partition: int
    start: int
    pieces: list[Piece]
    next_offset: int
    since: int | None
    size: int
    horizon: int  # of the state that this answer is of

    def records(self, topic: str) -> list[Record]:
        with collector_at_rest():
            if len(self.pieces) == 1:
                return self.pieces[0].records(topic)
            return [record for piece in self.pieces for record in piece.each_record(topic)]

    def each_record(self, topic: str) -> Iterator[Record]:
        """The same one by one: decoded now, each made when it is asked for. Errors: MalformedBatch, at the call."""
        return chain.from_iterable([piece.each_record(topic) for piece in self.pieces])


class Cursor:
    """One partition of one reader."""

    def __init__(
        self,
        partition: int,
        *,
        offset: int = 0,
        since: int | None = None,
        view: str = "compacted",
        tag: str | None = None,
        queue: str | None = None,
        target: int | None = None,
        topic_id: int | None = None,
        keys_only: bool = False,
    ) -> None:
        """``target``: where ``until_end`` stops if that is fixed (a snapshot's end). ``keys_only``: without values."""
        self.partition = partition
        self.offset = offset
        self.since = since
        self.view = view
        self.tag = tag
        self.queue = queue
        self.topic_id = topic_id
        self.keys_only = keys_only
        self.end: int | None = None
        self._fixed_target = target
        self._target = target
        self._has_end = False  # whether the end at the start is known
        self._is_caught_up = target is not None and offset >= target

    @property
    def is_caught_up(self) -> bool:
        """Whether everything up to ``max(end at start, every horizon seen)`` has been passed."""
        return self._is_caught_up

    @property
    def is_behind(self) -> bool:
        """Whether the last answer showed more than has been read."""
        return self.end is None or self.offset < self.end

    def raise_target(self, target: int) -> None:
        """Nothing counts as caught up before ``target``: where a reader before this one has been."""
        self._target = max(self._target or 0, target)

    def accept(self, meta: PageMeta, data: Buffer) -> Page:
        """Take an answer to a request from ``offset``; the cursor goes on behind it.

        Errors: SnapshotExpired, MalformedBatch, InvariantBroken; the cursor then stays where it was.
        """
        self._check(meta)
        since = self.since
        if self.view == "compacted":
            since = meta.horizon if since is None else min(since, meta.horizon)
        pieces = self._pieces(meta, data)
        self.topic_id = meta.topic_id
        self.since, self.end = since, meta.end
        start, self.offset = self.offset, meta.next_offset
        if self._fixed_target is None:
            start_end = 0 if self._has_end else meta.end
            horizon = meta.horizon if self.view == "compacted" else 0
            self._target = max(self._target or 0, start_end, horizon)
            self._has_end = True
        if self._target is not None and self.offset >= self._target:
            self._is_caught_up = True
        return Page(self.partition, start, pieces, self.offset, self.since, len(data), meta.horizon)

    def _check(self, meta: PageMeta) -> None:
        if self.topic_id is not None and meta.topic_id != self.topic_id:
            raise SnapshotExpired(
                f"partition {self.partition}: the topic was deleted and created anew: start anew",
                topic_id=meta.topic_id,
            )
        if meta.next_offset < self.offset:
            raise InvariantBroken(
                f"partition {self.partition}: asked from offset {self.offset}, sent on to {meta.next_offset}"
            )
        if self.view == "compacted" and self.since is not None:
            covered = max(self.offset, self.since)
            if meta.tombstone_floor > covered:
                raise SnapshotExpired(
                    f"partition {self.partition}: tombstones below {meta.tombstone_floor} are gone, this reader has "
                    f"seen only those below {covered}: start anew",
                    tombstone_floor=meta.tombstone_floor,
                )

    def _pieces(self, meta: PageMeta, data: Buffer) -> list[Piece]:
        found: list[Piece] = []
        last = -1
        for item in items(data, keys_only=self.keys_only):
            batch, header = item.batch, item.batch.header
            batch.verify()
            if header.topic_id != meta.topic_id or header.partition != self.partition:
                raise MalformedBatch(
                    f"a batch of topic {header.topic_id} partition {header.partition} in a read of "
                    f"topic {meta.topic_id} partition {self.partition}"
                )
            if header.base_offset <= last and self.queue is None:
                raise MalformedBatch(f"a batch at offset {header.base_offset} behind one that ends at {last}")
            last = header.last_offset
            piece = self._piece(batch, item.masked, meta.next_offset)
            if piece is not None:
                found.append(piece if item.place is None else replace(piece, place=item.place))
        return found

    def _piece(self, batch: Batch, masked: NDArray[np.bool_] | None, next_offset: int) -> Piece | None:
        header = batch.header
        keep = None if masked is None else ~masked
        # A light queue counts offsets of its own; its rows come picked, by masks.
        if self.queue is None and (header.base_offset < self.offset or header.last_offset >= next_offset):
            offsets = batch.columns.offsets
            inside = (offsets >= self.offset) & (offsets < next_offset)
            keep = inside if keep is None else keep & inside
        keep = self._of_tag(batch, keep)
        if keep is None or keep.all():
            return Piece(batch, None)
        return Piece(batch, keep) if keep.any() else None

    def _of_tag(self, batch: Batch, keep: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
        if self.tag is None:
            return keep
        tagged = np.array([tag == self.tag for tag in batch.tag_list()], np.bool_)
        return tagged if keep is None else keep & tagged
