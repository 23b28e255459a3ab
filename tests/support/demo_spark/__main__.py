"""``make demo-spark``: the flights of ``make demo`` through the jobs of firn_spark. Exit code 1 for any difference.

A broker, the flights of 2013 in it; then, each as its own command says it, on Spark on this machine: a forced
compaction, a snapshot to Parquet, a load into a second topic of another number of partitions, an audit of both. What
Parquet and the second topic hold is compared row by row with pandas, which shares no code with firn.
"""

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from demo_spark.report import Report, Rows

from firn.client.blocking import Client
from firn.errors import Invalid
from firn_node.demo.flights import Flights, expected, load
from firn_node.demo.process import BrokerProcess
from firn_node.demo.report import say
from firn_node.demo.steps import check_view, first_load
from firn_spark.session import check_here, session

QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "FATAL"}
TOPIC, SECOND, PARTITIONS = "flights", "flights-2", 6


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the broker does not outlive the demo
    try:
        check_here()
    except Invalid as error:
        say(f"demo-spark: {error.message}")
        return 1
    began = time.perf_counter()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="firn-demo-spark-") as folder:
        # Nothing is compacted because it is due: that is left to Spark.
        broker = BrokerProcess(Path(folder) / "data", "--compaction-check", "1h")
        try:
            broker.start()
            _run(broker, Path(folder), report)
            code = broker.stop()
            report.expect(code == 0, f"the broker stopped with exit code {code}")
        finally:
            broker.kill()
    report.total_seconds = time.perf_counter() - began
    report.print()
    return report.code


def _run(broker: BrokerProcess, folder: Path, report: Report) -> None:
    flights = load()
    wanted: Rows = expected(flights)
    asyncio.run(first_load(broker.address, TOPIC, flights, report))
    began = time.perf_counter()
    spark = session("firn demo", conf=QUIET)
    try:
        spark.range(1).collect()
        report.spark_seconds = time.perf_counter() - began
        say(f"Spark {spark.version} runs after {report.spark_seconds:.1f} s")
        jobs = Jobs(broker.address, report)
        _compact(jobs, report)
        asyncio.run(check_view(broker.address, TOPIC, flights, report))
        _snapshot(jobs, spark, folder, wanted, report)
        _load(jobs, broker.address, folder, wanted, report)
        _audit(jobs, flights, report)
    finally:
        spark.stop()


class Jobs:
    """Runs the commands in this process and its Spark session: their starts would take most of the time."""

    def __init__(self, address: str, report: Report) -> None:
        self._address = address
        self._report = report

    def run(self, name: str, *arguments: object) -> tuple[dict[str, Any], float]:
        """A job's JSON and its seconds; it is shown as a person would type it."""
        given = [str(argument) for argument in arguments]
        say(f"$ python -m firn_spark.{name} {' '.join(_short(argument) for argument in given)}")
        job: Callable[[Sequence[str]], int] = import_module(f"firn_spark.{name}").main
        printed, began = StringIO(), time.perf_counter()
        with redirect_stdout(printed):
            code = job([*given, "--bootstrap", self._address, "-o", "json"])
        seconds = time.perf_counter() - began
        self._report.expect(code == 0, f"firn_spark.{name} ended with exit code {code}")
        lines = printed.getvalue().splitlines()
        return json.loads(lines[-1]) if lines else {}, seconds


def _short(argument: str) -> str:
    """A path of the demo's own folder, as far as it matters."""
    return argument.rpartition("/")[2] if argument.startswith("/") else argument


def _compact(jobs: Jobs, report: Report) -> None:
    found, report.compaction_seconds = jobs.run("force_compaction", TOPIC)
    for p in found.get("partitions", ()):
        report.expect(p["state"] == "done", f"partition {p['partition']}: {p['state']}: {p.get('reason')}")
        report.bytes_before += p["bytes_before"]
        report.bytes_after += p["bytes_after"]
        report.records_compacted += p["records_before"]
    report.expect(report.records_compacted > 0, "nothing was compacted")
    say(
        f"compacted {report.records_compacted:,} records in {report.compaction_seconds:.1f} s: "
        f"{report.bytes_before:,} bytes before, {report.bytes_after:,} after"
    )


def _snapshot(jobs: Jobs, spark: Any, folder: Path, wanted: Rows, report: Report) -> None:
    found, report.snapshot_seconds = jobs.run("snapshot", TOPIC, folder / "flights.parquet")
    frame = spark.read.parquet(str(folder / "flights.parquet"))
    rows = frame.selectExpr("CAST(key AS STRING) AS plane", "unix_millis(timestamp) AS ms", "value").collect()
    report.expect(
        found.get("records") == len(rows), f"{len(rows)} rows, the snapshot says {found.get('records')}"
    )
    report.compare("Parquet", {row.plane: (row.ms, json.loads(row.value)) for row in rows}, wanted)
    say(f"snapshot: {len(rows):,} planes in Parquet, compared row by row with pandas")


def _load(jobs: Jobs, address: str, folder: Path, wanted: Rows, report: Report) -> None:
    source = folder / "flights.parquet"
    found, report.load_seconds = jobs.run("load", source, SECOND, "--partitions", PARTITIONS)
    with Client(address) as client:
        records = list(client.reader(SECOND, until_end=True))
    report.expect(
        found.get("records") == len(records), f"{len(records)} records, the load says {found.get('records')}"
    )
    loaded = {r.key.decode(): (r.timestamp, json.loads(r.value or b"null")) for r in records}
    report.compare(SECOND, loaded, wanted)
    say(
        f"load: {len(records):,} planes in {PARTITIONS} partitions of {SECOND}, compared row by row with pandas"
    )


def _audit(jobs: Jobs, flights: Flights, report: Report) -> None:
    for topic in (TOPIC, SECOND):
        found, seconds = jobs.run("audit", topic)
        report.audit_seconds += seconds
        report.audited += found.get("keys", 0)
        report.differences += found.get("differences", 0)
    report.expect(report.differences == 0, f"the audits found {report.differences} differences")
    say(f"audit: {report.audited:,} keys recomputed from the raw views: {report.differences} differences")


if __name__ == "__main__":
    sys.exit(main())
