"""Hostile bytes from nobody in particular: nothing gets through, nothing stays, memory is flat.

``FIRN_FUZZ_INPUTS`` sets how many (1,000); a failure prints its seed, ``FIRN_FUZZ_SEED`` replays it.
"""

import asyncio
import contextlib
import gc
import os
import random
import ssl
from pathlib import Path

from security_kit import Site, guarded

from firn.tls import Credentials, client_context
from firn_node.server import ServerSettings
from firn_node.settings import SecuritySettings
from server.serving import StandIn, raw, run

INPUTS = int(os.environ.get("FIRN_FUZZ_INPUTS", "1000"))
SEED = int(os.environ.get("FIRN_FUZZ_SEED", "0")) or random.randrange(1, 1 << 32)
AT_ONCE = 16
GROWTH_MAX = 8 << 20  # of resident memory over the second half of the inputs
_SEEDS = (
    b"GET /v1/topics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer firn_0000\r\n\r\n",
    b"PUT /v1/topics/t/records/k HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nvalue",
    b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\nFIRN\x01\x00",
    b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n\x82\x7f\xff\xff\xff\xff",
    b"GET /v1/replicate?version=1&group=0&from=a&to=b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"k" * 6000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"",
)


def mutated(chance: random.Random) -> bytes:
    """One of the seeds with bytes flipped, cut out, doubled or put in; or noise."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(20_000))
    data = bytearray(chance.choice(_SEEDS))
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at : at + 1] = chance.randbytes(1)
            case 1:
                del data[at : at + chance.randrange(40)]
            case 2:
                data[at:at] = data[at : at + 2000] * chance.randrange(4)
            case _:
                data[at:at] = chance.choice((b"\r\n", b"\r\n\r\n", b"\x00", b" ", b":", b"9" * 400))
    return bytes(data)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def throw(address: str, data: bytes, tls: ssl.SSLContext | None, *, hangs_up: bool) -> bytes:
    """The answer to hostile bytes, until the broker ends the connection or the attacker does."""
    host, port = address.split(":")
    answer = b""
    with contextlib.suppress(OSError):  # ssl.SSLError is one
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        try:
            writer.write(data)
            if not hangs_up:
                if tls is None:
                    writer.write_eof()
                answer = await reader.read()
        finally:
            writer.transport.abort()
    return answer


def test_hostile_bytes_get_nothing_and_leave_nothing(tmp_path: Path) -> None:
    print(f"FIRN_FUZZ_SEED={SEED}")
    chance = random.Random(SEED)
    site = Site(tmp_path, tokens={"t": "principal: shop"})
    settings = ServerSettings(proof_seconds=0.5, unproven_per_address_max=AT_ONCE)
    plain = SecuritySettings(tokens=site.path("tokens.yaml"))
    spoken = client_context(Credentials(site.path("ca.crt")))

    async def main() -> None:
        broker = StandIn()
        async with (
            guarded(site, broker, settings=settings) as secret,
            guarded(site, broker, settings=settings, security=plain) as local,
        ):
            waiting, half = iter(range(INPUTS)), 0

            async def attack() -> None:
                nonlocal half
                for number in waiting:
                    if number == INPUTS // 2:
                        half = resident()
                    server, tls = chance.choice(((secret, spoken), (secret, None), (local, None)))
                    answer = await throw(server.address, mutated(chance), tls, hangs_up=chance.random() < 0.5)
                    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 1", b"HTTP/1.1 5")), answer[:200]

            await asyncio.gather(*(attack() for _ in range(AT_ONCE)))
            while any(
                s.context.counts.connections or s.context.door.admission.unproven for s in (secret, local)
            ):
                await asyncio.sleep(0.01)
            assert resident() - half < GROWTH_MAX
            for server in (secret, local):
                assert server.context.counts.failures == 0
                assert server.context.in_flight.used == 0
            assert broker.produced == []
            async with raw(local.address) as (reader, writer):  # and who belongs is served
                writer.write(b"GET /v1/topics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    run(main, seconds=600 + INPUTS / 50)
