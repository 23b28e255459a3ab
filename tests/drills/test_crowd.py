"""The crowd of a drill, before a real server."""

import asyncio
import random

from firn_node.drills.crowd import Crowd
from firn_node.ports import free_ports
from firn_node.server import ServerSettings, serve
from server.serving import StandIn, run


def test_guests_come_in_come_back_to_the_next_broker_and_are_gone_at_the_end() -> None:
    async def main() -> None:
        short = ServerSettings(stop_seconds=0.5)
        [port] = free_ports("127.0.0.1", 1)  # which no guest has at its own end while the server is down
        server = await serve(StandIn(connections_max=1000), host="127.0.0.1", port=port, settings=short)
        async with Crowd([port], "127.0.0.1", random.Random(1), count=200) as crowd:
            assert crowd.idle == 192
            while not await crowd.all_are_inside():
                await asyncio.sleep(0.01)
            assert server.context.counts.connections >= crowd.idle
            await server.stop()
            while crowd.inside:
                await asyncio.sleep(0.01)
            server = await serve(StandIn(connections_max=1000), host="127.0.0.1", port=port, settings=short)
            while not await crowd.all_are_inside():
                await asyncio.sleep(0.01)
        while server.context.counts.connections:
            await asyncio.sleep(0.01)
        assert server.context.counts.failures == 0
        await server.stop()

    run(main)
