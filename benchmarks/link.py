"""How much of a long link the stream to a standby fills: 100 ms there and back, 100 and 500 Mbit/s.

Two replicas on this machine. What they say to one another goes through proxies of the drills (``firn_node.drills.links``),
which hold each byte back for half of the round trip and let no more of them through a second than the link does. Each
connection ends at its proxy: the kernel's buffers, which a real link of that length needs larger, are not measured.
"""

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from benchmarks.compared import Sizes
from benchmarks.processes import run_child
from benchmarks.report import Row, Spread

from firn.client import Client
from firn_node.drills.links import Links
from firn_node.drills.processes import Cluster, Node

ROUND_TRIP_S = 0.1
MBITS = (100, 500)
VALUE_BYTES = 1024
RECORD_BYTES = VALUE_BYTES + 32  # of the log, about
_OPTIONS = ("--lease-ttl", "3s")
_POLL_S = 0.05
_WAIT_S = 120.0


def measure(work: Path, sizes: Sizes) -> list[Row]:
    """The rows; brokers and data are removed afterwards."""
    folder = work / "firn-link"
    folder.mkdir(parents=True)
    chosen = MBITS[:1] if sizes.is_quick else MBITS
    try:
        return [row for mbits in chosen for row in asyncio.run(_measure(folder / str(mbits), mbits, sizes))]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _measure(folder: Path, mbits: int, sizes: Sizes) -> list[Row]:
    folder.mkdir()
    records = round(mbits * 1e6 / 8 * sizes.link_seconds / RECORD_BYTES)
    cluster = Cluster(folder, 2, _OPTIONS)
    async with cluster, Links([node.port for node in cluster.nodes], random.Random(1)) as links:
        await cluster.start(links)
        await _until(partial(_are_in_sync, cluster, 2))
        behind = await _behind(cluster, links, mbits, records)
        await _until(partial(_are_in_sync, cluster, 2))
        beside = await _beside(cluster, records)
    title, link = f"link of 100 ms and {mbits} Mbit/s", mbits * 1e6 / 8

    def row(what: str, rate: float) -> Row:
        return Row(
            f"{title}, {what}", "% of the link", Spread.of([100 * rate / link]), note=f"{rate / 1e6:.1f} MB/s"
        )

    return [row("a standby that was away", behind), row("writes that wait for the standby", beside)]


async def _behind(cluster: Cluster, links: Links, mbits: int, records: int) -> float:
    """Bytes a second of the log that a standby gets that was cut off while all of it was written."""
    master, standby = await _roles(cluster)
    links.isolate(standby.ordinal)
    await _until(partial(_are_in_sync, cluster, 1))
    await _produce(cluster, "behind", records, min_in_sync=1)
    end, start = await _end(master), await _end(standby)
    links.worsen(delay_s=ROUND_TRIP_S / 2, rate=mbits * 1e6 / 8)
    links.rejoin(standby.ordinal)
    now = asyncio.get_running_loop().time
    while (first := await _end(standby)) == start:
        await asyncio.sleep(_POLL_S)
    began = now()
    while await _end(standby) < end:
        await asyncio.sleep(_POLL_S)
    return (end - first) / (now() - began)


async def _beside(cluster: Cluster, records: int) -> float:
    """Bytes a second of the log while each write waits for the standby."""
    master, _ = await _roles(cluster)
    before = await _end(master)
    seconds = await _produce(cluster, "beside", records, min_in_sync=2)
    return (await _end(master) - before) / seconds


async def _produce(cluster: Cluster, topic: str, records: int, *, min_in_sync: int) -> float:
    """Seconds that a client in a process of its own takes."""
    durability = {"minInSync": min_in_sync, "flush": "interval"}
    async with Client(cluster.addresses, timeout=_WAIT_S) as client:
        await client.create_topic(topic, durability=durability)
    asked = {"topic": topic, "records": records, "keys": records, "value_bytes": VALUE_BYTES}
    found = await asyncio.to_thread(run_child, "firn_client:produce", address=cluster.addresses, **asked)
    return float(found["seconds"])


async def _roles(cluster: Cluster) -> tuple[Node, Node]:
    master = await cluster.master()
    assert master is not None, "asked only while there is one"
    [standby] = [node for node in cluster.nodes if node is not master]
    return master, standby


async def _end(node: Node) -> int:
    async with Client(node.address, timeout=_WAIT_S) as client:
        [row] = (await client.status())["brokers"]
    return int(row["log_end"])


async def _are_in_sync(cluster: Cluster, count: int) -> bool:
    return len(await cluster.in_sync()) == count and await cluster.master() is not None


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    """*Errors*: TimeoutError."""
    async with asyncio.timeout(_WAIT_S):
        while not await holds():
            await asyncio.sleep(_POLL_S)
