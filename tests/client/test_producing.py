"""What a producer promises while the connection and the broker fail it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from client.fake_broker import FakeBroker, fake_broker
from firn.batch import Batch
from firn.client import Client
from firn.client.chunks import Sent
from firn.client.even import AT_ONCE_BYTES_MAX
from firn.errors import (
    Conflict,
    FirnError,
    Invalid,
    LimitExceeded,
    SequenceGap,
    Timeout,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from firn.partitioner import partition_of


def with_broker(work: Callable[[FakeBroker, Client], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with fake_broker() as (broker, address):
            broker.create("t")
            broker.create("wide", 4)
            async with asyncio.timeout(60), Client(address, **settings) as client:
                await work(broker, client)

    asyncio.run(main())


def test_a_sent_record_is_acknowledged_with_its_partition_and_offset() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=1)
        first, second = producer.send(b"a", b"1"), producer.send(b"b", None)
        assert await first == (0, 0)
        assert await second == (0, 1)
        assert [(r.key, r.value) for r in broker.records("t")] == [(b"a", b"1"), (b"b", None)]

    with_broker(work)


def test_records_go_to_the_partition_of_their_key_and_keep_their_order() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        keys = [b"k%d" % (i % 17) for i in range(500)]
        async with client.producer("wide", batch_bytes=512) as producer:
            sent = [producer.send(key, b"%d" % i) for i, key in enumerate(keys)]
            placed = [await s for s in sent]
        for key, (partition, _) in zip(keys, placed, strict=True):
            assert partition == partition_of(key, 4)
        for number in range(4):
            values = [int(r.value or b"") for r in broker.records("wide", number)]
            assert values == sorted(values)
            assert [r.offset for r in broker.records("wide", number)] == list(range(len(values)))
        assert sum(len(broker.records("wide", n)) for n in range(4)) == 500

    with_broker(work)


def test_tag_timestamp_headers_queues_and_partition_travel_with_the_record() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("wide")
        producer.send(b"plain", b"x", partition=3)
        await producer.send(
            b"k", b"v", tag="red", timestamp=77, headers={"a": "b"}, queues=["device-17"], partition=3
        )
        plain, full = broker.records("wide", 3)
        assert (plain.tag, plain.headers, plain.queues) == (None, {}, ())
        assert (full.tag, full.timestamp, full.headers, full.queues) == (
            "red",
            77,
            {"a": "b"},
            ("device-17",),
        )

    with_broker(work)


@pytest.mark.parametrize("linger_ms", [0, 5])
def test_records_with_and_without_a_tag_keep_their_order_and_their_own_offsets(linger_ms: int) -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        tags = [None] * 3 + ["red", None, "blue"] + [None] * 300 + ["red"]
        async with client.producer("t", linger_ms=linger_ms) as producer:
            sent = [producer.send(b"k%d" % i, b"%d" % i, tag) for i, tag in enumerate(tags)]
            many = await producer.send_many([b"a", b"b"], [b"x", None])
            assert [await s for s in sent] == [(0, i) for i in range(len(tags))]
            assert (await many)[1].tolist() == [len(tags), len(tags) + 1]
        found = [(r.value, r.tag) for r in broker.records("t")]
        assert found == [*((b"%d" % i, tag) for i, tag in enumerate(tags)), (b"x", None), (None, None)]

    with_broker(work)


@pytest.mark.parametrize(
    "fate", ["drop_before", "drop_after", "unavailable", "unavailable_after", "first_unavailable"]
)
def test_a_lost_or_refused_request_is_repeated_byte_for_byte_and_nothing_is_doubled(fate: str) -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.script.extend([fate, "ok", fate, fate])
        producer = client.producer("t", linger_ms=0, batch_bytes=300)
        for i in range(200):
            producer.send(b"k%d" % (i % 5), b"%d" % i)
            if i % 40 == 0:
                await asyncio.sleep(0.01)
        await producer.flush()
        assert [int(r.value or b"") for r in broker.records("t")] == list(range(200))
        by_sequence: dict[int, set[bytes]] = {}
        for data in broker.produced:
            by_sequence.setdefault(Batch(data).header.sequence, set()).add(data)
        assert all(len(variants) == 1 for variants in by_sequence.values())
        assert len(broker.produced) > len(by_sequence)

    with_broker(work)


def test_never_more_than_64_batches_of_a_partition_are_unacknowledged() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.script.append("hang")
        producer = client.producer("t", linger_ms=0, batch_bytes=1)
        sent = [producer.send(b"k", b"%d" % i) for i in range(200)]
        while len(broker.produced) < 64:
            await asyncio.sleep(0.01)
        assert await client.get("t", b"k") is None  # comes behind what was sent before it
        assert len(broker.produced) == 64
        await producer.abort()
        with pytest.raises(Unavailable):
            await sent[0]

    with_broker(work)


def test_what_is_not_acknowledged_in_time_fails_with_the_outcome_unknown_and_the_producer_goes_on() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.script.append("hang")
        assert await client.get("t", b"k") is None  # the connection is there before time counts
        producer = client.producer("t", linger_ms=0, delivery_timeout=1.0)
        lost = producer.send(b"k", b"old")
        with pytest.raises(Timeout, match="unknown"):
            await lost
        assert await producer.send(b"k", b"new") == (0, 0)
        with pytest.raises(Timeout):
            await producer.flush()
        await producer.flush()
        # The batch that was given up is still somewhere on its way: when it arrives late, it is fenced.
        with pytest.raises(FirnError, match="older epoch"):
            broker.append(broker.produced[0])

    with_broker(work)


def test_a_forgotten_producer_is_an_error_and_not_a_second_copy() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=0)
        await producer.send(b"k", b"1")
        broker.partition("t").producers.clear()
        with pytest.raises(SequenceGap):
            await producer.send(b"k", b"2")
        with pytest.raises(SequenceGap):
            await producer.flush()
        assert await producer.send(b"k", b"3") == (0, 1)

    with_broker(work)


def test_a_null_key_fails_alone_and_is_named_by_its_index() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=1)
        await producer.send(b"zero", b"")
        good, bad = producer.send(b"", b"empty key"), producer.send(None, b"null key")  # type: ignore[arg-type]
        huge, last = producer.send(b"x" * 65537, b""), producer.send(b"last", bytearray(b"v"))
        assert await good == (0, 1)
        assert await last == (0, 2)
        with pytest.raises(Invalid, match="record 2: the key is None"):
            await bad
        with pytest.raises(LimitExceeded, match="record 3: a key of 65537 bytes"):
            await huge
        with pytest.raises(Invalid, match="record 2"):
            await producer.flush()
        assert [r.value for r in broker.records("t")] == [b"", b"empty key", b"v"]

    with_broker(work)


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"partition": 9}, UnknownPartition),
        ({"tag": 5}, Invalid),
        ({"tag": "x" * 300}, LimitExceeded),
        ({"timestamp": "now"}, Invalid),
        ({"headers": {"a": 1}}, Invalid),
        ({"queues": "name"}, Invalid),
        ({"queues": [""]}, Invalid),
        ({"queues": ["q"] * 65}, LimitExceeded),
    ],
)
def test_a_faulty_field_fails_its_record_alone(extra: dict[str, Any], error: type[FirnError]) -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=1)
        bad, good = producer.send(b"k", b"v", **extra), producer.send(b"k", b"w")
        with pytest.raises(error, match="record 0"):
            await bad
        assert await good == (0, 0)
        with pytest.raises(error):
            await producer.flush()

    with_broker(work)


def test_a_field_that_cannot_be_compared_fails_its_record_alone() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=1)
        array: Any = np.zeros(3)
        bad = [producer.send(b"k", array), producer.send(b"k", b"v", tag=array), producer.send(array, b"v")]
        good = producer.send(b"k", b"w")
        assert await good == (0, 0)
        for number, sent in enumerate(bad):
            with pytest.raises(Invalid, match=f"record {number}"):
                await sent
        alone = producer.send(b"k", b"v", tag=array)
        with pytest.raises(Invalid, match="record 4"):
            await alone
        assert await producer.send(b"k", b"x") == (0, 1)
        with pytest.raises(Invalid, match="record 0"):
            await producer.flush()

    with_broker(work)


def test_send_many_takes_lists_and_refuses_the_whole_call_by_the_index_of_a_null_key() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("wide")
        keys = [b"%d" % i for i in range(1000)]
        acknowledgements = await producer.send_many(
            keys, [None if i % 10 == 0 else b"v" for i in range(1000)]
        )
        partitions, offsets = await acknowledgements
        assert partitions.tolist() == [partition_of(key, 4) for key in keys]
        for number in range(4):
            assert offsets[partitions == number].tolist() == list(range(int((partitions == number).sum())))
        with pytest.raises(Invalid, match="record 1: the key is None"):
            await producer.send_many([b"a", None, b"c"], [b"", b"", b""])
        with pytest.raises(Invalid, match="2 of them for 1 keys"):
            await producer.send_many([b"a"], [b"", b""])
        await producer.flush()
        assert sum(len(broker.records("wide", n)) for n in range(4)) == 1000

    with_broker(work)


def test_a_large_send_many_is_sent_part_by_part_whatever_becomes_of_the_lists() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", buffer_bytes=4 << 20)
        await producer.send(b"first", b"")  # it knows the topic
        keys = [b"%016d" % i for i in range(17 * 992 + 5)]  # 992 a chunk
        lists = list(keys), [key * 64 for key in keys]
        assert len(keys) * 65 * 16 > AT_ONCE_BYTES_MAX
        sending = asyncio.create_task(producer.send_many(*lists))
        while len(broker.records("t")) == 1:
            await asyncio.sleep(0)
        assert not sending.done()
        lists[0].clear()
        lists[1].clear()
        await (await sending)
        assert [(r.key, r.value) for r in broker.records("t")[1:]] == [(key, key * 64) for key in keys]

    with_broker(work)


def test_send_many_takes_arrow_arrays_sliced_and_with_nulls() -> None:
    pa = pytest.importorskip("pyarrow")

    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t")
        keys = pa.array([b"skip", b"a", b"bb", b""], pa.binary())[1:]
        values = pa.chunked_array([pa.array(["x", None]), pa.array(["zz"])])
        await (await producer.send_many(keys, values, tags=pa.array(["t", None, "u"]), timestamps=5))
        found = [(r.key, r.value, r.tag, r.timestamp) for r in broker.records("t")]
        assert found == [(b"a", b"x", "t", 5), (b"bb", None, None, 5), (b"", b"zz", "u", 5)]

    with_broker(work)


def test_a_full_buffer_refuses_the_next_send_until_something_is_acknowledged() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=0, buffer_bytes=10_000)
        sent: list[Sent] = []

        def fill() -> None:
            while len(sent) < 10_000:
                sent.append(producer.send(b"key", b"x" * 100))

        with pytest.raises(LimitExceeded, match="buffer_bytes"):
            fill()
        await producer.flush()
        await producer.send(b"key", b"again")
        assert len(broker.records("t")) == len(sent) + 1

    with_broker(work)


def test_a_deleted_topic_fails_what_was_sent_and_a_new_one_is_found_again() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=0)
        await producer.send(b"k", b"1")
        del broker.topics["t"]
        with pytest.raises(UnknownTopic):
            await producer.send(b"k", b"2")
        broker.create("t")
        assert await producer.send(b"k", b"3") == (0, 0)
        with pytest.raises(UnknownTopic):
            await producer.flush()

    with_broker(work)


def test_a_closed_producer_refuses_and_an_aborted_one_fails_what_is_open() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=1)
        producer.send(b"k", b"v")
        await producer.close()
        assert len(broker.records("t")) == 1
        with pytest.raises(Unavailable):
            producer.send(b"k", b"v")
        broker.script.append("hang")
        other = client.producer("t", linger_ms=1)
        open_one = other.send(b"k", b"w")
        await other.abort()
        with pytest.raises(Unavailable):
            await open_one

    with_broker(work)


def test_put_repeats_a_lost_answer_and_gets_its_first_outcome() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.script.extend(["drop_after", "unavailable_after"])
        assert await client.put("t", b"k", b"v", if_offset=-1) == (0, 0)
        assert await client.put("t", b"k", b"w", if_offset=0) == (0, 1)
        with pytest.raises(Conflict) as lost:
            await client.put("t", b"k", b"x", if_offset=0)
        assert lost.value.details["newest_offset"] == 1
        assert await client.delete("t", b"k", if_offset=1) == (0, 2)
        assert [r.value for r in broker.records("t")] == [b"v", b"w", None]

    with_broker(work)


def test_concurrent_puts_all_succeed_and_names_are_used_again() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        for _ in range(3):
            await asyncio.gather(*(client.put("wide", b"%d" % i, b"v") for i in range(40)))
        assert sum(len(broker.records("wide", n)) for n in range(4)) == 120
        assert sum(len(broker.partition("wide", n).producers) for n in range(4)) <= 40

    with_broker(work)


def test_the_next_address_is_tried_when_nobody_answers_at_the_first() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        async with Client(f"127.0.0.1:1,{client._transport.addresses.preferred}") as other:
            await other.put("t", b"k", b"v")
            found = await other.get("t", b"k")
            assert found is not None
            assert found.value == b"v"

    with_broker(work)


def test_a_request_without_any_broker_fails_within_its_timeout() -> None:
    async def main() -> None:
        async with Client("127.0.0.1:1", timeout=0.3) as client:
            with pytest.raises(Unavailable):
                await client.get("t", b"k")
            with pytest.raises(Unavailable):
                await client.status()

    asyncio.run(asyncio.wait_for(main(), 5))


def test_writes_leave_a_broker_that_is_no_master_and_knows_none() -> None:
    """A master that was cut off from everybody kept its clients until it was found again."""

    async def main() -> None:
        async with fake_broker() as (old, first), fake_broker() as (new, second):
            for broker in (old, new):
                broker.create("t")
            old.script.extend(["no_lease"] * 1000)
            async with asyncio.timeout(60), Client(f"{first},{second}") as client:
                producer = client.producer("t", linger_ms=0)
                assert await producer.send(b"a", b"1") == (0, 0)
                assert await client.put("t", b"b", b"2") == (0, 1)
            assert [r.key for r in new.records("t")] == [b"a", b"b"]
            assert old.records("t") == []

    asyncio.run(main())


def test_who_sends_one_record_at_a_time_does_not_wait_for_the_end_of_the_turn() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=0)
        for i in range(8):
            assert await producer.send(b"k", b"%d" % i) == (0, i)
        sent = [producer.send(b"k", b"%d" % i) for i in range(8, 12)]
        assert [await s for s in sent] == [(0, i) for i in range(8, 12)]
        # The first of the four did not wait for the others, which went together.
        assert [Batch(data).header.records for data in broker.produced] == [1] * 9 + [3]
        assert [int(r.value or b"") for r in broker.records("t")] == list(range(12))
        for i in range(12, 15):
            producer.send(b"k", b"%d" % i)
        await producer.flush()
        assert [Batch(data).header.records for data in broker.produced[10:]] == [3]

    with_broker(work)


@pytest.mark.parametrize("fate", ["drop_before", "drop_after", "unavailable", "unavailable_after"])
def test_a_record_that_was_sent_alone_is_repeated_until_it_is_there_once(fate: str) -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=0)
        for i in range(20):
            if i % 3 == 0:
                broker.script.append(fate)
            assert await producer.send(b"k", b"%d" % i) == (0, i)
        assert [int(r.value or b"") for r in broker.records("t")] == list(range(20))

    with_broker(work)


def test_a_faulty_record_that_was_sent_alone_fails_on_its_own() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        producer = client.producer("t", linger_ms=0)
        for _ in range(8):
            await producer.send(b"k", b"v")
        faulty: Any = "a text"
        sent = producer.send(faulty, b"v")
        with pytest.raises(Invalid, match="record 8"):
            await sent
        assert await producer.send(b"k", b"v") == (0, 8)
        with pytest.raises(Invalid, match="record 8"):
            await producer.flush()

    with_broker(work)
