"""A cluster of processes on this machine (``firn up --replicas N``), as people run one.

Nothing is forked here: other tests of the same process may have opened RocksDB, whose threads do not survive it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn_cli.calls import Ended, Running

from firn.client import Client

LEASE_TTL = "1500ms"
SECONDS_MAX = 90.0  # until something that takes a second or two has happened, on a busy machine
Row = dict[str, Any]


@dataclass
class LocalCluster:
    running: Running
    addresses: list[str]

    @property
    def all_addresses(self) -> str:
        return ",".join(self.addresses)

    def client(self, *, timeout: float = 60) -> Client:
        return Client(self.all_addresses, timeout=timeout)

    async def firn(self, *arguments: str, code: int = 0, address: str = "", input: bytes = b"") -> Ended:
        """``firn`` as people call it, in a process of its own."""

        def run() -> Ended:
            with Running(*arguments, address=address or self.all_addresses) as running:
                running.write(input)
                return running.end()

        found = await asyncio.to_thread(run)
        assert found.returncode == code, found
        return found

    async def rows(self) -> list[Row]:
        async with self.client() as client:
            rows: list[Row] = (await client.cluster_status())["brokers"]
            return rows

    async def master(self) -> Row:
        [row] = [row for row in await self.rows() if row["role"] == "master"]
        return row

    async def until(self, holds: Callable[[list[Row]], bool], what: str) -> list[Row]:
        """The rows of status, once they are as they should be."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SECONDS_MAX
        while not holds(rows := await self.rows()):
            assert loop.time() < end, f"never happened: {what}: {rows}"
            await asyncio.sleep(0.05)
        return rows

    async def until_in_sync(self) -> list[Row]:
        return await self.until(
            lambda rows: (
                all(row["in_sync"] and row["state"] == "serving" for row in rows)
                and sorted(row["group"] for row in rows if row["role"] == "master")
                == sorted({row["group"] for row in rows})
            ),
            "all are in sync under one master a group",
        )

    async def until_restarted(self, before: Row) -> None:
        """Once the replica of this row is another process, that serves."""

        def holds(rows: list[Row]) -> bool:
            [row] = [row for row in rows if row["node"] == before["node"]]
            return bool(row["state"] == "serving" and row["pid"] != before["pid"])

        await self.until(holds, f"{before['node']} is back")


@contextlib.asynccontextmanager
async def local_cluster(folder: Path, *options: str, replicas: int = 3) -> AsyncIterator[LocalCluster]:
    """A cluster whose replicas are all in sync; that it ends with code 0 is checked at its end."""
    command = (
        "up", "--data", str(folder / "data"), "--listen", "127.0.0.1:0", "--replicas", str(replicas), "--print-ready",
        "--lease-ttl", LEASE_TTL, *options,
    )  # fmt: skip
    with Running(*command) as running:
        line = (await asyncio.to_thread(running.line)).decode()
        assert line.startswith("READY "), line + running.stop().stderr.decode()
        found = LocalCluster(running, line.split()[1].split(","))
        await found.until_in_sync()
        yield found
        ended = await asyncio.to_thread(running.stop)
        assert ended.returncode == 0, ended.stderr.decode()
