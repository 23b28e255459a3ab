"""What a producer has cut and not yet seen acknowledged: sequences, windows, retries. No I/O, no clock.

Events in (``add``, ``take``, ``acknowledge``, ``fail``, ``expire``), batches out. Invariants, per partition:

- the sequence counts batches from 0 without a hole, and a batch is sent with the same bytes every time;
- batches are sent in order; at most 64 from the oldest unacknowledged one on are with the broker, which
  remembers as many sequences and answers a repeated one with its first offsets;
- after a failure nothing more is sent until everything that is under way has been answered: then all that is
  unacknowledged goes again, in order, after a jittered back-off that doubles;
- a batch is acknowledged or failed exactly once. When one fails for good, so do those behind it: what came later
  must not take effect without what came before. The partition then goes on under the next producer epoch, whose
  sequences begin at 0: the broker fences whatever of the epoch before is still on its way, so that a stray old
  value never lands on top of a newer one.

====================================== ==================================================================
answer                                 what it means here
====================================== ==================================================================
offset                                 acknowledged, whatever the earlier tries met
error with ``retry``                   rewind: send again from the oldest unacknowledged one
any error of a batch behind the oldest the same: mostly SequenceGap, because the one before it was refused
SequenceGap of the oldest              for good: the broker has forgotten this producer (7 d), or lost its
                                       batches; sending anew could store a record twice
any other error of the oldest          for good
delivery timeout of the oldest         for good, with the outcome unknown
====================================== ==================================================================
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from firn.batch import Buffer, Codecs, Identity, encode
from firn.client.chunks import Chunk, Cut
from firn.client.even import Even, encode_even
from firn.client.small import Part, Writer, encode_small
from firn.client.stream import address_in
from firn.errors import FirnError, SequenceGap, Timeout
from firn.limits import UNACKNOWLEDGED_BATCHES_MAX

BACK_OFF_S = 0.05
BACK_OFF_MAX_S = 0.5  # what a failover may take longer because a producer waits


@dataclass(slots=True, eq=False)
class OutBatch:
    """A batch on its way; ``rows`` are its records' places in ``chunk``."""

    partition: int
    sequence: int
    data: Buffer
    chunk: Chunk
    rows: NDArray[np.int64] | list[int]
    deadline: float
    is_under_way: bool = False
    is_settled: bool = False


@dataclass(slots=True)
class _Lane:
    """One partition's unsettled batches, oldest first; the first ``sent`` of them were sent in this pass."""

    epoch: int = 0
    next_sequence: int = 0
    batches: deque[OutBatch] = field(default_factory=deque)
    sent: int = 0
    under_way: int = 0
    failures: int = 0  # in a row
    resume_at: float | None = None  # set from a failure on until the pass begins anew
    last_error: FirnError | None = None


class Outbox:
    """The unacknowledged batches of one producer, for one creation of a topic."""

    def __init__(self, topic_id: int, *, randomness: Random, codecs: Codecs | None = None) -> None:
        self._topic_id = topic_id
        self._randomness = randomness
        self.producer_id = randomness.randrange(1, 1 << 64)
        self._codecs = codecs
        self._lanes: dict[int, _Lane] = {}
        # Partitions with unsettled batches, next one first; there may be a hundred thousand.
        self._turn: OrderedDict[int, None] = OrderedDict()
        self.unsettled = 0
        self.bytes_under_way = 0
        self._unsettled_under_way = 0

    def add(self, cut: Cut, chunk: Chunk, deadline: float) -> OutBatch:
        """Take a batch: it gets its sequence, and its bytes for good."""
        lane = self._lanes.get(cut.partition)
        if lane is None:
            lane = self._lanes[cut.partition] = _Lane()
        data: Buffer
        if isinstance(cut.columns, Even):
            data = encode_even(cut.columns, self._writer(cut.partition, lane))
        else:
            data = encode(cut.columns, Identity(**self._writer(cut.partition, lane)._asdict()), self._codecs)
        return self._add(lane, OutBatch(cut.partition, lane.next_sequence, data, chunk, cut.rows, deadline))

    def add_small(self, part: Part, chunk: Chunk, deadline: float, now_ms: int) -> OutBatch:
        """As ``add``, of few plain records."""
        partition, rows, keys, values = part
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = _Lane()
        data = encode_small(keys, values, now_ms, self._writer(partition, lane))
        return self._add(lane, OutBatch(partition, lane.next_sequence, data, chunk, rows, deadline))

    def _writer(self, partition: int, lane: _Lane) -> Writer:
        return Writer(self._topic_id, partition, self.producer_id, lane.epoch, lane.next_sequence)

    def _add(self, lane: _Lane, batch: OutBatch) -> OutBatch:
        lane.next_sequence += 1
        if not lane.batches:
            self._turn[batch.partition] = None
        lane.batches.append(batch)
        self.unsettled += 1
        return batch

    def take(self, now: float, *, bytes_max: int, under_way_max: int) -> list[OutBatch]:
        """The batches to send now in one request; at least one where any may go, else none.

        *Effects*: they count as under way until ``acknowledge`` or ``fail``.
        """
        found: list[OutBatch] = []
        size = 0
        for _ in range(len(self._turn)):
            partition = next(iter(self._turn))
            self._turn.move_to_end(partition)
            lane = self._lanes[partition]
            if lane.resume_at is not None:
                if lane.under_way or now < lane.resume_at:
                    continue
                lane.resume_at, lane.sent = None, 0
            while lane.sent < min(len(lane.batches), UNACKNOWLEDGED_BATCHES_MAX):
                batch = lane.batches[lane.sent]
                more = size + len(batch.data)
                if (found and more > bytes_max) or (
                    self.bytes_under_way and self.bytes_under_way + len(batch.data) > under_way_max
                ):
                    return found
                size = more
                lane.sent += 1
                if not batch.is_settled:
                    self._send(batch, lane)
                    found.append(batch)
        return found

    @property
    def has_unsent(self) -> bool:
        """Whether a batch is neither settled nor with the broker."""
        return self.unsettled > self._unsettled_under_way

    def _send(self, batch: OutBatch, lane: _Lane) -> None:
        batch.is_under_way = True
        self._unsettled_under_way += 1
        lane.under_way += 1
        self.bytes_under_way += len(batch.data)

    def acknowledge(self, batch: OutBatch, base_offset: int) -> None:
        """The broker has it, at this offset."""
        lane = self._back(batch)
        if batch.is_settled:
            return
        self._settle(batch)
        batch.chunk.acknowledge(batch.rows, base_offset)
        lane.failures = 0
        self._drop_settled(batch.partition, lane)

    def fail(self, batch: OutBatch, error: FirnError, now: float) -> None:
        """The broker refused it, or the connection broke before it answered."""
        lane = self._back(batch)
        if batch.is_settled:
            return
        if self._may_retry(batch, lane, error):
            lane.last_error = error if not isinstance(error, SequenceGap) else lane.last_error or error
            if lane.resume_at is None:  # the first failure of this pass decides when the next one begins
                lane.failures = 1 if address_in(error) is not None else lane.failures + 1
                most = min(BACK_OFF_MAX_S, BACK_OFF_S * 2 ** min(lane.failures - 1, 16))
                lane.resume_at = now + most * self._randomness.uniform(0.5, 1.0)
        else:
            self._give_up(lane, batch.partition, error)

    def _back(self, batch: OutBatch) -> _Lane:
        lane = self._lanes[batch.partition]
        if batch.is_under_way:
            batch.is_under_way = False
            self.bytes_under_way -= len(batch.data)
            # A batch of a partition that was given up meanwhile no longer counts in its lane.
            if not batch.is_settled:
                lane.under_way -= 1
                self._unsettled_under_way -= 1
        return lane

    def _may_retry(self, batch: OutBatch, lane: _Lane, error: FirnError) -> bool:
        return lane.batches[0] is not batch or error.retry

    def _give_up(self, lane: _Lane, partition: int, error: FirnError) -> None:
        """The oldest batch and all behind it fail; the partition goes on under the next producer epoch."""
        for batch in lane.batches:
            if not batch.is_settled:
                self._settle(batch)
                batch.chunk.fail(batch.rows, error)
        self._lanes[partition] = _Lane(lane.epoch + 1)
        self._turn.pop(partition, None)

    def _settle(self, batch: OutBatch) -> None:
        batch.is_settled = True
        self.unsettled -= 1
        if batch.is_under_way:
            self._unsettled_under_way -= 1

    def _drop_settled(self, partition: int, lane: _Lane) -> None:
        while lane.batches and lane.batches[0].is_settled:
            lane.batches.popleft()
            lane.sent = max(0, lane.sent - 1)
        if not lane.batches:
            lane.resume_at = None
            self._turn.pop(partition, None)

    def expire(self, now: float) -> None:
        """Partitions whose oldest batch passed its deadline fail, with the last error they met."""
        for partition in list(self._turn):
            lane = self._lanes[partition]
            oldest = lane.batches[0]
            if now >= oldest.deadline:
                why = f"; the last error: {lane.last_error.message}" if lane.last_error else ""
                error = Timeout(
                    f"partition {partition}: not acknowledged within the delivery timeout, the outcome is unknown{why}",
                    partition=partition,
                )
                self._give_up(lane, partition, error)

    def fail_all(self, error: FirnError) -> None:
        """Nothing more will be sent: everything unsettled fails."""
        for partition in list(self._turn):
            lane = self._lanes[partition]
            self._give_up(lane, partition, error)

    def next_time(self, now: float) -> float | None:
        """When ``take`` or ``expire`` has something to do next, if no event comes before."""
        times = [lane.batches[0].deadline for lane in self._open()]
        times += [
            lane.resume_at for lane in self._open() if lane.resume_at is not None and not lane.under_way
        ]
        return max(now, min(times)) if times else None

    def _open(self) -> list[_Lane]:
        return [self._lanes[partition] for partition in self._turn]
