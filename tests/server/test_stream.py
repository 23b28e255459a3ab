import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest

from firn.errors import ReadOnly
from firn.topicspec import TopicSpec
from firn.values import pack_keys, unpack_values
from firn.websocket import handshake
from firn.wire import Op, frames, items
from firn_node.engine.api import ReadResult
from firn_node.server import ServerSettings
from firn_node.settings import MemorySettings
from server.serving import StandIn, batch, file_ranges, raw, real, run, served


async def broker_with_topic(**options: object) -> StandIn:
    broker = StandIn(**options)  # type: ignore[arg-type]
    await broker.create_topic("t", TopicSpec(2))
    return broker


def test_a_greeting_says_version_node_and_limits() -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer:
            found = await peer.ask(Op.HELLO, 1, {"version": 1, "client": "test"})
            assert (found.op, found.id, found.meta["version"], found.meta["node"]) == (Op.OK, 1, 1, "firn-0")
            assert found.meta["limits"]["frame_bytes"] == 65536
            found = await peer.ask(Op.HELLO, 2, {"version": 99})
            assert (found.op, found.meta["error"]) == (Op.ERROR, "invalid")
            assert await peer.is_alive()

    run(main)


def test_pipelined_produces_go_together_and_are_acknowledged_each() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        async with served(broker) as s, s.stream() as peer:
            for i in range(500):
                await peer.send(Op.PRODUCE, i, {}, batch(8, (b"k%d" % i, b"v"), partition=i % 2))
            found = [await peer.receive() for _ in range(500)]
            assert [m.op for m in found] == [Op.ACK] * 500
            assert {m.id: m.meta["results"] for m in found} == {i: [[i % 2, i // 2]] for i in range(500)}
            assert len(broker.produced) < 250  # many messages a call
            assert s.context.in_flight.used == 0

    run(main)


def test_answers_of_one_exchange_keep_their_order_when_a_later_append_is_faster() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        async with served(broker) as s, s.stream() as peer:
            broker.hold = hold = asyncio.Event()
            await peer.send(Op.PRODUCE, 7, {}, batch(8, (b"a", b"1")))
            while not broker.produced:
                await asyncio.sleep(0.01)
            broker.hold = None
            await peer.send(Op.PRODUCE, 7, {}, batch(8, (b"b", b"2")))
            await peer.send(Op.PRODUCE, 8, {}, batch(8, (b"c", b"3")))
            first = await peer.receive()
            hold.set()
            rest = [await peer.receive() for _ in range(2)]
            assert (first.id, first.meta["results"]) == (8, [[0, 1]])
            assert [(m.id, m.meta["results"]) for m in rest] == [(7, [[0, 2]]), (7, [[0, 0]])]

    run(main)


def test_a_large_message_travels_in_frames_and_conditions_are_decided_per_batch() -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer:
            data = batch(s.topic_id, (b"a", bytes(3 << 20))) + batch(s.topic_id, (b"b", b"2"))
            found = await peer.ask(Op.PRODUCE, 1, {"if_offset": [-1, -1]}, data)
            assert found.meta["results"] == [[0, 0], [0, 1]]
            data = batch(s.topic_id, (b"a", b"3")) + batch(s.topic_id, (b"c", b"4"))
            found = await peer.ask(Op.PRODUCE, 2, {"if_offset": [5, None]}, data)
            assert found.meta["results"][0]["error"] == "conflict"
            assert found.meta["results"][0]["newest_offset"] == 0
            assert found.meta["results"][1] == [0, 2]
            found = await peer.ask(Op.PRODUCE, 3, {"if_offset": [5]}, data)
            assert (found.op, found.meta["error"]) == (Op.ERROR, "invalid")
            assert s.context.in_flight.used == 0

    run(main)


def test_a_broken_message_fails_alone_among_its_neighbours() -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer:
            good = batch(s.topic_id, (b"a", b"1"))
            flipped = bytearray(good)
            flipped[-1] ^= 1  # values CRC
            headless = bytearray(good)
            headless[50] ^= 1  # header CRC
            sent = [
                good,
                bytes(flipped),
                good,
                bytes(headless),
                good,
                good[:-8],
                b"",
                batch(99, (b"x", b"y")),
                good,
            ]
            for i, data in enumerate(sent):
                await peer.send(Op.PRODUCE, i, {}, data)
            found = {}
            for _ in sent:
                message = await peer.receive()
                found[message.id] = message
            for i in (0, 2, 4, 8):
                assert [len(r) for r in found[i].meta["results"]] == [2]
            assert found[1].meta["results"][0]["error"] == "malformed_batch"
            assert found[7].meta["results"][0]["error"] == "unknown_topic"
            assert found[3].meta["results"][0]["error"] == "malformed_batch"
            assert (found[6].op, found[6].meta["error"]) == (Op.ERROR, "invalid")
            assert await peer.is_alive()

    run(main)


def test_a_refusal_of_the_engine_answers_every_message() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        broker.failure = ReadOnly("the disk is full")
        async with served(broker) as s, s.stream() as peer:
            await peer.send(Op.PRODUCE, 1, {}, batch(8, (b"a", b"1")))
            await peer.send(Op.PRODUCE, 2, {}, batch(8, (b"a", b"1")))
            found = [await peer.receive() for _ in range(2)]
            assert [(m.op, m.meta["error"], m.meta["retry"]) for m in found] == [
                (Op.ERROR, "read_only", True)
            ] * 2

    run(main)


def test_a_fetch_goes_on_with_what_is_produced_until_it_is_cancelled() -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer, s.stream() as other:
            found = await peer.ask(Op.FETCH, 5, {"topic": "t", "partition": 1})
            assert (found.op, found.meta["end"], bytes(found.data)) == (Op.DATA, 0, b"")
            for i in range(3):
                await other.ask(Op.PRODUCE, i, {}, batch(s.topic_id, (b"k%d" % i, b"v"), partition=1))
                found = await peer.receive()
                assert [x.batch.key_list() for x in items(found.data)] == [[b"k%d" % i]]
                assert (found.meta["next_offset"], found.meta["end"]) == (i + 1, i + 1)
            assert (await peer.ask(Op.CANCEL, 5)).op == Op.OK
            await other.ask(Op.PRODUCE, 9, {}, batch(s.topic_id, (b"k", b"v"), partition=1))
            assert await peer.is_alive()
            assert (await peer.ask(Op.FETCH, 5, {"topic": "t", "partition": 1})).meta["next_offset"] == 4

    run(main)


def test_a_fetch_that_is_cancelled_in_the_turn_that_brought_it_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with real(1) as s, raw(s.server.address) as (reader, writer):
            writer.write(handshake("x", "/v1/stream", "AAAAAAAAAAAAAAAAAAAAAA==", {}))
            await reader.readuntil(b"\r\n\r\n")
            both = [*frames(Op.FETCH, 5, {"topic": "t"}), *frames(Op.CANCEL, 5, {})]
            writer.write(b"".join(bytes((0x82, 0x80 | len(frame), 0, 0, 0, 0)) + frame for frame in both))
            assert (await reader.readexactly(2))[0] == 0x82  # CANCEL is answered
            gc.collect()  # a coroutine that nobody awaited warns, and warnings are errors

    run(main)


def test_data_stop_without_credit_and_go_on_with_more() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        one = len(batch(8, (b"k0", bytes(1000))))
        for i in range(6):
            await broker.produce(batch(8, (b"k%d" % i, bytes(1000))))
        async with served(broker) as s, s.stream() as peer:
            await peer.send(Op.FETCH, 1, {"topic": "t", "credit": 2 * one, "max_bytes": one})
            assert [(await peer.receive()).meta["next_offset"] for _ in range(2)] == [1, 2]
            await asyncio.sleep(0.05)
            await peer.send(Op.PING, 2)
            assert (await peer.receive()).id == 2
            await peer.send(Op.CREDIT, 1, {"bytes": one})
            assert (await peer.receive()).meta["next_offset"] == 3
            await peer.send(Op.CREDIT, 99, {"bytes": one})
            assert await peer.is_alive()

    run(main)


@pytest.mark.parametrize(
    ("meta", "named"),
    [
        ({}, "topic"), ({"topic": "t", "view": "x"}, "view"), ({"topic": "t", "offset": -1}, "offset"),
        ({"topic": "t", "partition": "0"}, "partition"), ({"topic": "t", "max_bytes": 0}, "max_bytes"),
        ({"topic": "t", "since": True}, "since"), ({"topic": "t", "projection": 1}, "projection"),
        ({"topic": "t", "credit": -1}, "credit"), ({"topic": "none"}, "none"), ({"topic": "t", "partition": 7}, "7"),
    ],
)  # fmt: skip
def test_a_bad_fetch_is_an_error_of_that_exchange(meta: dict[str, object], named: str) -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer:
            found = await peer.ask(Op.FETCH, 3, meta)
            assert (found.op, found.id) == (Op.ERROR, 3)
            assert named in found.meta["message"]
            assert await peer.is_alive()

    run(main)


def test_pages_of_files_travel_whole(tmp_path: Path) -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        values = [b"a" * 10, b"b" * 700_000, b"c" * 5]
        with file_ranges(tmp_path, *[batch(8, (b"k", v)) for v in values]) as ranges:
            broker.pages = [ReadResult(8, [*ranges, batch(8, (b"k", b"d"))], 4, 4, 0, 0)]
            async with served(broker) as s, s.stream() as peer:
                found = await peer.ask(Op.FETCH, 1, {"topic": "t", "credit": 1})
                assert [x.batch.value_list()[0] for x in items(found.data)] == [*values, b"d"]
                assert not any(r.lease._held for r in ranges)
                assert s.context.reads.used == 0

    run(main)


def test_values_of_many_keys_come_in_order() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        async with served(broker) as s, s.stream() as peer:
            await s.ask("PUT", "/v1/topics/t/records/b", data=b"2")
            await s.ask("PUT", "/v1/topics/t/records/a", data=b"\xff" * 100_000, headers={"Firn-Tag": "x"})
            keys = [b"a", b"none", b"b", b"a"]
            found = await peer.ask(Op.GET, 1, {"topic": "t", "keys": 4}, pack_keys(keys))
            assert found.op == Op.VALUES
            values, later = unpack_values("t", keys, found.data)
            assert [v and v.value for v in values] == [b"\xff" * 100_000, None, b"2", b"\xff" * 100_000]
            assert [v and v.tag for v in values] == ["x", None, None, "x"]
            assert later == []
            for key, value in ((b"b", b"2"), (b"none", None)):
                found = await peer.ask(Op.GET, 2, {"topic": "t", "keys": 1}, pack_keys([key]))
                assert [v and v.value for v in unpack_values("t", [key], found.data)[0]] == [value]

    run(main)


@pytest.mark.parametrize(
    ("keys", "data"),
    [
        (1, b""), (1, b"\1\0\0\0"), (1, b"\1\0\0\0ab"), (2, b"\xff\xff\xff\xff\3\0\0\0ab"), (-1, b""), (None, b""),
        (True, b"\0\0\0\0"), (1 << 40, b"\0\0\0\0"), ("1", b"\0\0\0\0"), (65_537, bytes(4 * 65_537)),
    ],
)  # fmt: skip
def test_keys_that_do_not_add_up_are_refused(keys: Any, data: bytes) -> None:
    async def main() -> None:
        async with served(await broker_with_topic()) as s, s.stream() as peer:
            found = await peer.ask(Op.GET, 2, {"topic": "t", "keys": keys}, data)
            assert (found.op, found.meta["error"]) in [(Op.ERROR, "invalid"), (Op.ERROR, "limit_exceeded")]
            assert (found.meta["error"] == "limit_exceeded") == (keys == 65_537)

    run(main)


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\xc1", b"\x00", msgpack.packb([1, 2, 3]), msgpack.packb({}),
        msgpack.packb([1, "x", {}, b""]), msgpack.packb([1, True, {}, b""]), b"\xdd\xff\xff\xff\xff", b"\x91" * 3000,
    ],
)  # fmt: skip
def test_a_frame_that_is_no_message_is_an_error_of_exchange_0(frame: bytes) -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer:
            await peer.socket.send_bytes(frame)
            found = await peer.receive()
            assert (found.op, found.id, found.meta["error"]) == (Op.ERROR, 0, "invalid")
            assert await peer.is_alive()

    run(main)


def test_text_unknown_ops_and_the_brokers_own_ops_are_errors_that_the_stream_survives() -> None:
    async def main() -> None:
        async with real(2) as s, s.stream() as peer:
            await peer.socket.send_str("hello")
            assert (await peer.receive()).id == 0
            await peer.socket.send_bytes(msgpack.packb([99, 4, {}, b""]))
            assert (await peer.receive()).id == 4
            for op in (Op.OK, Op.ACK, Op.DATA, Op.VALUES, Op.ERROR):
                assert (await peer.ask(op, 5)).op == Op.ERROR
            assert await peer.is_alive()

    run(main)


def test_an_announced_message_waits_for_room_and_is_refused_without_harm_to_the_next() -> None:
    async def main() -> None:
        broker = await broker_with_topic(memory=MemorySettings(in_flight_bytes=100_000))
        async with served(broker, ServerSettings(budget_wait_seconds=0.1)) as s, s.stream() as peer:
            granted = await s.context.in_flight.take(90_000)
            found = await peer.ask(Op.PRODUCE, 1, {}, batch(8, (b"k", bytes(80_000))))
            assert (found.op, found.id, found.meta["error"]) == (Op.ERROR, 1, "limit_exceeded")
            assert await peer.is_alive()
            s.context.in_flight.give(granted)
            found = await peer.ask(Op.PRODUCE, 1, {}, batch(8, (b"k", bytes(80_000))))
            assert found.meta["results"] == [[0, 0]]
            assert s.context.in_flight.used == 0

    run(main)


def test_a_message_that_is_never_finished_gives_its_room_back() -> None:
    async def main() -> None:
        async with real(2, ServerSettings(stall_seconds=0.2)) as s:
            async with s.stream() as peer:
                await peer.socket.send_bytes(msgpack.packb([Op.PRODUCE, 1, {"size": 20 << 20}, b"x"]))
                while not s.context.in_flight.used:
                    await asyncio.sleep(0.01)
                assert (await peer.socket.receive()).type is not aiohttp.WSMsgType.BINARY
            while s.context.streams:
                await asyncio.sleep(0.01)
            assert s.context.in_flight.used == 0

    run(main)


def test_a_peer_that_never_reads_its_answers_stops_being_read() -> None:
    async def main() -> None:
        settings = ServerSettings(stall_seconds=1.0, unanswered_max=50)
        async with real(2, settings) as s:
            await s.ask("PUT", "/v1/topics/t/records/k", data=bytes(1 << 20))
            get = client_frame(msgpack.packb([Op.GET, 1, {"topic": "t", "keys": 1}, pack_keys([b"k"])]))
            async with raw_stream(s.address) as peer:
                peer.write(get * 2000)
                while not s.context.streams:
                    await asyncio.sleep(0.01)
                (stream,) = s.context.streams
                most = 0
                while s.context.streams:  # until the stall ends it
                    most = max(most, stream._outbox.bytes)
                    assert len(stream._tasks) <= 50
                    await asyncio.sleep(0.02)
                assert (256 << 10) - 65536 <= most <= (256 << 10) + 65536
                assert s.context.counts.stream_messages["GET"] < 2000

    run(main)


def test_a_peer_that_is_gone_without_a_word_is_found_by_heartbeats() -> None:
    async def main() -> None:
        async with real(2, ServerSettings(heartbeat_seconds=0.2)) as s, raw_stream(s.address):
            while not s.context.streams:
                await asyncio.sleep(0.01)
            while s.context.streams:  # it never answers a ping
                await asyncio.sleep(0.02)

    run(main)


def test_what_was_received_is_answered_before_the_stop() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        async with served(broker) as s, s.stream() as peer:
            broker.hold = asyncio.Event()
            await peer.send(Op.PRODUCE, 1, {}, batch(8, (b"a", b"1")))
            while not broker.produced:
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(s.server.stop())
            await asyncio.sleep(0.05)
            broker.hold.set()
            assert (await peer.receive()).meta["results"] == [[0, 0]]
            closed = await peer.socket.receive()
            assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY)
            await stopping

    run(main)


def test_a_request_that_is_no_websocket_is_told_so() -> None:
    async def main() -> None:
        async with real(2) as s:
            status, found, _ = await s.ask("GET", "/v1/stream")
            assert (status, found["error"]) == (400, "invalid")
            assert "WebSocket" in found["message"]

    run(main)


@contextlib.asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[asyncio.StreamWriter]:
    """A stream of which nobody reads what arrives beyond the handshake."""
    async with raw(address, limit=1 << 12) as (reader, writer):
        writer.write(
            b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        yield writer


def client_frame(payload: bytes) -> bytes:
    assert len(payload) < 126
    return bytes([0x82, 0x80 | len(payload), 0, 0, 0, 0]) + payload
