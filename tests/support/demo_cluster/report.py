"""What the demo counts, and the table at its end."""

from dataclasses import dataclass

from firn_node.demo.report import Comparisons, say

FIRST_WRITE_SECONDS_MAX = 20.0  # with the images on the nodes
GAP_SECONDS_MAX = 5.0  # leaseTtl is 3 s


@dataclass(slots=True)
class Report(Comparisons):
    """Figures of one run. Times in seconds."""

    cluster_seconds: float = 0.0
    images_seconds: float = 0.0
    install_seconds: float = 0.0
    applied_at: float = 0.0  # by the performance counter; the next two count from there
    first_write_seconds: float = 0.0
    ready_seconds: float = 0.0
    records: int = 0
    produce_seconds: float = 0.0
    killed: str = ""
    acknowledged_at_kill: int = 0
    master_after: str = ""
    beats: int = 0
    gap_seconds: float = 0.0
    whole_seconds: float = 0.0
    lost: int = -1  # not counted yet
    doubled: int = -1
    live: int = 0
    total_seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        return bool(self.mismatches) or self.lost != 0 or self.doubled != 0 or bool(self.late())

    def late(self) -> list[str]:
        """What took longer than it may, or was not measured; a sentence each."""
        bounds = [
            ("from kubectl apply to the first acknowledged write", self.first_write_seconds, FIRST_WRITE_SECONDS_MAX),
            ("the gap", self.gap_seconds, GAP_SECONDS_MAX),
        ]  # fmt: skip
        return [
            f"{what}: {found:.2f} s, which is not between 0 and {most:g} s"
            for what, found, most in bounds
            if not 0 < found < most
        ]

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("Kubernetes, three nodes", f"{self.cluster_seconds:.1f} s"),
            ("images on every node", f"{self.images_seconds:.1f} s"),
            ("chart installed, operator ready", f"{self.install_seconds:.1f} s"),
            ("topic applied until its first write", f"{self.first_write_seconds:.1f} s"),
            ("topic applied until it is ready", f"{self.ready_seconds:.1f} s"),
            ("records produced", f"{self.records:,} in {self.produce_seconds:.1f} s"),
            ("master killed", f"{self.killed}, {self.acknowledged_at_kill:,} acknowledged"),
            ("master afterwards", self.master_after),
            ("longest gap between acknowledged writes", f"{self.gap_seconds:.2f} s"),
            ("replicas in sync again, after the load", f"{self.whole_seconds:.1f} s"),
            ("acknowledged records lost", f"{self.lost:,}"),
            ("records doubled", f"{self.doubled:,}"),
            ("live planes after compaction", f"{self.live:,}"),
            ("compared", f"{self.compared:,}"),
            ("mismatches", f"{self.mismatches:,}"),
            ("whole demo", f"{self.total_seconds:.1f} s"),
        ]

    def print(self) -> None:
        self.print_table("firn demo: a master's pod killed under load", self.rows())
        for sentence in self.late():
            say(sentence)
