"""A driver of a forced compaction by Spark that is killed, its Spark with it, once its plan has come so far.

``driver_child.py BOOTSTRAP TOPIC RUN FOLDER MOMENT``. Tasks upload what the files of ``FOLDER`` let them: see ``held``.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firn_spark.force_compaction import Task, compact
from firn_spark.mapping import Mapped, Slice, map_slice

SLICE_RECORDS = 450
Document = dict[str, Any]


MOMENTS: dict[
    str, Callable[[Document], bool]
] = {  # of a plan; each comes true and stays so, but for the first
    "open": lambda plan: not any(row["uploaded"] for row in plan["partitions"]),
    "a slice is uploaded": lambda plan: any(row["uploaded"] for row in plan["partitions"]),
    "a partition is done": lambda plan: any(row["state"] == "done" for row in plan["partitions"]),
    "all is uploaded": lambda plan: not any(row["missing"] for row in plan["partitions"]),
    "done": lambda plan: bool(plan["state"] == "done"),
}


def held(folder: Path) -> Task:
    """A task that leaves its slice to another round until a file bears the name of it, or of its partition."""

    def task(asked: Slice) -> Mapped:
        names = (f"{asked.partition}", f"{asked.partition}-{asked.slice}")
        if any((folder / name).exists() for name in names):
            return map_slice(asked)
        return Mapped(partition=asked.partition, slice=asked.slice, outcome="already")

    return task


def main(bootstrap: str, topic: str, run: str, folder: str, moment: str) -> None:
    from firn_spark.connection import Connection
    from firn_spark.session import session

    connection = Connection(bootstrap=bootstrap, timeout=120)
    group, do, has_come = os.getpgid(0), held(Path(folder)), MOMENTS[moment]

    def watch(plan: Document) -> None:
        if has_come(plan):
            os.killpg(group, signal.SIGKILL)

    def task(asked: Slice) -> Mapped:
        """Looks by itself: a driver hears of a plan once a second."""
        found = do(asked)
        with connection.client() as client:
            watch(client.compaction_plan(topic) or {})
        return found

    spark = session("firn-killed-driver", master="local[2]", conf={"spark.ui.enabled": "false"})
    compact(spark, connection, topic, run=run, slice_records=SLICE_RECORDS, watch=watch, task=task)


if __name__ == "__main__":
    main(*sys.argv[1:])
