"""``python -m firn_spark.audit TOPIC``: is the compacted view the map that the raw view gives?

The independent check of the whole engine: plain Spark SQL recomputes, from every raw record, the newest one of each
key, and compares offset, time, tag, headers and value (by SHA-256) with what the compacted view serves. Both are read
as of one pinned snapshot. Of a partition whose raw view no longer starts at 0, the map begins with an earlier
``snapshot`` (``--snapshot FOLDER``) and goes on with the raw view since; the report says which partition was
recomputed from what.

=========== =====================================================================
difference  what it means
=========== =====================================================================
missing     the raw view has a value, the compacted view none: a record was lost
resurrected the compacted view has a value that the raw view has deleted, or never had
different   both have a value, not the same record
=========== =====================================================================
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firn.cli.times import time_text
from firn.errors import Invalid
from firn_spark.__main__ import run_by_name
from firn_spark.connection import Connection
from firn_spark.jobs import command, folder, topics
from firn_spark.jobs.folder import Snapshot
from firn_spark.jobs.pins import pinned
from firn_spark.jobs.report import KEYS_SHOWN, Report, key_text, keys_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

KINDS = ("missing", "resurrected", "different")


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that is not as it should be; offsets: None where that side has no live record."""

    partition: int
    key: bytes
    kind: str
    raw_offset: int | None
    compacted_offset: int | None


@dataclass(frozen=True, slots=True)
class Audited:
    """One partition: the keys that are live by the raw view, the differences, and what the raw side was made of."""

    partition: int
    end: int
    since: int  # the raw view was read from here on
    snapshot_ms: int | None  # the moment of the snapshot that it begins with; None: the raw view alone
    keys: int
    differences: dict[str, int]


@dataclass(frozen=True, slots=True)
class Audit:
    topic: str
    partitions: list[Audited]
    first: list[Difference]

    @property
    def differences(self) -> int:
        return sum(sum(p.differences.values()) for p in self.partitions)


def audit(spark: "SparkSession", connection: Connection, topic: str, *, snapshot: str | None = None) -> Audit:
    """Compare. ``snapshot``: the folder of an earlier one, for partitions whose raw view begins later than at 0.

    Errors: Invalid when a partition's raw view begins later and no snapshot reaches so far; OffsetExpired when
    retention overtook the reading.
    """
    with pinned(connection, topic) as pin:
        with connection.client() as client:
            begin = topics.earliest(client.describe(topic))
        earlier = None if snapshot is None else _earlier(snapshot, topic, pin.topic_id)
        ends = dict(pin.ends)
        since = _starts(topic, ends, begin, earlier)
        options = {**connection.options(), "topic": topic}
        raw = {"view": "raw", "startingOffsets": _json(since), "endingOffsets": _json(ends)}
        frames = [_side(spark.read.format("firn").options(**options, **raw).load(), "raw")]
        if earlier is not None and earlier.files and any(since.values()):
            used = spark.read.parquet(*earlier.files).where(
                _either("partition", [p for p, o in since.items() if o])
            )
            frames.append(_side(used, "raw"))
        pinned_view = {"view": "compacted", "snapshot": pin.id}
        frames.append(_side(spark.read.format("firn").options(**options, **pinned_view).load(), "compacted"))
        compared = _compared(frames)
        counts = _counts(compared)
        first = _first(compared) if any(kind in KINDS for _, kind in counts) else []
    moments = {} if earlier is None else {part.partition: part.taken_ms for part in earlier.parts}
    return Audit(
        topic,
        [
            Audited(
                p, end, since[p], moments[p] if since[p] else None,
                sum(counts.get((p, kind), 0) for kind in ("equal", "missing", "different")),
                {kind: counts[p, kind] for kind in KINDS if (p, kind) in counts},
            )
            for p, end in sorted(ends.items())
        ],
        first,
    )  # fmt: skip


def _earlier(address: str, topic: str, topic_id: int) -> Snapshot:
    found = folder.snapshot_at(address)
    if found is None:
        raise Invalid(f"{address}: no snapshot is there; firn_spark.snapshot writes one")
    if found.topic_id != topic_id:
        raise Invalid(
            f"{address} is a snapshot of {found.topic} (topic id {found.topic_id}), not of this {topic} ({topic_id})"
        )
    return found


def _starts(
    topic: str, ends: topics.Offsets, begin: topics.Offsets, earlier: Snapshot | None
) -> topics.Offsets:
    """Where the raw view is read from: 0, or the end of the snapshot. Errors: Invalid."""
    known = {} if earlier is None else earlier.ends
    found = {}
    for partition in sorted(ends):
        first = begin[partition]
        if first == 0:
            found[partition] = 0
        elif partition not in known:
            raise Invalid(
                f"partition {partition} of {topic}: its raw view begins at offset {first}; what was before is only in "
                "the compacted view: give --snapshot FOLDER, of a snapshot from before retention went past its end"
            )
        elif not first <= known[partition] <= ends[partition]:
            raise Invalid(
                f"partition {partition} of {topic}: its raw view begins at offset {first}, the snapshot ends at "
                f"{known[partition]}: what lies between is only in the compacted view; a younger snapshot is needed"
            )
        else:
            found[partition] = known[partition]
    return found


def _side(frame: "DataFrame", side: str) -> "DataFrame":
    """The rows as they are compared: partition, key, and one struct that orders by offset."""
    from pyspark.sql import functions as F

    record = F.struct(
        F.col("offset"), F.col("value").isNotNull().alias("is_live"), F.col("timestamp"), F.col("tag"),
        F.to_json("headers").alias("headers"), F.sha2("value", 256).alias("digest"),
    )  # fmt: skip
    return frame.select("partition", "key", F.lit(side).alias("side"), record.alias("record"))


def _compared(frames: "list[DataFrame]") -> "DataFrame":
    """A row a key: partition, key, kind, the offsets of both sides. One shuffle, whatever the number of sides."""
    from functools import reduce

    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    def newest(side: str) -> "Column":
        return F.max(F.when(F.col("side") == side, F.col("record"))).alias(side)

    both = reduce(DataFrame.union, frames).groupBy("partition", "key").agg(newest("raw"), newest("compacted"))
    in_raw = F.coalesce(F.col("raw.is_live"), F.lit(False))
    in_compacted = F.coalesce(F.col("compacted.is_live"), F.lit(False))
    kind = (
        F.when(~in_raw & ~in_compacted, "deleted")
        .when(in_raw & ~in_compacted, "missing")
        .when(~in_raw & in_compacted, "resurrected")
        .when(F.col("raw") != F.col("compacted"), "different")
        .otherwise("equal")
    )
    return both.select(
        "partition", "key", kind.alias("kind"),
        F.when(in_raw, F.col("raw.offset")).alias("raw_offset"),
        F.when(in_compacted, F.col("compacted.offset")).alias("compacted_offset"),
    )  # fmt: skip


def _counts(compared: "DataFrame") -> dict[tuple[int, str], int]:
    return {
        (row["partition"], row["kind"]): row["count"]
        for row in compared.groupBy("partition", "kind").count().collect()
    }


def _first(compared: "DataFrame") -> list[Difference]:
    from pyspark.sql import functions as F

    wrong = compared.where(F.col("kind").isin(*KINDS)).orderBy("partition", "key").limit(KEYS_SHOWN)
    return [Difference(row[0], bytes(row[1]), row[2], row[3], row[4]) for row in wrong.collect()]


def _either(column: str, values: list[int]) -> str:
    return f"{column} IN ({', '.join(map(str, values))})"


def _json(offsets: topics.Offsets) -> str:
    return json.dumps({str(partition): offset for partition, offset in sorted(offsets.items())})


def report_of(found: Audit, snapshot: str | None) -> Report:
    """As a table and as JSON; differences are a failure."""

    def source_of(p: Audited) -> str:
        if p.snapshot_ms is None:
            return "raw view"
        return f"{snapshot} of {time_text(p.snapshot_ms)}, raw view since {p.since:,}"

    rows = [
        (p.partition, p.end, p.keys, *(p.differences.get(kind, 0) for kind in KINDS), source_of(p))
        for p in found.partitions
    ]
    keys = sum(p.keys for p in found.partitions)
    document: dict[str, Any] = {
        "job": "audit", "topic": found.topic, "keys": keys, "differences": found.differences,
        "partitions": [
            {
                "partition": p.partition, "end": p.end, "keys": p.keys, "source": source_of(p), "raw_since": p.since,
                "snapshot_ms": p.snapshot_ms, **{kind: p.differences.get(kind, 0) for kind in KINDS},
            }
            for p in found.partitions
        ],
        "first": [
            {
                "partition": d.partition, "key": key_text(d.key), "kind": d.kind, "raw_offset": d.raw_offset,
                "compacted_offset": d.compacted_offset,
            }
            for d in found.first
        ],
    }  # fmt: skip
    columns = [
        ("PARTITION", "r"), ("END", "r"), ("KEYS", "r"), ("MISSING", "r"), ("RESURRECTED", "r"), ("DIFFERENT", "r"),
        ("RECOMPUTED FROM", "l"),
    ]  # fmt: skip
    if not found.differences:
        return Report(document, columns, rows, [f"{keys:,} keys of {found.topic} compared: no difference"])
    told = [
        f"{d.kind}: partition {d.partition}, key {key_text(d.key) or repr('')}, offset {d.raw_offset} in the raw view, "
        f"{d.compacted_offset} in the compacted view"
        for d in found.first
    ]
    failure = (
        f"{found.topic}: the compacted view differs in {found.differences:,} keys: "
        f"{keys_text([d.key for d in found.first], found.differences)}"
    )
    return Report(document, columns, rows, told, failure)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code: 1 for a difference."""
    made = command.parser("audit", "Compare a topic's compacted view with a map made anew from its raw view.")
    made.add_argument("topic", type=command.topic_name)
    made.add_argument(
        "--snapshot", metavar="FOLDER", help="an earlier one, where the raw view no longer starts at 0"
    )

    def work(job: command.Job) -> Report:
        found = audit(job.spark, job.connection, job.asked.topic, snapshot=job.asked.snapshot)
        return report_of(found, job.asked.snapshot)

    return command.run(made, work, arguments)


if __name__ == "__main__":
    sys.exit(run_by_name("audit"))
