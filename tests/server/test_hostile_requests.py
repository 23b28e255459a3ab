"""Requests and frames that nobody would send: never a 500, never silence, and the broker serves on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote_from_bytes

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firn.wire import Op
from firn_node.server.answers import to_json
from firn_node.server.app import ROUTER
from server.serving import Served, batch, real

QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class Runner:
    """One served broker on one loop for all examples of a test."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._served = self._open()
        self.served: Served = self.run(self._served.__aenter__())

    def run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work

        return self._runner.run(bounded())

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[Served]:
        async with real(2) as s:
            yield s

    def close(self) -> None:
        self.run(self._served.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    found = Runner()
    yield found
    found.close()


names = st.one_of(st.just(b"t"), st.just(b"0"), st.binary(max_size=12))
parameters = st.sampled_from(
    [
        "view", "offset", "since", "snapshot", "max_bytes", "queue", "tag", "projection", "after", "limit", "key",
        "until", "timestamp", "x",
    ]
)  # fmt: skip
values = st.one_of(
    st.sampled_from([b"", b"0", b"1", b"raw", b"keys", b"-1", b"9223372036854775807", b"1e9", b"0x1"]),
    st.integers().map(lambda n: b"%d" % n),
    st.binary(max_size=8),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=5)
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                ["key", "value", "partition", "timestamp", "tag", "headers", "queues", "name", "spec", "offsets",
                 "force", "0", "offset", "since", "partitions", "compaction", "minLag", "key_base64"]
            ), inner, max_size=4,
        ),
    ),
    max_leaves=8,
)  # fmt: skip
bodies = st.one_of(st.binary(max_size=300), documents.map(to_json))
headers = st.dictionaries(
    st.sampled_from(["If-Match", "If-None-Match", "Firn-Tag", "Firn-Timestamp", "Firn-Partition", "Accept",
                     "Content-Type", "Expect", "Content-Encoding"]),
    st.sampled_from(["0", "*", "-1", '"5"', "application/json", "application/msgpack", "%FF", "x", "1" * 30,
                     "100-continue", "identity", "gzip"]),
    max_size=3,
)  # fmt: skip


@QUICK
@given(data=st.data())
def test_no_request_is_answered_with_a_500_and_none_is_left_without_an_answer(
    runner: Runner, data: st.DataObject
) -> None:
    route = data.draw(st.sampled_from([r for r in ROUTER.routes if r.pattern != "/v1/stream"]))
    parts = [
        quote_from_bytes(data.draw(names), safe="") if p.startswith("{") else p
        for p in route.pattern.split("/")
    ]
    query = data.draw(st.dictionaries(parameters, values, max_size=3))
    target = "/".join(parts)
    if query:
        target += "?" + "&".join(f"{n}={quote_from_bytes(v)}" for n, v in query.items())
    method = data.draw(
        st.sampled_from([route.method, route.method, route.method, "GET", "PUT", "POST", "DELETE"])
    )
    if method == "DELETE" and target == "/v1/topics/t":
        return  # the topic is needed
    body = data.draw(bodies) if method in ("PUT", "POST") else None
    failures = runner.served.context.counts.failures
    status, _, _ = runner.run(runner.served.ask(method, target, data=body, headers=data.draw(headers)))
    assert status != 500
    assert runner.served.context.counts.failures == failures
    assert runner.served.context.in_flight.used == 0


ops = st.one_of(st.sampled_from([int(o) for o in Op]), st.integers(-2, 40))
metas = st.dictionaries(
    st.sampled_from(["topic", "partition", "view", "offset", "since", "queue", "tag", "snapshot", "projection",
                     "max_bytes", "credit", "bytes", "size", "if_offset", "version"]),
    st.one_of(scalars, st.just("t"), st.just("raw"), st.lists(scalars, max_size=3), st.integers(0, 100)),
    max_size=5,
)  # fmt: skip


@QUICK
@given(data=st.data())
def test_no_frame_ends_the_stream(runner: Runner, data: st.DataObject) -> None:
    good = batch(runner.served.topic_id, (b"k", b"v"))
    payloads = st.one_of(
        st.just(b""),
        st.just(good),
        st.just(good + good),
        st.binary(max_size=100),
        st.tuples(st.integers(0, len(good) - 1), st.integers(1, 255)).map(lambda f: flipped(good, *f)),
        st.integers(0, len(good)).map(lambda n: good[:n]),
        st.just(msgpack.packb([b"k", b""])),
    )
    frames = st.one_of(
        st.binary(max_size=50),
        st.tuples(ops, st.integers(-1, 5), metas, payloads).map(lambda f: msgpack.packb(list(f))),
    )
    sent = data.draw(st.lists(frames, min_size=1, max_size=12))

    async def main() -> None:
        async with runner.served.stream() as peer:
            for frame in sent:
                await peer.socket.send_bytes(frame)
            # An id that no example uses: its answer shows that the stream lives.
            await peer.socket.send_bytes(msgpack.packb([Op.PING, 999_999, {}, b""]))
            while True:
                found = msgpack.unpackb(await peer.socket.receive_bytes())
                assert not (found[0] == Op.ERROR and found[2]["error"] == "error"), found
                if found[1] == 999_999:
                    break
        # Appends go on when their peer has left; then everything they held is free again.
        context = runner.served.context
        while context.streams or context.in_flight.used or context.reads.used:
            await asyncio.sleep(0.005)

    failures = runner.served.context.counts.failures
    runner.run(main())
    assert runner.served.context.counts.failures == failures


def flipped(data: bytes, at: int, bits: int) -> bytes:
    found = bytearray(data)
    found[at] ^= bits
    return bytes(found)
