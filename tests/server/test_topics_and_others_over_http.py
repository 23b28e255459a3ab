import asyncio
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from firn.errors import BY_CODE
from firn.topicspec import TopicSpec
from firn_node.server import ServerSettings
from firn_node.server.app import ROUTER
from server.serving import StandIn, batch, raw, real, run, served

DOCS = Path(__file__).parents[2] / "docs"


def test_topics_are_made_listed_in_pages_changed_and_deleted() -> None:
    async def main() -> None:
        async with real() as s:
            for name in ("a", "b", "c"):
                spec = {"partitions": 2, "compaction": {"minDirtyRatio": 0.2}}
                status, found, _ = await s.ask("POST", "/v1/topics", json={"name": name, "spec": spec})
                assert (status, found["name"], found["spec"]["partitions"]) == (201, name, 2)
            status, found, _ = await s.ask("POST", "/v1/topics", json={"name": "a"})
            assert (status, found["error"]) == (409, "topic_exists")
            seen, after = [], ""
            while after is not None:
                _, page, _ = await s.ask("GET", f"/v1/topics?limit=2&after={after}")
                seen += [t["name"] for t in page["topics"]]
                after = page["after"]
            assert seen == ["a", "b", "c", "t"]
            spec = {"compaction": {"maxLag": "1h"}}
            status, found, _ = await s.ask("PUT", "/v1/topics/a", json={"spec": spec})
            assert (status, found["spec"]["compaction"]["maxLag"], found["spec"]["partitions"]) == (
                200,
                "1h",
                2,
            )
            status, found, _ = await s.ask("PUT", "/v1/topics/a", json={"spec": {"partitions": 3}})
            assert (status, found["error"]) == (400, "invalid")
            _, found, _ = await s.ask("GET", "/v1/topics/a?after=0")
            assert [p["partition"] for p in found["partitions"]] == [1]
            assert (await s.ask("DELETE", "/v1/topics/a"))[0] == 200
            status, found, _ = await s.ask("GET", "/v1/topics/a")
            assert (status, found["error"]) == (404, "unknown_topic")

    run(main)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"name": "x", "colour": 1}, "colour"), ({"name": "a/b"}, "a/b"), ({}, "None"), ([], "object"),
        ({"name": "x", "spec": {"partitions": 0}}, "spec.partitions"), ({"name": "x", "spec": []}, "spec"),
        ({"name": "__x"}, "__x"), ({"name": "x", "spec": {"compaction": {"maxLag": 5}}}, "maxLag"),
    ],
)  # fmt: skip
def test_a_bad_topic_document_is_refused_by_name(body: object, named: str) -> None:
    async def main() -> None:
        async with served(StandIn()) as s:
            status, found, _ = await s.ask("POST", "/v1/topics", json=body)
            assert (status, found["error"]) == (400, "invalid")
            assert named in found["message"]

    run(main)


def test_a_forced_compaction_runs_and_shows_its_result() -> None:
    async def main() -> None:
        async with real(compaction={"deleteRetention": "0s"}) as s:
            assert (await s.ask("GET", "/v1/topics/t/compaction"))[0] == 404
            for i in range(10):
                await s.ask("PUT", "/v1/topics/t/records/k", data=b"%d" % i)
            status, found, _ = await s.ask("POST", "/v1/topics/t/compaction", json={"force": True})
            assert (status, found["topic"], found["force"]) == (202, "t", True)
            while found["state"] not in ("done", "failed"):
                await asyncio.sleep(0.02)
                _, found, _ = await s.ask("GET", "/v1/topics/t/compaction")
            (row,) = found["partitions"]
            assert (found["state"], row["records_before"], row["records_after"]) == ("done", 10, 1), row
            _, records, headers = await s.ask(
                "GET", "/v1/topics/t/partitions/0", headers={"Accept": "application/json"}
            )
            assert [(r["offset"], r["value"]) for r in records] == [(9, "9")]
            assert headers["Firn-Horizon"] == "10"
            assert (await s.ask("POST", "/v1/topics/t/compaction", json={"force": 1}))[0] == 400

    run(main)


def test_a_snapshot_shows_its_moment_until_it_is_given_back() -> None:
    async def main() -> None:
        async with real() as s:
            await s.ask("PUT", "/v1/topics/t/records/k", data=b"old")
            status, snapshot, _ = await s.ask("POST", "/v1/topics/t/snapshots")
            assert (status, snapshot["partitions"]["0"]["end"]) == (201, 1)
            await s.ask("PUT", "/v1/topics/t/records/k", data=b"new")
            page = f"/v1/topics/t/partitions/0?snapshot={snapshot['id']}"
            as_json = {"Accept": "application/json"}
            _, found, headers = await s.ask("GET", page, headers=as_json)
            assert ([r["value"] for r in found], headers["Firn-End"]) == (["old"], "1")
            path = f"/v1/topics/t/snapshots/{snapshot['id']}"
            renewed = [(await s.ask("PUT", path))[1] for _ in range(2)]
            assert renewed[0]["expires_ms"] >= snapshot["expires_ms"]
            assert [document["renewals"] for document in (snapshot, *renewed)] == [0, 1, 2]
            assert (await s.ask("DELETE", path))[0] == 200
            status, found, _ = await s.ask("GET", page, headers=as_json)
            assert (status, found["error"]) == (410, "snapshot_expired")
            assert (await s.ask("PUT", path))[0] == 410

    run(main)


def test_a_groups_offsets_come_back() -> None:
    async def main() -> None:
        async with real(2) as s:
            path = "/v1/groups/g%2F1/offsets/t"
            assert (await s.ask("GET", path))[1]["offsets"] == {}
            body = {"offsets": {"0": {"offset": 7, "since": 3}, "1": {"offset": 0}}}
            assert (await s.ask("PUT", path, json=body))[0] == 200
            _, found, _ = await s.ask("GET", path)
            assert found == {
                "group": "g/1",
                "topic": "t",
                "offsets": {"0": {"offset": 7, "since": 3}, "1": {"offset": 0, "since": None}},
            }
            for bad in (
                {"0": 5},
                {"x": {"offset": 1}},
                {"0": {"offset": -1}},
                {"0": {}},
                {"9": {"offset": 1}},
                [],
            ):
                assert (await s.ask("PUT", path, json={"offsets": bad}))[0] == 400

    run(main)


def test_raw_records_are_found_by_key_id_and_time() -> None:
    async def main() -> None:
        async with real() as s:
            for i in range(3):
                headers = {"Firn-Timestamp": str(1000 * (i + 1))}
                await s.ask("PUT", "/v1/topics/t/records/k%00", data=b"%d" % i, headers=headers)
            _, found, _ = await s.ask("GET", "/v1/topics/t/query?key=k%00&since=1000&until=3000")
            assert [r["value"] for r in found] == ["0", "1"]
            assert (await s.ask("GET", "/v1/topics/t/query?key=other"))[1] == []
            assert (await s.ask("GET", "/v1/topics/t/query"))[0] == 400
            status, by_id, _ = await s.ask("GET", f"/v1/topics/t/ids/{found[1]['id']}")
            assert (status, by_id) == (200, found[1])
            assert (await s.ask("GET", "/v1/topics/t/ids/0-fffff8-0-0"))[0] == 404
            assert (await s.ask("GET", "/v1/topics/t/ids/nonsense"))[0] == 400
            _, found, _ = await s.ask("GET", "/v1/topics/t/partitions/0/offset?timestamp=2000")
            assert found == {"partition": 0, "offset": 1}
            assert (await s.ask("GET", "/v1/topics/t/partitions/0/offset"))[0] == 400

    run(main)


def test_batches_are_appended_while_the_body_still_arrives() -> None:
    async def main() -> None:
        async with real(2) as s:
            data = [batch(s.topic_id, (b"k%d" % i, bytes(5000)), partition=i % 2) for i in range(8)]
            whole = b"".join(data)

            async def body():  # type: ignore[no-untyped-def]
                yield whole[:15_000]
                while s.broker.metrics["append_batches"] < 3:  # __topics' one, and the first two of these
                    await asyncio.sleep(0.01)
                yield whole[15_000:]

            status, found, _ = await s.ask("POST", "/v1/batches", data=body())
            assert (status, found) == (200, [[i % 2, i // 2] for i in range(8)])
            assert s.context.in_flight.used == 0

    run(main)


def test_a_faulty_batch_of_a_bulk_produce_has_its_error_at_its_place() -> None:
    async def main() -> None:
        async with real() as s:
            good = batch(s.topic_id, (b"k", b"v"))
            flipped = bytearray(good)
            flipped[-1] ^= 1
            _, found, _ = await s.ask("POST", "/v1/batches", data=good + bytes(flipped) + good)
            assert found[0] == [0, 0]
            assert found[1]["error"] == "malformed_batch"
            assert found[2] == [0, 1]
            _, found, _ = await s.ask("POST", "/v1/batches", data=good + b"garbage" * 40)
            assert found[0] == [0, 2]
            assert found[1]["error"] == "malformed_batch"
            _, found, _ = await s.ask("POST", "/v1/batches", data=good + good[:-8])
            assert [type(f) for f in found] == [list, dict]
            for body in (b"", b"x", b"garbage" * 40, good[:-1]):
                status, found, _ = await s.ask("POST", "/v1/batches", data=body)
                assert (status, "error" in found) == (400, True)
            assert s.context.in_flight.used == 0

    run(main)


def test_the_largest_batch_fits_a_budget_of_the_same_size() -> None:
    async def main() -> None:
        broker = StandIn()
        await broker.create_topic("t", TopicSpec())
        values = [(b"k", bytes(15 << 20)), (b"l", bytes(16 << 20))]
        async with served(broker, ServerSettings(budget_wait_seconds=1)) as s:
            status, found, _ = await s.ask("POST", "/v1/batches", data=io.BytesIO(batch(8, *values) * 2))
            assert (status, found) == (200, [[0, 0], [0, 2]])
            assert s.context.in_flight.used == 0

    run(main)


def test_unknown_paths_and_methods_are_answered_in_the_shape_of_errors() -> None:
    async def main() -> None:
        async with served(StandIn()) as s:
            for path in (
                "/",
                "/v2",
                "/v1/topics/",
                "/v1//topics",
                "/v1/topics/t/partitions/0/x",
                "/v1/records",
            ):
                status, found, _ = await s.ask("GET", path)
                assert (status, found["error"]) == (404, "not_found"), path
            status, found, headers = await s.ask("PATCH", "/v1/topics/t")
            assert (status, found["error"], found["allowed"]) == (405, "invalid", ["DELETE", "GET", "PUT"])
            assert headers["Allow"] == "DELETE, GET, PUT"
            assert (await s.ask("POST", "/healthz"))[0] == 405
            assert (await s.ask("GET", "/v1/topics/t/partitions/x"))[0] == 400
            status, found, _ = await s.ask("GET", "/v1/status?verbose=1")
            assert (status, "verbose" in found["message"]) == (400, True)

    run(main)


def test_what_is_not_http_is_answered_in_the_shape_of_errors() -> None:
    async def main() -> None:
        async with served(StandIn()) as s:
            for garbage in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET " + b"a" * 300_000):
                async with raw(s.address) as (reader, writer):
                    writer.write(garbage)
                    answer = await reader.read()
                    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
                    assert b'"error":"invalid"' in answer

    run(main)


def test_health_readiness_status_and_metrics() -> None:
    async def main() -> None:
        async with real() as s:
            await s.ask("PUT", "/v1/topics/t/records/k", data=b"v")
            assert (await s.ask("GET", "/healthz"))[:2] == (200, {"status": "ok"})
            assert (await s.ask("GET", "/readyz"))[:2] == (200, {"status": "ready"})
            _, found, _ = await s.ask("GET", "/v1/status")
            assert [b["role"] for b in found["brokers"]] == ["master"]
            assert [t["name"] for t in found["topics"]] == ["t"]
            status, body, headers = await s.ask("GET", "/metrics")
            text = body.decode()
            assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
            for line in (
                "firn_ready 1.0",
                "firn_append_records_total 2.0",
                'firn_partition_latest{partition="0",topic="t"} 1.0',
                'firn_server_requests_total{method="PUT",route="/v1/topics/{topic}/records/{rest}",status="200"} 1.0',
                "firn_server_in_flight_bytes 0.0",
            ):
                assert line in text.splitlines(), line
            assert all(line.startswith(("#", "firn_")) for line in text.splitlines())
            await s.kit.broker.stop()
            assert (await s.ask("GET", "/readyz"))[0] == 503
            await s.kit.broker.start()

    run(main)


@pytest.mark.parametrize("is_open", [False, True])
def test_metrics_show_a_broker_that_was_told_to_listen_insecurely(is_open: bool) -> None:
    async def main() -> None:
        broker = StandIn()
        broker.settings = replace(broker.settings, insecure=is_open)
        async with served(broker) as s:
            _, body, _ = await s.ask("GET", "/metrics")
            assert f"firn_insecure {float(is_open)}" in body.decode().splitlines()

    run(main)


def test_connections_past_the_bound_are_told_so_and_others_go_on() -> None:
    async def main() -> None:
        async with served(StandIn(connections_max=2)) as s:
            request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
            async with raw(s.address) as first, raw(s.address) as second, raw(s.address) as third:
                answers = []
                for reader, writer in (first, second, third):
                    writer.write(request)
                    answers.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
                assert answers == [b"200", b"200", b"503"]
                assert b"limit_exceeded" in await third[0].read()
            while s.context.counts.connections:
                await asyncio.sleep(0.01)
            assert (await s.ask("GET", "/healthz"))[0] == 200

    run(main)


def test_a_connection_that_says_nothing_is_closed() -> None:
    async def main() -> None:
        async with (
            served(StandIn(), ServerSettings(first_request_seconds=0.1)) as s,
            raw(s.address) as (reader, _),
        ):
            assert await reader.read() == b""
            assert s.context.counts.connections == 0

    run(main)


def test_a_port_in_use_is_an_os_error() -> None:
    async def main() -> None:
        from firn_node.server import serve

        async with served(StandIn()) as s:
            host, port = s.address.split(":")
            with pytest.raises(OSError):
                await serve(StandIn(), host=host, port=int(port))

    run(main)


def test_every_route_has_its_curl_example() -> None:
    examples = (DOCS / "http.md").read_text()
    shown = set(re.findall(r"^### `([A-Z]+) (/[^`?]*)", examples, re.M))
    routes = {(r.method, r.pattern.replace("{rest}", "{key}")) for r in ROUTER.routes}
    assert shown == routes
    for method, pattern in routes:
        section = examples.split(f"### `{method} {pattern}", 1)[1].split("\n### ", 1)[0]
        assert "curl" in section, pattern


def test_the_table_of_errors_is_that_of_the_classes() -> None:
    text = (DOCS / "errors.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+)` \| (\d+) \| (yes|no) \|", text, re.M)
    assert {code: (int(status), retry == "yes") for code, status, retry in rows} == {
        code: (kind.status, kind.retry) for code, kind in BY_CODE.items()
    }


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("switchover", {}, "group"), ("switchover", {"group": "0"}, "group"), ("switchover", {"group": True}, "group"),
        ("switchover", {"group": -1}, "group"), ("switchover", {"group": 0, "to": ""}, "to"),
        ("switchover", {"group": 0, "node": "n"}, "node"), ("data-loss", {"group": 0}, "node"),
        ("data-loss", {"group": 0, "node": 7}, "node"),
    ],
)  # fmt: skip
def test_a_bad_request_to_a_group_is_refused_by_name(path: str, body: dict[str, object], named: str) -> None:
    async def main() -> None:
        async with served(StandIn()) as s:
            status, found, _ = await s.ask("POST", f"/v1/cluster/{path}", json=body)
            assert (status, found["error"]) == (400, "invalid")
            assert named in found["message"]

    run(main)
