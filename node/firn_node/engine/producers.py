"""What each idempotent producer wrote last to one partition.

Invariants: sequences of one producer epoch are dense; the row remembers the last 64 dispatched batches, which is as
many as a producer may have unacknowledged, and all that are not dispatched; a row that was stored speaks of committed
batches only. A row of a newer epoch holds on to the older one until a batch of its own is dispatched: what is not
dispatched may be cut away (``without``).

Stored row: i64 last use in ms (log clock), then msgpack ``[epoch, [[sequence, base_offset, records], ...]]``. What a
newer firn adds at the end of the row, or of a batch in it, is passed over.
"""

from collections import deque
from dataclasses import dataclass, field

import msgpack

from firn.errors import Fenced, SequenceGap
from firn.limits import UNACKNOWLEDGED_BATCHES_MAX


@dataclass(slots=True)
class ProducerRow:
    epoch: int
    last_use_ms: int = 0
    batches: deque[tuple[int, int, int]] = field(default_factory=deque)
    before: "ProducerRow | None" = None  # of the epoch before

    def add(self, sequence: int, base: int, records: int, *, dispatched_end: int) -> None:
        """Remember a batch, and no more older ones than are of use."""
        batches = self.batches
        batches.append((sequence, base, records))
        if self.before is not None and batches[0][1] + batches[0][2] <= dispatched_end:
            self.before = None
        while len(batches) > UNACKNOWLEDGED_BATCHES_MAX:
            _, base, records = batches[UNACKNOWLEDGED_BATCHES_MAX]
            if base + records > dispatched_end:
                return
            batches.popleft()

    def next_sequence(self) -> int:
        return self.batches[-1][0] + 1 if self.batches else 0

    @property
    def end(self) -> int:
        """The offset after its newest batch."""
        return self.batches[-1][1] + self.batches[-1][2] if self.batches else 0

    def without(self, end: int) -> "ProducerRow | None":
        """The row as it was before the batches that end beyond offset ``end``; None: it was not in memory."""
        while self.batches and self.end > end:
            self.batches.pop()
        if self.batches:
            return self
        return None if self.before is None else self.before.without(end)

    def pack(self, *, before: int) -> bytes | None:
        """The stored row, of batches that end at or before offset ``before``; None: of none."""
        kept = [list(b) for b in self.batches if b[1] + b[2] <= before]
        if not kept:
            return None if self.before is None else self.before.pack(before=before)
        kept = kept[-UNACKNOWLEDGED_BATCHES_MAX:]
        return self.last_use_ms.to_bytes(8, "little", signed=True) + bytes(msgpack.packb([self.epoch, kept]))


def unpack_row(data: bytes) -> ProducerRow:
    epoch, batches, *_ = msgpack.unpackb(data[8:])
    row = ProducerRow(epoch, int.from_bytes(data[:8], "little", signed=True))
    row.batches.extend((sequence, base, records) for sequence, base, records, *_ in batches)
    return row


def first_offset(row: ProducerRow | None, *, epoch: int, sequence: int) -> int | None:
    """The base offset that this sequence got before, or None when it is the next one to append.

    Errors: Fenced for an older producer epoch, SequenceGap when a batch before this one is missing (or the
    row has expired: what it wrote is unknown).
    """
    if row is None or epoch > row.epoch:
        expected = 0
    elif epoch < row.epoch:
        raise Fenced(
            f"producer epoch {epoch} is fenced: epoch {row.epoch} writes now", producer_epoch=row.epoch
        )
    else:
        expected = row.next_sequence()
        if sequence < expected:
            for known, base, _ in row.batches:
                if known == sequence:
                    return base
    if sequence != expected:
        raise SequenceGap(
            f"producer sequence {sequence}: expected {expected}; a batch before it is missing or its state has expired",
            expected=expected,
        )
    return None
