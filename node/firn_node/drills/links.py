"""The network between the replicas of a drill: a TCP proxy for every ordered pair, and how bad each way is.

Node ``i`` dials node ``j`` at the proxy of ``(i, j)``; what ``i`` says to ``j`` takes the way ``(i, j)`` on whichever
connection it is said. A way that is cut holds bytes back, as a network does that loses them and everything that is
sent again: they arrive when the way is whole again, if both ends still wait; no new connection is made meanwhile. A
lost packet arrives 0.2 s late, the least retransmission timeout of Linux, and all behind it too.

Bytes are never changed, lost within a connection, or brought out of order: TCP does not do that either.
"""

import asyncio
import random
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 << 10
_CHUNKS_MAX = 256  # under way on a connection: 16 MiB, more than 100 ms at 1 Gbit/s
_PACKET_BYTES = 1448
_RETRANSMIT_S = 0.2
HOST = "127.0.0.1"


@dataclass(slots=True)
class Way:
    """From one node to another. ``loss``: share of packets; ``rate``: bytes a second, 0: no bound."""

    delay_s: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.whole.set()

    def cut(self) -> None:
        self.whole.clear()

    def heal(self) -> None:
        self.delay_s = self.loss = self.rate = 0.0
        self.whole.set()

    def lateness(self, size: int, chance: random.Random) -> float:
        """How much later than at once a chunk arrives."""
        late = self.delay_s
        lost = 1 - (1 - self.loss) ** max(1, -(-size // _PACKET_BYTES))
        while lost and chance.random() < lost:
            late += _RETRANSMIT_S
            lost = self.loss  # the same packet once more
        return late


class Links:
    """All ways among ``nodes`` replicas, whose ports are ``ports``. Use as ``async with``."""

    def __init__(self, ports: list[int], chance: random.Random) -> None:
        self._ports = ports
        self._chance = chance
        pairs = [(a, b) for a in range(len(ports)) for b in range(len(ports)) if a != b]
        self.ways = {pair: Way() for pair in pairs}
        self._servers: dict[tuple[int, int], asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Links":
        for pair in self.ways:
            self._servers[pair] = await asyncio.start_server(self._acceptor(pair), HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def routes(self, node: int) -> dict[str, str]:
        """Where a node dials the others: real address -> proxy."""
        found = {}
        for (a, b), server in self._servers.items():
            if a == node:
                found[f"{HOST}:{self._ports[b]}"] = f"{HOST}:{server.sockets[0].getsockname()[1]}"
        return found

    # What a drill orders.

    def isolate(self, node: int, *others: int) -> None:
        """Cut both ways between a node and these others, or all."""
        for a, b in self.ways:
            if node in (a, b) and (not others or (a if b == node else b) in others):
                self.ways[a, b].cut()

    def cut_one_way(self, source: int, target: int) -> None:
        self.ways[source, target].cut()

    def rejoin(self, node: int) -> None:
        """Make all ways from and to a node whole."""
        for pair, way in self.ways.items():
            if node in pair:
                way.whole.set()

    def worsen(self, *, delay_s: float = 0.0, loss: float = 0.0, rate: float = 0.0) -> None:
        """All ways alike."""
        for way in self.ways.values():
            way.delay_s, way.loss, way.rate = delay_s, loss, rate

    def heal(self) -> None:
        for way in self.ways.values():
            way.heal()

    # Connections.

    def _acceptor(self, pair: tuple[int, int]):  # type: ignore[no-untyped-def]
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._carry(pair, reader, writer)
            except (OSError, asyncio.CancelledError):
                pass
            finally:
                writer.transport.abort()
                self._tasks.discard(task)

        return accept

    async def _carry(
        self, pair: tuple[int, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        forth, back = self.ways[pair], self.ways[pair[1], pair[0]]
        await forth.whole.wait()
        await back.whole.wait()
        await asyncio.sleep(forth.delay_s + back.delay_s)  # of the handshake
        there_reader, there = await asyncio.open_connection(HOST, self._ports[pair[1]])
        try:
            pipes = [
                asyncio.create_task(self._pipe(reader, there, forth)),
                asyncio.create_task(self._pipe(there_reader, writer, back)),
            ]
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
        finally:
            there.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        """Bytes of one direction until their source ends, which the other end is told as late as the bytes."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_MAX)
        taking = asyncio.create_task(self._take(reader, under_way, way))
        try:
            while True:
                due, data = await under_way.get()
                late = due - asyncio.get_running_loop().time()
                if late > 0:
                    await asyncio.sleep(late)
                await way.whole.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take(
        self, reader: asyncio.StreamReader, under_way: "asyncio.Queue[tuple[float, bytes]]", way: Way
    ) -> None:
        loop = asyncio.get_running_loop()
        is_free_at = loop.time()
        data = b"-"
        while data:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except OSError:
                data = b""
            is_free_at = max(is_free_at, loop.time())
            if way.rate:
                is_free_at += len(data) / way.rate
            await under_way.put((is_free_at + way.lateness(len(data), self._chance), data))
