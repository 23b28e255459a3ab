"""Readers and tables while connections break, replicas differ and tombstones vanish."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from client.fake_broker import FakeBroker, fake_broker
from firn.batch import Batch, Identity, encode
from firn.client import Client
from firn.client.gets import PART_KEYS
from firn.errors import Corrupt, Invalid, MalformedBatch, OffsetExpired, SnapshotExpired, Timeout, Unavailable
from firn.record import Record


def with_broker(work: Callable[[FakeBroker, Client], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with fake_broker() as (broker, address):
            broker.create("t")
            async with asyncio.timeout(60), Client(address, **settings) as client:
                await work(broker, client)

    asyncio.run(main())


def test_until_end_passes_gaps_and_ends_though_the_last_offsets_are_gone() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"], at=5)
        broker.write("t", 0, [b"b"], [b"1"], at=90)
        broker.partition("t").end = broker.partition("t").horizon = 200
        found = [r.offset async for r in client.reader("t", until_end=True)]
        assert found == [5, 90]

    with_broker(work)


def test_a_reader_asks_again_when_the_broker_cannot_answer_now() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"])
        broker.reads.extend([Unavailable("now now"), Unavailable("not yet")])
        assert [r.key async for r in client.reader("t", until_end=True)] == [b"a"]

    with_broker(work)


def test_a_follower_goes_on_after_its_connection_was_cut_without_loss_or_repetition() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        async def write() -> None:
            for i in range(60):
                broker.write("t", 0, [b"k"], [b"%d" % i])
                await asyncio.sleep(0.005)
                if i % 20 == 10:
                    await broker.cut()

        writing = asyncio.create_task(write())
        found = []
        async for record in client.reader("t"):
            found.append(int(record.value or b""))
            if found[-1] == 59:
                break
        await writing
        assert found == list(range(60))
        assert broker.connections >= 2
        assert len(broker.fetches) >= 2

    with_broker(work)


def test_a_reader_that_missed_tombstones_is_interrupted() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"])
        reader = client.reader("t")
        values = []

        async def read() -> None:
            async for record in reader:
                values.append(record.value)
                if len(values) == 1:
                    broker.partition("t").tombstone_floor = broker.partition("t").horizon = 50
                    broker.write("t", 0, [b"b"], [b"2"], at=60)

        with pytest.raises(SnapshotExpired):
            await read()

    with_broker(work)


def test_offsets_that_retention_removed_surface_and_earliest_starts_behind_them() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b"], [b"1", b"2"], at=7)
        gone = OffsetExpired("retention", earliest=7)
        broker.reads.append(gone)
        assert [r.offset async for r in client.reader("t", view="raw", until_end=True)] == [7, 8]
        broker.reads.append(gone)
        with pytest.raises(OffsetExpired):
            await anext(aiter(client.reader("t", view="raw", start=3, until_end=True)))

    with_broker(work)


def test_positions_cover_exactly_what_the_loop_has_seen() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"%d" % i for i in range(10)], [b"v"] * 10)
        broker.partition("t").horizon = 4
        reader = client.reader("t", group="g", until_end=True)
        async for record in reader:
            if record.offset == 6:
                break
        assert reader.positions() == {0: (7, 4)}
        await reader.commit()
        assert broker.groups["g", "t"] == {"0": {"offset": 7, "since": 4}}
        assert [r.offset async for r in reader] == [7, 8, 9]
        assert reader.positions() == {0: (10, 4)}
        assert [r.offset async for r in client.reader("t", group="g", until_end=True)] == [7, 8, 9]
        with pytest.raises(Invalid, match="no group"):
            await client.reader("t").commit()

    with_broker(work)


def test_a_dropped_reader_stops_fetching() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"])
        async for _ in client.reader("t"):
            break
        for _ in range(20):
            await asyncio.sleep(0.01)
            names = [task.get_name() for task in asyncio.all_tasks()]
            if not any(name.startswith("firn read") for name in names):
                break
        assert not any(name.startswith("firn read") for name in names)

    with_broker(work)


def test_a_slow_reader_holds_no_more_than_its_prefetch_and_a_page() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        for i in range(50):
            broker.write("t", 0, [b"%d" % i], [bytes(10_000)])
        reader = client.reader("t", page_bytes=20_000, prefetch_bytes=30_000, until_end=True)
        count = 0
        async for _ in reader:
            count += 1
            if count % 10 == 0:
                await asyncio.sleep(0.02)
                assert reader._feed is not None
                assert reader._feed._buffered <= 30_000 + 21_000
        assert count == 50

    with_broker(work)


def test_a_table_reads_anew_by_itself_and_reports_only_what_differs() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b", b"c"], [b"1", b"1", b"1"])
        table = await client.table("t")
        await table.caught_up()
        assert dict(table) == {b"a": b"1", b"b": b"1", b"c": b"1"}
        changes: list[Any] = []
        stop = table.on_change(lambda *change: changes.append(change))
        # While the table was away: b was deleted and its tombstone removed; a was written anew.
        partition = broker.partition("t")
        partition.batches.clear()
        broker.write("t", 0, [b"c"], [b"1"], at=2)
        partition.end = partition.horizon = partition.tombstone_floor = 40
        broker.write("t", 0, [b"a"], [b"2"], at=41)
        await table.caught_up()
        assert dict(table) == {b"a": b"2", b"c": b"1"}
        assert sorted(changes) == [(b"a", b"1", b"2"), (b"b", b"1", None)]
        stop()
        broker.write("t", 0, [b"z"], [b"z"])
        await table.caught_up()
        assert (len(changes), table[b"z"]) == (2, b"z")

    with_broker(work)


def test_a_table_takes_a_topic_that_was_created_anew_as_new() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b"], [b"1", b"1"])
        table = await client.table("t")
        await table.caught_up()
        broker.create("t")
        broker.write("t", 0, [b"b"], [b"2"])
        broker.changed()
        await broker.cut()
        for _ in range(200):
            if dict(table) == {b"b": b"2"}:
                break
            await asyncio.sleep(0.02)
        assert dict(table) == {b"b": b"2"}

    with_broker(work)


def test_a_failing_callback_does_not_stop_the_table(caplog: pytest.LogCaptureFixture) -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        table = await client.table("t")
        table.on_change(lambda *_: 1 // 0)
        broker.write("t", 0, [b"a"], [b"1"])
        await table.caught_up()
        assert table[b"a"] == b"1"
        assert "a callback of table t failed" in caplog.text

    with_broker(work)


def test_get_many_asks_in_parts_and_keeps_the_order() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"%d" % i for i in range(0, 3000, 2)], [b"v%d" % i for i in range(0, 3000, 2)])
        keys = [b"%d" % (i % 3000) for i in range(PART_KEYS + 3000)]
        found = await client.get_many("t", keys)
        assert [None if r is None else (r.key, r.value) for r in found] == [
            (b"%d" % i, b"v%d" % i) if i % 2 == 0 else None for i in (int(key) for key in keys)
        ]
        assert broker.gets == [(PART_KEYS + 3000) // 2] * 2
        assert await client.get_many("t", []) == []

    with_broker(work)


def test_what_did_not_fit_an_answer_is_asked_for_again() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"%d" % i for i in range(10)], [b"v%d" % i for i in range(10)])
        broker.values_max = 4
        found = await client.get_many("t", [b"%d" % i for i in range(12)])
        assert [r and r.value for r in found] == [*(b"v%d" % i for i in range(10)), None, None]
        assert broker.gets == [12, 6, 2]

    with_broker(work)


def test_an_error_of_one_part_of_a_list_is_the_error_of_the_list() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"])
        broker.bad_key = b"bad"
        with pytest.raises(Corrupt):
            await client.get_many("t", [*([b"a"] * PART_KEYS), b"bad"])
        with pytest.raises(Corrupt):
            await client.get("t", b"bad")
        with pytest.raises(Corrupt):  # over the stream that is open by now
            await client.get("t", b"bad")

    with_broker(work)


def test_gets_that_are_under_way_when_the_connection_ends_are_asked_again() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b"], [b"1", b"2"])
        assert await client.get("t", b"a") is not None
        broker.cut_gets = 2
        found = await asyncio.gather(client.get("t", b"a"), client.get("t", b"b"), client.get("t", b"c"))
        assert [r and r.value for r in found] == [b"1", b"2", None]
        assert broker.cut_gets == 0

    with_broker(work)


def test_a_get_that_nobody_answers_ends_in_time() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"])
        assert await client.get("t", b"a") is not None
        broker.values_max = -1  # says nothing
        with pytest.raises(Timeout):
            await client.get("t", b"a")

    with_broker(work, timeout=1.5)


def test_what_did_not_fit_is_asked_for_again_by_single_gets_too() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"%d" % i for i in range(10)], [b"v%d" % i for i in range(10)])
        assert await client.get("t", b"0") is not None
        broker.values_max = 4
        found = await asyncio.gather(*(client.get("t", b"%d" % i) for i in range(12)))
        assert [r and r.value for r in found] == [*(b"v%d" % i for i in range(10)), None, None]
        assert broker.gets == [1, 12, 6, 2]

    with_broker(work)


def test_gets_of_one_turn_go_out_as_one_request() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b"], [b"1", b"2"])
        found = await asyncio.gather(*(client.get("t", key) for key in (b"a", b"b", b"none", b"a")))
        assert [r and r.value for r in found] == [b"1", b"2", None, b"1"]
        assert broker.gets == [4]

    with_broker(work)


def test_a_get_that_fails_leaves_those_that_went_out_with_it() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b"], [b"1", b"2"])
        broker.bad_key = b"bad"
        asked = [asyncio.create_task(client.get("t", key)) for key in (b"a", b"bad", b"b", b"b")]
        await asyncio.sleep(0)
        asked[2].cancel()
        a, bad, cancelled, b = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(a, Record)
        assert isinstance(b, Record)
        assert (a.value, b.value) == (b"1", b"2")
        assert isinstance(bad, Corrupt)
        assert isinstance(cancelled, asyncio.CancelledError)

    with_broker(work)


@pytest.mark.parametrize("way", ["records", "pages", "arrow"])
def test_what_cannot_be_decoded_ends_the_reader_and_no_position_passes_it(way: str) -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        for key in (b"a", b"b", b"c"):
            broker.write("t", 0, [key], [b"1"])
        stored = broker.partition("t").batches
        columns = replace(Batch(stored[1]).columns, tags=b"\1\0\0\0\xff")
        stored[1] = encode(columns, Identity(topic_id=Batch(stored[0]).header.topic_id, partition=0))
        reader = client.reader("t", until_end=True, group="g", page_bytes=1)
        found = reader if way == "records" else reader.pages() if way == "pages" else reader.arrow()
        with pytest.raises((MalformedBatch, ValueError)):
            async for _ in found:
                pass
        assert [r.key async for r in reader] == []
        assert reader.positions()[0].offset == (0 if way == "arrow" else 1)

    with_broker(work)


def test_who_gets_one_key_at_a_time_does_not_wait_for_the_end_of_the_turn() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a", b"b"], [b"1", b"2"])
        for _ in range(8):
            await client.get("t", b"a")
        found = await asyncio.gather(*(client.get("t", key) for key in (b"a", b"b", b"none", b"a")))
        assert [r and r.value for r in found] == [b"1", b"2", None, b"1"]
        assert broker.gets == [1] * 8 + [1, 3]  # the first of the four did not wait for the others
        found = await asyncio.gather(*(client.get("t", key) for key in (b"a", b"b", b"a")))
        assert broker.gets[10:] == [3]

    with_broker(work)


def test_each_of_several_gets_that_nobody_answers_ends_in_its_own_time() -> None:
    async def work(broker: FakeBroker, client: Client) -> None:
        broker.write("t", 0, [b"a"], [b"1"])
        for _ in range(8):
            await client.get("t", b"a")
        broker.values_max = -1  # says nothing
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ended_after(pause: float) -> float:
            await asyncio.sleep(pause)
            asked = loop.time()
            with pytest.raises(Timeout):
                await client.get("t", b"a")
            assert loop.time() - asked >= 1.49
            return loop.time() - began

        first, second, third = await asyncio.gather(*(ended_after(pause) for pause in (0.0, 0.2, 0.4)))
        assert first <= second <= third

    with_broker(work, timeout=1.5)
