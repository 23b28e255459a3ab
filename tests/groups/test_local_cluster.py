"""``firn up --replicas 3``: real processes, a real client, a master that is killed under load."""

import asyncio
import os
import signal
from pathlib import Path

from engine_kit import run
from firn_cli.calls import Running

from firn.client import Client
from firn.errors import FirnError

TOPIC = """
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: t}
spec: {durability: {minInSync: 2}}
"""


async def master_pid(addresses: list[str]) -> int | None:
    for address in addresses:
        async with Client(address, timeout=5) as client:
            try:
                [row] = (await client.status())["brokers"]
            except FirnError:
                continue
            if row["role"] == "master":
                return int(row["pid"])
    return None


async def another_master(addresses: str, *, than: int | None) -> int:
    """The process of the master, once there is one that is not ``than``."""
    async with asyncio.timeout(60):
        while (found := await master_pid(addresses.split(","))) in (None, than):
            await asyncio.sleep(0.05)
    assert found is not None
    return found


def test_a_killed_master_costs_no_acknowledged_record_and_the_cluster_goes_on(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TOPIC)
    command = (
        "up", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--replicas", "3", "--print-ready",
        "--lease-ttl", "1500ms", "--restart-after", "500ms", "-f", str(tmp_path / "t.yaml"),
    )  # fmt: skip

    async def story(addresses: str) -> None:
        acknowledged: list[int] = []

        async def produce() -> None:
            async with Client(addresses, timeout=30) as client:
                producer = client.producer("t", linger_ms=0)
                for number in range(600):
                    await producer.send(b"%d" % number, b"v%d" % number)
                    acknowledged.append(number)
                await producer.close()

        producing = asyncio.create_task(produce())
        while len(acknowledged) < 100:
            await asyncio.sleep(0.01)
            assert not producing.done(), producing.result()
        killed = await another_master(addresses, than=None)
        os.kill(killed, signal.SIGKILL)
        await producing
        async with Client(addresses, timeout=30) as client:
            found = [record async for record in client.reader("t", view="raw", until_end=True)]
            assert [record.key for record in found] == [b"%d" % number for number in acknowledged]
            assert await client.get("t", b"599") is not None
        await another_master(addresses, than=killed)

    with Running(*command) as cluster:
        word, addresses = cluster.line().decode().split()
        assert word == "READY"
        assert len(addresses.split(",")) == 3
        run(story(addresses))
        assert cluster.stop().returncode == 0
