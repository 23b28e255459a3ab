"""The network of a drill: what it does to bytes, and to connections."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from firn_node.drills.links import HOST, Links

Ports = list[int]


@contextlib.asynccontextmanager
async def echoes(count: int) -> AsyncIterator[Ports]:
    """Servers that send back what they get."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(echo, HOST, 0) for _ in range(count)]
    try:
        yield [server.sockets[0].getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


async def dial(
    links: Links, ports: Ports, a: int, b: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = links.routes(a)[f"{HOST}:{ports[b]}"].split(":")
    return await asyncio.open_connection(host, int(port))


def with_links(story: Callable[[Links, Ports], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), echoes(3) as ports, Links(ports, random.Random(1)) as links:
            await story(links, ports)

    asyncio.run(main())


async def is_silent(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await reader.readexactly(1)
            return False
    return True


def test_bytes_go_there_and_back_unchanged_and_in_order() -> None:
    async def story(links: Links, ports: Ports) -> None:
        links.worsen(delay_s=0.01, loss=0.01, rate=50e6)
        reader, writer = await dial(links, ports, 0, 1)
        sent = random.Random(2).randbytes(2 << 20)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()

    with_links(story)


def test_what_is_sent_into_a_cut_way_arrives_when_it_is_whole_again() -> None:
    async def story(links: Links, ports: Ports) -> None:
        reader, writer = await dial(links, ports, 0, 1)
        links.cut_one_way(1, 0)
        writer.write(b"x")
        assert await is_silent(reader)
        links.heal()
        assert await reader.readexactly(1) == b"x"
        writer.close()

    with_links(story)


def test_a_cut_way_holds_up_both_connections_between_two_nodes_and_no_other() -> None:
    async def story(links: Links, ports: Ports) -> None:
        dialled, answered, other = [await dial(links, ports, *pair) for pair in ((0, 1), (1, 0), (0, 2))]
        links.cut_one_way(0, 1)
        for _, writer in (dialled, answered, other):
            writer.write(b"x")
        assert await other[0].readexactly(1) == b"x"
        assert await is_silent(dialled[0])  # asked by 0: the question is held
        assert await is_silent(answered[0])  # asked by 1: the answer is held
        for _, writer in (dialled, answered, other):
            writer.close()

    with_links(story)


def test_nobody_new_gets_through_to_an_isolated_node_until_it_rejoins() -> None:
    async def story(links: Links, ports: Ports) -> None:
        links.isolate(1)
        reader, writer = await dial(links, ports, 0, 1)
        writer.write(b"x")
        assert await is_silent(reader)
        links.rejoin(1)
        assert await reader.readexactly(1) == b"x"
        writer.close()

    with_links(story)


def test_delay_counts_each_way() -> None:
    async def story(links: Links, ports: Ports) -> None:
        reader, writer = await dial(links, ports, 0, 1)
        links.worsen(delay_s=0.2)
        began = asyncio.get_running_loop().time()
        writer.write(b"x")
        await reader.readexactly(1)
        assert asyncio.get_running_loop().time() - began >= 0.4
        writer.close()

    with_links(story)


def test_an_end_is_passed_on() -> None:
    async def story(links: Links, ports: Ports) -> None:
        reader, writer = await dial(links, ports, 0, 1)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    with_links(story)
