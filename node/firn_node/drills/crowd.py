"""A crowd before a drill's brokers: thousands of connections that come back whenever they are lost, and bad guests.

========= ==========================================================================================
idle      a WebSocket that asks for nothing
slow      asks for all records of a partition, and reads none of the answer
oversize  a WebSocket whose first frame claims a tebibyte
garbage   bytes that are no HTTP
========= ==========================================================================================

The bad ones are cut, and try again like the others. No guest has a task of its own, and all of them are another
process: what is tested are the brokers, and the drill's process also carries what their replicas say (``links``).
It ends with its standard input, and says how many are inside on its output, a number a line.
"""

import asyncio
import base64
import contextlib
import json
import random
import resource
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from firn.websocket import handshake

GUESTS = 5000
_DESCRIPTORS_A_GUEST = 3  # here, with some room
_PAUSE_S = (0.05, 1.5)  # before a guest that was lost comes back
_LOOK_S = 0.05
_BAD = {"slow": 50, "oversize": 100, "garbage": 100}  # one in so many guests
_OVERSIZE = b"\x82\xff" + (1 << 40).to_bytes(8, "big") + bytes(4)


class _Guest(asyncio.Protocol):
    """``is_inside``: the broker has answered its handshake."""

    def __init__(self, crowd: "_Guests", kind: str) -> None:
        self.crowd = crowd
        self.kind = kind
        self.is_inside = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        chance, address = self.crowd.chance, "crowd"
        if self.kind == "garbage":
            transport.write(chance.randbytes(chance.randrange(1, 20_000)))
        elif self.kind == "slow":
            transport.write(
                b"GET /v1/topics/drill/partitions/0?view=raw&offset=0 HTTP/1.1\r\nHost: crowd\r\n\r\n"
            )
            transport.pause_reading()
            self.is_inside = True
        else:
            key = base64.b64encode(chance.randbytes(16)).decode()
            transport.write(handshake(address, "/v1/stream", key, {}))

    def data_received(self, data: bytes) -> None:
        if not self.is_inside and data.startswith(b"HTTP/1.1 101"):
            self.is_inside = True
            if self.kind == "oversize" and self.transport is not None:
                self.transport.write(_OVERSIZE)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_inside, self.transport = False, None
        self.crowd.come_back(self)


class _Guests:
    """All of them. Use as ``async with``."""

    def __init__(self, host: str, ports: Sequence[int], chance: random.Random, count: int) -> None:
        self.chance = chance
        self._host = host
        self._ports = ports
        self._guests = [_Guest(self, kind) for kind in kinds_of(count)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    @property
    def inside(self) -> int:
        """How many idle guests are connected."""
        return sum(guest.is_inside for guest in self._guests if guest.kind == "idle")

    def come_back(self, guest: _Guest) -> None:
        if not self._is_over:
            task = asyncio.create_task(self._come(guest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _come(self, guest: _Guest) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(*_PAUSE_S))
            try:
                port = self.chance.choice(self._ports)
                await asyncio.get_running_loop().create_connection(lambda: guest, self._host, port)
                return
            except OSError:
                continue

    async def __aenter__(self) -> Self:
        for guest in self._guests:
            self.come_back(guest)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for guest in self._guests:
            if guest.transport is not None:
                guest.transport.abort()
        await asyncio.sleep(0)


def kinds_of(count: int) -> list[str]:
    """What each of so many guests is."""
    bad = [kind for kind, share in _BAD.items() for _ in range(count // share)]
    return [*bad, *["idle"] * (count - len(bad))]


class Crowd:
    """The guests' process. Use as ``async with``: no guest outlives it."""

    def __init__(self, ports: list[int], host: str, chance: random.Random, *, count: int = GUESTS) -> None:
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.count = min(count, descriptors // _DESCRIPTORS_A_GUEST)
        self.idle = kinds_of(self.count).count("idle")
        self.inside = 0  # of the idle ones
        self._order = json.dumps(
            {"host": host, "ports": ports, "seed": chance.randrange(1 << 32), "count": self.count}
        )
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def all_are_inside(self) -> bool:
        return self.inside == self.idle

    async def __aenter__(self) -> Self:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "firn_node.drills.crowd", self._order,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(process))
        return self

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.inside = int(line)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._reading is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await asyncio.gather(self._process.wait(), self._reading)


async def _be_a_crowd(host: str, ports: Sequence[int], seed: int, count: int) -> None:
    """Until nobody holds the other end of standard input."""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), is_over.set)
    told = -1
    async with _Guests(host, ports, random.Random(seed), count) as guests:
        while not is_over.is_set():
            if (inside := guests.inside) != told:
                told = inside
                print(inside, flush=True)
            await asyncio.sleep(_LOOK_S)


def main(order: str) -> None:
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    asyncio.run(_be_a_crowd(**json.loads(order)))


if __name__ == "__main__":
    main(sys.argv[1])
