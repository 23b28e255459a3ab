"""Measure firn beside Apache Kafka: ``python -m benchmarks [--quick] [--only NAME,...] [--runs N] [--without-kafka]``.

Prints the table, writes it with machine and settings as JSON (``--json``). A measurement that fails is named, the
others go on, and the exit code is 1. Without Java it says so and runs firn alone.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks import alone, kafka_broker, link, machine, rebuild, replicated, spark, start
from benchmarks.compared import FULL, QUICK, WORKLOADS, Brokers, Figures, Sizes, Workload
from benchmarks.firn_broker import FirnBroker
from benchmarks.kafka_broker import KafkaBroker, NoKafka
from benchmarks.processes import preload
from benchmarks.report import Report, Row, Spread, Target

NAMES = (
    *(workload.name for workload in WORKLOADS),
    "memory",
    "start",
    "replicated",
    "rebuild",
    "link",
    "spark",
    *alone.ALONE,
)
LEFT_OUT_OF_QUICK = {
    "spark"
}  # a session takes longer to start than all else that is quick; tests/spark reads so


def say(line: str) -> None:
    """Progress: for the person who waits, not for the table."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="everything small, once: does the harness still work?"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--runs", type=int, help="runs of each workload (5; quick: 1)")
    parser.add_argument("--without-kafka", action="store_true", help="firn alone")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), metavar="PATH")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="under which the brokers' data go; removed at the end"
    )
    found = parser.parse_args()
    unknown = [name for name in found.only.split(",") if name and name not in NAMES]
    if unknown:
        parser.error(f"--only: {unknown[0]} is unknown; known are {', '.join(NAMES)}")
    return found


def rows_of(
    workload: Workload, sizes: Sizes, ours: Sequence[Figures], theirs: Sequence[Figures]
) -> list[Row]:
    """The rows of a workload from the figures of its runs."""
    records = f"{workload.records(sizes):,}"
    return [
        Row(
            row.title.replace("{records}", records), row.unit, Spread.of([run[row.firn] for run in ours]),
            row.peer if row.figure is not None or theirs else "",
            Spread.of([run[row.kafka] for run in theirs]) if row.kafka and theirs else None,
            row.figure, row.target, row.note,
        )
        for row in workload.rows
    ]  # fmt: skip


def run(workload: Workload, brokers: Brokers, sizes: Sizes) -> list[Row]:
    """All runs of a workload, the two sides in turn; which one begins changes with every run."""
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for number in range(sizes.runs):
        topic = f"{workload.name}-{number}"
        order = ("firn", "kafka") if number % 2 == 0 else ("kafka", "firn")
        for side in order:
            if side == "firn":
                ours.append(workload.firn(brokers.firn, topic, sizes))
            elif workload.kafka is not None and brokers.kafka is not None:
                theirs.append(workload.kafka(brokers.kafka, topic, sizes))
        say(f"{workload.name} run {number + 1} of {sizes.runs}, load {os.getloadavg()[0]:.1f}")
    return rows_of(workload, sizes, ours, theirs)


def memory_row(firn: FirnBroker, kafkas: float | None) -> Row:
    """What both brokers took at most, over all workloads. ``kafkas``: MB, of a Kafka that has ended."""
    _, ours = firn.memory()
    theirs = Spread.of([kafkas]) if kafkas is not None else None
    return Row(
        "resident memory of the broker, peak of all above", "MB", Spread.of([ours]), "Kafka" if theirs else "", theirs,
        target=Target("at most", 0.4),
    )  # fmt: skip


def compare(report: Report, work: Path, sizes: Sizes, wanted: set[str], *, with_kafka: bool) -> None:
    """The workloads of both sides; then, once Kafka has ended, those whose peer is a figure from elsewhere."""
    chosen = [workload for workload in WORKLOADS if workload.name in wanted]
    with_peer = [workload for workload in chosen if workload.kafka is not None]
    firn = FirnBroker(work / "firn")
    kafka = KafkaBroker(work / "kafka", is_quick=sizes.is_quick) if with_kafka and with_peer else None
    kafkas_peak: float | None = None
    firn.start()
    try:
        if kafka is not None:
            kafka.start()
        try:
            for workload in with_peer:
                _noting(report, workload.name, partial(run, workload, Brokers(firn, kafka), sizes))
            if kafka is not None:
                _, kafkas_peak = kafka.memory()
        finally:
            if kafka is not None:
                kafka.stop()
        for workload in chosen:
            if workload.kafka is None:
                _noting(report, workload.name, partial(run, workload, Brokers(firn, None), sizes))
        if "memory" in wanted:
            _noting(report, "memory", lambda: [memory_row(firn, kafkas_peak)])
    finally:
        firn.stop()
        for name in ("firn", "kafka"):
            shutil.rmtree(work / name, ignore_errors=True)


def measure(report: Report, work: Path, sizes: Sizes, wanted: set[str], *, with_kafka: bool) -> None:
    """Fill the report; a failure is noted in it, and the next measurement begins."""
    if any(workload.name in wanted for workload in WORKLOADS):
        compare(report, work, sizes, wanted, with_kafka=with_kafka)
    if "start" in wanted:
        _noting(report, "start", lambda: start.measure(work, sizes, with_kafka=with_kafka))
    if "replicated" in wanted:
        _noting(report, "replicated", lambda: replicated.measure(work, sizes, with_kafka=with_kafka))
    if "rebuild" in wanted:
        _noting(report, "rebuild", lambda: rebuild.measure(work, sizes))
    if "link" in wanted:
        _noting(report, "link", lambda: link.measure(work, sizes))
    if "spark" in wanted:
        _noting(report, "spark", lambda: spark.measure(work, sizes))
    for name in alone.ALONE:
        if name in wanted:
            _noting(report, name, partial(alone.measure, name, work, sizes))


def _noting(report: Report, name: str, rows: Callable[[], list[Row]]) -> None:
    began = time.perf_counter()
    try:
        report.rows += rows()
        say(f"{name} took {time.perf_counter() - began:.1f} s")
    except Exception as error:  # one workload's failure does not end the run
        report.failures.append(f"{name}: {error}")
        say(f"{name} FAILED: {error}")


def main() -> int:
    given = arguments()
    sizes = QUICK if given.quick else FULL
    if given.runs:
        sizes = replace(sizes, runs=given.runs)
    wanted = set(filter(None, given.only.split(","))) or set(NAMES) - (
        LEFT_OUT_OF_QUICK if given.quick else set()
    )
    with_kafka = not given.without_kafka
    if with_kafka:
        try:
            kafka_broker.jars()
        except NoKafka as why:
            say(f"without Kafka: {why}; firn runs alone")
            with_kafka = False
    preload(["benchmarks.firn_client", "pyarrow", *(["benchmarks.kafka_client"] if with_kafka else [])])
    if given.work:
        given.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="firn-bench-", dir=given.work))
    signal.signal(
        signal.SIGTERM, lambda number, _frame: sys.exit(128 + number)
    )  # so that brokers are stopped
    began = time.perf_counter()
    try:
        report = Report(
            {**machine.describe(), **machine.limits(work, megabytes=64 if given.quick else 512)},
            {
                "sizes": asdict(sizes), "quick": given.quick, "kafka": kafka_broker.VERSION if with_kafka else None,
                "kafka_jvm": kafka_broker.JVM, "kafka_properties": kafka_broker.PROPERTIES,
            },
        )  # fmt: skip
        measure(report, work, sizes, wanted, with_kafka=with_kafka)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(f"brokers and tools took {used.ru_utime + used.ru_stime:.0f} s of CPU")
    report.settings["minutes"] = round((time.perf_counter() - began) / 60, 1)
    report.write(given.json)
    print(report.table())
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
