"""``firn up --replicas 2 --groups 2``: real processes and the command line; each group's master is killed under load."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from cluster_kit import LocalCluster, local_cluster
from engine_kit import run
from firn_cli.calls import Ended

from firn.client import Client

TOPIC = """
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: t}
spec: {partitions: 4, durability: {minInSync: 1}}
"""


def lines(ended: Ended) -> list[Any]:
    return [json.loads(line) for line in ended.stdout.splitlines()]


async def masters(client: Client) -> dict[int, int]:
    """The process of each group's master."""
    rows = (await client.cluster_status())["brokers"]
    return {row["group"]: row["pid"] for row in rows if row["role"] == "master"}


def test_the_command_line_reaches_all_partitions_and_no_record_is_lost_when_masters_are_killed(
    tmp_path: Path,
) -> None:
    (tmp_path / "t.yaml").write_text(TOPIC)
    options = ("--groups", "2", "--restart-after", "500ms", "-f", str(tmp_path / "t.yaml"))
    keys = [f"key-{number}" for number in range(200)]

    async def story() -> None:
        async with local_cluster(tmp_path, *options, replicas=2) as cluster:
            folders = sorted(
                str(path.parent.relative_to(tmp_path / "data")) for path in tmp_path.glob("data/*/*/log")
            )
            assert folders == ["0/0", "0/1", "1/0", "1/1"]
            sent = await cluster.firn("produce", "t", input="".join(f"{key}\t1\n" for key in keys).encode())
            assert sent.stdout.startswith(b"200 records")
            assert (await cluster.firn("get", "t", keys[7])).stdout == b"1"
            read = lines(await cluster.firn("consume", "t", "--until-end", "--group", "g"))
            assert sorted(row["key"] for row in read) == sorted(keys)
            assert {row["partition"] for row in read} == {0, 1, 2, 3}
            assert lines(await cluster.firn("consume", "t", "--until-end", "--group", "g")) == []
            [found] = lines(await cluster.firn("query", "t", "--key", keys[7]))
            assert found["value"] == "1"
            [compacted] = lines(await cluster.firn("compact", "t", "--force", "--wait", "-o", "json"))
            states = [(p["partition"], p["state"]) for p in compacted["partitions"]]
            assert states == [(number, "done") for number in range(4)]
            assert b"groups: 0, 1" in (await cluster.firn("topics", "describe", "t")).stdout
            [shown] = lines(await cluster.firn("status", "-o", "json"))
            assert [row["partition"] for row in shown["topics"][0]["partitions"]] == [0, 1, 2, 3]
            await killed_under_load(cluster)
            await cluster.firn("topics", "delete", "t", "--yes")
            assert lines(await cluster.firn("topics", "list", "-o", "json")) == [[]]

    run(story(), 300)


async def killed_under_load(cluster: LocalCluster) -> None:
    acknowledged: list[int] = []
    stop = asyncio.Event()

    async def until_more() -> None:
        before = len(acknowledged)
        async with asyncio.timeout(60):
            while len(acknowledged) < before + 200:
                await asyncio.sleep(0.01)
                assert not producing.done(), producing.result()

    async with cluster.client() as client:
        before = [record async for record in client.reader("t", view="raw", until_end=True)]

        async def produce() -> None:
            producer = client.producer("t", linger_ms=0)
            number = 0
            while not stop.is_set():
                await asyncio.gather(*(producer.send(b"%d" % n, b"v") for n in range(number, number + 8)))
                acknowledged.extend(range(number, number + 8))
                number += 8
            await producer.close()

        producing = asyncio.create_task(produce())
        for group in (0, 1):
            await until_more()
            dead = (await masters(client))[group]
            os.kill(dead, signal.SIGKILL)
            async with asyncio.timeout(60):
                while (await masters(client)).get(group, dead) == dead:
                    await asyncio.sleep(0.05)
            await cluster.until_in_sync()
        await until_more()
        stop.set()
        await producing
        read = [record async for record in client.reader("t", view="raw", until_end=True)]
        assert sorted(int(record.key) for record in read if record.key.isdigit()) == acknowledged
        assert len(read) == len(before) + len(acknowledged)
