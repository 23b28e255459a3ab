"""``firn up --replicas 2``: a standby loses its data under load, and dies again and again while it is rebuilt."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from engine_kit import run
from firn_cli.calls import Running

from firn.client import Client
from firn.errors import FirnError

TOPIC = """
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: t}
spec:
  partitions: 8
  compaction: {maxLag: 1s, minDirtyRatio: 0, deleteRetention: 0s, maxSegmentAge: 1s}
  retention: {time: 0s, size: 0}
"""
KEYS = 400


class Load:
    """Puts and deletes of the same keys, over and over; what was acknowledged last of each."""

    def __init__(self, addresses: str) -> None:
        self.newest: dict[bytes, bytes | None] = {}
        self._addresses = addresses
        self._is_over = False

    async def run(self) -> None:
        async with Client(self._addresses, timeout=60) as client:
            producer = client.producer("t", linger_ms=0)
            number = 0
            while not self._is_over or number % KEYS:
                key = b"%d" % (number % KEYS)
                value = None if number % 5 == number // KEYS % 5 else b"%d" % number * 100
                await producer.send(key, value)
                self.newest[key] = value
                number += 1
            await producer.close()

    def stop(self) -> None:
        self._is_over = True


async def rows(addresses: list[str]) -> dict[str, dict[str, Any]]:
    """What each broker that answers says of itself, by address."""
    found = {}
    for address in addresses:
        async with Client(address, timeout=5) as client:
            try:
                found[address] = (await client.status())["brokers"][0]
            except FirnError:
                continue
    return found


async def until(addresses: list[str], holds: Any, what: str) -> dict[str, dict[str, Any]]:
    loop = asyncio.get_running_loop()
    end, found = loop.time() + 100, {}
    while loop.time() < end:
        found = await rows(addresses)
        if holds(found):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"never happened: {what}: {found}")


def test_a_standby_that_dies_over_and_over_is_rebuilt_under_load_and_serves_everything(
    tmp_path: Path,
) -> None:
    (tmp_path / "t.yaml").write_text(TOPIC)
    command = (
        "up", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--replicas", "2", "--print-ready",
        "--lease-ttl", "1500ms", "--restart-after", "3s", "-f", str(tmp_path / "t.yaml"),
        "--log-segment-bytes", "256Ki", "--checkpoint-interval", "1s", "--compaction-check", "200ms",
    )  # fmt: skip

    async def story(together: str) -> None:
        addresses = together.split(",")
        load = Load(together)
        loading = asyncio.create_task(load.run())
        found = await until(
            addresses,
            lambda now: any(row["role"] == "master" and row["log_start"] > 4096 for row in now.values()),
            "retention lets go of the log",
        )
        [master] = [address for address, row in found.items() if row["role"] == "master"]
        [standby] = [address for address in addresses if address != master]
        first = found[standby]["pid"]
        os.kill(first, signal.SIGKILL)
        folder = tmp_path / "data" / "0" / str(addresses.index(standby))
        shutil.rmtree(folder)
        folder.mkdir()

        def is_in_sync(now: dict[str, dict[str, Any]]) -> bool:
            return standby in now and now[standby]["in_sync"] and now[standby]["pid"] != first

        await until(addresses, is_in_sync, "it is rebuilt")
        await until(addresses, lambda _: not (folder / "rebuild").exists(), "nothing is left over")
        load.stop()
        await loading
        assert loading.exception() is None
        # Everything is on both once a write of the end is: then the old master goes.
        found = await until(
            addresses, lambda now: len(now) == 2 and now[standby]["in_sync"], "both are there"
        )
        os.kill(found[master]["pid"], signal.SIGKILL)
        await until(
            [standby], lambda now: standby in now and now[standby]["role"] == "master", "it is elected"
        )
        async with Client(standby, timeout=30) as client:
            read: dict[bytes, bytes | None] = {}
            async for record in client.reader("t", until_end=True):
                read[record.key] = record.value
            expected = {key: value for key, value in load.newest.items() if value is not None}
            assert {key: value for key, value in read.items() if value is not None} == expected

    # Each of its lives ends with the third partition that is pulled in it, before that is whole; there are nine.
    with Running(*command, FIRN_FAILPOINT="rebuild.partition_pulled:3") as cluster:
        word, addresses = cluster.line().decode().split()
        assert word == "READY"
        run(story(addresses), seconds=400)
        ended = cluster.stop()
        assert ended.returncode == 0
        deaths = ended.stderr.decode().count("ended with signal SIGKILL")
        assert deaths >= 2 + 3, ended.stderr  # the standby and the master, by the test; three in the rebuild
