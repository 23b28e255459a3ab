"""Connections that receive pages into place: answers cut at any byte, connections that end, what is no answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from firn.client.pageget import CannotConnect, PageSockets

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[tuple[PageSockets, str]]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    sockets = PageSockets({"Authorization": "Bearer t"}, connect_seconds=5)
    try:
        async with asyncio.timeout(60):
            yield sockets, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        sockets.close()
        server.close()
        await server.wait_closed()


async def request_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answer(body: bytes, *more: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more, "", ""]
    return "\r\n".join(head).encode() + body


def test_an_answer_cut_at_any_byte_arrives_whole() -> None:
    whole = answer(b"0123456789", "firn-next-offset:  7")

    async def main() -> None:
        cuts = iter(range(1, len(whole)))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for cut in cuts:
                await request_of(reader)
                writer.write(whole[:cut])
                await writer.drain()
                await asyncio.sleep(0.001)
                writer.write(whole[cut:])

        async with served(serve) as (sockets, address):
            for _ in range(1, len(whole)):
                found = await sockets.get(address, "/v1/x", {})
                assert (found.status, bytes(found.body)) == (200, b"0123456789")
                assert found.headers["Firn-Next-Offset"] == "7"

    asyncio.run(main())


def test_a_large_page_is_received_beyond_its_head_and_the_next_one_apart_from_it() -> None:
    pages = [bytes([n]) * (3 << 20) for n in (1, 2)]

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for page in pages:
                request = await request_of(reader)
                assert request.startswith(b"GET /v1/x?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
                assert b"\r\nAuthorization: Bearer t\r\nAccept: y\r\n" in request
                writer.write(answer(page))
                await writer.drain()

        async with served(serve) as (sockets, address):
            found = [(await sockets.get(address, "/v1/x?a=b", {"Accept": "y"})).body for _ in pages]
            assert [bytes(body) for body in found] == pages

    asyncio.run(main())


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    connections = []

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(1)
            await request_of(reader)
            writer.write(answer(b"a"))
            await writer.drain()
            if len(connections) > 1:
                return
            await request_of(reader)  # it crosses with the end of the connection: no answer

        async with served(serve) as (sockets, address):
            for _ in range(3):
                assert bytes((await sockets.get(address, "/", {})).body) == b"a"
                await asyncio.sleep(0.02)
        assert len(connections) == 3

    asyncio.run(main())


def test_a_page_that_ends_early_is_an_error_and_its_connection_is_not_used_again() -> None:
    connections = []

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(1)
            while True:
                try:
                    await request_of(reader)
                except asyncio.IncompleteReadError:
                    return
                if len(connections) == 1:
                    writer.write(answer(b"abc")[:-1])
                    return
                writer.write(answer(b"abc"))

        async with served(serve) as (sockets, address):
            with pytest.raises(ConnectionResetError):
                await sockets.get(address, "/", {})
            assert bytes((await sockets.get(address, "/", {})).body) == b"abc"
            waiting = asyncio.create_task(sockets.get(address, "/", {}))
            await asyncio.sleep(0)
            waiting.cancel()  # its answer may still come: nobody else may find it
            await asyncio.gather(waiting, return_exceptions=True)
            assert bytes((await sockets.get(address, "/", {})).body) == b"abc"
        assert len(connections) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "begins with 'SSH-2.0-OpenSSH'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length: expected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "found '99999999999'"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (16 << 10), "a head of more than"),
        (answer(b"a") + b"b", "1 bytes behind the answer"),
        (b"HTTP/1.1 abc\r\n\r\n", "invalid literal"),
    ],
)
def test_what_is_no_answer_with_its_length_is_refused(sent: bytes, named: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(sent)
            await asyncio.gather(reader.read(), return_exceptions=True)

        async with served(serve) as (sockets, address):
            with pytest.raises(OSError, match=named):
                await sockets.get(address, "/", {})

    asyncio.run(main())


def test_nobody_there_is_told_apart_from_a_connection_that_broke() -> None:
    async def main() -> None:
        async def serve(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            return

        async with served(serve) as (sockets, address):
            with pytest.raises(OSError) as broken:
                await sockets.get(address, "/", {})
            assert not isinstance(broken.value, CannotConnect)
        with pytest.raises(CannotConnect):
            await sockets.get(address, "/", {})

    asyncio.run(main())


def test_a_line_break_in_a_header_sends_nothing() -> None:
    async def main() -> None:
        sockets = PageSockets({}, connect_seconds=5)
        with pytest.raises(ValueError, match="line break"):
            await sockets.get("127.0.0.1:1", "/", {"Accept": "a\r\nb: c"})

    asyncio.run(main())
