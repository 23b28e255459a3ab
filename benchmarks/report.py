"""What was measured, against what was to be reached: rows, their verdicts, the printed table, the JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of some runs."""

    least: float
    median: float
    most: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(min(values), statistics.median(values), max(values), len(values))

    def text(self, digits: str) -> str:
        if self.runs == 1:
            return f"{self.median:{digits}}"
        return f"{self.median:{digits}} ({self.least:{digits}}-{self.most:{digits}})"


@dataclass(frozen=True, slots=True)
class Target:
    """``factor`` times the peer's figure that firn's is to reach: ``at least``, or ``at most``."""

    kind: str
    factor: float

    def text(self) -> str:
        return f"{'>=' if self.kind == 'at least' else '<='} {self.factor:g}x"


@dataclass(slots=True)
class Row:
    """One line of the table. ``peer_figure``: given from elsewhere, where the peer does not run here."""

    title: str
    unit: str
    firn: Spread
    peer_name: str = ""
    peer: Spread | None = None
    peer_figure: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """firn's median over the peer's."""
        other = self.peer.median if self.peer is not None else self.peer_figure
        return None if not other else self.firn.median / other

    @property
    def ratio_range(self) -> tuple[float, float] | None:
        """The least and the largest ratio that a run of firn and a run of the peer can have."""
        least = self.peer.least if self.peer is not None else self.peer_figure
        most = self.peer.most if self.peer is not None else self.peer_figure
        return None if not least or not most else (self.firn.least / most, self.firn.most / least)

    @property
    def verdict(self) -> str:
        """reached, missed, or nothing where there is nothing to compare with."""
        ratio = self.ratio
        if ratio is None or self.target is None:
            return ""
        reached = (
            ratio >= self.target.factor if self.target.kind == "at least" else ratio <= self.target.factor
        )
        return "reached" if reached else "missed"

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self), "ratio": self.ratio, "ratio_range": self.ratio_range, "verdict": self.verdict
        }  # fmt: skip


@dataclass(slots=True)
class Report:
    """All rows of one run, and where and how they were measured."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def table(self) -> str:
        """The table as Markdown."""
        lines = ["| workload | unit | firn | peer | ratio | target | |", "|---|---|---|---|---|---|---|"]
        for row in self.rows:
            digits = _digits(row.firn.median)
            if row.peer is not None:
                peer = f"{row.peer_name} {row.peer.text(digits)}"
            elif row.peer_figure is not None:
                peer = f"{row.peer_name} {row.peer_figure:{digits}}, given"
            else:
                peer = row.peer_name
            ratio = _ratio(row)
            target = row.target.text() if row.target is not None else ""
            verdict = " ".join(filter(None, (row.verdict, row.note)))
            cells = [row.title, row.unit, row.firn.text(digits), peer, ratio, target, verdict]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        document = {
            "machine": self.machine,
            "settings": self.settings,
            "rows": [row.document() for row in self.rows],
            "failures": self.failures,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def _ratio(row: Row) -> str:
    """The ratio of the medians, and its range where there were several runs."""
    if row.ratio is None or row.ratio_range is None:
        return ""
    least, most = row.ratio_range
    return f"{row.ratio:.2f}" if least == most else f"{row.ratio:.2f} ({least:.2f}-{most:.2f})"


def _digits(value: float) -> str:
    """Three digits that count."""
    return ",.0f" if abs(value) >= 100 else ".1f" if abs(value) >= 10 else ".2f" if abs(value) >= 1 else ".3f"
