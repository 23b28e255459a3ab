"""WebSocket (RFC 6455) as ``/v1/stream`` needs it: whole messages over a transport, handed on as they arrive.

No task, no queue and no future stand between the bytes of a socket and who takes them: a message costs a call, and
an answer can leave in the turn of the event loop that brought the question. aiohttp's own classes cost two tasks
and three turns a message on each side; its HTTP parser still does the handshake of the broker.

Invariants: frames leave whole; what arrives after the end is passed over; ``ended`` is called once.

====== ======= ================ =========================================================
offset type    field            note
====== ======= ================ =========================================================
0      u8      bits             0x80: last frame of its message; low 4: opcode
1      u8      size             0x80: masked; low 7: size, 126: u16 follows, 127: u64 follows (big endian)
...    u8[4]   key              when masked: byte i of the payload is XORed with key[i % 4]
...    ...     payload
====== ======= ================ =========================================================

A client masks with the key 0, so that bytes go as they are: masks keep scripts in browsers from writing bytes of
their choice past proxies, and this client is no browser. A broker takes any key.
"""

import asyncio
import base64
import hashlib
import json
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

import numpy as np

from firn.errors import FirnError, Invalid, Unavailable, from_document

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_HEAD_BYTES_MAX = 64 << 10  # of an HTTP answer
_FINAL, _MASKED = 0x80, 0x80
_CONTROL_BYTES_MAX = 125
_NO_MASK = bytes(4)
AWAITED_PING_S, AWAITED_ANSWER_S = 1.0, 2.0  # below the time in which a group elects another master
IN_VAIN_MAX = 3  # tries of the kernel in a row that a machine does not acknowledge: about two seconds
_VIEWED_BYTES_MIN = 4096  # copying less costs no more than a view


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    OK = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    TOO_LARGE = 1009


_WHOLE_BINARY: Final = _FINAL | Opcode.BINARY.value
# Heads of frames by the width of their size; and with the key 0 behind, of a client's.
_HEADS = struct.Struct(">BB"), struct.Struct(">BBH"), struct.Struct(">BBQ")
_HEADS_MASKED = struct.Struct(">BB4x"), struct.Struct(">BBH4x"), struct.Struct(">BBQ4x")


def accept_key(key: str) -> str:
    """What proves to a client that its handshake was understood."""
    return base64.b64encode(hashlib.sha1(key.encode() + _GUID, usedforsecurity=False).digest()).decode()


def handshake(host: str, target: str, key: str, headers: dict[str, str]) -> bytes:
    """The request that asks for a WebSocket."""
    lines = [
        f"GET {target} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", *(f"{k}: {v}" for k, v in headers.items()),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


class Handshake:
    """The broker's answer to ``handshake``, as it arrives."""

    def __init__(self, key: str) -> None:
        self._expected = accept_key(key)
        self._head = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """The bytes behind the answer once it is whole, else None.

        Errors: when it is a refusal, the error that it holds; Unavailable when it holds none.
        """
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _HEAD_BYTES_MAX:
                raise Unavailable("the answer to the WebSocket handshake has no end")
            return None
        first, *lines = bytes(self._head[:end]).decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        if first.split(" ")[1:2] != ["101"]:
            length = headers.get("content-length", "0")
            body = bytes(self._head[end + 4 :])
            if length.isdecimal() and len(body) < int(length) <= _HEAD_BYTES_MAX:
                return None
            raise _refusal(first, body)
        if headers.get("sec-websocket-accept") != self._expected:
            raise Unavailable("the WebSocket handshake was answered with a wrong key")
        return bytes(self._head[end + 4 :])


def _refusal(first: str, body: bytes) -> FirnError:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict) and "error" in document:
        return from_document(document)
    return Unavailable(f"the WebSocket handshake was answered {first!r}")


def frame_head(bits: int, size: int, *, is_masked: bool) -> bytes:
    """The bytes before a payload of ``size``."""
    mask, heads = (_MASKED, _HEADS_MASKED) if is_masked else (0, _HEADS)
    if size < 126:
        return heads[0].pack(bits, mask | size)
    if size < 1 << 16:
        return heads[1].pack(bits, mask | 126, size)
    return heads[2].pack(bits, mask | 127, size)


class WebSocket:
    """One end of an open connection."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        is_client: bool,
        take: Callable[[Opcode, bytes | memoryview], None],
        ended: Callable[[str], None],
        message_bytes_max: int,
        heartbeat_s: float,
        is_awaited: Callable[[], bool] | None = None,
    ) -> None:
        """``take`` gets each message, a large one as a view of what arrived: who keeps it, copies it. ``ended``: why
        there will be no more. ``is_awaited``: whether the peer owes an answer; its silence is borne for less time then.
        """
        self._transport = transport
        self._is_awaited = is_awaited
        self._is_client = is_client
        self._take = take
        self._ended = ended
        self._bytes_max = message_bytes_max
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._rest = bytearray()  # an unfinished frame
        self._rest_bytes = 0  # how long it will be; 0: its head has not come whole
        self._begun: tuple[Opcode, bytearray] | None = None  # a message whose last frame has not come
        self.is_open = True
        self._is_paused = False
        self._stall_s: float | None = None
        self._heard = self._loop.time()
        self._pinged: float | None = None  # since something was heard
        self._watching = self._loop.call_later(
            heartbeat_s if is_awaited is None else AWAITED_PING_S, self._watch
        )

    @property
    def unfinished_bytes(self) -> int:
        """Of a frame that has not come whole."""
        return len(self._rest)

    # Sending.

    def send(self, payload: bytes) -> None:
        """Write one binary message; who sends much looks at the transport's water marks."""
        if self.is_open:
            self._write(_WHOLE_BINARY, payload)

    def send_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write one binary message that lies in parts: the transport joins them, or does not."""
        if self.is_open:
            size = sum(map(len, parts))
            self._transport.writelines((frame_head(_WHOLE_BINARY, size, is_masked=self._is_client), *parts))

    def _write(self, bits: int, payload: bytes) -> None:
        head = frame_head(bits, len(payload), is_masked=self._is_client)
        if len(payload) < 4096:
            self._transport.write(head + payload)
        else:
            self._transport.writelines((head, payload))

    def close(self, code: CloseCode, why: str = "") -> None:
        """Tell the peer, and take nothing more; what was sent still leaves."""
        if not self._transport.is_closing():
            self._say_close(code, why)
            self._transport.close()
        self._end(why or f"it was closed with {code.name}")

    def ask_to_close(self, why: str) -> None:
        """Tell the peer that no more will be sent: its answer ends the connection."""
        if self.is_open and not self._transport.is_closing():
            self._say_close(CloseCode.GOING_AWAY, why)

    def _say_close(self, code: CloseCode, why: str) -> None:
        text = why.encode("ascii", "replace")[: _CONTROL_BYTES_MAX - 2]
        self._write(_FINAL | Opcode.CLOSE, code.to_bytes(2, "big") + text)

    # Receiving.

    def feed_data(self, data: bytes | memoryview) -> tuple[bool, bytes]:
        """Take what arrived, which need not last longer than this call.

        *Shape*: as aiohttp asks its parsers: never at an end, nothing left.
        """
        self._heard, self._pinged = self._loop.time(), None
        try:
            if not self._rest:
                self._parse_keeping(data)
            elif (missing := self._rest_bytes - len(self._rest)) > 0:
                # Only what completes the frame is put to it: all that lies behind is parsed where it is.
                self._rest += memoryview(data)[:missing]
                if len(data) >= missing:
                    begun, self._rest = self._rest, bytearray()
                    self._parse(begun)
                    self._parse_keeping(memoryview(data)[missing:])
            else:
                begun, self._rest = self._rest + data, bytearray()
                self._parse_keeping(begun)
        except Invalid as error:
            self.close(CloseCode.PROTOCOL_ERROR, error.message)
        return False, b""

    def _parse_keeping(self, data: bytes | bytearray | memoryview) -> None:
        """Take the whole frames at the head of ``data``, keep the rest."""
        taken = self._parse(data)
        if taken < len(data):
            self._rest += memoryview(data)[taken:]

    def feed_eof(self) -> None:
        """The connection is lost."""
        self._end("the connection was closed")

    def _parse(self, data: bytes | bytearray | memoryview) -> int:
        """Take the whole frames at the head of ``data``; how many bytes they are. Errors: Invalid."""
        at, end = 0, len(data)
        self._rest_bytes = 0
        while end - at >= 2 and self.is_open:
            bits, second = data[at], data[at + 1]
            size, body = second & 127, at + 2
            if size > 125:
                wide = 2 if size == 126 else 8
                if end - body < wide:
                    break
                size, body = int.from_bytes(data[body : body + wide], "big"), body + wide
                if size > self._bytes_max:
                    self.close(CloseCode.TOO_LARGE, f"a frame of {size} bytes; at most {self._bytes_max}")
                    break
            masked_at = body
            if second & _MASKED:
                body += 4
            at_next = body + size
            if at_next > end:
                self._rest_bytes = at_next - at
                break
            payload: bytes | memoryview
            if size < _VIEWED_BYTES_MIN:
                payload = bytes(data[body:at_next])
            else:
                payload = memoryview(data)[body:at_next]
            if second & _MASKED and (key := bytes(data[masked_at:body])) != _NO_MASK:
                payload = unmasked(bytes(payload), key)
            at = at_next
            if bits == _WHOLE_BINARY and self._begun is None:
                self._take(Opcode.BINARY, payload)
            else:
                self._other(bits, payload)
        return at if self.is_open else end

    def _other(self, bits: int, payload: bytes | memoryview) -> None:
        """A frame that is not a whole binary message."""
        try:
            opcode = Opcode(bits & 0x0F)
        except ValueError:
            raise Invalid(f"WebSocket: opcode {bits & 0x0F} is unknown") from None
        if bits & 0x70:
            raise Invalid("WebSocket: reserved bits are set, and no extension was agreed on")
        if opcode >= Opcode.CLOSE:
            if not bits & _FINAL or len(payload) > _CONTROL_BYTES_MAX:
                raise Invalid(f"WebSocket: a {opcode.name} frame of {len(payload)} bytes or in parts")
            self._control(opcode, bytes(payload))
            return
        if (self._begun is None) == (opcode == Opcode.CONTINUATION):
            raise Invalid(f"WebSocket: a frame {opcode.name} out of turn")
        kind, whole = self._begun or (opcode, bytearray())
        whole += payload
        if len(whole) > self._bytes_max:
            self.close(CloseCode.TOO_LARGE, f"a message of more than {self._bytes_max} bytes")
        elif bits & _FINAL:
            self._begun = None
            self._take(kind, bytes(whole))
        else:
            self._begun = kind, whole

    def _control(self, opcode: Opcode, payload: bytes) -> None:
        if opcode == Opcode.PING:
            self._write(_FINAL | Opcode.PONG, payload)
        elif opcode == Opcode.CLOSE:
            if not self._transport.is_closing():
                self._write(_FINAL | Opcode.CLOSE, payload[:2])
                self._transport.close()
            self._end("the peer closed the connection")

    def pause(self) -> None:
        """Read no more until ``resume``: TCP slows the peer down."""
        if not self._is_paused and self.is_open and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._heard, self._pinged = self._loop.time(), None
            self.bound_silence(self._stall_s)
            if self.is_open and not self._transport.is_closing():
                self._transport.resume_reading()

    # Silence.

    def bound_silence(self, seconds: float | None) -> None:
        """Cut the connection when nothing arrives for so long; None: a heartbeat is enough of a sign of life."""
        self._stall_s = seconds
        if seconds is not None and self.is_open and self._watching.when() > self._loop.time() + seconds:
            self._watch_in(seconds)

    def _watch(self) -> None:
        now = self._loop.time()
        if self._is_paused:
            self._watch_in(self._heartbeat_s)
            return
        if self._stall_s is not None and now >= self._heard + self._stall_s:
            self.cut(f"nothing came for {self._stall_s:g} s in the middle of a message")
            return
        ping_after, answer_within = self._patience()
        if self._pinged is None and now >= self._heard + ping_after:
            self._pinged = now
            self._write(_FINAL | Opcode.PING, b"")
        due = self._heard + ping_after
        if self._pinged is not None:
            # A ping that left early says nothing while what is on its way goes on again: it comes behind that.
            due = max(due, self._pinged) + answer_within
            if now >= due:
                self.cut(f"no sign of life for {now - self._heard:.0f} s")
                return
        if self._stall_s is not None:
            due = min(due, self._heard + self._stall_s)
        if self._is_awaited is not None:
            due = min(due, now + AWAITED_PING_S)
        self._watch_in(due - now)

    def _patience(self) -> tuple[float, float]:
        """How long silence lasts before a ping, and how long until its answer.

        A peer that owes an answer, and has received all that was sent, answers a ping at once unless it is stopped.
        While something is on its way to it, on a slow link, a ping would come behind that.
        """
        if self._is_awaited is not None and self._is_awaited() and not self._is_sending():
            return AWAITED_PING_S, AWAITED_ANSWER_S
        return self._heartbeat_s, self._heartbeat_s / 2

    def _is_sending(self) -> bool:
        """Whether bytes are on their way to the peer's machine, and it is there; True where the system does not say.

        What is on its way to a machine that is cut off is no reason to wait: of it nothing is acknowledged, while one that
        is slow, or takes no more for now, acknowledges each try.
        """
        if sys.platform != "linux":
            return True
        import fcntl
        import termios

        own = self._transport.get_extra_info("socket")
        try:
            unsent = fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, bytes(4))
            tries = _tries_in_vain(own.fileno())
        except OSError:
            return True
        is_pending = self._transport.get_write_buffer_size() or int.from_bytes(unsent, sys.byteorder) > 0
        return bool(is_pending) and tries < IN_VAIN_MAX

    def _watch_in(self, seconds: float) -> None:
        self._watching.cancel()
        self._watching = self._loop.call_later(max(0.001, seconds), self._watch)

    def cut(self, why: str) -> None:
        """End the connection at once; what has not left stays unsent."""
        self._transport.abort()
        self._end(why)

    def _end(self, why: str) -> None:
        if self.is_open:
            self.is_open = False
            self._watching.cancel()
            self._ended(why)


def _tries_in_vain(descriptor: int) -> int:
    """How often in a row the kernel sent something, or asked for room, and the peer's machine did not acknowledge it.

    Source: ``struct tcp_info`` of Linux, bytes 2 and 3: ``tcpi_retransmits`` and ``tcpi_probes``.
    """
    own = socket.socket(fileno=descriptor)
    try:
        return max(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[2:])
    finally:
        own.detach()


def unmasked(payload: bytes, key: bytes) -> bytes:
    """The payload that was masked with ``key``; or masked, when it was not."""
    size = len(payload)
    words = np.frombuffer(payload + bytes(-size % 4), "<u4") ^ np.frombuffer(key, "<u4")
    return bytes(words.tobytes()[:size])
