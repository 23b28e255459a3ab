"""``python -m firn_spark.force_compaction TOPIC``: a compaction by force that Spark decides and the brokers check.

The driver makes a plan, lets tasks upload a statement about each slice that is missing, and waits until the brokers have
compacted every partition or said why not. It holds counts only. Until the end it tells the brokers every second that it is
there and how far it is; whoever follows the run asks them. When the plan is gone (a new master, a silence of ten minutes)
it plans again. Exit codes: 0 done; 1 a partition failed or disagrees, or the run cannot go on; 2 wrong usage; 75 try again.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firn.client.blocking import Client
from firn.errors import FirnError, NotMaster, Unavailable, UnknownPlan
from firn_spark.__main__ import run_by_name
from firn_spark.connection import Connection
from firn_spark.jobs import command
from firn_spark.jobs.report import Report
from firn_spark.mapping import Mapped, Slice, map_slice
from firn_spark.newest import KEYS_BYTES_MAX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEARTBEAT_S = 1.0
PARTITIONS_PER_S = 2000  # of a plan's document: a look takes about a hundredth of the time
PLANS_MAX = 10  # of one run: each new master costs one
FIELDS = (  # of a partition, in the document that the command ends with
    "partition", "state", "records_before", "records_after", "bytes_before", "bytes_after", "bytes_read", "bytes_written",
    "tombstones_dropped", "records_kept_by_min_lag", "rounds", "seconds", "seen", "dead", "compared", "disagreements",
    "reason",
)  # fmt: skip
SUMMED = (
    "records_before", "records_after", "bytes_before", "bytes_after", "tombstones_dropped", "compared",
)  # fmt: skip
Document = dict[str, Any]
Watch = Callable[[Document], None]
Task = Callable[[Slice], Mapped]


class Cancelled(FirnError):
    """Somebody has cancelled the plan."""


class PlanLost(Unavailable):
    """The plan was lost again and again: the brokers have no rest."""


def compact(
    spark: "SparkSession",
    connection: Connection,
    topic: str,
    *,
    run: str = "",
    slice_records: int | None = None,
    keys_bytes_max: int = KEYS_BYTES_MAX,
    watch: Watch = lambda plan: None,
    task: Task = map_slice,
) -> Document:
    """Compact a topic by force: the plan as it has ended. ``watch`` is shown the plan about every second.

    ``run``: a name; a plan of that name that is done is not done again. ``task``: what is run for each slice.
    *Effects*: may be repeated.
    *Errors*: Cancelled, PlanLost, UnknownTopic, those of the tasks, in Spark's own words.
    """
    with connection.client() as client:
        for _ in range(PLANS_MAX):
            plan = client.open_plan(topic, run=run, slice_records=slice_records)
            watch(plan)
            try:
                return _carried_out(_Run(spark, connection, client, topic, keys_bytes_max, watch, task), plan)
            except UnknownPlan:
                newest = client.compaction_plan(topic)
                if newest is not None and newest["state"] == "cancelled" and newest["ids"] == plan["ids"]:
                    raise Cancelled(
                        f"{topic}: the compaction was cancelled; what was compacted by then stays"
                    ) from None
    raise PlanLost(
        f"{topic}: the plan was lost {PLANS_MAX} times; run it again when the brokers have come to rest"
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One plan of one driver."""

    spark: "SparkSession"
    connection: Connection
    client: Client
    topic: str
    keys_bytes_max: int
    watch: Watch
    task: Task

    def tasks(self, plan: Document) -> list[Slice]:
        """What is missing, the largest first."""
        rows = sorted(plan["partitions"], key=lambda row: -row["records"] // max(row["slices"], 1))
        return [
            Slice(
                connection=self.connection, topic=self.topic, topic_id=plan["topic_id"], plan=row["plan"],
                partition=row["partition"], slice=number, slices=row["slices"], plan_end=row["plan_end"],
                keys_bytes_max=self.keys_bytes_max,
            )
            for row in rows
            for number in row["missing"]
        ]  # fmt: skip

    def touch(self, plan: Document, phase: str) -> Document:
        """The plan as it is now. *Errors*: UnknownPlan."""
        done = sum(len(row["uploaded"]) for row in plan["partitions"])
        total = sum(row["slices"] for row in plan["partitions"])
        progress = {
            "phase": phase, "slices_done": done, "slices_total": total, "driver": socket.gethostname(),
            "rows_read": sum(row["seen"] for row in plan["partitions"]),
            "rows_total": sum(row["records"] for row in plan["partitions"]),
        }  # fmt: skip
        found = self.client.touch_plan(self.topic, plan["ids"], progress)
        self.watch(found)
        return found


def _carried_out(run: _Run, plan: Document) -> Document:
    """The plan at its end. *Errors*: UnknownPlan; those of the tasks."""
    while plan["state"] == "open":
        if tasks := run.tasks(plan):
            plan = _mapped(run, plan, tasks)
        else:
            plan = run.touch(plan, "applying")
            if plan["state"] == "open":
                time.sleep(_pause(plan) / 4)
    if plan["state"] != "done":
        raise UnknownPlan(f"the plan of {run.topic} is {plan['state']}")
    with suppress(FirnError):  # what is done is done, whoever hears how far it came
        return run.touch(plan, "applying")
    return plan


def _pause(plan: Document) -> float:
    """Seconds between two looks at a plan: its document grows with its partitions."""
    return max(HEARTBEAT_S, len(plan["partitions"]) / PARTITIONS_PER_S)


def _mapped(run: _Run, plan: Document, tasks: list[Slice]) -> Document:
    """Run a job over slices, and tell the brokers meanwhile. *Errors*: UnknownPlan; those of the job."""
    context = run.spark.sparkContext
    group = f"firn-plan-{'-'.join(plan['ids'])}"
    found: list[Mapped] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            context.setJobGroup(group, f"force compaction of {run.topic}", interruptOnCancel=True)
            found.extend(context.parallelize(tasks, len(tasks)).map(run.task).collect())
        except BaseException as error:
            failed.append(error)

    from pyspark import InheritableThread

    thread: threading.Thread = InheritableThread(target=work, name="firn tasks", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_pause(plan))
            plan = run.touch(plan, "mapping")
            if plan["state"] not in ("open", "done"):
                raise UnknownPlan(f"the plan of {run.topic} is {plan['state']}")
    finally:
        if thread.is_alive():
            context.cancelJobGroup(group)
            thread.join()
    if failed:
        raise failed[0]
    if any(mapped.outcome == "unknown_plan" for mapped in found):
        raise UnknownPlan(f"the plan of {run.topic} is gone")
    return plan


def report_of(plan: Document, seconds: float) -> Report:
    """As a table and as JSON; a partition that is not done is a failure."""
    document = {
        "topic": plan["topic"], "engine": plan["engine"],
        "partitions": [{name: row[name] for name in FIELDS} for row in plan["partitions"]],
    }  # fmt: skip
    found = document["partitions"]
    rows = [(row["partition"], row["state"], *_numbers([row])) for row in found]
    if len(found) > 1:
        rows.append(("all", "", *_numbers(found)))
    columns = [
        ("PARTITION", "r"), ("STATE", "l"), ("RECORDS", "r"), ("LEFT", "r"), ("BYTES", "r"), ("LEFT", "r"),
        ("TOMBSTONES", "r"), ("COMPARED", "r"), ("DIFFER", "r"), ("SECONDS", "r"),
    ]  # fmt: skip
    sentences = [f"{plan['topic']}: {len(found)} partitions by Spark in {seconds:.1f} s"]
    failure = next(
        (
            f"partition {row['partition']} of {plan['topic']} ended in {row['state']}: {row['reason']}"
            for row in found
            if row["state"] != "done"
        ),
        None,
    )
    return Report(document, columns, rows, sentences, failure)


def _numbers(rows: Sequence[Document]) -> list[object]:
    sums = [sum(row[name] for row in rows) for name in SUMMED]
    differ = sum(len(row["disagreements"]) for row in rows)
    return [*sums, differ, f"{sum(row['seconds'] for row in rows):.1f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code: 75 where another try may go on with what was uploaded."""
    made = command.parser(
        "force_compaction",
        "Compact a topic by force: Spark decides by the real keys, the brokers check and compact.",
    )
    made.add_argument("topic", type=command.topic_name)
    made.add_argument(
        "--run", metavar="NAME", default="", help="a run of this name that is done is not done again"
    )
    made.add_argument("--slice-records", metavar="N", type=command.count, help="rows of a task (5,000,000)")
    made.add_argument("--progress", action="store_true", help="a JSON line on stderr for every change")

    def work(job: command.Job) -> Report:
        asked, started = job.asked, time.monotonic()
        plan = compact(
            job.spark, job.connection, asked.topic, run=asked.run, slice_records=asked.slice_records,
            watch=_lines() if asked.progress else lambda plan: None,
        )  # fmt: skip
        return report_of(plan, time.monotonic() - started)

    return command.run(made, work, arguments, passing=(Unavailable, NotMaster))


def _lines() -> Watch:
    """Prints what has changed of a plan, a JSON object a line."""
    before = ""

    def show(plan: Document) -> None:
        nonlocal before
        rows = plan["partitions"]
        ended = [row for row in rows if row["state"] not in ("waiting", "running")]
        now = {
            **plan["progress"], "state": plan["state"], "partitions": len(rows), "partitions_done": len(ended),
            "rows_done": sum(row["rows_done"] for row in rows), "rows_to_write": sum(row["rows_total"] for row in rows),
        }  # fmt: skip
        line = json.dumps(now, separators=(",", ":"))
        if line != before:
            before = line
            print(line, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(run_by_name("force_compaction"))
