"""Batches of one task on their way to the brokers, as an idempotent producer of the task's own.

Invariants: of each partition the batches are numbered from 0 without a hole and appended in that order, each once,
however often a request is repeated; at most one request to a broker group is under way, and it holds at most as many
batches of a partition as a broker remembers numbers of; what ``finish`` counts is acknowledged.

Epochs. An attempt that writes fences those before it, which may only be asleep: a broker refuses a producer's batch of a
lower epoch than it has seen (``Fenced``). In a batch write every attempt of a task has a greater number than the ones
before, and that is the epoch. In a stream it must go on through restarts, of which no task knows: the epochs of a
micro-batch are ``[256 b + 1, 256 b + 255]``, and an attempt asks the broker which one its producer has come to
(``claim``), and takes the next. Two attempts of the same number, of a query and of its restart, that ask within the same
millisecond could take the same one; both write the same micro-batch, so what the one adds the other has.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from firn.batch import Codecs, Columns, Identity, encode
from firn.client.routes import Target
from firn.client.transport import Transport
from firn.errors import Fenced, FirnError, InvariantBroken, LimitExceeded, SequenceGap, from_document
from firn.limits import UNACKNOWLEDGED_BATCHES_MAX
from firn.wire import Op
from firn_spark.cutting import Part
from firn_spark.fetch import Link

REQUEST_BYTES = 4 << 20
DELIVERY_S = 120.0  # longer than a failover
EPOCHS = 256  # of a micro-batch
MICRO_BATCHES_MAX = (1 << 32) // EPOCHS
_NO_SEQUENCE = (1 << 32) - 1  # which no batch has


def producer_id_of(run: str, task: int) -> int:
    """The producer that all attempts of a task are."""
    digest = blake2b(f"{run}/{task}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes. ``micro_batch``: of a stream; None: ``attempt`` is the epoch."""

    producer_id: int
    attempt: int
    micro_batch: int | None = None


def epoch_after(known: int, writer: Writer) -> int:
    """The epoch that an attempt takes of a micro-batch, when its producer has come to ``known``.

    Errors: Fenced for a micro-batch that a later one has overtaken, LimitExceeded when there is none left.
    """
    assert writer.micro_batch is not None, "epochs are claimed for streams"
    first = writer.micro_batch * EPOCHS + 1
    last = first + EPOCHS - 2
    if known > last:
        raise Fenced(
            f"micro-batch {writer.micro_batch} has been overtaken by micro-batch {known // EPOCHS}: this is an old task "
            "of it",
            producer_epoch=known,
        )
    found = max(first + writer.attempt, known + 1)
    if found > last or writer.micro_batch >= MICRO_BATCHES_MAX:
        raise LimitExceeded(
            f"micro-batch {writer.micro_batch}: no epoch is left for its {writer.attempt + 1}. attempt; begin with a new "
            "checkpoint"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Batch:
    partition: int
    records: int
    data: bytes


@dataclass(slots=True)
class _Lane:
    """What goes to one broker group."""

    way: Transport
    batches: list[_Batch] = field(default_factory=list)
    bytes: int = 0
    most: int = 0  # of one partition among them
    under_way: "Future[None] | None" = None


class Sender:
    def __init__(self, link: Link, target: Target, writer: Writer, codecs: Codecs) -> None:
        self._link = link
        self._target = target
        self._writer = writer
        self._codecs = codecs
        self._epochs: dict[int, int] = {}
        self._sequences: dict[int, int] = {}
        self._lanes = [_Lane(way) for way in target.transports]
        self.records = 0  # acknowledged
        self.ends: dict[int, int] = {}  # of each partition the offset behind what was acknowledged

    def send(self, parts: Iterable[Part]) -> None:
        """Take batches; they are sent when enough have come. Errors: what an earlier one failed with."""
        parts = list(parts)
        self._claim([part.partition for part in parts])
        for part in parts:
            lane = self._lanes[part.partition % len(self._lanes)]
            sequence = self._sequences.get(part.partition, 0)
            self._sequences[part.partition] = sequence + 1
            data = encode(part.columns, self._identity(part.partition, sequence), self._codecs)
            lane.batches.append(_Batch(part.partition, part.columns.records, data))
            lane.bytes += len(data)
            lane.most = max(lane.most, sum(batch.partition == part.partition for batch in lane.batches))
            if lane.bytes >= REQUEST_BYTES or lane.most >= UNACKNOWLEDGED_BATCHES_MAX:
                self._dispatch(lane)

    def finish(self) -> None:
        """Return when everything is acknowledged. Errors: what a batch failed with."""
        for lane in self._lanes:
            if lane.batches:
                self._dispatch(lane)
        for lane in self._lanes:
            self._await(lane)

    def _identity(self, partition: int, sequence: int) -> Identity:
        return Identity(
            topic_id=self._target.topic_id, partition=partition, producer_id=self._writer.producer_id,
            producer_epoch=self._epochs[partition], sequence=sequence,
        )  # fmt: skip

    def _dispatch(self, lane: _Lane) -> None:
        self._await(lane)
        batches, lane.batches, lane.bytes, lane.most = lane.batches, [], 0, 0
        lane.under_way = self._link.submit(self._deliver(lane.way, batches))

    def _await(self, lane: _Lane) -> None:
        if lane.under_way is not None:
            under_way, lane.under_way = lane.under_way, None
            under_way.result()

    async def _deliver(self, way: Transport, batches: list[_Batch]) -> None:
        data = b"".join([batch.data for batch in batches])

        async def attempt() -> list[int | FirnError]:
            results = await _produced(way, data, len(batches))
            refused = _refusal([batch.partition for batch in batches], results)
            if refused is not None:
                raise refused
            return results

        results = await way.retried(attempt, what="write", timeout=max(DELIVERY_S, self._link.timeout))
        for batch, base in zip(batches, results, strict=True):
            assert isinstance(base, int), "errors were raised"
            self.records += batch.records
            self.ends[batch.partition] = base + batch.records

    def _claim(self, partitions: list[int]) -> None:
        """Take epochs in partitions that this attempt has not written to yet."""
        fresh = sorted(set(partitions) - self._epochs.keys())
        if self._writer.micro_batch is None:
            self._epochs.update(dict.fromkeys(fresh, self._writer.attempt))
            return
        for at, lane in enumerate(self._lanes):
            mine = [p for p in fresh if p % len(self._lanes) == at]
            if mine:
                known = self._link.run(self._known_epochs(lane.way, mine))
                self._epochs |= {
                    p: epoch_after(epoch, self._writer) for p, epoch in zip(mine, known, strict=True)
                }

    async def _known_epochs(self, way: Transport, partitions: list[int]) -> list[int]:
        """The epoch that this producer has come to in each; 0: none. Asked by a batch that every broker refuses."""
        data = b"".join([self._question(partition) for partition in partitions])

        async def attempt() -> list[int]:
            return [_epoch_in(found) for found in await _produced(way, data, len(partitions))]

        return await way.retried(attempt, what="claim an epoch", timeout=max(DELIVERY_S, self._link.timeout))

    def _question(self, partition: int) -> bytes:
        columns = Columns(
            key_lengths=np.zeros(1, "<i4"), value_lengths=np.full(1, -1, "<i4"), timestamps=np.zeros(1, "<i8"),
            offsets=np.zeros(1, np.int64), keys=np.empty(0, np.uint8), values=np.empty(0, np.uint8),
        )  # fmt: skip
        identity = Identity(
            topic_id=self._target.topic_id, partition=partition, producer_id=self._writer.producer_id,
            sequence=_NO_SEQUENCE,
        )  # fmt: skip
        return encode(columns, identity)


def _epoch_in(found: int | FirnError) -> int:
    """Errors: InvariantBroken for a question that was written; what else a broker refuses it with."""
    if isinstance(found, Fenced):
        return int(found.details["producer_epoch"])
    if isinstance(found, SequenceGap):
        return 0
    if isinstance(found, FirnError):
        raise found
    raise InvariantBroken(f"a batch of the sequence {_NO_SEQUENCE} was written at offset {found}")


async def _produced(way: Transport, data: bytes, count: int) -> list[int | FirnError]:
    """What became of each batch: its base offset, or why it was refused."""
    stream = await way.stream()
    answer = await stream.ask(Op.PRODUCE, {}, data)
    results = answer.meta.get("results")
    if answer.op != Op.ACK or not isinstance(results, list) or len(results) != count:
        raise InvariantBroken(f"the broker acknowledged {count} batches with op {answer.op} and {results!r}")
    return [from_document(found) if isinstance(found, dict) else int(found[1]) for found in results]


def _refusal(partitions: list[int], results: list[int | FirnError]) -> FirnError | None:
    """The error that decides what to do next: one that no repetition helps, else any.

    Behind a batch that was refused the others of its partition are too, for the gap: they say nothing.
    """
    first: dict[int, FirnError] = {}
    for partition, found in zip(partitions, results, strict=True):
        if isinstance(found, FirnError):
            first.setdefault(partition, found)
    return min(first.values(), key=lambda error: error.retry, default=None)
