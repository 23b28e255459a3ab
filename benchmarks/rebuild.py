"""How fast a standby is rebuilt by messages, alone and while its master takes half the writes that it could.

Groups on this machine: two replicas, and three that speak TLS. The topic's log is let go of, so that the standby gets
everything by the compacted log. From the order until the standby is in sync again; all replicas and the client share
the cores.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compared import Sizes
from benchmarks.firn_broker import FirnBroker
from benchmarks.processes import cpu_seconds, run_child
from benchmarks.report import Row, Spread

from firn.client.blocking import Client

VALUE_BYTES = 1024
TOPIC = "rebuilt"
LETS_GO: dict[str, Any] = {"retention": {"time": "0s", "size": 0}, "durability": {"flush": "interval"}}
TRIM_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A group, and how its clients prove who they are."""

    title: str
    options: tuple[str, ...]
    credentials: dict[str, str]


def _shapes(folder: Path) -> list[Shape]:
    ca = folder / "data" / "tls"
    proof = {"tls_ca": f"{ca}/ca.crt", "tls_cert": f"{ca}/admin.crt", "tls_key": f"{ca}/admin.key"}
    return [
        Shape("two replicas", ("--replicas", "2"), {}),
        Shape("three replicas, TLS", ("--replicas", "3", "--tls"), proof),
    ]


def _until_trimmed(client: Client, bytes_left: int) -> None:
    """*Errors*: RuntimeError when the log is not let go of."""
    end = time.monotonic() + TRIM_S
    while (row := client.status()["brokers"][0])["log_end"] - row["log_start"] > bytes_left:
        if time.monotonic() > end:
            raise RuntimeError(f"the log was not let go of: {row}")
        time.sleep(0.1)


def measure(work: Path, sizes: Sizes) -> list[Row]:
    """The rows; brokers and data are removed afterwards."""
    folder = work / "firn-rebuild"
    return [row for shape in _shapes(folder) for row in _measure(folder, sizes, shape)]


def _measure(folder: Path, sizes: Sizes, shape: Shape) -> list[Row]:
    records = sizes.rebuild_bytes // VALUE_BYTES
    segment = max(256 << 10, min(64 << 20, sizes.rebuild_bytes // 16))
    broker = FirnBroker(
        folder, *shape.options, "--restart-after", "1s", "--log-segment-bytes", str(segment),
        "--checkpoint-interval", "1s",
    )  # fmt: skip
    broker.start()
    try:
        with Client(broker.address, **shape.credentials) as client:
            rows = client.cluster_status()["brokers"]
            [master] = [row for row in rows if row["role"] == "master"]
            standby = next(row for row in rows if row["role"] != "master")
            client.create_topic(TOPIC, partitions=4, **LETS_GO)
            client.create_topic("load", **LETS_GO)
        common = {"address": broker.address, "value_bytes": VALUE_BYTES, "credentials": shape.credentials}
        produced = run_child("firn_client:produce", topic=TOPIC, records=records, keys=records, **common)
        with Client(master["address"], **shape.credentials) as client:
            client.compact(TOPIC, force=True, wait=True)
            _until_trimmed(client, 3 * segment)
            size = sum(int(part["compacted_bytes"]) for part in client.describe(TOPIC)["partitions"])
        asked = {"standby": standby["address"], "node": standby["node"], "topic": "load", **common}
        pids = [int(row["pid"]) for row in (master, standby)]
        before = [cpu_seconds(pid) for pid in pids]
        alone = run_child("firn_client:rebuild", **asked, rate=0.0)
        cpu = [cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]
        loaded = run_child("firn_client:rebuild", **asked, rate=produced["rate"] / 2)
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    title = f"rebuild of a standby, {shape.title}, {size / 1e9:.2g} GB compacted"

    def row(what: str, unit: str, value: float, note: str = "") -> Row:
        return Row(f"{title}, {what}", unit, Spread.of([value]), note=note)

    return [
        row("alone", "MB/s", size / alone["seconds"] / 1e6, "target: 150 MB/s or more"),
        row("alone, the pull", "MB/s", size / alone["pulled_s"] / 1e6),
        row("alone, CPU of the master", "s/GB", cpu[0] / size * 1e9),
        row("alone, CPU of the standby", "s/GB", cpu[1] / size * 1e9),
        row("beside half the writes", "MB/s", size / loaded["seconds"] / 1e6, "target: 150 MB/s or more"),
        row("of these writes are kept", "%", 100 * loaded["kept"], "target: 80 % or more"),
    ]
