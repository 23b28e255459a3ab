import asyncio
import json

import msgpack
import pytest

from firn.topicspec import TopicSpec
from firn_node.server import ServerSettings
from firn_node.settings import MemorySettings
from server.serving import StandIn, raw, real, run, served


async def broker_with_topic(partitions: int = 1, **options: object) -> StandIn:
    broker = StandIn(**options)  # type: ignore[arg-type]
    await broker.create_topic("t", TopicSpec(partitions))
    return broker


def test_a_put_value_comes_back_with_its_offset() -> None:
    async def main() -> None:
        async with real() as s:
            status, found, _ = await s.ask("PUT", "/v1/topics/t/records/k", data=b"v0")
            assert (status, found) == (200, {"partition": 0, "offset": 0})
            status, found, headers = await s.ask("PUT", "/v1/topics/t/records/k", data=b"v\xff1")
            assert found == {"partition": 0, "offset": 1}
            status, found, headers = await s.ask("GET", "/v1/topics/t/records/k")
            assert (status, found) == (200, b"v\xff1")
            assert headers["Firn-Offset"] == "1"
            assert int(headers["Firn-Timestamp"]) > 1_600_000_000_000

    run(main)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("", b""), ("a%2Fb", b"a/b"), ("%00%FF%2f", b"\x00\xff/"), ("a/b", b"a/b"), ("%2E%2E", b".."), ("..", b".."),
        ("%25", b"%"), ("%zz", b"%zz"), ("a+b", b"a+b"), ("%C3%BC", "ü".encode()), ("%3Fq%23", b"?q#"),
    ],
)  # fmt: skip
def test_a_key_of_any_bytes_is_addressable(path: str, key: bytes) -> None:
    async def main() -> None:
        async with real() as s:
            status, _, _ = await s.ask("PUT", f"/v1/topics/t/records/{path}", data=b"v")
            assert status == 200
            assert [f.value for f in await s.broker.get("t", [key]) if f] == [b"v"]
            assert (await s.ask("GET", f"/v1/topics/t/records/{path}"))[1] == b"v"

    run(main)


def test_a_deleted_key_is_not_found() -> None:
    async def main() -> None:
        async with real() as s:
            await s.ask("PUT", "/v1/topics/t/records/k", data=b"v")
            status, found, _ = await s.ask("DELETE", "/v1/topics/t/records/k")
            assert (status, found) == (200, {"partition": 0, "offset": 1})
            status, found, _ = await s.ask("GET", "/v1/topics/t/records/k")
            assert status == 404
            assert found == {"error": "not_found", "message": "no such key", "retry": False}

    run(main)


def test_if_match_decides_and_its_loser_learns_the_newest_offset() -> None:
    async def main() -> None:
        async with real() as s:
            path = "/v1/topics/t/records/k"
            created = {"If-None-Match": "*"}
            assert (await s.ask("PUT", path, data=b"1", headers=created))[0] == 200
            status, found, _ = await s.ask("PUT", path, data=b"2", headers=created)
            assert (status, found["error"], found["newest_offset"]) == (412, "conflict", 0)
            assert (await s.ask("PUT", path, data=b"2", headers={"If-Match": "0"}))[1]["offset"] == 1
            assert (await s.ask("PUT", path, data=b"3", headers={"If-Match": '"0"'}))[0] == 412
            assert (await s.ask("DELETE", path, headers={"If-Match": "1"}))[1]["offset"] == 2

    run(main)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"If-Match": "x"}, "If-Match"),
        ({"If-Match": "*"}, "If-Match"),
        ({"If-None-Match": "3"}, "If-None-Match"),
        ({"If-Match": "1", "If-None-Match": "*"}, "If-Match"),
        ({"Firn-Timestamp": "soon"}, "Firn-Timestamp"),
        ({"Firn-Partition": "-1"}, "Firn-Partition"),
        ({"Firn-Timeout-Ms": "0"}, "Firn-Timeout-Ms"),
        ({"Firn-Tag": "%FF"}, "Firn-Tag"),
    ],
)
def test_a_bad_header_is_named(headers: dict[str, str], named: str) -> None:
    async def main() -> None:
        async with real() as s:
            status, found, _ = await s.ask("PUT", "/v1/topics/t/records/k", data=b"v", headers=headers)
            assert (status, found["error"]) == (400, "invalid")
            assert named in found["message"]

    run(main)


def test_tag_timestamp_and_partition_of_a_put_are_kept() -> None:
    async def main() -> None:
        async with real(4) as s:
            headers = {"Firn-Tag": "gr%C3%BCn", "Firn-Timestamp": "-5", "Firn-Partition": "3"}
            status, found, _ = await s.ask("PUT", "/v1/topics/t/records/k", data=b"v", headers=headers)
            assert (status, found["partition"]) == (200, 3)
            status, body, found_headers = await s.ask(
                "GET", "/v1/topics/t/records/k", headers={"Firn-Partition": "3"}
            )
            assert (status, body) == (200, b"v")
            assert found_headers["Firn-Tag"] == "gr%C3%BCn"
            assert found_headers["Firn-Timestamp"] == "-5"
            headers = {"Firn-Partition": "3", "Accept": "application/json"}
            _, document, _ = await s.ask("GET", "/v1/topics/t/records/k", headers=headers)
            assert document["tag"] == "grün"

    run(main)


def test_a_value_above_the_limit_is_refused_before_it_is_sent() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        async with served(broker) as s, raw(s.address) as (reader, writer):
            head = f"PUT /v1/topics/t/records/k HTTP/1.1\r\nHost: x\r\nContent-Length: {(16 << 20) + 1}\r\n"
            writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 413")
            assert broker.produced == []

    run(main)


def test_a_peer_that_expects_it_is_told_to_continue() -> None:
    async def main() -> None:
        async with real() as s, raw(s.address) as (reader, writer):
            writer.write(
                b"PUT /v1/topics/t/records/k HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
            )
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(b"abc")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(main)


def test_a_chunked_value_of_the_largest_size_is_kept_and_one_byte_more_is_refused() -> None:
    async def body(size: int):  # type: ignore[no-untyped-def]
        for at in range(0, size, 1 << 20):
            yield bytes(min(1 << 20, size - at))

    async def main() -> None:
        async with real() as s:
            assert (await s.ask("PUT", "/v1/topics/t/records/k", data=body(16 << 20)))[0] == 200
            status, found, _ = await s.ask("PUT", "/v1/topics/t/records/k", data=body((16 << 20) + 1))
            assert (status, found["error"]) == (413, "limit_exceeded")
            assert s.context.in_flight.used == 0

    run(main)


def test_a_key_above_the_limit_is_413() -> None:
    async def main() -> None:
        async with real() as s:
            assert (await s.ask("PUT", f"/v1/topics/t/records/{'k' * 65536}", data=b"v"))[0] == 200
            assert (await s.ask("PUT", f"/v1/topics/t/records/{'k' * 65537}", data=b"v"))[0] == 413

    run(main)


def test_a_timeout_is_504_and_the_append_goes_on() -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        broker.hold = asyncio.Event()
        async with served(broker) as s:
            status, found, _ = await s.ask(
                "PUT", "/v1/topics/t/records/k", data=b"v", headers={"Firn-Timeout-Ms": "20"}
            )
            assert (status, found["error"], found["retry"]) == (504, "timeout", True)
            broker.hold.set()
            while broker.ends.get((8, 0)) != 1:
                await asyncio.sleep(0.01)

    run(main)


def test_produce_waits_for_room_and_is_refused_in_time() -> None:
    async def main() -> None:
        broker = await broker_with_topic(memory=MemorySettings(in_flight_bytes=1000))
        broker.hold = asyncio.Event()
        async with served(broker, ServerSettings(budget_wait_seconds=0.2)) as s:
            first = asyncio.create_task(s.ask("PUT", "/v1/topics/t/records/a", data=bytes(900)))
            while s.context.in_flight.used != 900:
                await asyncio.sleep(0.01)
            status, found, headers = await s.ask("PUT", "/v1/topics/t/records/b", data=bytes(200))
            assert (status, found["error"], found["retry"]) == (503, "limit_exceeded", True)
            assert headers["Retry-After"] == "1"
            broker.hold.set()
            assert (await first)[0] == 200
            assert s.context.in_flight.used == 0
        broker.hold = asyncio.Event()
        async with served(broker, ServerSettings(budget_wait_seconds=60)) as s:
            first = asyncio.create_task(s.ask("PUT", "/v1/topics/t/records/a", data=bytes(900)))
            while s.context.in_flight.used != 900:
                await asyncio.sleep(0.01)
            later = asyncio.create_task(s.ask("PUT", "/v1/topics/t/records/b", data=bytes(200)))
            while not s.context.in_flight.waiting:
                await asyncio.sleep(0.01)
            broker.hold.set()
            assert (await first)[0] == 200
            assert (await later)[0] == 200
            assert s.context.in_flight.used == 0

    run(main)


def test_a_json_array_gets_its_offsets_in_input_order() -> None:
    async def main() -> None:
        async with real(3) as s:
            records = [{"key": f"k{i}", "value": None if i % 7 == 0 else f"v{i}"} for i in range(50)]
            records.append({"key_base64": "/w==", "value_base64": "AA==", "partition": 2, "tag": "x",
                            "headers": {"a": "b"}, "timestamp": 7, "queues": ["q"], "topic": "t"})  # fmt: skip
            status, found, _ = await s.ask("POST", "/v1/topics/t/records", data=json.dumps(records))
            assert status == 200
            assert len(found) == 51
            for p in range(3):
                offsets = [f["offset"] for f in found if f["partition"] == p]
                assert offsets == list(range(len(offsets)))
            _, documents, _ = await s.ask(
                "GET", "/v1/topics/t/partitions/2", headers={"Accept": "application/json"}
            )
            assert documents[-1] == {
                "topic": "t", "partition": 2, "offset": found[-1]["offset"], "timestamp": 7, "key_base64": "/w==",
                "value": "\x00", "tag": "x", "headers": {"a": "b"}, "queues": ["q"],
            }  # fmt: skip

    run(main)


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "malformed"),
        (b"[" * 100_000, 400, "malformed"),
        (b"\xff\xff", 400, "malformed"),
        (b"{}", 400, "array"),
        (b"", 400, "array"),
        (b'[{"value":"x"}]', 400, "record 0"),
        (b'[{"key":"a"},{"key":null}]', 400, "record 1"),
        (b'[{"key":"a","partition":9}]', 404, "partition"),
        (b'[{"key":"\\ud800"}]', 400, "record 0"),
        (b'[{"key":"a","tag":"\\ud800"}]', 400, "record 0"),
        (b'[{"key":"a","timestamp":1e400}]', 400, "record 0"),
        (b'[{"key":"a","timestamp":' + b"9" * 5000 + b"}]", 400, "malformed"),
        (b'[{"key":"' + b"k" * 65537 + b'"}]', 413, "record 0"),
        (b'[{"key":"a","tag":"' + b"t" * 256 + b'"}]', 413, "tag"),
        (json.dumps([{"key": "a", "queues": ["q"] * 65}]).encode(), 413, "queues"),
        (json.dumps([{"key": "a", "headers": {"h": "x" * 70_000}}]).encode(), 413, "headers"),
    ],
)
def test_a_bad_array_is_refused_by_name(body: bytes, status: int, named: str) -> None:
    async def main() -> None:
        async with real() as s:
            found_status, found, _ = await s.ask("POST", "/v1/topics/t/records", data=body)
            assert (found_status, named in found["message"]) == (status, True), found

    run(main)


def test_msgpack_is_answered_to_who_asks_for_it_errors_too() -> None:
    async def main() -> None:
        async with real() as s:
            headers = {"Accept": "application/msgpack"}
            _, body, _ = await s.ask("PUT", "/v1/topics/t/records/k", data=b"v", headers=headers)
            assert msgpack.unpackb(body) == {"partition": 0, "offset": 0}
            status, body, _ = await s.ask("GET", "/v1/topics/none/records/k", headers=headers)
            assert status == 404
            assert msgpack.unpackb(body)["error"] == "unknown_topic"

    run(main)


def test_a_bug_is_answered_and_counted_and_told_no_details(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        broker = await broker_with_topic()
        async with served(broker) as s:
            broker.failure = RuntimeError("secret")
            status, found, _ = await s.ask("PUT", "/v1/topics/t/records/k", data=b"v")
            assert (status, found["error"]) == (500, "error")
            assert "secret" not in found["message"]
            assert s.context.counts.failures == 1

    run(main)
    assert "secret" in caplog.text
