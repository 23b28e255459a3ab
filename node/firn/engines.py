"""Which engine a forced compaction takes when nobody says, and where Spark then runs: by bytes, in one sentence.

A session of Spark and its first job take about 15 s, in which a broker compacts some gigabytes by itself; executors
take as long again before they work. Spark spares the brokers no rewriting, it checks them: it decides by the bytes of
the keys, and its cost pays where the deciding is much work.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from firn.units import size_text

SPARK_FROM_BYTES = 16 << 30  # a broker's compactor rewrites as much in a few minutes
EXECUTORS_FROM_BYTES = (
    128 << 30
)  # one process reads the keys of as much in about the time that executors take to begin

Engine = Literal["broker", "spark"]
Runner = Literal["local", "job"]


def choose_engine(size: int, *, has_spark: bool) -> tuple[Engine, str]:
    """The engine for so many bytes, and why."""
    if not has_spark:
        return "broker", "there is no Spark here"
    if size < SPARK_FROM_BYTES:
        return (
            "broker",
            f"the topic has {size_text(size)} to compact, and Spark pays from {size_text(SPARK_FROM_BYTES)} on",
        )
    return (
        "spark",
        f"the topic has {size_text(size)} to compact, which is {size_text(SPARK_FROM_BYTES)} or more",
    )


def choose_runner(size: int) -> tuple[Runner, str]:
    """Whether the driver works alone or with executors of its own, and why."""
    if size < EXECUTORS_FROM_BYTES:
        return "local", f"the driver works alone below {size_text(EXECUTORS_FROM_BYTES)}"
    return "job", f"executors pay from {size_text(EXECUTORS_FROM_BYTES)} on"


def bytes_to_compact(partitions: Iterable[Mapping[str, Any]]) -> int:
    """What a forced compaction has to go through, by the rows of a topic's description: the clean part and what is
    dirty above it."""
    return sum(_of_partition(each) for each in partitions)


def _of_partition(row: Mapping[str, Any]) -> int:
    clean, raw = int(row.get("compacted_bytes") or 0), int(row.get("raw_bytes") or 0)
    ratio = float(row.get("dirty_ratio") or 0.0)
    dirty = raw if ratio >= 1.0 else min(raw, int(clean * ratio / (1.0 - ratio)))
    return clean + dirty
