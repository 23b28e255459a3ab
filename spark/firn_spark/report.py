"""What has become of a plan, for people and for programs."""

from typing import Any

Document = dict[str, Any]
FIELDS = (
    "partition", "state", "records_before", "records_after", "bytes_before", "bytes_after", "bytes_read", "bytes_written",
    "tombstones_dropped", "records_kept_by_min_lag", "rounds", "seconds", "seen", "dead", "compared", "disagreements",
    "reason",
)  # fmt: skip


def final_document(plan: Document) -> Document:
    """The object that ``firn compact -o json`` ends with."""
    return {
        "topic": plan["topic"], "engine": plan["engine"],
        "partitions": [{name: row[name] for name in FIELDS} for row in plan["partitions"]],
    }  # fmt: skip


def print_table(document: Document, *, seconds: float) -> None:
    """One row a partition, and the sums."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in (
        "partition",
        "state",
        "records",
        "left",
        "bytes",
        "left",
        "tombstones",
        "compared",
        "differ",
        "s",
    ):
        table.add_column(name, justify="left" if name == "state" else "right")
    rows = document["partitions"]
    for row in rows:
        table.add_row(str(row["partition"]), row["state"], *_numbers([row]))
    if len(rows) > 1:
        table.add_row("all", "", *_numbers(rows))
    console = Console(width=None)
    console.print(table)
    console.print(f"{document['topic']}: {len(rows)} partitions by Spark in {seconds:.1f} s")


def _numbers(rows: list[Document]) -> list[str]:
    found = [
        sum(row[name] for row in rows)
        for name in (
            "records_before", "records_after", "bytes_before", "bytes_after", "tombstones_dropped", "compared",
        )
    ]  # fmt: skip
    differ = sum(len(row["disagreements"]) for row in rows)
    return [*(f"{number:,}" for number in (*found, differ)), f"{sum(row['seconds'] for row in rows):.1f}"]
