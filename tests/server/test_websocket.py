"""Frames of RFC 6455, from peers of any kind."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from firn.errors import Unavailable
from firn.websocket import (
    CloseCode,
    Handshake,
    Opcode,
    WebSocket,
    accept_key,
    frame_head,
    handshake,
    unmasked,
)  # fmt: skip


class Wire(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_aborted = self.is_reading_paused = self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_aborted = self._is_closing = True

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False


class End:
    """A socket on a ``Wire``, with what it took and why it ended."""

    def __init__(
        self, *, is_client: bool = False, bytes_max: int = 1 << 17, heartbeat_s: float = 30.0
    ) -> None:
        self.wire = Wire()
        self.taken: list[tuple[Opcode, bytes | memoryview]] = []
        self.ended: list[str] = []
        self.socket = WebSocket(
            self.wire, is_client=is_client, take=lambda kind, data: self.taken.append((kind, data)),
            ended=self.ended.append, message_bytes_max=bytes_max, heartbeat_s=heartbeat_s,
        )  # fmt: skip

    def close_code(self) -> int:
        at = self.wire.written.rindex(0x88)
        return int.from_bytes(self.wire.written[at + 2 : at + 4], "big")


def frame(bits: int, payload: bytes, key: bytes = b"") -> bytes:
    head = bytearray(frame_head(bits, len(payload), is_masked=False))
    if key:
        head[1] |= 0x80
        return bytes(head) + key + unmasked(payload, key)
    return bytes(head) + payload


def in_a_loop(check: Callable[[], Any]) -> None:
    async def main() -> None:
        found = check()
        if found is not None:
            await found

    asyncio.run(main())


def pieces(data: bytes, seed: int) -> Iterator[bytes]:
    chance, at = random.Random(seed), 0
    while at < len(data):
        size = chance.choice((1, 2, 3, 7, 100, 5_000))
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_whole_however_the_bytes_are_parted(seed: int) -> None:
    def check() -> None:
        chance, end = random.Random(seed), End()
        sent = [chance.randbytes(size) for size in (0, 1, 125, 126, 127, 65_535, 65_536, 70_001, 3)]
        stream = b"".join(frame(0x82, data, chance.randbytes(4)) for data in sent)
        for part in pieces(stream, seed):
            assert end.socket.feed_data(part) == (False, b"")
        assert end.taken == [(Opcode.BINARY, data) for data in sent]

    in_a_loop(check)


@pytest.mark.parametrize("is_client", [False, True])
def test_what_one_end_sends_the_other_takes(is_client: bool) -> None:
    def check() -> None:
        one, other = End(is_client=is_client), End(is_client=not is_client)
        sent = [bytes([i]) * size for i, size in enumerate((0, 1, 125, 126, 4_095, 4_096, 65_535, 65_536))]
        for data in sent:
            one.socket.send(data)
        assert bool(one.wire.written[1] & 0x80) == is_client
        other.socket.feed_data(bytes(one.wire.written))
        assert other.taken == [(Opcode.BINARY, data) for data in sent]

    in_a_loop(check)


def test_a_message_in_parts_is_joined_and_a_ping_between_them_answered() -> None:
    def check() -> None:
        end = End()
        end.socket.feed_data(
            frame(0x02, b"a", b"abcd") + frame(0x89, b"hello") + frame(0x00, b"b") + frame(0x80, b"c")
        )
        end.socket.feed_data(frame(0x81, b"text"))
        assert end.taken == [(Opcode.BINARY, b"abc"), (Opcode.TEXT, b"text")]
        assert bytes(end.wire.written) == frame(0x8A, b"hello")

    in_a_loop(check)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(0x80, b"x"), 1002),  # continues nothing
        (frame(0x02, b"x") + frame(0x82, b"y"), 1002),  # begins another in the middle
        (frame(0x83, b"x"), 1002),  # unknown opcode
        (frame(0xC2, b"x"), 1002),  # a reserved bit
        (frame(0x09, b""), 1002),  # a ping in parts
        (frame(0x89, bytes(126)), 1002),  # a long ping
        (frame_head(0x82, 1001, is_masked=False), 1009),  # too large; its bytes are not awaited
        (frame_head(0x82, 1 << 62, is_masked=False), 1009),
        (frame(0x02, bytes(600)) + frame(0x80, bytes(600)), 1009),
    ],
)
def test_a_peer_that_breaks_the_rules_is_told_and_cut_off(sent: bytes, code: int) -> None:
    def check() -> None:
        end = End(bytes_max=1000)
        end.socket.feed_data(sent + frame(0x82, b"later"))
        assert end.close_code() == code
        assert end.wire.is_closing()
        assert not end.socket.is_open
        assert end.taken == []
        assert len(end.ended) == 1

    in_a_loop(check)


def test_a_close_is_answered_once_and_nothing_behind_it_is_taken() -> None:
    def check() -> None:
        end = End()
        end.socket.feed_data(frame(0x88, b"\x03\xe8bye") + frame(0x82, b"later"))
        assert bytes(end.wire.written) == frame(0x88, b"\x03\xe8")
        end.socket.feed_data(frame(0x82, b"later"))
        end.socket.feed_eof()
        end.socket.send(b"too late")
        assert end.taken == []
        assert end.ended == ["the peer closed the connection"]
        assert bytes(end.wire.written) == frame(0x88, b"\x03\xe8")

    in_a_loop(check)


def test_a_silent_peer_is_pinged_and_then_cut_off_and_one_that_answers_is_not() -> None:
    async def check() -> None:
        silent, alive = End(heartbeat_s=0.05), End(heartbeat_s=0.05)
        while not silent.ended:
            await asyncio.sleep(0.005)
            alive.socket.feed_data(frame(0x8A, b""))
        assert bytes(silent.wire.written) == frame(0x89, b"")
        assert silent.wire.is_aborted
        assert alive.socket.is_open
        alive.socket.close(CloseCode.OK)

    in_a_loop(check)


def test_silence_in_the_middle_of_a_message_is_bounded_but_not_while_nothing_is_read() -> None:
    async def check() -> None:
        stalled, paused = End(heartbeat_s=3600), End(heartbeat_s=3600)
        for end in (stalled, paused):
            end.socket.bound_silence(0.02)
        paused.socket.pause()
        assert paused.wire.is_reading_paused
        while not stalled.ended:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert stalled.wire.is_aborted
        assert paused.socket.is_open
        paused.socket.resume()
        assert not paused.wire.is_reading_paused
        async with asyncio.timeout(10):  # else for ever
            while not paused.ended:
                await asyncio.sleep(0.005)

    in_a_loop(check)


def test_a_handshake_that_was_answered_otherwise_is_refused() -> None:
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    assert accept_key(key) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, 1.3
    assert b"\r\nSec-WebSocket-Key: " + key.encode() in handshake("a:1", "/v1/stream", key, {})
    good = f"HTTP/1.1 101 Switching\r\nsec-websocket-ACCEPT: {accept_key(key)}\r\n\r\nrest".encode()
    answer = Handshake(key)
    assert [answer.feed(good[at : at + 1]) for at in range(len(good) - 5)] == [None] * (len(good) - 5)
    assert answer.feed(good[-5:]) == b"rest"
    for refusal in (good.replace(b"101", b"503"), good.replace(b"s3p", b"xxx"), bytes(1 << 17)):
        with pytest.raises(Unavailable, match="handshake"):
            Handshake(key).feed(refusal)
