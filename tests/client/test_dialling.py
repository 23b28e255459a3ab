"""Brokers that are reached elsewhere than at the addresses that they have among themselves."""

import asyncio
from pathlib import Path

import pytest
from security_kit import Site, guarded

from firn.client import Client
from firn.client.dialling import host_and_port
from firn.errors import FirnError, Invalid, Unavailable
from firn_node.engine.broker import Broker
from firn_node.settings import BrokerSettings


def test_everything_goes_where_the_dial_says_and_the_broker_proves_the_name_of_its_address(
    tmp_path: Path,
) -> None:
    (tmp_path / "pki").mkdir()
    site = Site(tmp_path / "pki")
    admin = site.client("admin", is_admin=True)
    asked: list[str] = []

    async def main() -> None:
        broker = Broker(BrokerSettings(str(tmp_path / "data"), index="files"))
        await broker.start()
        try:
            async with guarded(site, broker) as server:
                port = host_and_port(server.address)[1]

                async def dial(address: str) -> str:
                    asked.append(address)
                    return f"127.0.0.1:{port}"

                def client(address: str) -> Client:
                    return Client(
                        address, tls_ca=admin.tls_ca, tls_cert=admin.tls_cert, tls_key=admin.tls_key,
                        dial=dial, timeout=20,
                    )  # fmt: skip

                async with client("localhost:1") as found:
                    await found.create_topic("flights", partitions=2)
                    await found.put("flights", b"k", b"v")
                    records = [r async for r in found.reader("flights", until_end=True)]
                    assert [(r.key, r.value) for r in records] == [(b"k", b"v")]
                assert set(asked) == {"localhost:1"}
                # The same broker under a name that its certificate lacks.
                async with client("main-0-0.main-0.shop.svc:7700") as found:
                    for ask in (found.topics(), found.put("flights", b"k", b"w")):
                        with pytest.raises(Invalid, match="certificate is not trusted"):
                            await ask
        finally:
            await broker.stop()

    asyncio.run(main())


def test_an_address_without_a_way_is_unavailable_and_the_next_one_is_tried(tmp_path: Path) -> None:
    from firn_node.server import serve

    async def main() -> None:
        broker = Broker(BrokerSettings(str(tmp_path), index="files"))
        await broker.start()
        server = await serve(broker, host="127.0.0.1", port=0)

        async def dial(address: str) -> str:
            if address.startswith("gone"):
                raise ConnectionError("there is no pod gone")
            return server.address

        try:
            async with Client("gone.svc:7700,here.svc:7700", dial=dial, timeout=20) as client:
                await client.create_topic("flights")
                assert await client.put("flights", b"k", b"v") == (0, 0)
            async with Client("gone.svc:7700", dial=dial, timeout=0.5) as client:
                with pytest.raises(FirnError, match="there is no pod gone") as caught:
                    await client.topics()
                assert isinstance(caught.value, Unavailable)
        finally:
            await server.stop()
            await broker.stop()

    asyncio.run(main())


def test_hosts_lose_their_brackets() -> None:
    assert host_and_port("[::1]:7700") == ("::1", 7700)
    assert host_and_port("main-0-1.main-0.shop.svc:7700") == ("main-0-1.main-0.shop.svc", 7700)
