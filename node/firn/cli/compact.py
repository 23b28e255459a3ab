"""``firn compact``: start a compaction, wait for its end, show what it did."""

import asyncio
import sys
from typing import Annotated, Any

import typer

from firn.cli.printing import compact_json
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, connect, fail, run
from firn.cli.tables import print_compaction

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
        fail("--engine spark: this build has no Spark engine; leave it out, or give --engine auto")

    async def work() -> dict[str, Any]:
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

    found = run(work())
    if output == "json":
        print(compact_json({name: found[name] for name in ("topic", "engine", "partitions")}))
    else:
        print_compaction(found)
    failed = [p for p in found["partitions"] if p["state"] in ("failed", "cancelled")]
    if failed:
        sys.stdout.flush()
        first = failed[0]
        fail(
            f"partition {first['partition']} of {topic} was not compacted: {first.get('reason') or first['state']}; "
            "its old state is kept, the broker tries again"
        )


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

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
