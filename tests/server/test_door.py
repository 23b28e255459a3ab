"""The port itself: how connections come in, and what is left of them when it closes."""

import asyncio
import contextlib
import gc
import socket
from collections import Counter

import pytest
import uvloop

from firn_node.server import Server, door, serve
from server.serving import StandIn

GUESTS = 3 * door.BITE + 1


async def _knocking(server: Server, knocks: contextlib.ExitStack) -> list[socket.socket]:
    """Connections that wait in the kernel: the event loop has not turned since."""
    host, _, port = server.address.rpartition(":")
    return [knocks.enter_context(socket.create_connection((host, int(port)), 30)) for _ in range(GUESTS)]


async def _all_lost(server: Server) -> None:
    async with asyncio.timeout(30):
        while server.context.counts.connections:
            await asyncio.sleep(0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_crowd_comes_in_over_several_turns_of_the_event_loop(loop: str) -> None:
    async def main() -> None:
        server = await serve(StandIn(), host="127.0.0.1", port=0)
        counts, turns = server.context.counts, Counter[int]()
        with contextlib.ExitStack() as knocks:
            await _knocking(server, knocks)
            while counts.connections < GUESTS:
                before = counts.connections
                await asyncio.sleep(0)
                turns[counts.connections - before] += 1
            await server.stop()
        await _all_lost(server)
        assert max(turns) <= door.BITE

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("turns", range(5))
def test_a_port_that_closes_while_it_accepts_leaves_no_connection_behind(loop: str, turns: int) -> None:
    async def main() -> None:
        server = await serve(StandIn(), host="127.0.0.1", port=0)
        with contextlib.ExitStack() as knocks:
            guests = await _knocking(server, knocks)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            for guest in guests:
                with contextlib.suppress(ConnectionResetError):
                    assert guest.recv(1) == b""
        await _all_lost(server)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main())
    gc.collect()  # what nobody closed warns, and warnings are errors
