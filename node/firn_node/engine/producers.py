"""What each idempotent producer wrote last to one partition.

Invariants: sequences of one producer epoch are dense; the row remembers the last 64 batches, which is as many
as a producer may have unacknowledged; a row that was stored speaks of committed batches only.

Stored row: i64 last use in ms (log clock), then msgpack ``[epoch, [[sequence, base_offset, records], ...]]``.
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
    batches: deque[tuple[int, int, int]] = field(
        default_factory=lambda: deque(maxlen=UNACKNOWLEDGED_BATCHES_MAX)
    )

    def next_sequence(self) -> int:
        return self.batches[-1][0] + 1 if self.batches else 0

    @property
    def end(self) -> int:
        """The offset after its newest batch."""
        return self.batches[-1][1] + self.batches[-1][2] if self.batches else 0

    def pack(self, *, before: int) -> bytes:
        """The stored row, of batches that end at or before offset ``before``."""
        kept = [list(b) for b in self.batches if b[1] + b[2] <= before]
        return self.last_use_ms.to_bytes(8, "little", signed=True) + bytes(msgpack.packb([self.epoch, kept]))


def unpack_row(data: bytes) -> ProducerRow:
    epoch, batches = msgpack.unpackb(data[8:])
    row = ProducerRow(epoch, int.from_bytes(data[:8], "little", signed=True))
    row.batches.extend(tuple(b) for b in batches)
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
