"""What the demo counts, and the table at its end."""

from dataclasses import dataclass
from typing import Any

from firn_node.demo.report import Report as LoadReport

Rows = dict[str, tuple[int, Any]]  # tail number -> time in ms, flight


@dataclass(slots=True)
class Report(LoadReport):
    """Figures of one run. Times in seconds, of jobs in a session that runs already."""

    spark_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    load_seconds: float = 0.0
    audit_seconds: float = 0.0
    audited: int = 0
    differences: int = 0

    @property
    def code(self) -> int:
        """The exit code of the demo."""
        return 1 if self.mismatches else 0

    def compare(self, where: str, found: Rows, wanted: Rows) -> None:
        """Count every plane that is wanted, and every one that is there and should not be."""
        for plane, row in wanted.items():
            self.expect(
                found.get(plane) == row, f"{where}: {plane}: expected {row}, found {found.get(plane)}"
            )
        for plane in found.keys() - wanted.keys():
            self.expect(False, f"{where}: {plane} is there, pandas finds none")

    def rows(self) -> list[tuple[str, str]]:
        share = self.bytes_after / max(self.bytes_before, 1)
        return [
            ("records in", f"{self.records_in:,} (of them {self.tombstones:,} tombstones)"),
            ("Spark started", f"{self.spark_seconds:.1f} s"),
            ("force compaction by Spark", f"{self.compaction_seconds:.1f} s"),
            ("bytes before compaction", f"{self.bytes_before:,}"),
            ("bytes after compaction", f"{self.bytes_after:,} ({share:.1%})"),
            ("live planes", f"{self.live:,}"),
            ("snapshot to Parquet", f"{self.snapshot_seconds:.1f} s"),
            ("load into a second topic", f"{self.load_seconds:.1f} s"),
            ("audit of both topics", f"{self.audit_seconds:.1f} s"),
            ("keys audited", f"{self.audited:,}"),
            ("differences", f"{self.differences:,}"),
            ("compared", f"{self.compared:,}"),
            ("mismatches", f"{self.mismatches:,}"),
            ("whole demo", f"{self.total_seconds:.1f} s"),
        ]

    def print(self) -> None:
        self.print_table("firn demo: Spark", self.rows())
