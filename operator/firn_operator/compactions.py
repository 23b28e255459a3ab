"""A ForceCompaction, from the wish to its result: one run of a topic at a time, asked of the brokers, followed to its end.

======== ================================================= =================================
phase    when                                              next
======== ================================================= =================================
(none)   asked for; its turn, and its topic is ready       the brokers are asked: Running
Pending  it must wait, and the condition says for what     looked at again
Running  the brokers are at it                             looked at again until it has ended
(ended)  Succeeded, Failed                                 deleted after its time
======== ================================================= =================================

The brokers are asked before ``Running`` is written: an operator that ends in between asks again, which compacts once
more and harms nothing. A run that the brokers know nothing of any more (another master) is asked for again, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from firn_operator.certificates import parse_time
from firn_operator.conditions import READY, Condition, is_true
from firn_operator.kube import Obj, name_of

LOOK_S, WAIT_S = 2.0, 10.0
ENDED = ("Succeeded", "Failed", "Cancelled")
NO_SPARK = "the Spark engine is not part of this operator; ask for a run with engine: broker"
_FIELDS = {
    "records_before": "recordsBefore", "records_after": "recordsAfter", "bytes_before": "bytesBefore",
    "bytes_after": "bytesAfter", "tombstones_dropped": "tombstonesDropped", "seconds": "seconds",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    topic: str
    engine: str
    phase: str
    created: str
    ended: datetime | None
    ttl: timedelta


def parse_run(obj: Obj) -> Run:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    ended = status.get("completionTime")
    return Run(
        name_of(obj), str((spec.get("topicRef") or {}).get("name", "")), str(spec.get("engine", "auto")),
        str(status.get("phase", "")), str(obj["metadata"].get("creationTimestamp", "")),
        parse_time(str(ended)) if ended else None, timedelta(seconds=int(spec.get("ttlSecondsAfterFinished", 86_400))),
    )  # fmt: skip


def waits_for(run: Run, topic: Obj | None, others: Iterable[Run]) -> str:
    """What a run that has not begun waits for; empty: nothing."""
    if run.engine == "spark":
        return NO_SPARK
    if topic is None:
        return f"there is no topic {run.topic}"
    if not is_true(topic, READY):
        return f"the topic {run.topic} is not ready"
    before = [
        each for each in others
        if each.topic == run.topic and each.name != run.name and each.phase not in ENDED and each.engine != "spark"
        and (each.phase == "Running" or (each.created, each.name) < (run.created, run.name))
    ]  # fmt: skip
    return f"{before[0].name} compacts the topic before it" if before else ""


def pending(why: str) -> tuple[Obj, Condition]:
    reason = "EngineUnavailable" if why == NO_SPARK else "Waiting"
    return {"phase": "Pending"}, Condition("Complete", False, reason, why)


def followed(document: Mapping[str, Any], begun: str, now: str) -> tuple[Obj, Condition]:
    """The status of a run as the brokers tell of it."""
    rows = [_row(each) for each in document.get("partitions") or ()]
    done = sum(row["state"] not in ("waiting", "running") for row in rows)
    status: Obj = {
        "phase": "Running",
        "engine": "broker",
        "progress": f"{done}/{len(rows)}",
        "startTime": begun,
    }
    if document.get("state") in ("waiting", "running"):
        return status, Condition("Complete", False, "Running", "the brokers compact the topic")
    failed = [row for row in rows if row["state"] != "done"]
    status |= {"phase": "Failed" if failed else "Succeeded", "completionTime": now, "partitions": rows}
    if failed:
        why = failed[0].get("reason") or failed[0]["state"]
        return status, Condition("Complete", False, "Failed", f"partition {failed[0]['partition']}: {why}")
    return status, Condition("Complete", True, "Succeeded", f"{len(rows)} partitions are compacted")


def _row(told: Mapping[str, Any]) -> Obj:
    row: Obj = {"partition": int(told.get("partition", 0)), "state": str(told.get("state", ""))}
    if told.get("reason"):
        row["reason"] = str(told["reason"])[:1024]
    return row | {ours: told[theirs] for theirs, ours in _FIELDS.items() if told.get(theirs) is not None}
