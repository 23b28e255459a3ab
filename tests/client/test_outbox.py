"""The producer's sequences against a model broker that fails at random, without sockets."""

import asyncio
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.batch import Batch, columns_of
from firn.client.chunks import Chunk, Cut
from firn.client.outbox import OutBatch, Outbox
from firn.errors import FirnError, Invalid, SequenceGap, Unavailable

FATES = st.lists(st.sampled_from(["ok", "lost", "refused", "written_and_lost"]), max_size=60)


class Model:
    """One partition's log under the rules of idempotent producers."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.known: dict[tuple[int, int], int] = {}
        self.next: dict[int, int] = {}

    def append(self, batch: OutBatch) -> int:
        header = Batch(batch.data).header
        name = (header.producer_epoch, header.sequence)
        if name in self.known:
            return self.known[name]
        if header.sequence != self.next.get(header.producer_epoch, 0):
            raise SequenceGap("a batch before it is missing")
        self.known[name] = len(self.log)
        self.next[header.producer_epoch] = header.sequence + 1
        self.log += Batch(batch.data).key_list()
        return self.known[name]


def chunk_of(loop: asyncio.AbstractEventLoop, records: int) -> Chunk:
    chunk = Chunk(loop, 0)
    chunk.fill([[b""] * records, [None] * records, *([None] * records for _ in range(5))])
    chunk.opened()
    return chunk


def cut_of(keys: list[bytes], rows: int) -> Cut:
    return Cut(0, columns_of(keys, [None] * len(keys), 0), np.arange(rows, rows + len(keys)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=90), FATES, st.integers(0, 1 << 30))
def test_whatever_fails_every_record_lands_once_and_in_order(
    sizes: list[int], fates: list[str], seed: int
) -> None:
    randomness = Random(seed)
    loop = asyncio.new_event_loop()
    try:
        outbox, model, now = Outbox(8, randomness=randomness), Model(), 0.0
        total = sum(sizes)
        chunk = chunk_of(loop, total)
        under_way: list[OutBatch] = []
        at, waiting, pending = 0, list(sizes), list(fates)
        while waiting or outbox.unsettled:
            if waiting and randomness.random() < 0.5:
                size = waiting.pop(0)
                outbox.add(cut_of([b"%d" % i for i in range(at, at + size)], at), chunk, deadline=1e9)
                at += size
            now += 0.3
            under_way += outbox.take(now, bytes_max=1000, under_way_max=5000)
            assert len({b.sequence for b in under_way}) == len(under_way)
            if under_way:
                lowest = min(b.sequence for b in under_way)
                assert max(b.sequence for b in under_way) - lowest < 64
            while under_way and randomness.random() < 0.8:  # answers come in the order of the requests
                batch = under_way.pop(0)
                answer(outbox, model, batch, pending.pop(0) if pending else "ok", now)
        assert model.log == [b"%d" % i for i in range(total)]
        assert chunk.is_complete
        assert chunk.failure is None
        assert chunk.offsets.tolist() == list(range(total))
        assert outbox.bytes_under_way == 0
    finally:
        loop.close()


def answer(outbox: Outbox, model: Model, batch: OutBatch, fate: str, now: float) -> None:
    try:
        if fate in ("lost", "refused"):
            raise Unavailable(fate)
        offset = model.append(batch)
        if fate == "written_and_lost":
            raise Unavailable(fate)
    except FirnError as error:
        outbox.fail(batch, error, now)
    else:
        outbox.acknowledge(batch, offset)


def test_a_refused_batch_fails_with_those_behind_it_and_the_next_epoch_begins_at_zero() -> None:
    loop = asyncio.new_event_loop()
    try:
        outbox = Outbox(8, randomness=Random(1))
        chunk = chunk_of(loop, 4)
        for row in range(3):
            outbox.add(cut_of([b"k"], row), chunk, deadline=1e9)
        first, second, third = outbox.take(0, bytes_max=1 << 20, under_way_max=1 << 20)
        outbox.fail(second, SequenceGap("not yet"), 0)  # behind an open one: no reason to give up
        assert chunk.left == 4
        outbox.fail(first, Invalid("never"), 0)
        assert (chunk.left, sorted(chunk.errors)) == (1, [0, 1, 2])
        outbox.acknowledge(third, 99)  # too late: it counts as failed
        assert chunk.offsets.tolist() == [-2, -2, -2, -1]
        outbox.add(cut_of([b"k"], 3), chunk, deadline=1e9)
        (after,) = outbox.take(0, bytes_max=1 << 20, under_way_max=1 << 20)
        header = Batch(after.data).header
        assert (header.producer_id, header.producer_epoch, header.sequence) == (outbox.producer_id, 1, 0)
        outbox.acknowledge(after, 0)
        assert (outbox.unsettled, outbox.bytes_under_way) == (0, 0)
    finally:
        loop.close()


def test_a_retry_waits_for_what_is_under_way_and_for_its_back_off() -> None:
    loop = asyncio.new_event_loop()
    try:
        outbox = Outbox(8, randomness=Random(1))
        chunk = chunk_of(loop, 2)
        for row in range(2):
            outbox.add(cut_of([b"k"], row), chunk, deadline=1e9)
        first, second = outbox.take(0, bytes_max=1 << 20, under_way_max=1 << 20)
        outbox.fail(first, Unavailable("busy"), 10.0)
        assert outbox.take(1000.0, bytes_max=1 << 20, under_way_max=1 << 20) == []
        outbox.fail(second, SequenceGap("behind it"), 10.0)
        assert outbox.take(10.0, bytes_max=1 << 20, under_way_max=1 << 20) == []
        due = outbox.next_time(10.0)
        assert due is not None
        assert 10.0 < due <= 10.05
        assert outbox.take(due, bytes_max=1 << 20, under_way_max=1 << 20) == [first, second]
    finally:
        loop.close()


class Counted(int):
    """A partition's number that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_an_acknowledgement_looks_at_no_other_partition() -> None:
    partitions, loop = 500, asyncio.new_event_loop()
    try:
        outbox, chunk = Outbox(8, randomness=Random(1)), chunk_of(loop, partitions)
        for number in range(partitions):
            columns = columns_of([b"k"], [None], 0)
            outbox.add(Cut(Counted(number), columns, np.array([number])), chunk, deadline=1e9)
        batches = outbox.take(0.0, bytes_max=1 << 20, under_way_max=1 << 20)
        Counted.compared = 0
        for batch in reversed(batches):
            outbox.acknowledge(batch, 0)
        assert (len(batches), outbox.unsettled) == (partitions, 0)
        assert Counted.compared <= partitions
    finally:
        loop.close()
