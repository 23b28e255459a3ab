"""How fast Spark reads and compacts a topic on two cores, which it shares with the broker: no peer was measured at it."""

import shutil
from pathlib import Path
from typing import Any

from benchmarks.compared import RATE, Sizes
from benchmarks.firn_broker import FirnBroker
from benchmarks.processes import run_child
from benchmarks.report import Row, Spread

TOPIC = "spark"
PARTITIONS = 4
COMPACTED_PARTITIONS = 10
WAYS = {  # of a figure the row's title, and its bar
    "columns": ("every column to the JVM", "target: 1.5 M/s or more"),
    "count": ("count()", ""),
    "keys_count": ("count() of the keys projection", "target: 2 M/s or more"),
    "keys_in_tasks": ("distinct keys counted inside the tasks", "target: 5 M/s or more"),
}


def measure(work: Path, sizes: Sizes) -> list[Row]:
    """The rows; broker and data are removed afterwards."""
    return [*_reading(work, sizes), _compacting(work, sizes)]


def _reading(work: Path, sizes: Sizes) -> list[Row]:
    found = _measured(work, "read", sizes.spark_records, PARTITIONS)
    return [
        Row(f"Spark reads 100 B, {title}", RATE, Spread.of([found[name]]), note=note)
        for name, (title, note) in WAYS.items()
    ]


def _compacting(work: Path, sizes: Sizes) -> Row:
    """A forced compaction of 10 partitions, its keys read and decided by Spark, written by the broker."""
    found = _measured(work, "compact", sizes.spark_compaction, COMPACTED_PARTITIONS)
    keys = f"{sizes.spark_compaction // 5:,} keys, {COMPACTED_PARTITIONS} partitions"
    note = f"target: 3 M/s or more with a driver of 1 GiB; {keys}"
    return Row("Spark compacts by force, 100 B", RATE, Spread.of([found["rate"]]), note=note)


def _measured(work: Path, what: str, records: int, partitions: int) -> dict[str, Any]:
    """What ``spark_client`` measures of a topic of so many records, a fifth as many keys, on a broker of its own."""
    broker = FirnBroker(work / "firn-spark")
    broker.start()
    try:
        broker.create_topic(TOPIC, partitions=partitions)
        common = {"address": broker.address, "topic": TOPIC, "records": records}
        run_child("firn_client:produce", **common, keys=records // 5, value_bytes=100)
        return run_child(f"spark_client:{what}", **common)
    finally:
        broker.stop()
        shutil.rmtree(work / "firn-spark", ignore_errors=True)
