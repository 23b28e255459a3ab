"""A firn broker as a user starts it: ``firn up`` on loopback, in its own process."""

import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_seconds, forget_peak, memory_mb

from firn.client.blocking import Client

READY_S = 120.0
SETTLE_POLL_S = 0.01
KEY_ROW_BYTES = 16  # of a key index
# No compaction but by force, and nothing leaves the raw log: what is measured is what was asked for.
QUIET: dict[str, dict[str, Any]] = {
    "compaction": {
        "minDirtyRatio": 1.0,
        "backlogThreshold": "1024Gi",
        "maxLag": "365d",
        "maxSegmentAge": "24h",
    },
    "retention": {"time": "365d", "size": "1024Gi"},
}


class FirnBroker:
    """One broker on a fixed data folder. ``options`` are further flags of ``firn up``."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.address = ""
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds from the start of the process until it takes writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        firn = Path(sys.executable).with_name("firn")
        command = [str(firn), "up", "--data", str(self.folder / "data"), "--listen", "127.0.0.1:0"]
        with (self.folder / "broker.log").open("ab") as log:
            began = time.perf_counter()
            self._process = subprocess.Popen(
                [*command, "--print-ready", *self._options], stdout=subprocess.PIPE, stderr=log
            )
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], READY_S)
        line = stdout.readline().decode() if ready else ""
        seconds = time.perf_counter() - began
        if not line.startswith("READY "):
            self.kill()
            raise RuntimeError(
                f"the broker did not get ready, see {self.folder / 'broker.log'}; it said {line!r}"
            )
        self.address = line.split()[1]
        return seconds

    def create_topic(
        self,
        name: str,
        *,
        flush: str = "interval",
        partitions: int = 1,
        min_in_sync: int = 1,
        compaction: Mapping[str, Any] | None = None,
    ) -> None:
        """``compaction``: fields that differ from ``QUIET``."""
        durability = {"flush": flush, "minInSync": min_in_sync}
        spec = {**QUIET, "compaction": {**QUIET["compaction"], **(compaction or {})}}
        with Client(self.address) as client:
            client.create_topic(name, partitions=partitions, durability=durability, **spec)

    def delete_topic(self, name: str) -> None:
        with Client(self.address) as client:
            client.delete_topic(name)

    def settle(self) -> None:
        """Returns when everything that was acknowledged is dispatched."""
        with Client(self.address) as client:
            while (row := client.status()["brokers"][0])["committed_position"] < row["log_end"]:
                time.sleep(SETTLE_POLL_S)

    def row_bytes(self, topic: str) -> float:
        """What a row of a compacted topic takes: its share of the batches, and its row of the key index."""
        with Client(self.address) as client:
            parts = client.describe(topic)["partitions"]
        rows = sum(int(part["live_records"]) for part in parts)
        return sum(int(part["compacted_bytes"]) for part in parts) / rows + KEY_ROW_BYTES

    def latest(self, topic: str) -> int:
        """The ends of a topic's partitions, summed: how many records it has ever held."""
        with Client(self.address) as client:
            return sum(int(part["latest"]) for part in client.describe(topic)["partitions"])

    def metric(self, name: str) -> float:
        """A figure of ``/metrics`` that has no labels; 0 when it is not there yet."""
        with urllib.request.urlopen(f"http://{self.address}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def stop(self) -> float:
        """SIGTERM; seconds until the process is gone."""
        began = time.perf_counter()
        self._end(signal.SIGTERM)
        return time.perf_counter() - began

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(timeout=READY_S)
            if process.stdout is not None:
                process.stdout.close()

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def memory(self) -> tuple[float, float]:
        """Resident MB now and at the peak."""
        return memory_mb(self.pid)

    def forget_peak(self) -> None:
        forget_peak(self.pid)
