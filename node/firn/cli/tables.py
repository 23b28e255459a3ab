"""Tables for people: topics, brokers, partitions."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from firn.cli.times import time_text


def print_table(columns: Iterable[tuple[str, str]], rows: Iterable[Iterable[object]]) -> None:
    """Columns as (heading, "l" or "r"); None shows as a dash."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "r" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    # A pipe gets whole lines: nothing is cut to a width that nobody sees.
    width = None if sys.stdout.isatty() else 400
    console = Console(width=width, highlight=False, soft_wrap=False)
    for line in _lines(console, table):
        print(line)


def _lines(console: Any, table: Any) -> list[str]:
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def bytes_text(count: object) -> str:
    """A size for people: ``1.5 MiB``."""
    if not isinstance(count, int | float):
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def number_text(count: object) -> str:
    return f"{count:,}" if isinstance(count, int) else "-"


def print_topics(topics: list[dict[str, Any]]) -> None:
    """One line a topic."""
    if not topics:
        print("no topics; create one with: firn topics create NAME")
        return
    rows = []
    for topic in topics:
        partitions = topic.get("partitions")
        count = len(partitions) if isinstance(partitions, list) else partitions
        if count is None:
            count = (topic.get("spec") or {}).get("partitions")
        rows.append((topic.get("name"), count))
    print_table([("TOPIC", "l"), ("PARTITIONS", "r")], rows)


def print_topic(topic: Mapping[str, Any]) -> None:
    """One topic: its partitions, then its settings."""
    print(topic.get("name"))
    _print_partitions(topic)
    if groups := topic.get("groups"):
        print(f"groups: {', '.join(map(str, groups))}")
    for group in topic.get("lacking", ()):
        print(f"group {group} does not have it yet: it follows once it has a master")
    for group, why in (topic.get("silent") or {}).items():
        print(f"group {group} does not answer: {why}")
    if spec := topic.get("spec"):
        for section, value in spec.items():
            if isinstance(value, Mapping):
                print(f"{section}: " + ", ".join(f"{name} {field}" for name, field in value.items()))


def _last_compaction(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "never"
    started = found.get("started")
    when = time_text(started) if isinstance(started, int) else str(started)
    seconds = found.get("seconds")
    took = f" in {seconds:.2f} s" if isinstance(seconds, int | float) else ""
    reason = f": {found['reason']}" if found.get("reason") else ""
    return f"{found.get('result')} {when}{took}{reason}"


def _print_partitions(topic: Mapping[str, Any]) -> None:
    partitions = topic.get("partitions")
    if not isinstance(partitions, list):
        return
    columns = [
        ("PARTITION", "r"), ("EARLIEST", "r"), ("HORIZON", "r"), ("LATEST", "r"), ("LIVE", "r"), ("DIRTY", "r"),
        ("RAW", "r"), ("COMPACTED", "r"), ("LAST COMPACTION", "l"),
    ]  # fmt: skip
    rows = []
    for at, p in enumerate(partitions):
        ratio = p.get("dirty_ratio")
        rows.append(
            (
                p.get("partition", at), number_text(p.get("earliest")), number_text(p.get("horizon")),
                number_text(p.get("latest")), number_text(p.get("live_records")),
                f"{ratio:.0%}" if isinstance(ratio, int | float) else "-", bytes_text(p.get("raw_bytes")),
                bytes_text(p.get("compacted_bytes")), _last_compaction(p.get("last_compaction")),
            )
        )  # fmt: skip
    print_table(columns, rows)


def _lag_text(broker: Mapping[str, Any]) -> str:
    """What a standby lacks: ``12.5 MiB, 0.8 s``."""
    size, seconds = broker.get("lag_bytes"), broker.get("lag_seconds")
    if size is None:
        return "-"
    return f"{bytes_text(size)}, {seconds or 0:.1f} s" if size else "0 B"


def _reason_text(broker: Mapping[str, Any]) -> str:
    """Why it is as it is, a rebuild first."""
    found, reason = broker.get("rebuild"), broker.get("reason") or ""
    if not found:
        return str(reason)
    done = f"{found.get('partitions_done')} of {found.get('partitions')} partitions"
    size = f"{bytes_text(found.get('bytes'))} of {bytes_text(found.get('bytes_expected'))}"
    told = f"rebuild: {found.get('phase')}, {done}, {size}"
    return f"{told}; {found.get('reason') or reason}" if found.get("reason") or reason else told


def print_status(status: Mapping[str, Any]) -> None:
    """Brokers, then each topic's partitions."""
    columns = [
        ("BROKER", "l"), ("GROUP", "r"), ("ADDRESS", "l"), ("ROLE", "l"), ("EPOCH", "r"), ("STATE", "l"),
        ("IN SYNC", "l"), ("LAG", "r"), ("COMMITTED", "r"), ("LOG", "r"), ("REASON", "l"),
    ]  # fmt: skip
    rows = []
    for b in status.get("brokers", []):
        state = f"{b.get('state')}{' (read-only)' if b.get('read_only') else ''}"
        start, end = b.get("log_start"), b.get("log_end")
        size = bytes_text(end - start) if isinstance(start, int) and isinstance(end, int) else "-"
        rows.append(
            (b.get("node"), b.get("group"), b.get("address"), b.get("role"), b.get("epoch"), state,
             "yes" if b.get("in_sync") else "no", _lag_text(b), number_text(b.get("committed_position")), size,
             _reason_text(b))
        )  # fmt: skip
    print_table(columns, rows)
    for topic in status.get("topics", []):
        print(f"\n{topic.get('name')}")
        _print_partitions(topic)


def print_compaction(run: Mapping[str, Any]) -> None:
    """What a compaction did, a line a partition."""
    columns = [
        ("PARTITION", "r"), ("STATE", "l"), ("RECORDS BEFORE", "r"), ("AFTER", "r"), ("BYTES BEFORE", "r"),
        ("AFTER", "r"), ("TOMBSTONES DROPPED", "r"), ("SECONDS", "r"), ("REASON", "l"),
    ]  # fmt: skip
    rows = [
        (
            p["partition"], p["state"], number_text(p.get("records_before")), number_text(p.get("records_after")),
            bytes_text(p.get("bytes_before")), bytes_text(p.get("bytes_after")),
            number_text(p.get("tombstones_dropped")), f"{p.get('seconds') or 0:.3f}", p.get("reason") or "",
        )
        for p in run["partitions"]
    ]  # fmt: skip
    print_table(columns, rows)
