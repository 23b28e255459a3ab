import asyncio
from pathlib import Path

import numpy as np
import pytest

from firn.batch import Batch
from firn.topicspec import TopicSpec
from firn.wire import items, mask_block
from firn_node.engine.api import ReadRequest, ReadResult
from firn_node.filecache import FileRange
from firn_node.server import ServerSettings, install_uvloop
from firn_node.settings import MemorySettings
from server.serving import StandIn, batch, file_ranges, raw, run, served

PAGE = "/v1/topics/t/partitions/0"
JSON = {"Accept": "application/json"}


async def broker_with_records(count: int) -> StandIn:
    broker = StandIn()
    await broker.create_topic("t", TopicSpec())
    for i in range(count):
        await broker.produce(batch(8, (b"k%d" % i, b"v%d" % i)))
    return broker


def test_a_page_is_whole_batches_with_the_numbers_to_go_on() -> None:
    async def main() -> None:
        async with served(await broker_with_records(5)) as s:
            status, body, headers = await s.ask("GET", f"{PAGE}?offset=1&max_bytes=1&since=")
            assert (status, headers["Content-Type"]) == (200, "application/vnd.firn.batches")
            assert [i.batch.key_list() for i in items(body)] == [[b"k1"]]
            assert headers["Firn-Next-Offset"] == "2"
            assert headers["Firn-End"] == "5"
            assert headers["Firn-Topic-Id"] == "8"
            for name in ("Firn-Horizon", "Firn-Tombstone-Floor", "Firn-Generation"):
                assert headers[name] == "0"
            status, body, headers = await s.ask("GET", f"{PAGE}?offset=5", headers={"Accept": "*/*"})
            assert (status, body, headers["Firn-Next-Offset"]) == (200, b"", "5")

    run(main)


def test_a_long_poll_ends_with_the_first_record() -> None:
    async def main() -> None:
        broker = await broker_with_records(1)
        async with served(broker) as s:
            asking = asyncio.create_task(s.ask("GET", f"{PAGE}?offset=1&wait_ms=10000", headers=JSON))
            while not s.context.waiting:
                await asyncio.sleep(0.01)
            await broker.produce(batch(8, (b"new", b"v")))
            assert [d["key"] for d in (await asking)[1]] == ["new"]
            started = asyncio.get_running_loop().time()
            assert (await s.ask("GET", f"{PAGE}?offset=2&wait_ms=100", headers=JSON))[1] == []
            assert asyncio.get_running_loop().time() - started >= 0.1

    run(main)


def test_a_long_poll_does_not_hold_up_the_stop() -> None:
    async def main() -> None:
        async with served(await broker_with_records(1)) as s:
            asking = asyncio.create_task(s.ask("GET", f"{PAGE}?offset=1&wait_ms=60000"))
            while not s.context.waiting:
                await asyncio.sleep(0.01)
            started = asyncio.get_running_loop().time()
            await s.server.stop()
            assert asyncio.get_running_loop().time() - started < 30
            status, found, _ = await asking
            assert (status, found["error"], found["retry"]) == (503, "unavailable", True)

    run(main)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_ranges_of_files_arrive_whole_and_in_order_by_sendfile(tmp_path: Path, loop: str) -> None:
    values = [bytes([i]) * size for i, size in enumerate((100, 70_000, 3_000_000, 10))]
    batches = [batch(8, (b"k", value)) for value in values]

    async def main() -> None:
        broker = await broker_with_records(0)
        with file_ranges(tmp_path, *batches) as ranges:
            mask = mask_block(np.array([True]))
            parts: list[bytes | FileRange] = [ranges[0], mask, ranges[1], batches[0], ranges[2], ranges[3]]
            async with served(broker) as s:
                for _ in range(2):
                    broker.pages = [ReadResult(8, list(parts), 5, 5, 0, 0)]
                    _, body, _ = await s.ask("GET", PAGE)
                    found = [i.batch.value_list()[0] for i in items(body)]
                    assert found == [values[0], values[1], values[0], values[2], values[3]]
                sent = 2 * sum(len(b) for b in batches if len(b) >= 64 << 10)
                assert s.context.counts.sendfile_bytes == sent
                assert s.context.reads.used == 0

    if loop == "uvloop":
        import uvloop

        async def bounded() -> None:
            async with asyncio.timeout(60):
                await main()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())
    else:
        run(main)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_peer_that_reads_slowly_gets_every_byte_and_costs_no_memory(tmp_path: Path, loop: str) -> None:
    page = batch(8, (b"k", np.random.default_rng(1).bytes(12 << 20)))

    async def main() -> None:
        broker = await broker_with_records(0)
        with file_ranges(tmp_path, page) as ranges:
            broker.pages = [ReadResult(8, list(ranges), 1, 1, 0, 0)]
            async with served(broker) as s, raw(s.address, limit=1 << 16) as (reader, writer):
                writer.write(f"GET {PAGE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(0.3)
                assert s.context.reads.used == 0
                assert await reader.readexactly(len(page)) == page

    if loop == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(main(), 60))
    else:
        run(main)


def test_a_peer_that_takes_nothing_is_cut_off_and_its_leases_go_back(tmp_path: Path) -> None:
    page = batch(8, (b"k", bytes(15 << 20)))

    async def main() -> None:
        broker = await broker_with_records(0)
        with file_ranges(tmp_path, page) as ranges:
            result = ReadResult(8, list(ranges), 1, 1, 0, 0)
            broker.pages = [result]
            stalling = ServerSettings(stall_seconds=0.3)
            async with served(broker, stalling) as s, raw(s.address, limit=1 << 10) as (_, writer):
                writer.write(f"GET {PAGE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                while not s.context.counts.connections:
                    await asyncio.sleep(0.01)
                while s.context.counts.connections:
                    await asyncio.sleep(0.05)
                assert not ranges[0].lease._held

    run(main)


def test_a_page_that_comes_as_its_reader_leaves_gives_its_leases_back(tmp_path: Path) -> None:
    async def main() -> None:
        broker = await broker_with_records(0)
        ready = asyncio.Event()
        with file_ranges(tmp_path, bytes(8)) as ranges:

            async def read(_: ReadRequest) -> ReadResult:
                await ready.wait()
                return ReadResult(8, list(ranges), 1, 1, 0, 0)

            broker.read = read  # type: ignore[method-assign]
            async with served(broker) as s:
                request = ReadRequest(topic="t", partition=0, wait_ms=1000)
                reading = asyncio.create_task(s.context.wait_for_bytes(request))
                while not s.context.waiting:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                (inner,) = s.context.waiting
                ready.set()
                while not inner.done():
                    await asyncio.sleep(0)
                    reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                await asyncio.sleep(0)
                assert not ranges[0].lease._held

    run(main)


def test_a_file_that_ends_early_cuts_the_connection_instead_of_lying(tmp_path: Path) -> None:
    async def main() -> None:
        import aiohttp

        broker = await broker_with_records(0)
        for size in (100, 200_000):
            folder = tmp_path / str(size)
            folder.mkdir()
            with file_ranges(folder, bytes(size)) as ranges:
                longer = FileRange(ranges[0].lease, 4, size + 1000)
                broker.pages = [ReadResult(8, [longer], 1, 1, 0, 0)]
                async with served(broker) as s:
                    with pytest.raises(aiohttp.ClientError):
                        await s.ask("GET", PAGE)

    run(main)


def test_json_leaves_out_masked_rows_earlier_offsets_and_other_tags() -> None:
    async def main() -> None:
        broker = await broker_with_records(0)
        data = batch(8, *[(b"k%d" % i, None if i == 3 else b"v") for i in range(6)], tags=["a", "b"] * 3)
        masked = mask_block(np.array([False, False, True, False, False, False]))
        async with served(broker) as s:
            page = ReadResult(8, [masked, data], 6, 6, 0, 0)
            broker.pages = [page]
            _, found, _ = await s.ask("GET", f"{PAGE}?offset=1", headers=JSON)
            assert [d["offset"] for d in found] == [1, 3, 4, 5]
            broker.pages = [page]
            _, found, _ = await s.ask("GET", f"{PAGE}?tag=a", headers=JSON)
            assert [(d["offset"], d["tag"]) for d in found] == [(0, "a"), (4, "a")]
            keys = data[: 104 + Batch(data).header.keys_bytes]
            broker.pages = [ReadResult(8, [keys], 6, 6, 0, 0)]
            _, found, _ = await s.ask("GET", f"{PAGE}?projection=keys", headers=JSON)
            assert [d["tombstone"] for d in found] == [False, False, False, True, False, False]
            assert "value" not in found[0]

    run(main)


def test_rows_of_other_light_queues_are_masked() -> None:
    async def main() -> None:
        broker = await broker_with_records(0)
        data = batch(8, (b"a", b"1"), (b"b", b"2"), (b"c", b"3"))
        async with served(broker) as s:
            for target, wanted in ((f"{PAGE}?queue=q", False), (f"{PAGE}?queue=q&projection=keys", True)):
                broker.pages = [ReadResult(8, [data], 9, 9, 0, 0, queue_rows=[[(7, 0), (8, 2)]])]
                _, body, headers = await s.ask("GET", target)
                (item,) = items(body, keys_only=wanted)
                assert item.masked is not None
                assert item.masked.tolist() == [False, True, False]
                assert item.batch.has_values is not wanted
                assert headers["Firn-Next-Offset"] == "9"
            broker.pages = [ReadResult(8, [data], 9, 9, 0, 0, queue_rows=[[(7, 0), (8, 2)]])]
            _, found, _ = await s.ask("GET", f"{PAGE}?queue=q&offset=7", headers=JSON)
            assert [(d["queue_offset"], d["offset"], d["key"]) for d in found] == [(7, 0, "a"), (8, 2, "c")]

    run(main)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("view=old", "view"), ("offset=-1", "offset"), ("offset=x", "offset"), ("offset=1e3", "offset"),
        ("offset=%D9%A1", "offset"), ("max_bytes=0", "max_bytes"), ("wait_ms=60001", "wait_ms"),
        ("since=9223372036854775808", "since"), ("projection=values", "projection"), ("colour=red", "colour"),
        ("offset=1&offset=2", "offset"), ("tag=%FF", "tag"), ("%FF=1", "parameter"),
    ],
)  # fmt: skip
def test_a_bad_parameter_is_named(query: str, named: str) -> None:
    async def main() -> None:
        async with served(await broker_with_records(1)) as s:
            status, found, _ = await s.ask("GET", f"{PAGE}?{query}")
            assert (status, found["error"]) == (400, "invalid")
            assert named in found["message"]

    run(main)


def test_json_pages_wait_for_room_in_the_budget_of_reads() -> None:
    async def main() -> None:
        broker = StandIn(memory=MemorySettings(reads_bytes=1000))
        await broker.create_topic("t", TopicSpec())
        await broker.produce(batch(8, (b"k", bytes(900))))
        async with served(broker, ServerSettings(budget_wait_seconds=0.1)) as s:
            granted = await s.context.reads.take(500)
            assert (await s.ask("GET", PAGE, headers=JSON))[0] == 503
            s.context.reads.give(granted)
            assert (await s.ask("GET", PAGE, headers=JSON))[0] == 200
            assert s.context.reads.used == 0

    run(main)


def test_uvloop_is_there_for_the_broker() -> None:
    before = asyncio.get_event_loop_policy()
    try:
        assert install_uvloop()
    finally:
        asyncio.set_event_loop_policy(before)
