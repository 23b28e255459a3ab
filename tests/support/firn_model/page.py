"""The tables of ``docs/replication.md`` that say what the model found, between two marks.

A row is replaced when its run was run again; the rows of other runs stay, those of runs that are no more go.
"""

from collections.abc import Sequence
from pathlib import Path

from firn_model.runs import DROPPED, HOLDING, LARGE, REACHED, Run
from firn_model.tlc import Found

PAGE = Path(__file__).parents[3] / "docs" / "replication.md"
BEGIN = "<!-- `make model` writes from here -->"
END = "<!-- to here -->"
_HEADS = {
    "holds": "| run | what is in play | bounds | states | generated | result |\n|---|---|---|---|---|---|",
    "violated": "| rule | dropped | so that | violated | steps | states |\n|---|---|---|---|---|---|",
    "reached": "| state that is reached | run | steps |\n|---|---|---|",
}
Rows = dict[str, str]


def write(results: Sequence[tuple[Run, Found]]) -> None:
    """*Effects*: the page holds the rows of these runs."""
    text = PAGE.read_text()
    rows = read_rows(text) | {run.name: row(run, found) for run, found in results}
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(rows)}\n\n{END}{after}")


def read_rows(text: str) -> Rows:
    """The rows that the page has, by the name of their run."""
    section = text.partition(BEGIN)[2].partition(END)[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        name = _RUN_OF.get((len(cells), cells[0])) or _RUN_OF.get((len(cells), cells[min(1, len(cells) - 1)]))
        if name is not None:
            found[name] = line
    return found


def tables(rows: Rows) -> str:
    """All that stands between the marks."""
    parts = []
    for heading, kind, runs in (
        (
            "The rules in force, nodes taken as interchangeable:",
            "holds",
            (*HOLDING, *LARGE),
        ),
        (
            "One clause left out at a time. Each ends in a violation; steps: length of the counterexample, its initial "
            "state included:",
            "violated",
            DROPPED,
        ),
        ("That the model is not too tame:", "reached", REACHED),
    ):
        lines = [rows[run.name] for run in runs if run.name in rows]
        parts.append("\n".join([heading, "", _HEADS[kind], *lines]))
    return "\n\n".join(parts)


def row(run: Run, found: Found) -> str:
    """One line of the table that a run belongs to."""
    if run.expected == "reached":
        return f"| {run.says} | `{run.name}` | {found.steps} |"
    if run.expected == "violated":
        violated = found.violated or "nothing"
        return f"| {run.rule} | `{run.drop}` | {run.says} | {violated} | {found.steps} | {found.distinct:,} |"
    if found.violated:
        result = found.violated
    elif run.expected == "walks":
        result = "random walks, holds"
    elif found.is_whole:
        result = "all states, holds"
    else:
        result = "so far, holds" if run.expected == "searches" else "not finished"
    distinct = f"{found.distinct:,}" if found.distinct else ""
    return f"| `{run.name}` | {run.says} | {run.bounds} | {distinct} | {found.generated:,} | {result} |"


_RUN_OF = {
    **{(6, run.name): run.name for run in (*HOLDING, *LARGE)},
    **{(6, run.drop): run.name for run in DROPPED},
    **{(3, run.name): run.name for run in REACHED},
}
