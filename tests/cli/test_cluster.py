"""A cluster of local processes: its supervisor over small processes that say what a broker says, then the real one."""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_kit import run

from firn.errors import Invalid, Unavailable
from firn_node.cluster import Cluster, Replica, Supervisor, plan_cluster
from firn_node.main import Announcer
from support.firn_cli.calls import Running, call

# Says READY with its folder's name as the address, and ends when told, or at once when it fails.
CHILD = """
import os, sys, time
folder, how = sys.argv[1:]
open(f"{folder}/{os.getpid()}", "w").close()
if how == "fails":
    print("no good", file=sys.stderr)
    sys.exit(3)
print("READY", folder[-3:], flush=True)
time.sleep(60)
"""


class Said(Announcer):
    """What people were told."""

    def __init__(self) -> None:
        super().__init__(ready_only=False)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(line)

    def ready(self, address: str) -> None:
        self.lines.append(f"READY {address}")


def supervised(
    cluster: Cluster, *, how: str = "", only: str = "", restart_after_s: float = 0.05
) -> tuple[Supervisor, Said]:
    said = Said()

    def command(replica: Replica) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", CHILD, replica.data, how if replica.node == only else ""]

    return Supervisor(cluster, command, said, restart_after_s=restart_after_s), said


async def until_said(said: Said, part: str) -> None:
    async with asyncio.timeout(60):
        while not any(part in line for line in said.lines):
            await asyncio.sleep(0.01)


def pids(cluster: Cluster) -> list[int]:
    return [int(name) for replica in cluster.replicas for name in os.listdir(replica.data)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def cluster(folder: Path, replicas: int = 2, groups: int = 2) -> Cluster:
    return plan_cluster(str(folder), host="127.0.0.1", port=0, replicas=replicas, groups=groups)


def test_folders_and_ports_of_a_cluster_count_up_group_by_group() -> None:
    found = plan_cluster("/d", host="127.0.0.1", port=7700, replicas=3, groups=2)
    assert [(r.node, r.data, r.port) for r in found.replicas] == [
        ("firn-0-0", "/d/0/0", 7700), ("firn-0-1", "/d/0/1", 7701), ("firn-0-2", "/d/0/2", 7702),
        ("firn-1-0", "/d/1/0", 7703), ("firn-1-1", "/d/1/1", 7704), ("firn-1-2", "/d/1/2", 7705),
    ]  # fmt: skip
    assert found.coordinator == "/d/coordinator.sqlite"
    with pytest.raises(Invalid, match="65535"):
        plan_cluster("/d", host="127.0.0.1", port=65_531, replicas=3, groups=2)


def test_a_cluster_says_ready_once_with_all_addresses_and_ends_with_all_its_processes(tmp_path: Path) -> None:
    async def story() -> None:
        supervisor, said = supervised(cluster(tmp_path))
        running = asyncio.create_task(supervisor.run())
        await until_said(said, "READY")
        assert said.lines == ["READY 0/0,0/1,1/0,1/1"]
        assert (tmp_path / "coordinator.sqlite").exists()
        supervisor.stop()
        await running
        assert not any(map(is_alive, pids(cluster(tmp_path))))

    run(story())


def test_a_replica_that_dies_is_started_again_and_the_others_are_left_alone(tmp_path: Path) -> None:
    async def story() -> None:
        supervisor, said = supervised(cluster(tmp_path), restart_after_s=0.05)
        running = asyncio.create_task(supervisor.run())
        await until_said(said, "READY")
        [victim] = os.listdir(tmp_path / "1" / "0")
        os.kill(int(victim), signal.SIGKILL)
        await until_said(said, "firn-1-0 ended with signal SIGKILL; it is started again in 0.05 s")
        async with asyncio.timeout(60):
            while len(os.listdir(tmp_path / "1" / "0")) < 2:
                await asyncio.sleep(0.01)
        assert len(pids(cluster(tmp_path))) == 5
        supervisor.stop()
        await running
        assert [line for line in said.lines if line.startswith("READY")] == ["READY 0/0,0/1,1/0,1/1"]

    run(story())


def test_a_replica_is_not_started_again_where_nobody_wants_it(tmp_path: Path) -> None:
    async def story() -> None:
        supervisor, said = supervised(cluster(tmp_path, 2, 1), restart_after_s=0)
        running = asyncio.create_task(supervisor.run())
        await until_said(said, "READY")
        [victim] = os.listdir(tmp_path / "0" / "1")
        os.kill(int(victim), signal.SIGKILL)
        await until_said(said, "it is not started again")
        supervisor.stop()
        await running
        assert len(pids(cluster(tmp_path, 2, 1))) == 2

    run(story())


def test_a_replica_that_ends_before_the_cluster_is_ready_ends_the_cluster(tmp_path: Path) -> None:
    async def story() -> None:
        supervisor, said = supervised(cluster(tmp_path), how="fails", only="firn-1-1")
        with pytest.raises(Unavailable, match="firn-1-1 ended with code 3 before it was ready"):
            await supervisor.run()
        assert "firn-1-1: no good" in said.lines
        assert not any(map(is_alive, pids(cluster(tmp_path))))

    run(story())


def test_replicas_end_with_their_supervisor_whatever_ends_it(tmp_path: Path) -> None:
    parent = f"""
import asyncio, sys
from firn_node.cluster import Supervisor, plan_cluster
from firn_node.main import Announcer
cluster = plan_cluster({str(tmp_path)!r}, host="127.0.0.1", port=0, replicas=2, groups=1)
command = lambda replica: [sys.executable, "-I", "-S", "-c", {CHILD!r}, replica.data, ""]
asyncio.run(Supervisor(cluster, command, Announcer(ready_only=True), restart_after_s=1).run())
"""

    async def story() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE, env={**os.environ}
        )
        assert process.stdout is not None
        assert (await process.stdout.readline()) == b"READY 0/0,0/1\n"
        children = pids(cluster(tmp_path, 2, 1))
        process.kill()
        await process.wait()
        async with asyncio.timeout(60):
            while any(map(is_alive, children)):
                await asyncio.sleep(0.01)

    run(story())


def status_of(address: str) -> dict[str, Any]:
    """The one row of a broker's own status; empty when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/v1/status", timeout=5) as answer:
            row: dict[str, Any] = json.load(answer)["brokers"][0]
            return row
    except OSError:
        return {}


def until(holds: Callable[[], Any], what: str) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(f"never happened: {what}")


def test_a_group_of_processes_outlives_its_master_and_takes_it_back_as_a_standby(tmp_path: Path) -> None:
    data, topics = tmp_path / "data", tmp_path / "topics.yaml"
    topics.write_text(
        "apiVersion: firn.dev/v1alpha1\nkind: CompactedTopic\nmetadata: {name: flights}\n"
        "spec: {durability: {minInSync: 1}}\n"
    )
    with Running(
        "up", "--data", str(data), "--listen", "127.0.0.1:0", "--replicas", "2", "-f", str(topics),
        "--lease-ttl", "1500ms", "--restart-after", "10s", "--print-ready",
    ) as running:  # fmt: skip
        line = running.line().decode()
        assert line.startswith("READY 127.0.0.1:"), line + running.stop().stderr.decode()
        addresses = line.split()[1].split(",")
        assert len(addresses) == 2
        where = ",".join(addresses)
        assert call("produce", "flights", address=where, input=b"a\t1\nb\t2\n").stdout.startswith(
            b"2 records"
        )
        rows: dict[str, dict[str, Any]] = {}

        def are_whole() -> bool:
            rows.update({each: status_of(each) for each in addresses})
            roles = sorted(row.get("role", "") for row in rows.values() if row.get("in_sync"))
            return roles == ["master", "standby"]

        until(are_whole, "a master and a standby, both in sync")
        master, other = sorted(addresses, key=lambda each: str(rows[each]["role"]))
        killed = rows[master]["pid"]
        # Its next process would win at once, were it there before the lease is over.
        os.kill(killed, signal.SIGKILL)
        until(lambda: status_of(other).get("role") == "master", "the standby is master")
        assert call("produce", "flights", address=where, input=b"a\t3\n").stdout.startswith(b"1 records")
        assert call("get", "flights", "a", address=where).stdout.strip() == b"3"
        until(lambda: status_of(master).get("role") == "standby", "the killed one is back")
        until(lambda: status_of(master).get("in_sync"), "it is in sync again")
        pids = [status_of(each)["pid"] for each in addresses]
        assert killed not in pids
        assert running.stop().returncode == 0
        assert not any(map(is_alive, pids))
