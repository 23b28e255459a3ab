"""The table of results in ``docs/drills.md``: one row a drill, the newest run of it."""

from collections.abc import Iterable
from pathlib import Path

from firn_node.drills.catalogue import DRILLS
from firn_node.drills.verdict import Result

START, END = "<!-- results -->", "<!-- end of results -->"
_HEADS = (
    "drill", "#", "what goes wrong", "passes", "acknowledged", "lost", "doubled", "elections", "gap s", "healthy s",
    "seed", "result",
)  # fmt: skip


def row_of(result: Result, ttl_s: float) -> str:
    drill = DRILLS[result.drill]
    cells = (
        f"`{drill.name}`", drill.number, drill.sentence, drill.bounds.sentence(ttl_s), f"{result.acknowledged:,}",
        result.lost, result.duplicates, result.elections, _number(result.gap_s), _number(result.healthy_s),
        result.seed, "passed" if result.passed else "FAILED",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def update(path: Path, results: Iterable[Result], ttl_s: float) -> None:
    """Put the rows of these results into the table of a file, in the order of the catalogue; others stay."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    table, _, after = rest.partition(END)
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    rows |= {result.drill: row_of(result, ttl_s) for result in results}
    head = [f"| {' | '.join(_HEADS)} |", "|---" * len(_HEADS) + "|"]
    lines = [*head, *(rows[name] for name in DRILLS if name in rows)]
    path.write_text("\n".join([f"{before}{START}", *lines, f"{END}{after}"]), encoding="utf-8")
