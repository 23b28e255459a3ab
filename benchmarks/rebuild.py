"""How fast a standby is rebuilt by messages, alone and while its master takes half the writes that it could.

A group of two on this machine. The topic's log is let go of, so that the standby gets everything by the compacted
log. From the order until the standby is in sync again; the master, the standby and the client share the cores.
"""

import shutil
import time
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


def _row(address: str) -> dict[str, Any]:
    """What a broker says of itself."""
    with Client(address) as client:
        found: dict[str, Any] = client.status()["brokers"][0]
    return found


def _until_trimmed(address: str, bytes_left: int) -> None:
    """*Errors*: RuntimeError when the log is not let go of."""
    end = time.monotonic() + TRIM_S
    with Client(address) as client:
        while (row := client.status()["brokers"][0])["log_end"] - row["log_start"] > bytes_left:
            if time.monotonic() > end:
                raise RuntimeError(f"the log was not let go of: {row}")
            time.sleep(0.1)


def _compacted_bytes(address: str) -> int:
    with Client(address) as client:
        return sum(int(part["compacted_bytes"]) for part in client.describe(TOPIC)["partitions"])


def measure(work: Path, sizes: Sizes) -> list[Row]:
    """The rows; brokers and data are removed afterwards."""
    folder, records = work / "firn-rebuild", sizes.rebuild_bytes // VALUE_BYTES
    segment = max(256 << 10, min(64 << 20, sizes.rebuild_bytes // 16))
    broker = FirnBroker(
        folder, "--replicas", "2", "--restart-after", "1s", "--log-segment-bytes", str(segment),
        "--checkpoint-interval", "1s",
    )  # fmt: skip
    broker.start()
    try:
        addresses = broker.address.split(",")
        [master] = [address for address in addresses if _row(address)["role"] == "master"]
        [standby] = [address for address in addresses if address != master]
        with Client(master) as client:
            client.create_topic(TOPIC, partitions=4, **LETS_GO)
            client.create_topic("load", **LETS_GO)
        produced = run_child(
            "firn_client:produce", address=broker.address, topic=TOPIC, records=records, keys=records,
            value_bytes=VALUE_BYTES,
        )  # fmt: skip
        with Client(master) as client:
            client.compact(TOPIC, force=True, wait=True)
        _until_trimmed(master, 3 * segment)
        size = _compacted_bytes(master)
        common = {"address": broker.address, "standby": standby, "topic": "load", "value_bytes": VALUE_BYTES}
        pids = [int(_row(address)["pid"]) for address in (master, standby)]
        before = [cpu_seconds(pid) for pid in pids]
        alone = run_child("firn_client:rebuild", **common, rate=0.0)
        cpu = [cpu_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)]
        loaded = run_child("firn_client:rebuild", **common, rate=produced["rate"] / 2)
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    title = f"rebuild of a standby, {size / 1e9:.2g} GB compacted"

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
