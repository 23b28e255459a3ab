"""Bulk reads over HTTP/1.1 connections of their own: an answer's body goes from the socket into the memory that its
batches are views of, without a copy between.

aiohttp copies a body three times on its way; of a page of 2 MiB that took longer than checking and decoding it.

Invariants: one request at a time on a connection; a connection is used again only when the whole answer was read
and nothing came behind it; what a request announces is in memory before it is given out, and never more than
``BODY_BYTES_MAX``.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from multidict import CIMultiDict

from firn.client.dialling import Dial, direct, host_and_port
from firn.tls import refusal_of

HEAD_BYTES_MAX = 16 << 10
# The broker's bound of a page is 16 MiB, and one batch of any size, and its masks.
BODY_BYTES_MAX = 1 << 30
IDLE_MAX = 16  # connections kept to one address


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    headers: Mapping[str, str]
    body: memoryview


class CannotConnect(OSError):
    """Nobody there: nothing was asked."""


class PageSockets:
    """The connections of one client, by address."""

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        connect_seconds: float,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        dial: Dial = direct,
    ) -> None:
        self._headers = dict(headers)
        self._tls = tls
        self._dial = dial
        self._connect_seconds = connect_seconds
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)
        self._is_closed = False

    async def get(self, address: str, target: str, headers: Mapping[str, str]) -> RawAnswer:
        """The whole answer to one GET.

        Errors: CannotConnect; OSError when the connection ends early or what comes is not an answer of HTTP/1.1
        with its length; Invalid when the broker's certificate is not trusted.
        """
        request = _request(address, target, {**self._headers, **headers})
        while (kept := self._kept(address)) is not None:
            try:
                return await self._answered(address, kept, request)
            except _Stale:  # it was closed while it lay idle: nothing was answered
                continue
        return await self._answered(address, await self._connected(address), request)

    def _kept(self, address: str) -> "_Connection | None":
        idle = self._idle[address]
        while idle:
            found = idle.pop()
            if found.is_open:
                return found
        return None

    async def _connected(self, address: str) -> "_Connection":
        name, _ = host_and_port(address)
        tls = self._tls()
        try:
            async with asyncio.timeout(self._connect_seconds):
                host, port = host_and_port(await self._dial(address))
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, host, port, ssl=tls, server_hostname=name if tls else None
                )
        except TimeoutError:
            raise CannotConnect(f"no answer within {self._connect_seconds:g} s") from None
        except OSError as error:
            raise refusal_of(error, address) or CannotConnect(str(error)) from error
        return connection

    async def _answered(self, address: str, connection: "_Connection", request: bytes) -> RawAnswer:
        is_whole = False
        try:
            answer = await connection.ask(request)
            is_whole = True
            return answer
        finally:
            idle = self._idle[address]
            if is_whole and connection.is_open and not self._is_closed and len(idle) < IDLE_MAX:
                idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Ends the idle connections; those in use end with their request."""
        self._is_closed = True
        self.forget()

    def forget(self) -> None:
        """Ends the idle connections."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


def _request(address: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"GET {target} HTTP/1.1", f"Host: {address}", *(f"{k}: {v}" for k, v in headers.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a line of an HTTP request cannot hold a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class _Stale(ConnectionResetError):
    """The connection ended before the first byte of an answer."""


class _Connection(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[RawAnswer] | None = None
        self._head = memoryview(bytearray(HEAD_BYTES_MAX))
        self._status = 0
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._body: memoryview | None = None  # None: the head is not complete
        self._filled = 0  # of the head, then of the body

    async def ask(self, request: bytes) -> RawAnswer:
        """Errors: as ``PageSockets.get``; _Stale."""
        if self._transport is None or not self.is_open:
            raise _Stale("the connection is closed")
        self._body, self._filled = None, 0
        answer: asyncio.Future[RawAnswer] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(request)
        return await answer

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        is_stale = self._body is None and not self._filled
        kind = _Stale if is_stale else ConnectionResetError
        self._fail(kind(f"the connection ended: {error or 'closed by the broker'}"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return (self._head if self._body is None else self._body)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None or self._answer.done():  # nobody asked, or asks any more
            self.close()
            return
        self._filled += nbytes
        if self._body is None:
            try:
                self._read_head()
            except ValueError as error:
                self._fail(ConnectionError(f"not an answer of HTTP/1.1: {error}"))
                self.close()
                return
        if self._body is not None and self._filled == len(self._body):
            self._settle()

    def _read_head(self) -> None:
        """Begins the body once the head is complete. Errors: ValueError."""
        raw = bytes(self._head[: self._filled])
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            if self._filled == len(self._head):
                raise ValueError(f"a head of more than {HEAD_BYTES_MAX} bytes")
            return
        first, *lines = raw[:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if version != "HTTP/1.1":
            raise ValueError(f"it begins with {first[:80]!r}")
        self._status = int(rest[:3])
        self._headers = CIMultiDict()
        for line in lines:
            name, _, value = line.partition(":")
            self._headers[name] = value.strip()
        length = self._headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > BODY_BYTES_MAX:
            raise ValueError(f"Content-Length: expected at most {BODY_BYTES_MAX}, found {length!r}")
        came = raw[end + 4 :]
        if len(came) > int(length):
            raise ValueError(f"{len(came) - int(length)} bytes behind the answer")
        self._body = np.empty(int(length), np.uint8).data  # not zeroed: all of it is received
        self._body[: len(came)] = came
        self._filled = len(came)

    def _settle(self) -> None:
        answer, self._answer = self._answer, None
        body, self._body, self._filled = self._body, None, 0
        if self._headers.get("Connection", "").lower() == "close":
            self.is_open = False
        if answer is not None and body is not None and not answer.done():
            answer.set_result(RawAnswer(self._status, self._headers, body))

    def _fail(self, error: OSError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
