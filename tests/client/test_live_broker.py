"""The client against the real broker and server, on real files."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from firn.client import Client, GroupOffset, blocking
from firn.errors import Conflict, Invalid, TopicExists, UnknownTopic
from firn_node.engine.broker import Broker
from firn_node.server.app import serve
from firn_node.settings import BrokerSettings

# A test's broker needs no durable index: the file one starts fastest.
TINY = {"index": "files"}


def with_live_broker(
    folder: Path, work: Callable[[Client, str], Awaitable[None]], *, loop: str = "asyncio"
) -> None:
    async def main() -> None:
        broker = Broker(BrokerSettings(str(folder), **TINY))  # type: ignore[arg-type]
        await broker.start()
        server = await serve(broker, host="127.0.0.1", port=0)
        try:
            async with asyncio.timeout(30), Client(server.address) as client:
                await work(client, server.address)
        finally:
            await server.stop()
            await broker.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())


def test_topics_are_created_listed_described_changed_and_deleted(tmp_path: Path) -> None:
    async def work(client: Client, _: str) -> None:
        made = await client.create_topic("flights", partitions=4, compaction={"minDirtyRatio": 0.2})
        assert made["spec"]["compaction"]["minDirtyRatio"] == 0.2
        with pytest.raises(TopicExists):
            await client.create_topic("flights", partitions=2)
        with pytest.raises(Invalid, match="nonsense"):
            await client.create_topic("other", nonsense=1)
        assert [t["name"] for t in await client.topics()] == ["flights"]
        changed = await client.update_topic("flights", compaction={"minLag": "5s"})
        assert (changed["spec"]["compaction"]["minLag"], changed["spec"]["partitions"]) == ("5s", 4)
        assert changed["spec"]["compaction"]["minDirtyRatio"] == 0.2
        status = await client.status()
        assert status["brokers"][0]["role"]
        await client.delete_topic("flights")
        with pytest.raises(UnknownTopic):
            await client.describe("flights")

    with_live_broker(tmp_path, work)


@pytest.mark.parametrize("partitions", [1000, 2500])
def test_a_topic_is_described_with_more_partitions_than_one_answer_has(
    tmp_path: Path, partitions: int
) -> None:
    """A copy that did not see the last of them was cut over before they were copied."""

    async def work(client: Client, _: str) -> None:
        await client.create_topic("many", partitions=partitions)
        found = await client.describe("many")
        assert [row["partition"] for row in found["partitions"]] == list(range(partitions))

    with_live_broker(tmp_path, work)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_is_produced_is_read_in_both_views_got_and_queried(tmp_path: Path, loop: str) -> None:
    async def work(client: Client, _: str) -> None:
        await client.create_topic("t", partitions=3)
        async with client.producer("t", batch_bytes=4096, compression="zstd") as producer:
            for i in range(2000):
                producer.send(
                    b"k%d" % (i % 50), None if i % 50 == 7 else b"v%d" % i, timestamp=i, headers={"i": str(i)}
                )
        raw = [r async for r in client.reader("t", view="raw", until_end=True)]
        assert sorted(r.timestamp for r in raw) == list(range(2000))
        assert raw[0].headers == {"i": str(raw[0].timestamp)}
        expected = {b"k%d" % k: b"v%d" % (1950 + k) for k in range(50) if k != 7}
        for forced in (False, True):
            if forced:
                run = await client.compact("t", force=True, wait=True, timeout=20)
                assert run["state"] == "done"
            found: dict[bytes, bytes | None] = {}
            rows = 0
            async for record in client.reader("t", until_end=True):
                found[record.key] = record.value
                rows += 1
            assert {k: v for k, v in found.items() if v is not None} == expected
            assert found[b"k7"] is None
            assert not forced or rows == 50
        got = await client.get_many("t", [b"k1", b"k7", b"absent"])
        assert [r and r.value for r in got] == [b"v1951", None, None]
        assert got[0] is not None
        assert got[0].headers == {"i": "1951"}
        history = await client.query("t", b"k1", since=1900, until=1952)
        assert [r.timestamp for r in history] == [1901, 1951]

    with_live_broker(tmp_path, work, loop=loop)


def test_compare_and_set_lets_one_writer_win(tmp_path: Path) -> None:
    async def work(client: Client, _: str) -> None:
        await client.create_topic("t")
        results = await asyncio.gather(
            *(client.put("t", b"k", b"%d" % i, if_offset=-1) for i in range(10)), return_exceptions=True
        )
        winners = [i for i, r in enumerate(results) if not isinstance(r, BaseException)]
        assert len(winners) == 1
        assert sum(isinstance(r, Conflict) for r in results) == 9
        newest = await client.get("t", b"k")
        assert newest is not None
        assert newest.value == b"%d" % winners[0]
        with pytest.raises(Conflict) as lost:
            await client.put("t", b"k", b"x", if_offset=newest.offset + 5)
        assert lost.value.details["newest_offset"] == newest.offset
        await client.delete("t", b"k", if_offset=newest.offset)
        assert await client.get("t", b"k") is None
        await client.put("t", b"k", b"again", if_offset=-1)

    with_live_broker(tmp_path, work)


def test_a_table_follows_writes_deletes_and_the_re_creation_of_its_topic(tmp_path: Path) -> None:
    async def work(client: Client, _: str) -> None:
        await client.create_topic("t", partitions=2)
        for i in range(20):
            await client.put("t", b"%d" % i, b"old")
        table = await client.table("t")
        await table.caught_up()
        assert len(table) == 20
        changes: list[tuple[bytes, bytes | None, bytes | None]] = []
        table.on_change(lambda *change: changes.append(change))
        await client.put("t", b"3", b"new")
        await client.delete("t", b"4")
        await client.put("t", b"x", b"y")
        await table.caught_up()
        assert sorted(changes) == [(b"3", b"old", b"new"), (b"4", b"old", None), (b"x", None, b"y")]
        assert (table[b"3"], b"4" in table, table.get(b"4"), len(table)) == (b"new", False, None, 20)
        assert (await client.put("t", b"3", b"newer", if_offset=table.offset(b"3")))[1] > 0

    with_live_broker(tmp_path, work)


def test_a_group_goes_on_where_it_committed(tmp_path: Path) -> None:
    async def work(client: Client, _: str) -> None:
        await client.create_topic("t")
        producer = client.producer("t")
        await (await producer.send_many([b"%d" % i for i in range(100)], [b"v"] * 100))
        seen = []
        async with client.reader("t", group="g", until_end=True) as reader:
            async for record in reader:
                seen.append(record.offset)
                if record.offset == 41:
                    await reader.commit()
                    break
        known = await client.fetch_offsets("g", "t")
        assert known[0].offset == 42
        async for record in client.reader("t", group="g", until_end=True):
            seen.append(record.offset)
        assert seen == list(range(100))
        await client.commit_offsets("g", "t", {0: GroupOffset(7, 3)})
        assert await client.fetch_offsets("g", "t") == {0: GroupOffset(7, 3)}

    with_live_broker(tmp_path, work)


def test_a_reader_follows_what_is_written_and_marks_where_it_caught_up(tmp_path: Path) -> None:
    async def work(client: Client, _: str) -> None:
        await client.create_topic("t", partitions=2)
        producer = client.producer("t", linger_ms=0)
        await (await producer.send_many([b"%d" % i for i in range(10)], [b"before"] * 10))
        values = []
        reader = client.reader("t", view="raw")
        async for record in reader:
            values.append(record.value)
            if len(values) == 10:
                asyncio.get_running_loop().call_later(
                    0.2, lambda: [producer.send(b"%d" % i, b"after") for i in range(5)]
                )
            if len(values) == 15:
                break
        assert values == [b"before"] * 10 + [b"after"] * 5
        assert reader.caught_up.is_set()
        await reader.close()

    with_live_broker(tmp_path, work)


@pytest.mark.parametrize("start", ["latest", "@1500", 5, {0: 8}])
def test_a_reader_starts_where_it_is_told(tmp_path: Path, start: object) -> None:
    expected = {"latest": [], "@1500": [5, 6, 7, 8, 9]}
    wanted = (
        expected.get(start, [5, 6, 7, 8, 9] if start == 5 else [8, 9])
        if isinstance(start, str | int)
        else [8, 9]
    )

    async def work(client: Client, _: str) -> None:
        await client.create_topic("t")
        producer = client.producer("t", linger_ms=0)
        for i in range(10):
            await producer.send(b"k", b"%d" % i, timestamp=1000 + 100 * i)
        found = [r.offset async for r in client.reader("t", view="raw", start=start, until_end=True)]  # type: ignore[arg-type]
        assert found == wanted

    with_live_broker(tmp_path, work)


def test_a_snapshot_is_read_to_its_own_end_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    async def work(client: Client, _: str) -> None:
        await client.create_topic("t", partitions=2)
        for i in range(10):
            await client.put("t", b"%d" % i, b"pinned")
        async with await client.snapshot("t") as snapshot:
            for i in range(10):
                await client.put("t", b"%d" % i, b"later")
            await client.compact("t", force=True, wait=True, timeout=20)
            found = {r.key: r.value async for r in client.reader("t", snapshot=snapshot)}
            await snapshot.renew()
        assert found == {b"%d" % i: b"pinned" for i in range(10)}

    with_live_broker(tmp_path, work)


def test_a_light_queue_is_read_by_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        broker = Broker(BrokerSettings(str(tmp_path)))
        await broker.start()
        server = await serve(broker, host="127.0.0.1", port=0)
        try:
            async with asyncio.timeout(30), Client(server.address) as client:
                await client.create_topic("t")
                producer = client.producer("t")
                for i in range(30):
                    producer.send(b"k%d" % i, b"v", queues=[f"device-{i % 3}", "all"])
                await producer.flush()
                found = [r.key async for r in client.reader("t", queue="device-1", until_end=True)]
                assert found == [b"k%d" % i for i in range(1, 30, 3)]
                tail = [r.key async for r in client.reader("t", queue="device-1", start=8, until_end=True)]
                assert tail == found[8:]
        finally:
            await server.stop()
            await broker.stop()

    asyncio.run(main())


def test_arrow_batches_hold_what_the_records_do(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")

    async def work(client: Client, _: str) -> None:
        await client.create_topic("t")
        producer = client.producer("t", batch_bytes=2000)
        for i in range(300):
            producer.send(
                b"k%d" % (i % 40), None if i % 7 == 0 else b"v%d" % i, tag=f"t{i}" if i % 2 else None,
                headers={"h": "1"} if i % 3 == 0 else None,
            )  # fmt: skip
        await producer.flush()
        await client.compact("t", force=True, wait=True, timeout=20)
        producer.send(b"k1", b"after")
        await producer.flush()
        records = [r async for r in client.reader("t", until_end=True)]
        batches = [b async for b in client.reader("t", until_end=True).arrow()]
        assert sum(b.num_rows for b in batches) == len(records) == 41
        rows = [row for b in batches for row in b.to_pylist()]
        for row, record in zip(rows, records, strict=True):
            assert (row["offset"], row["key"], row["value"], row["tag"]) == (
                record.offset, record.key, record.value, record.tag,
            )  # fmt: skip
            assert dict(row["headers"] or {}) == record.headers
            assert int(row["timestamp"].timestamp() * 1000 + 0.5) == record.timestamp

    with_live_broker(tmp_path, work)


def test_the_blocking_client_has_the_same_names_and_needs_no_await(tmp_path: Path) -> None:
    async def work(_: Client, address: str) -> None:
        await asyncio.to_thread(use, address)

    def use(address: str) -> None:
        with blocking.Client(address) as client:
            client.create_topic("t", partitions=2)
            with client.producer("t", buffer_bytes=20_000, linger_ms=1) as producer:
                first = producer.send(b"first", b"x")
                for i in range(3000):  # many times what the buffer holds: send waits
                    producer.send(b"k%d" % (i % 10), b"%d" % i)
                assert first.result(10)[1] == 0
                partitions, _ = producer.send_many([b"a", b"b"], [b"1", None]).result(10)
                assert len(partitions) == 2
            with client.reader("t", view="raw", until_end=True) as reader:
                assert len(list(reader)) == 3003
            assert sum(len(page) for page in client.reader("t", view="raw", until_end=True).pages()) == 3003
            table = client.table("t")
            table.caught_up()
            assert table[b"k9"] == b"2999"
            assert len(table) == 12
            client.put("t", b"first", b"y", if_offset=table.offset(b"first"))
            with pytest.raises(Conflict):
                client.put("t", b"first", b"z", if_offset=0 if table.offset(b"first") else 1)
            found = client.get("t", b"first")
            assert found is not None
            assert found.value == b"y"
            with client.snapshot("t") as snapshot:
                assert len({r.key for r in client.reader("t", snapshot=snapshot)}) == 13
            assert client.status()["topics"][0]["name"] == "t"

    with_live_broker(tmp_path, work)
