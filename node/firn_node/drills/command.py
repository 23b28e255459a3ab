"""``firn drill``: list the drills, run one, or run all; a table or JSON, exit code 1 when one fails."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import typer

import firn_node
from firn.cli.printing import print_document
from firn.cli.running import fail
from firn_node.drills.catalogue import DRILLS
from firn_node.drills.processes import environment_of
from firn_node.drills.table import update
from firn_node.drills.verdict import Drill, Result, Settings, run_drill

LEASE_TTL_MS = 3_000


def list_drills(output: str | None) -> None:
    """What goes wrong in each, and what it passes with."""
    ttl_s = LEASE_TTL_MS / 1000
    found = [(drill, drill.bounds.sentence(ttl_s)) for drill in DRILLS.values()]
    keys = ("name", "number", "sentence", "passes")
    rows_of = [dict(zip(keys, (d.name, d.number, d.sentence, b), strict=True)) for d, b in found]
    if not print_document(rows_of, output):
        rows = [(drill.name, drill.sentence, bounds) for drill, bounds in found]
        _print_table(("drill", "what goes wrong", "passes with nothing lost or doubled, and"), rows)


def run_drills(
    name: str,
    *,
    seed: int | None,
    seconds: float,
    lease_ttl_ms: int | None,
    data: str | None,
    output: str | None,
    table: str | None = None,
    release: str | None = None,
) -> None:
    """Run the drill of this name, or ``all``; ``table``: the file whose table of results gets theirs; ``release``:
    where another release is imported from.

    *Errors*: typer.Exit 1 when one fails.
    """
    if name != "all" and name not in DRILLS:
        raise typer.BadParameter(f"there is no drill {name}; `firn drill list` shows them all")
    folder = None if data is None else Path(data).absolute()
    if folder is not None and name == "all":
        raise typer.BadParameter("--data: each drill needs a folder of its own; give it with one drill")
    if folder is not None and folder.exists() and any(folder.iterdir()):
        fail(f"--data {data}: a drill starts with an empty folder, and there are files in this one")
    settings = Settings(
        ttl_s=(lease_ttl_ms or LEASE_TTL_MS) / 1000, seconds=seconds, data=folder,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        release=None if release is None else _checked_release(release),
    )  # fmt: skip
    drills = list(DRILLS.values()) if name == "all" else [DRILLS[name]]
    missing = [drill for drill in drills if drill.needs_release and release is None]
    for drill in missing:
        if name != "all":
            raise typer.BadParameter(f"{name}: give the folder of another release with --release")
        settings.say(f"{drill.name} is left out: it needs another release (--release)")
    results = [_run(drill, seed, settings) for drill in drills if drill not in missing]
    if table is not None:
        update(Path(table), results, settings.ttl_s)
    documents = [result.document() for result in results]
    if not print_document(documents if name == "all" else next(iter(documents), None), output):
        _print(results)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _checked_release(release: str) -> str:
    """The folder, from the root. *Errors*: typer.Exit when no other release is imported from there."""
    folder = str(Path(release).absolute())
    found = subprocess.run(
        [sys.executable, "-c", "import firn_node; print(firn_node.__file__)"],
        env=environment_of(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode != 0 or not found.stdout.startswith(f"{folder}/"):
        fail(f"--release {release}: no firn_node lies there; give a folder that PYTHONPATH could name")
    if Path(found.stdout.strip()) == Path(firn_node.__file__):
        fail(f"--release {release}: that is this release, not another one")
    return folder


def _run(drill: Drill, seed: int | None, settings: Settings) -> Result:
    chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    settings.say(f"{drill.name}: {drill.sentence}; seed {chosen}")
    result = asyncio.run(run_drill(drill, chosen, settings))
    for sentence in result.why:
        settings.say(f"  {sentence}")
    if not result.passed:
        settings.say(f"  folder: {result.folder}; again: firn drill run {drill.name} --seed {chosen}")
    return result


def _print(results: list[Result]) -> None:
    heads = ("drill", "seed", "acknowledged", "lost", "doubled", "gap s", "healthy s", "result")
    rows = [
        (
            result.drill, str(result.seed), f"{result.acknowledged:,}", str(result.lost), str(result.duplicates),
            _number(result.gap_s), _number(result.healthy_s), "passed" if result.passed else result.why[0][:120],
        )
        for result in results
    ]  # fmt: skip
    _print_table(heads, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = [heads, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
