"""A cluster of processes on this machine (``firn up --replicas N``), as people run one."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn_cli.calls import Ended, Running, call

LEASE_TTL = "1500ms"
SECONDS_MAX = 60.0  # until something that takes a second or two has happened, on a busy machine


@dataclass
class LocalCluster:
    running: Running
    addresses: list[str]

    @property
    def all_addresses(self) -> str:
        return ",".join(self.addresses)

    def firn(self, *arguments: str, code: int | None = 0, input: bytes = b"", address: str = "") -> Ended:
        return call(*arguments, address=address or self.all_addresses, code=code, input=input)

    def status(self) -> dict[str, Any]:
        """What ``firn status -o json`` shows, asked of one broker after another until one answers."""
        found: dict[str, Any] = json.loads(self.firn("status", "-o", "json").stdout)
        return found

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.status()["brokers"]
        return rows

    def master(self) -> dict[str, Any]:
        [row] = [row for row in self.rows() if row["role"] == "master"]
        return row

    def until(self, holds: Callable[[list[dict[str, Any]]], bool], what: str) -> list[dict[str, Any]]:
        """The rows of status, once they are as they should be."""
        end = time.monotonic() + SECONDS_MAX
        while not holds(rows := self.rows()):
            assert time.monotonic() < end, f"never happened: {what}: {rows}"
            time.sleep(0.05)
        return rows

    def until_in_sync(self) -> list[dict[str, Any]]:
        return self.until(
            lambda rows: (
                all(row["in_sync"] and row["state"] == "serving" for row in rows)
                and sum(row["role"] == "master" for row in rows) == 1
            ),
            "all are in sync under one master",
        )


@contextlib.contextmanager
def local_cluster(folder: Path, *options: str, replicas: int = 3) -> Iterator[LocalCluster]:
    """A cluster whose replicas are all in sync; that all its processes end with code 0 is checked at its end."""
    command = (
        "up", "--data", str(folder / "data"), "--listen", "127.0.0.1:0", "--replicas", str(replicas), "--print-ready",
        "--lease-ttl", LEASE_TTL, *options,
    )  # fmt: skip
    with Running(*command) as running:
        line = running.line().decode()
        assert line.startswith("READY "), line + running.stop().stderr.decode()
        found = LocalCluster(running, line.split()[1].split(","))
        found.until_in_sync()
        yield found
        ended = running.stop()
        assert ended.returncode == 0, ended.stderr.decode()
