"""Principal x action x answer over real sockets, and credentials that are no good."""

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kube_kit import fake_kubernetes
from security_kit import (
    AUDIENCE,
    Asking,
    SetClock,
    Site,
    account,
    account_token,
    guarded,
    now,
    revocation_list,
)

from firn.client import Client, transport
from firn.errors import Forbidden, Invalid, Timeout, Unauthorized, Unavailable
from firn.tls import ClientProof, Credentials
from firn.topicspec import parse_spec
from firn.types import Epoch
from firn.values import pack_keys
from firn.wire import Op
from firn_node.clock import RealRandomness
from firn_node.replication.doors.codec import VERSION
from firn_node.replication.doors.peers import PATH, Dialling, Peers
from firn_node.replication.messages import Header, Leave
from firn_node.replication.record import GroupId, LogId
from firn_node.security.localca import make_ca, make_client, make_node
from firn_node.security.tokenreview import TokenReviews
from firn_node.server import Server, ServerSettings, replicate
from firn_node.server.app import ROUTER
from firn_node.server.guarded import HEAD_BYTES_MAX
from firn_node.settings import SecuritySettings
from server.serving import StandIn, batch, raw, run

ACCESS = [
    {"principals": ["reader"], "allow": ["read"]},
    {"principals": ["writer"], "allow": ["write"]},
    {"principals": ["spark-*"], "allow": ["read", "compact"]},
    {"principals": ["system:serviceaccount:shop:*"], "allow": ["read", "write"]},
    {"principals": ["system:serviceaccounts:audit"], "allow": ["read"]},
]
SECRET = [{"principals": ["somebody"], "allow": ["read", "write", "compact"]}]

# What each path needs; the test fails for a route that is not here.
OPEN, KNOWN, SEE, READ, WRITE, COMPACT, ADMIN = "open", "known", "see", "read", "write", "compact", "admin"
REPLICATE = "replicate"
_T = "/v1/topics/{topic}"
NEEDS = {
    ("PUT", f"{_T}/records/{{rest}}"): WRITE,
    ("GET", f"{_T}/records/{{rest}}"): READ,
    ("DELETE", f"{_T}/records/{{rest}}"): WRITE,
    ("POST", f"{_T}/records"): WRITE,
    ("POST", "/v1/batches"): KNOWN,
    ("GET", f"{_T}/partitions/{{partition}}"): READ,
    ("GET", "/v1/topics"): KNOWN,
    ("POST", "/v1/topics"): ADMIN,
    ("GET", _T): SEE,
    ("PUT", _T): ADMIN,
    ("DELETE", _T): ADMIN,
    ("POST", f"{_T}/compaction"): COMPACT,
    ("GET", f"{_T}/compaction"): SEE,
    ("DELETE", f"{_T}/compaction"): COMPACT,
    ("POST", f"{_T}/compaction/plan"): COMPACT,
    ("GET", f"{_T}/compaction/plan"): SEE,
    ("PUT", f"{_T}/compaction/plan/{{id}}"): COMPACT,
    ("DELETE", f"{_T}/compaction/plan/{{id}}"): COMPACT,
    ("GET", f"{_T}/compaction/plan/{{id}}/partitions/{{partition}}"): COMPACT,
    ("PUT", f"{_T}/compaction/plan/{{id}}/partitions/{{partition}}/slices/{{slice}}"): COMPACT,
    ("POST", f"{_T}/snapshots"): READ,
    ("PUT", f"{_T}/snapshots/{{id}}"): READ,
    ("DELETE", f"{_T}/snapshots/{{id}}"): READ,
    ("GET", f"{_T}/query"): READ,
    ("GET", f"{_T}/ids/{{id}}"): READ,
    ("GET", f"{_T}/partitions/{{partition}}/offset"): READ,
    ("GET", "/v1/groups/{group}/offsets/{topic}"): READ,
    ("PUT", "/v1/groups/{group}/offsets/{topic}"): READ,
    ("GET", "/v1/status"): KNOWN,
    ("POST", "/v1/rebuild"): ADMIN,
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): ADMIN,
    ("GET", "/v1/stream"): KNOWN,
    ("GET", "/v1/replicate"): REPLICATE,
    ("POST", "/v1/cluster/switchover"): ADMIN,
    ("POST", "/v1/cluster/data-loss"): ADMIN,
    ("GET", "/v1/replicate/rebuild"): REPLICATE,
    ("POST", "/v1/replicate/pins"): REPLICATE,
    ("GET", "/v1/replicate/pins/{id}"): REPLICATE,
    ("DELETE", "/v1/replicate/pins/{id}"): REPLICATE,
    ("GET", "/v1/catalogue"): REPLICATE,
}
# Who may what on the topic with ACCESS; None: not even known.
MAY: dict[str, set[str] | None] = {
    "nobody": None,
    "wrong token": None,
    "stranger": {KNOWN},
    "reader": {KNOWN, SEE, READ},
    "writer": {KNOWN, SEE, WRITE},
    "spark": {KNOWN, SEE, READ, COMPACT},
    "admin": {KNOWN, SEE, READ, WRITE, COMPACT, ADMIN},
    "admin token": {KNOWN, SEE, READ, WRITE, COMPACT, ADMIN},
    "node": {REPLICATE},
    "account": {KNOWN, SEE, READ, WRITE},
    "account by its group": {KNOWN, SEE, READ},
    "account of another namespace": {KNOWN},
    "account for another audience": None,
    "account that is gone": None,
    "user that is no account": None,
}
ACCOUNTS = {
    "account": account("shop", "till"),
    "account by its group": account("audit", "reader"),
    "account of another namespace": account("shopping", "till"),
    "account for another audience": account("shop", "till", audience="vault"),
    "account that is gone": {"authenticated": False},
    "user that is no account": {**account("shop", "till"), "user": {"username": "spark-1"}},
}
ACCOUNT_TOKENS = {who: account_token(who) for who in ACCOUNTS}


@contextlib.asynccontextmanager
async def serving(site: Site, broker: StandIn) -> AsyncIterator[Server]:
    """``guarded``, with a Kubernetes that knows the service accounts of the table."""
    async with fake_kubernetes() as kubernetes:
        kubernetes.tokens.update({ACCOUNT_TOKENS[who]: status for who, status in ACCOUNTS.items()})
        reviews = TokenReviews(kubernetes.api(), AUDIENCE, SetClock())
        try:
            async with guarded(site, broker, reviews=reviews) as server:
                yield server
        finally:
            await reviews.close()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    tokens = {"w": "principal: writer", "s": "principal: spark-run-7", "a": "principal: ops, roles: [admin]"}
    return Site(tmp_path, tokens=tokens)


def credentials(site: Site, who: str) -> Credentials:
    makers: dict[str, Callable[[], Credentials]] = {
        "nobody": lambda: Credentials(site.path("ca.crt")),
        "wrong token": lambda: site.with_token("wrong"),
        "stranger": lambda: site.client("stranger"),
        "reader": lambda: site.client("reader"),
        "writer": lambda: site.with_token("w"),
        "spark": lambda: site.with_token("s"),
        "admin": lambda: site.client("root", is_admin=True),
        "admin token": lambda: site.with_token("a"),
        "node": lambda: site.client("firn-1", pair=make_node(site.ca, "firn-1", now())),
    } | {name: functools.partial(site.with_token, ACCOUNT_TOKENS[name]) for name in ACCOUNTS}
    return makers[who]()


async def stand_in() -> StandIn:
    broker = StandIn()
    await broker.create_topic("flights", parse_spec({"access": ACCESS}))
    await broker.create_topic("secret", parse_spec({"access": SECRET}))
    return broker


def target(pattern: str, topic: str) -> str:
    values = {"topic": topic, "rest": "k", "partition": "0", "id": "i", "group": "g", "slice": "0"}
    return pattern.format(**values)


def test_the_table_of_needs_names_every_route() -> None:
    assert {(route.method, route.pattern) for route in ROUTER.routes} == set(NEEDS)


@pytest.mark.parametrize("who", MAY)
def test_each_path_answers_each_principal_as_the_table_says(site: Site, who: str) -> None:
    may = MAY[who]

    async def main() -> None:
        async with (
            serving(site, await stand_in()) as server,
            Asking(server.address, credentials(site, who)) as ask,
        ):
            for (method, pattern), need in NEEDS.items():
                status, body = await ask(method, target(pattern, "flights"))
                what = f"{who}: {method} {pattern}: {status} {body!r}"
                if need == OPEN:
                    assert status < 300, what
                elif may is None:
                    assert (status, body["error"]) == (401, "unauthorized"), what
                elif need not in may:
                    assert (status, body["error"]) == (403, "forbidden"), what
                else:
                    assert status not in (401, 403), what

    run(main)


def test_a_topic_that_may_not_be_seen_is_answered_as_one_that_does_not_exist(site: Site) -> None:
    async def main() -> None:
        async with (
            guarded(site, await stand_in()) as server,
            Asking(server.address, credentials(site, "reader")) as ask,
        ):
            for (method, pattern), need in NEEDS.items():
                if "{topic}" not in pattern or need == ADMIN:
                    continue
                hidden = await ask(method, target(pattern, "secret"))
                absent = await ask(method, target(pattern, "absent"))
                assert hidden[0] == 403
                assert json.dumps(hidden[1]).replace("secret", "absent") == json.dumps(absent[1])
            async with ask.stream() as peer:
                for op, meta in ((Op.FETCH, {}), (Op.GET, {"keys": 1})):
                    hidden_ = await peer.ask(op, 1, {**meta, "topic": "secret"}, pack_keys([b"k"]))
                    absent_ = await peer.ask(op, 2, {**meta, "topic": "absent"}, pack_keys([b"k"]))
                    assert hidden_.meta["error"] == "forbidden"
                    assert json.dumps(hidden_.meta).replace("secret", "absent") == json.dumps(absent_.meta)
                ids = [
                    (await peer.ask(Op.PRODUCE, 3, {}, batch(topic_id, (b"k", b"v")))).meta
                    for topic_id in (16, 4000)
                ]
                assert ids[0]["error"] == "unknown_topic"
                assert json.dumps(ids[0]).replace("16", "4000") == json.dumps(ids[1])

    run(main)


def test_lists_and_status_show_only_what_may_be_seen(site: Site) -> None:
    async def main() -> None:
        broker = await stand_in()
        rows = [{"name": name, "partitions": []} for name in ("flights", "secret")]
        broker.status = lambda *, limit=1000: {"brokers": [], "topics": list(rows)}
        async with guarded(site, broker) as server:
            for who, names in (
                ("reader", ["flights"]),
                ("stranger", []),
                ("admin", ["flights", "secret"]),
            ):
                async with Asking(server.address, credentials(site, who)) as ask:
                    for path in ("/v1/topics", "/v1/topics?limit=1", "/v1/status"):
                        _, body = await ask("GET", path)
                        limit = 1 if "limit=1" in path else 9
                        assert [topic["name"] for topic in body["topics"]] == names[:limit]
                    _, body = await ask("GET", "/v1/topics?limit=1")
                    assert body["after"] == ("flights" if len(names) > 1 else None)

    run(main)


@pytest.mark.parametrize("who", MAY)
def test_each_message_of_a_stream_is_decided_by_itself(site: Site, who: str) -> None:
    may = MAY[who]

    async def main() -> None:
        async with (
            serving(site, await stand_in()) as server,
            Asking(server.address, credentials(site, who)) as ask,
        ):
            if may is None or KNOWN not in may:
                with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                    async with ask.stream():
                        pass
                assert caught.value.status == (401 if may is None else 403)
                return
            async with ask.stream() as peer:
                produced = await peer.ask(Op.PRODUCE, 1, {}, batch(8, (b"k", b"v")))
                got = await peer.ask(Op.GET, 2, {"topic": "flights", "keys": 1}, pack_keys([b"k"]))
                fetched = await peer.ask(Op.FETCH, 3, {"topic": "flights", "credit": 1})
                assert (await peer.ask(Op.HELLO, 4, {})).op == Op.OK
            refused = "forbidden" if SEE in may else "unknown_topic"
            assert produced.meta.get("error") == (None if WRITE in may else refused)
            for answer, op in ((got, Op.VALUES), (fetched, Op.DATA)):
                assert answer.op == op if READ in may else answer.meta["error"] == "forbidden"

    run(main)


def test_batches_of_several_topics_are_written_all_or_not_at_all(site: Site) -> None:
    async def main() -> None:
        broker = await stand_in()
        async with (
            guarded(site, broker) as server,
            Asking(server.address, credentials(site, "writer")) as ask,
        ):
            both = batch(8, (b"k", b"v")) + batch(16, (b"k", b"v"))
            async with ask.stream() as peer:
                found = await peer.ask(Op.PRODUCE, 1, {}, both)
                assert found.meta["error"] == "unknown_topic"
            status, body = await ask("POST", "/v1/batches", data=both)
            assert (status, body["error"]) == (404, "unknown_topic")
            assert broker.logs == {}
            status, body = await ask("POST", "/v1/batches", data=batch(8, (b"k", b"v")))
            assert (status, body) == (200, [[0, 0]])

    run(main)


def test_who_names_a_topic_that_this_broker_has_yet_to_hear_of_is_told_to_try_again(site: Site) -> None:
    """It was told that there is no such topic, and gave its records up."""

    async def main() -> None:
        broker = await stand_in()
        broker.unknown = Unavailable("topic id is not known yet; try again")
        async with (
            guarded(site, broker) as server,
            Asking(server.address, credentials(site, "writer")) as ask,
            ask.stream() as peer,
        ):
            hidden = await peer.ask(Op.PRODUCE, 1, {}, batch(16, (b"k", b"v")))
            unknown = await peer.ask(Op.PRODUCE, 2, {}, batch(24, (b"k", b"v")))
            assert hidden.meta["error"] == unknown.meta["error"] == "unavailable"
            assert hidden.meta["message"] == unknown.meta["message"]
            assert hidden.meta["retry"]

    run(main)


def test_a_denial_and_an_administrative_action_are_in_the_audit_log_without_any_secret(site: Site) -> None:
    async def main() -> None:
        async with guarded(site, await stand_in()) as server:
            async with Asking(server.address, credentials(site, "wrong token")) as ask:
                await ask("GET", "/v1/topics/flights")
            async with Asking(server.address, credentials(site, "reader")) as ask:
                await ask("PUT", "/v1/topics/flights/records/k", data=b"v")
                await ask("GET", "/v1/topics/flights")
                async with ask.stream() as peer:
                    await peer.ask(Op.PRODUCE, 1, {}, batch(8, (b"k", b"v")))
            async with Asking(server.address, credentials(site, "admin")) as ask:
                await ask("POST", "/v1/topics", json={"name": "new"})
                await ask("POST", "/v1/topics", json={"name": "new"})
                await ask("DELETE", "/v1/topics/new")
                await ask("POST", "/v1/cluster/switchover", json={"group": 0, "to": "firn-0-1"})
                body = {"group": 3, "node": "firn-3-1"}
                status, found = await ask("POST", "/v1/cluster/data-loss", json=body)
                assert (status, found) == (200, {"group": 3, "to": "firn-3-1", "by": "root"})
        text = Path(site.path("audit.log")).read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [(x["principal"], x["action"], x["object"], x["outcome"]) for x in lines] == [
            (None, "GET /v1/topics/{topic}", "flights", "unauthorized"),
            ("reader", "PUT /v1/topics/{topic}/records/{rest}", "flights", "forbidden"),
            ("reader", "PRODUCE", "id 8", "forbidden"),
            ("root", "POST /v1/topics", "new", "done"),
            ("root", "POST /v1/topics", "new", "topic_exists"),
            ("root", "DELETE /v1/topics/{topic}", "new", "done"),
            ("root", "POST /v1/cluster/switchover", "group 0 to firn-0-1", "unavailable"),
            ("root", "POST /v1/cluster/data-loss", "group 3 to firn-3-1", "done"),
        ]
        assert {line["address"] for line in lines} == {"127.0.0.1"}
        assert "wrong" not in text

    run(main)


# Credentials that are no good


NOT_TAKEN = "the broker refuses this client's certificate: "


async def told(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What a request gives once one ends in time: a slow machine's last retry may not."""
    while True:
        try:
            return await ask()
        except Timeout:
            continue


def refused(site: Site, found: Credentials, kind: type[Exception], match: str, **options: Any) -> None:
    """A client with these credentials gets this error, from a request and from the stream."""

    async def main() -> None:
        async with guarded(site, await stand_in(), **options) as server:
            is_retried = kind is Unavailable
            for address in (server.address, f"127.0.0.1:1,{server.address}")[: 1 if is_retried else 2]:
                async with Client(
                    address,
                    timeout=1 if is_retried else 5,
                    tls_ca=found.tls_ca,
                    tls_cert=found.tls_cert,
                    tls_key=found.tls_key,
                    token=found.token,
                ) as client:
                    transport, page = client._transport, "/v1/topics/flights/partitions/0"
                    for ask in (
                        client.topics,
                        functools.partial(client.get, "flights", b"k"),
                        transport.stream,
                        functools.partial(transport.bulk, page, query={}, headers={}),
                    ):
                        with pytest.raises(kind, match=match):
                            await told(ask)

    run(main)


def test_an_expired_certificate_is_refused_in_the_handshake(site: Site) -> None:
    pair = make_client(site.ca, "reader", now() - timedelta(days=3), days=2)
    refused(site, site.client("reader", pair=pair), Unauthorized, NOT_TAKEN + "it has expired")
    lines = [json.loads(line) for line in Path(site.path("audit.log")).read_text().splitlines()]
    assert {(line["action"], line["outcome"], line["principal"]) for line in lines} == {
        ("TLS handshake", "certificate: certificate has expired", None)
    }


def test_a_certificate_that_is_not_valid_yet_is_refused(site: Site) -> None:
    pair = make_client(site.ca, "reader", now() + timedelta(days=1))
    refused(
        site, site.client("reader", pair=pair), Unauthorized, NOT_TAKEN + "it is damaged, or not valid yet"
    )


def test_a_certificate_of_a_foreign_ca_is_refused(site: Site) -> None:
    pair = make_client(make_ca("foreign", now()), "reader", now())
    refused(
        site, site.client("reader", pair=pair), Unauthorized, NOT_TAKEN + "the broker does not trust the CA"
    )


def test_a_revoked_certificate_is_refused_by_name(site: Site) -> None:
    pair = make_client(site.ca, "reader", now())
    found = site.client("reader", pair=pair)
    site.write("ca.crt", site.ca.certificate_pem() + revocation_list(site.ca, pair))
    refused(site, found, Unauthorized, "the certificate is revoked")


def test_a_nodes_certificate_is_no_clients(site: Site) -> None:
    refused(
        site, credentials(site, "node"), Forbidden, "firn-1 is a node: its certificate is for replication"
    )


def test_a_node_speaks_for_its_own_logs_and_for_one_that_nobody_has(site: Site) -> None:
    async def main() -> None:
        owners = {LogId("b"): "firn-1", LogId("c"): "firn-2"}
        peers = Peers(
            GroupId("0"), LogId("a"), receive=lambda *_: None, lost=lambda _: None, address_of=lambda _: None,
            randomness=RealRandomness(), node_of=owners.get,
        )  # fmt: skip
        async with (
            guarded(site, await stand_in()) as server,
            Asking(server.address, credentials(site, "node")) as ask,
        ):
            server.context.peers = peers
            for source, is_taken in (("b", True), ("d", True), ("c", False)):
                path = f"{PATH}?version={VERSION}&group=0&from={source}&to=a"
                if is_taken:
                    async with ask.stream(path):
                        assert source in peers.status()["accepted"]
                    continue
                with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                    async with ask.stream(path):
                        pass
                assert caught.value.status == 403
                _, body = await ask("GET", path)
                assert body["message"] == "replication: the log c is of node firn-2, not of firn-1"

    run(main)


def test_a_connection_of_a_node_ends_when_its_certificate_is_revoked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate, "CHECK_SECONDS", 0.02)

    async def main() -> None:
        pair = make_node(site.ca, "firn-1", now())
        peers = Peers(
            GroupId("0"), LogId("a"), receive=lambda *_: None, lost=lambda _: None, address_of=lambda _: None,
            randomness=RealRandomness(),
        )  # fmt: skip
        async with guarded(site, await stand_in()) as server:
            server.context.peers = peers
            path = f"{PATH}?version={VERSION}&group=0&from=b&to=a"
            async with (
                Asking(server.address, site.client("firn-1", pair=pair)) as ask,
                ask.stream(path) as peer,
            ):
                await asyncio.sleep(0.1)
                assert peers.status()["accepted"] == ["b"]
                site.write("ca.crt", site.ca.certificate_pem() + revocation_list(site.ca, pair))
                assert server.context.guard.files.reload_if_changed()
                while peers.status()["accepted"]:
                    await asyncio.sleep(0.01)
                assert (await peer.socket.receive()).type is not aiohttp.WSMsgType.BINARY

    run(main)


def test_nodes_reach_one_another_with_the_certificates_they_serve_with(site: Site) -> None:
    async def main() -> None:
        sides = {LogId(name): await stand_in() for name in ("a", "b")}
        received: list[Any] = []
        async with guarded(site, sides[LogId("a")]) as one, guarded(site, sides[LogId("b")]) as other:
            addresses = {LogId("a"): one.address, LogId("b"): other.address}
            for own, server in ((LogId("a"), one), (LogId("b"), other)):
                tls = ClientProof(site.settings.as_client()).context
                server.context.peers = Peers(
                    GroupId("0"), own, receive=lambda source, found: received.append((source, found.message)),
                    lost=lambda _: None, address_of=addresses.get, randomness=RealRandomness(),
                    dialling=Dialling(tls=tls), node_of=lambda _: "firn-0",
                )  # fmt: skip
            said = Leave(Header(GroupId("0"), Epoch(1), LogId("a")), "going")
            one.context.peers.send(LogId("b"), said)
            while not received:
                await asyncio.sleep(0.01)
            assert received == [("a", said)]

    run(main)


def test_a_connection_ends_with_the_answer_that_asks_who_is_there(site: Site) -> None:
    async def main() -> None:
        plain = SecuritySettings(tokens=site.path("tokens.yaml"))
        async with (
            guarded(site, await stand_in(), security=plain) as server,
            raw(server.address) as (reader, writer),
        ):
            writer.write(b"GET /v1/topics HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.read()  # to its end
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"\r\nWWW-Authenticate: Bearer\r\n" in answer

    run(main)


def test_a_servers_certificate_that_is_for_servers_alone_is_no_clients(site: Site) -> None:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    from firn_node.security import localca

    subject = make_client(site.ca, "reader", now()).certificate.subject
    pair = localca._issued(site.ca, subject, [], [ExtendedKeyUsageOID.SERVER_AUTH], now(), 1)
    refused(site, site.client("reader", pair=pair), Unauthorized, NOT_TAKEN)


def test_an_expired_and_an_unknown_token_get_the_same_answer(site: Site) -> None:
    site.tokens["old"] = "principal: reader, expires: 2020-01-01T00:00:00Z"
    site.write_tokens()
    for token in ("old", "wrong"):
        refused(site, site.with_token(token), Unauthorized, "^the token is not known here, or has expired$")


def test_a_client_that_shows_nothing_is_asked_who_it_is(site: Site) -> None:
    refused(site, Credentials(site.path("ca.crt")), Unauthorized, "^who are you")


def test_a_client_does_not_talk_to_a_broker_of_another_ca_or_name(site: Site) -> None:
    other = Site(site.folder / "other") if (site.folder / "other").mkdir() is None else site
    refused(site, Credentials(other.path("ca.crt"), token="w"), Invalid, "certificate is not trusted")
    pair = make_client(site.ca, "elsewhere", now())
    site.save("node", pair)  # signed by the right CA, and without the name of this address
    refused(site, site.with_token("w"), Invalid, "certificate is not trusted")


def test_a_client_of_tls_1_2_is_not_served(site: Site) -> None:
    async def main() -> None:
        async with guarded(site, await stand_in()) as server:
            host, port = server.address.split(":")
            context = ssl.create_default_context(cafile=site.path("ca.crt"))
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(host, int(port), ssl=context)

    run(main)


def test_a_client_without_tls_is_not_served(site: Site) -> None:
    async def main() -> None:
        async with guarded(site, await stand_in()) as server, raw(server.address) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await reader.read()

    run(main)


def test_credentials_of_another_scheme_are_no_token(site: Site) -> None:
    async def main() -> None:
        async with (
            guarded(site, await stand_in()) as server,
            Asking(server.address, credentials(site, "nobody")) as ask,
        ):
            for value in ("Basic dzp3", "w", "Bearer", "Bearer "):
                status, body = await ask("GET", "/v1/topics", headers={"Authorization": value})
                assert (status, body["error"]) == (401, "unauthorized"), value
            status, _ = await ask("GET", "/v1/topics", headers={"Authorization": "bearer  w "})
            assert status == 200

    run(main)


def test_tokens_alone_guard_a_plain_port_of_this_machine(site: Site) -> None:
    async def main() -> None:
        plain = SecuritySettings(tokens=site.path("tokens.yaml"))
        async with guarded(site, await stand_in(), security=plain) as server:
            async with Client(server.address, token="w", timeout=5) as client:
                assert [topic["name"] for topic in await client.topics()] == ["flights"]
            async with Client(server.address, timeout=5) as client:
                with pytest.raises(Unauthorized):
                    await client.topics()

    run(main)


# Open connections and what changes meanwhile


def test_an_open_connection_ends_with_its_credentials_and_with_its_rights(site: Site) -> None:
    async def main() -> None:
        clock, broker = SetClock(), await stand_in()
        site.tokens["short"] = f"principal: reader, expires: '{(clock.now + timedelta(hours=1)).isoformat()}'"
        site.write_tokens()
        async with (
            guarded(site, broker, clock=clock) as server,
            Asking(server.address, site.with_token("short")) as ask,
            ask.stream() as peer,
            Asking(server.address, site.client("reader")) as other,
            other.stream() as others_peer,
        ):
            for link in (peer, others_peer):
                assert (
                    await link.ask(Op.GET, 1, {"topic": "flights", "keys": 1}, pack_keys([b"k"]))
                ).op == Op.VALUES
            clock.advance(hours=2)
            found = await peer.ask(Op.GET, 2, {"topic": "flights", "keys": 1}, pack_keys([b"k"]))
            assert found.meta["error"] == "unauthorized"
            assert (await ask("GET", "/v1/topics"))[0] == 401
            await broker.update_topic("flights", parse_spec({}))
            found = await others_peer.ask(Op.GET, 2, {"topic": "flights", "keys": 1}, pack_keys([b"k"]))
            assert found.meta["error"] == "forbidden"

    run(main)


def test_a_fetch_that_goes_on_ends_when_the_certificate_is_revoked(site: Site) -> None:
    async def main() -> None:
        pair = make_client(site.ca, "reader", now())
        broker = await stand_in()
        async with (
            guarded(site, broker) as server,
            Asking(server.address, site.client("reader", pair=pair)) as ask,
            ask.stream() as peer,
        ):
            assert (await peer.ask(Op.FETCH, 1, {"topic": "flights", "credit": 1 << 20})).op == Op.DATA
            site.write("ca.crt", site.ca.certificate_pem() + revocation_list(site.ca, pair))
            assert server.context.guard.files.reload_if_changed()
            while (await broker.produce(batch(8, (b"k", b"v")))) and (
                found := await peer.receive()
            ).op == Op.DATA:
                pass
            assert found.meta["error"] == "unauthorized"

    run(main)


def test_certificates_and_tokens_change_under_load_without_a_failed_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything turns over: CA old and new side by side, the broker's certificate, the clients', the tokens."""
    monkeypatch.setattr(transport, "CREDENTIALS_POLL_S", 0.02)

    async def main() -> None:
        found = site.client("reader")
        token_file = site.write("token", b"s\n")
        async with guarded(site, await stand_in()) as server:
            trust, ends = server.context.guard.files, asyncio.Event()
            done = [0, 0]

            async def load(at: int, **credentials: Any) -> None:
                async with Client(server.address, timeout=10, **credentials) as client:
                    reading = asyncio.create_task(follow(client))
                    while not ends.is_set():
                        await client.describe("flights")
                        await client.get("flights", b"k")
                        done[at] += 1
                    assert not reading.done(), reading
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)

            async def follow(client: Client) -> None:
                async for _ in client.reader("flights"):
                    pass

            async def until_served() -> None:
                before = list(done)
                while min(now - then for now, then in zip(done, before, strict=True)) < 20:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)  # clients have looked at their files

            certificate = {"tls_ca": found.tls_ca, "tls_cert": found.tls_cert, "tls_key": found.tls_key}
            loads = [
                asyncio.create_task(load(0, **certificate)),
                asyncio.create_task(load(1, tls_ca=site.path("ca.crt"), token_file=token_file)),
            ]
            await until_served()
            old, new = site.ca, make_ca("cluster", now())
            site.tokens["s2"] = "principal: spark-run-8"
            for step in (
                lambda: site.write("ca.crt", new.certificate_pem() + old.certificate_pem()),
                lambda: site.save("node", make_node(new, "firn-0", now())),
                lambda: site.save("reader", make_client(new, "reader", now())),
                site.write_tokens,
                lambda: site.write("token", b"s2\n"),
                lambda: site.tokens.pop("s") and site.write_tokens(),
                lambda: site.write("ca.crt", new.certificate_pem()),
            ):
                step()
                trust.reload_if_changed()
                await until_served()
            assert trust.problem is None
            assert trust.reloads == 5  # the clients' own files are not the broker's
            ends.set()
            await asyncio.gather(*loads)

    run(main, seconds=60)


def test_status_and_metrics_show_how_a_broker_is_closed_and_what_is_wrong_with_its_files(site: Site) -> None:
    async def main() -> None:
        async with guarded(site, await stand_in()) as server:
            async with Asking(server.address, credentials(site, "reader")) as ask:
                await ask("PUT", "/v1/topics/flights/records/k")
                _, body = await ask("GET", "/v1/status")
                assert body["security"] == {"tls": True, "authentication": True, "problem": None}
                site.write("tokens.yaml", b"tokens: none")
                server.context.guard.files.reload_if_changed()
                _, body = await ask("GET", "/v1/status")
                assert "tokens.yaml" in body["security"]["problem"]
            async with Asking(server.address, credentials(site, "admin")) as ask:
                text = (await ask("GET", "/metrics"))[1].decode()
            for line in (
                "firn_security_problem 1.0",
                "firn_security_unproven 0.0",
                'firn_security_denials_total{code="forbidden"} 1.0',
                "firn_security_reloads_total 0.0",
                "firn_security_audit_failures_total 0.0",
            ):
                assert f"\n{line}\n" in text, line

    run(main)


# Before authentication


def test_connections_that_prove_nothing_are_bounded_per_address_and_cut_in_time(site: Site) -> None:
    settings = ServerSettings(unproven_per_address_max=3, proof_seconds=2.0)

    async def main() -> None:
        async with guarded(site, await stand_in(), settings=settings) as server:
            async with contextlib.AsyncExitStack() as stack:
                links = [await stack.enter_async_context(raw(server.address)) for _ in range(5)]
                ends = await asyncio.gather(*(cut(reader) for reader, _ in links))
                assert len(ends) == 5  # two at once, three when their time for the handshake is over
            door = server.context.door
            assert door.admission.refused == 2
            assert door.handshakes_failed == 3
            assert door.admission.unproven == 0
            async with Asking(server.address, credentials(site, "reader")) as ask:
                assert (await ask("GET", "/v1/topics"))[0] == 200

    run(main)


async def cut(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


def test_who_has_a_certificate_does_not_count_as_unproven(site: Site) -> None:
    settings = ServerSettings(unproven_per_address_max=1)

    async def main() -> None:
        async with (
            guarded(site, await stand_in(), settings=settings) as server,
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(4):
                ask = await stack.enter_async_context(Asking(server.address, credentials(site, "reader")))
                assert (await ask("GET", "/v1/topics"))[0] == 200
            assert server.context.door.admission.unproven == 0
            assert server.context.counts.connections == 4

    run(main)


def test_a_request_of_nobody_in_particular_has_a_short_head(site: Site) -> None:
    async def main() -> None:
        async with guarded(site, await stand_in()) as server:
            long_key = "/v1/topics/flights/records/" + "k" * HEAD_BYTES_MAX
            async with Asking(server.address, credentials(site, "nobody")) as ask:
                status, body = await ask("GET", long_key)
                assert (status, body["error"]) == (431, "limit_exceeded")
                for path in ("/healthz", "/healthz"):
                    assert (await ask("GET", path))[0] == 200
                assert (await ask("GET", long_key))[0] == 431
            async with Asking(server.address, credentials(site, "reader")) as ask:
                assert (await ask("GET", long_key))[0] == 404
            async with Asking(server.address, credentials(site, "spark")) as ask:
                assert (await ask("GET", "/v1/topics/flights"))[0] == 200
                assert (await ask("GET", long_key))[0] == 404

    run(main)


def test_the_body_of_a_refused_request_is_not_read(site: Site) -> None:
    async def main() -> None:
        async with (
            guarded(site, await stand_in()) as server,
            Asking(server.address, credentials(site, "nobody")) as ask,
        ):
            status, _ = await ask(
                "PUT",
                "/v1/topics/flights/records/k",
                data=b"v" * (900 << 10),
                headers={"Expect": "100-continue"},
            )
            assert status == 401
            assert server.context.counts.bytes_in == 0
            assert server.context.in_flight.used == 0

    run(main)


def test_a_connection_that_only_asks_for_health_is_cut_in_time(site: Site) -> None:
    async def main() -> None:
        plain = SecuritySettings(tokens=site.path("tokens.yaml"))
        settings = ServerSettings(proof_seconds=2.0)
        async with (
            guarded(site, await stand_in(), security=plain, settings=settings) as server,
            raw(server.address) as (reader, writer),
        ):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.read()  # ends because the broker cuts it

    run(main)
