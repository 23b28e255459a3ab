"""A connection that breaks at the worst moment: while a message is leaving."""

import asyncio
import gc
import warnings
from pathlib import Path

import pytest
from security_kit import Site

from firn.client.stream import Stream
from firn.errors import FirnError, Unavailable
from firn.tls import client_context
from firn.websocket import IN_VAIN_MAX, Opcode, WebSocket, accept_key
from firn.wire import Assembler, Message, Op, frames
from firn_node.security.trust import load_trust


class Peer(asyncio.Protocol):
    """The broker's end: answers the handshake and HELLO, and reads no more than it is told to."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self._assembler = Assembler(bytes_max=64 << 20)
        self._head = b""
        self._socket: WebSocket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.feed_data(data)
            return
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        key = self._head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0].decode()
        self.transport.write(
            f"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: {accept_key(key)}\r\n\r\n".encode()
        )
        self._socket = WebSocket(
            self.transport, is_client=False, take=self._take, ended=lambda why: None,
            message_bytes_max=1 << 20, heartbeat_s=20.0,
        )  # fmt: skip

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._socket is not None:
            self._socket.feed_eof()

    def _take(self, kind: Opcode, frame: bytes) -> None:
        message = self._assembler.feed(frame)
        if message is None or self._socket is None:
            return
        if message.op == Op.HELLO:
            for answer in frames(Op.OK, message.id, {}):
                self._socket.send(answer)
        else:
            self.messages.put_nowait(message)


async def connected(site: Site | None = None) -> tuple[Stream, Peer, asyncio.Server]:
    """By TLS with a ``site``."""
    peer = Peer()
    theirs = None if site is None else load_trust(site.settings).context
    ours = None if site is None else client_context(site.client("reader"))
    server = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0, ssl=theirs)
    port = server.sockets[0].getsockname()[1]
    stream = await Stream.connect(f"127.0.0.1:{port}", timeout=30, client="test", tls=ours)
    return stream, peer, server


def test_a_connection_that_is_reset_while_sending_ends_the_request_as_unavailable() -> None:
    """It once ended as a NameError, which broke the producer for good."""

    async def main() -> None:
        stream, peer, server = await connected()
        peer.transport.pause_reading()
        heard: list[Message | FirnError] = []
        left = stream.post(Op.PRODUCE, {}, bytes(32 << 20), heard.append)
        assert left is not None  # more than fits into the sockets
        peer.transport.abort()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(left, 60)
        assert [type(found) for found in heard] == [Unavailable]
        assert not stream.is_open
        with pytest.raises(Unavailable):
            stream.post(Op.PRODUCE, {}, b"batch", heard.append)
        assert len(heard) == 1
        await stream.close()
        server.close()

    asyncio.run(main())


def test_a_message_whose_sender_was_cancelled_leaves_whole_and_in_its_turn() -> None:
    async def main() -> None:
        stream, peer, server = await connected()
        peer.transport.pause_reading()
        large = bytes(range(256)) * (64 << 10)
        first = asyncio.create_task(stream.ask(Op.PRODUCE, {}, large))
        second = asyncio.create_task(stream.ask(Op.PRODUCE, {}, b"small"))
        await asyncio.sleep(0.01)
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        peer.transport.resume_reading()
        found = [await asyncio.wait_for(peer.messages.get(), 60) for _ in range(2)]
        assert [bytes(message.data) for message in found] == [large, b"small"]
        await stream.close()
        server.close()

    asyncio.run(main())


def test_a_broker_that_owes_an_answer_and_is_silent_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped broker held its clients for half a minute, although another was master by then."""
    monkeypatch.setattr("firn.client.stream.HEARTBEAT_S", 3600.0)

    async def main() -> None:
        stream, peer, server = await connected()
        peer.transport.pause_reading()
        with pytest.raises(Unavailable, match="no sign of life"):
            await asyncio.wait_for(stream.ask(Op.PRODUCE, {}, b"batch"), 60)
        peer.transport.abort()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_broker_is_not_given_up_while_a_long_message_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firn.websocket.AWAITED_PING_S", 0.05)
    monkeypatch.setattr("firn.websocket.AWAITED_ANSWER_S", 0.05)

    async def main() -> None:
        stream, peer, server = await connected()
        peer.transport.pause_reading()
        asking = asyncio.create_task(stream.ask(Op.PRODUCE, {}, bytes(32 << 20)))
        await asyncio.sleep(1)  # twenty times as long as the silence that would be borne
        assert stream.is_open
        assert not asking.done()
        peer.transport.resume_reading()
        await asyncio.wait_for(peer.messages.get(), 60)
        await stream.close()
        with pytest.raises(Unavailable):
            await asking
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_link_that_was_cut_off_for_a_moment_is_borne_as_long_as_one_that_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ping of that moment lies behind the rest of a long message: that it is not answered says nothing."""
    tries = iter([IN_VAIN_MAX])
    monkeypatch.setattr("firn.websocket.AWAITED_PING_S", 0.05)
    monkeypatch.setattr("firn.websocket.AWAITED_ANSWER_S", 0.05)
    monkeypatch.setattr("firn.websocket._tries_in_vain", lambda _: next(tries, 0))
    monkeypatch.setattr("firn.client.stream.HEARTBEAT_S", 2.0)

    async def main() -> None:
        stream, peer, server = await connected()
        loop = asyncio.get_running_loop()
        began = loop.time()
        peer.transport.pause_reading()
        with pytest.raises(Unavailable, match="no sign of life"):
            await asyncio.wait_for(stream.ask(Op.PRODUCE, {}, bytes(32 << 20)), 60)
        assert loop.time() - began >= 2.5, "a heartbeat, and half of one for the answer"
        assert list(tries) == []
        peer.transport.abort()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize("is_silent", [True, False])
def test_what_is_on_its_way_to_a_machine_that_is_cut_off_is_no_reason_to_wait(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firn.websocket._tries_in_vain", lambda _: IN_VAIN_MAX if is_silent else 0)
    monkeypatch.setattr("firn.client.stream.HEARTBEAT_S", 3600.0)

    async def main() -> None:
        stream, peer, server = await connected()
        peer.transport.pause_reading()
        asking = asyncio.create_task(stream.ask(Op.PRODUCE, {}, bytes(32 << 20)))
        done, _ = await asyncio.wait([asking], timeout=60 if is_silent else 4)
        assert (asking in done) == is_silent
        await stream.close(within=0.05)
        with pytest.raises(Unavailable):
            await asking
        peer.transport.abort()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize("is_answering", [True, False], ids=["answers", "is silent"])
def test_a_closed_stream_over_tls_leaves_no_connection_open_whether_or_not_the_broker(
    tmp_path: Path, is_answering: bool
) -> None:
    """TLS ends in several turns of the event loop, and waits for the peer; the blocking client's loop ended before."""

    async def main() -> None:
        stream, peer, server = await connected(Site(tmp_path))
        if not is_answering:
            peer.transport.pause_reading()
        await stream.close(within=30 if is_answering else 0.05)
        peer.transport.abort()
        await asyncio.sleep(0)  # the broker's own end
        server.close()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(warning.message) for warning in found] == []
