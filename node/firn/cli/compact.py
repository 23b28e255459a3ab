"""``firn compact``: start a compaction, wait for its end, show what it did.

By Spark it is one by force, in a child process on this machine, and always waited for; the brokers say how far it is.
"""

import asyncio
import sys
from typing import Annotated, Any

import typer

from firn.cli.printing import print_document
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, child_options, connect, fail, run
from firn.cli.sparkrun import check_spark, compact_by_spark, missing
from firn.cli.tables import print_compaction
from firn.engines import Engine, bytes_to_compact, choose_engine

POLL_SECONDS = 0.1
ENGINES = ("broker", "spark", "auto")


def register(app: typer.Typer) -> None:
    app.command("compact", help="Compact a topic.")(compact)


def compact(
    topic: str,
    force: Annotated[bool, typer.Option("--force", help="Also what is not due.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
    engine: Annotated[str, typer.Option("--engine", metavar="broker|spark|auto")] = "broker",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    if engine not in ENGINES:
        raise typer.BadParameter(f"--engine: {engine!r} is unknown; expected one of {', '.join(ENGINES)}")
    if engine == "spark":
        check_spark()
    if engine == "auto":
        engine, why = run(_chosen(topic, broker, timeout, force=force))
        print(f"engine {engine}: {why}", file=sys.stderr)
    if engine == "spark":
        with _Progress() as progress:
            found = compact_by_spark(topic, child_options(broker, timeout), progress.update_plan)
    else:
        found = run(_by_broker(topic, broker, timeout, force=force, wait=wait))
    if not print_document({name: found[name] for name in ("topic", "engine", "partitions")}, output):
        print_compaction(found)
    failed = [p for p in found["partitions"] if p["state"] in ("failed", "cancelled", "disagreement")]
    if failed:
        sys.stdout.flush()
        first = failed[0]
        end = "its old state is kept" + (
            "" if first["state"] == "disagreement" else ", the broker tries again"
        )
        fail(
            f"partition {first['partition']} of {topic} was not compacted: {first.get('reason') or first['state']}; {end}"
        )


async def _by_broker(
    topic: str, broker: str | None, timeout: str | None, *, force: bool, wait: bool
) -> dict[str, Any]:
    async with connect(broker, timeout) as client:
        found = await client.compact(topic, force=force)
        if not wait:
            return found
        with _Progress() as progress:
            while found["state"] in ("waiting", "running"):
                progress.update(found)
                await asyncio.sleep(POLL_SECONDS)
                found = await client.compaction(topic) or found
        return found


async def _chosen(topic: str, broker: str | None, timeout: str | None, *, force: bool) -> tuple[Engine, str]:
    """The engine, and why."""
    if not force:
        return "broker", "Spark compacts by force alone"
    async with connect(broker, timeout) as client:
        size = bytes_to_compact((await client.describe(topic))["partitions"])
    return choose_engine(size, has_spark=missing() is None)


def plan_bar(told: dict[str, Any]) -> tuple[str, int, int]:
    """The bar for what the driver of Spark tells: its title, rows done, rows in all. Of a new plan it tells no phase yet."""
    read, rows = told.get("rows_read", 0), told.get("rows_total", 1)
    if told.get("phase") != "applying" and read < rows:
        what, done, total = "Spark reads", read, rows
    else:
        what, done, total = "brokers write", told["rows_done"], told["rows_to_write"]
    return f"{what}, {told['partitions_done']}/{told['partitions']} partitions", done, total


class _Progress:
    """A bar on stderr, when that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows"),
            TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._bar = self._progress.add_task("compact", total=1)

    def update(self, document: dict[str, Any]) -> None:
        rows = [(p.get("rows_done", 0), p.get("rows_total", 0)) for p in document.get("partitions", [])]
        done, total = sum(r for r, _ in rows), sum(t for _, t in rows)
        running = sum(
            p.get("state") in ("done", "failed", "cancelled") for p in document.get("partitions", [])
        )
        self._progress.update(
            self._bar,
            completed=done,
            total=max(total, done, 1),
            description=f"compact {running}/{len(rows)} partitions",
        )

    def update_plan(self, told: dict[str, Any]) -> None:
        title, done, total = plan_bar(told)
        self._progress.update(self._bar, completed=done, total=max(total, done, 1), description=title)

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
