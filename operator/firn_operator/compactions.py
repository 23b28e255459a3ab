"""A ForceCompaction, from the wish to its result: one run of a topic at a time, by the brokers or by Spark. Pure.

========= ================================================= =================================
phase     when                                              next
========= ================================================= =================================
(none)    asked for; its turn, and its topic is ready       an engine is chosen, and kept: Running
Pending   it must wait, and the condition says for what     looked at again
Running   the engine is at it                               looked at again until it has ended
(ended)   Succeeded, Failed, Cancelled                      deleted after its time
========= ================================================= =================================

The choice is written before anything begins, so that an operator that takes over goes on with the same engine. What a
run is at is read from the brokers, who do the work by either engine: of Spark's they hold the plan, known by the run's
uid. Only where they know nothing of a plan does the driver's Job tell how it ended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from firn.engines import Engine, Runner, choose_engine, choose_runner
from firn_operator.certificates import parse_time
from firn_operator.conditions import READY, Condition, is_true
from firn_operator.kube import Obj, name_of
from firn_operator.names import LABEL_SCHEDULED
from firn_operator.sparkruns import Wish, parse_wish

LOOK_S, WAIT_S = 2.0, 10.0
ENDED = ("Succeeded", "Failed", "Cancelled")
NO_IMAGE = "this operator knows no image of Spark: set image.spark of the chart, or ask for a run with engine: broker"
TTL_S = 86_400
_OPEN = ("waiting", "running")  # states of a partition that is not done with
_REASON_MAX, TROUBLE_MAX = 1024, 512  # characters of what a status says
_FIELDS = {
    "records_before": "recordsBefore", "records_after": "recordsAfter", "bytes_before": "bytesBefore",
    "bytes_after": "bytesAfter", "tombstones_dropped": "tombstonesDropped", "seconds": "seconds",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    uid: str
    topic: str
    engine: str  # as asked for
    wish: Wish
    phase: str
    chosen: Engine | None
    runner: Runner | None
    why: str
    begun: str
    created: str
    ended: datetime | None
    ttl: timedelta
    is_scheduled: bool


def parse_run(obj: Obj) -> Run:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    ended, chosen, runner = status.get("completionTime"), status.get("engine"), status.get("runner")
    return Run(
        name_of(obj), str(meta.get("uid", "")), str((spec.get("topicRef") or {}).get("name", "")),
        str(spec.get("engine", "auto")), parse_wish(spec.get("spark") or {}), str(status.get("phase", "")),
        chosen if chosen in ("broker", "spark") else None, runner if runner in ("job", "local") else None,
        str(status.get("engineReason", "")), str(status.get("startTime", "")), str(meta.get("creationTimestamp", "")),
        parse_time(str(ended)) if ended else None, timedelta(seconds=int(spec.get("ttlSecondsAfterFinished", TTL_S))),
        (meta.get("labels") or {}).get(LABEL_SCHEDULED) == "true",
    )  # fmt: skip


def waits_for(run: Run, topic: Obj | None, others: Iterable[Run], *, has_spark: bool) -> str:
    """What a run that has not begun waits for; empty: nothing."""
    if run.engine == "spark" and not has_spark:
        return NO_IMAGE
    if topic is None:
        return f"there is no topic {run.topic}"
    if not is_true(topic, READY):
        return f"the topic {run.topic} is not ready"
    before = [
        each for each in others
        if each.topic == run.topic and each.name != run.name and each.phase not in ENDED
        and (each.engine != "spark" or has_spark)
        and (each.phase == "Running" or (each.created, each.name) < (run.created, run.name))
    ]  # fmt: skip
    return f"{before[0].name} compacts the topic before it" if before else ""


def pending(why: str) -> tuple[Obj, Condition]:
    reason = "EngineUnavailable" if why == NO_IMAGE else "Waiting"
    return {"phase": "Pending"}, Condition("Complete", False, reason, why)


@dataclass(frozen=True, slots=True)
class Choice:
    engine: Engine
    runner: Runner | None  # of Spark
    why: str


def choose(run: Run, size: int | None, *, has_spark: bool) -> Choice:
    """What a run is done by; ``size``: bytes to compact, None where nobody could be asked."""
    known = 0 if size is None else size
    engine, why = choose_engine(known, has_spark=has_spark)
    if run.engine != "auto":
        engine, why = ("spark" if run.engine == "spark" else "broker"), "as asked for"
    if engine == "broker":
        return Choice(engine, None, why)
    if run.wish.runner is not None:
        return Choice(engine, run.wish.runner, why)
    runner, because = choose_runner(known)
    return Choice(engine, runner, f"{why}; {because}")


def needs_size(run: Run) -> bool:
    return run.engine == "auto" or (run.engine == "spark" and run.wish.runner is None)


def begun(choice: Choice, now: str) -> tuple[Obj, Condition]:
    """The status with which a run begins, before anything is done for it."""
    status = _running(choice.engine, choice.runner, choice.why, now)
    return status, Condition(
        "Complete", False, "Running", f"{words_of(choice.engine, choice.runner)}: {choice.why}"
    )


def words_of(engine: Engine, runner: Runner | None) -> str:
    if engine == "broker":
        return "the brokers compact the topic"
    return f"Spark compacts the topic ({'driver and executors' if runner == 'job' else 'a driver alone'})"


def _running(engine: Engine, runner: Runner | None, why: str, since: str) -> Obj:
    return {
        "phase": "Running", "engine": engine, "runner": runner, "engineReason": why or None, "startTime": since,
    }  # fmt: skip


def followed(run: Run, document: Mapping[str, Any], now: str) -> tuple[Obj, Condition]:
    """The status of a run of the brokers, as they tell of it."""
    rows = [_row(each) for each in document.get("partitions") or ()]
    status = _running("broker", None, run.why, run.begun or now) | {"progress": _progress(rows)}
    if document.get("state") in _OPEN:
        return status, Condition("Complete", False, "Running", "the brokers compact the topic")
    return _ended(status, rows, now)


# Spark.


@dataclass(frozen=True, slots=True)
class JobState:
    """What Kubernetes tells of a driver."""

    has_succeeded: bool = False
    failure: str = ""  # a sentence, when it is given up
    trouble: str = ""  # why its pod does not run yet


def parse_job(job: Obj, pods: Iterable[Obj]) -> JobState:
    """``pods``: of the Job, in any order."""
    conditions = {each.get("type"): each for each in (job.get("status") or {}).get("conditions") or ()}
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))[-1:]
    if (conditions.get("Complete") or {}).get("status") == "True":
        return JobState(has_succeeded=True)
    words = " ".join(_last_words(pod) for pod in newest)
    failed = conditions.get("Failed") or {}
    if failed.get("status") == "True":
        told = f"{failed.get('reason', 'Failed')}: {failed.get('message', '')}".rstrip(": ")
        return JobState(
            failure=f"the driver was given up ({told})" + (f"; it said: {words}" if words else "")
        )
    trouble = f"the last try ended: {words}" if words else " ".join(_waits_for(pod) for pod in newest)
    return JobState(trouble=trouble[:TROUBLE_MAX])


def _last_words(pod: Obj) -> str:
    """The last line of a driver that has ended badly; empty for any other one."""
    ended = _container(pod).get("terminated") or {}
    if not ended or ended.get("exitCode") == 0:
        return ""
    lines = str(ended.get("message") or "").strip().splitlines()
    return (
        lines[-1].strip()
        if lines
        else f"exit code {ended.get('exitCode')}, {ended.get('reason', '')}".rstrip(", ")
    )


def _waits_for(pod: Obj) -> str:
    for each in (pod.get("status") or {}).get("conditions") or ():
        if each.get("type") == "PodScheduled" and each.get("status") == "False":
            return f"{each.get('reason', 'Unschedulable')}: {each.get('message', '')}"
    waiting = _container(pod).get("waiting") or {}
    return " ".join(str(waiting[part]) for part in ("reason", "message") if waiting.get(part))


def _container(pod: Obj) -> Mapping[str, Any]:
    found = (pod.get("status") or {}).get("containerStatuses") or ()
    return (found[0].get("state") or {}) if found else {}


def followed_spark(
    run: Run, plan: Mapping[str, Any] | None, job: JobState, now: str
) -> tuple[Obj, Condition]:
    """The status of a run of Spark: by its plan, and where the brokers know of none, by its Job."""
    status = _running("spark", run.runner, run.why, run.begun or now)
    own = plan if plan is not None and plan.get("run") == run.uid else None
    rows = [_row(each) for each in (own or {}).get("partitions") or ()]
    if own is not None:
        status |= {"progress": _progress(rows)}
    state = (own or {}).get("state")
    if state == "done":
        return _ended(status, rows, now)
    if state == "cancelled":
        status |= {"phase": "Cancelled", "completionTime": now, "partitions": rows}
        return status, Condition("Complete", False, "Cancelled", "its plan was cancelled at the brokers")
    if job.failure:
        status |= {"phase": "Failed", "completionTime": now, "partitions": rows}
        return status, Condition("Complete", False, "Failed", job.failure)
    if job.has_succeeded:
        # The driver ends well only when the brokers told it so; those that are masters now know nothing of its plan.
        status |= {"phase": "Succeeded", "completionTime": now}
        return status, Condition("Complete", True, "Succeeded", "the driver's report is in its log")
    return status, Condition("Complete", False, "Running", _at_work(run, own, job))


def _at_work(run: Run, plan: Mapping[str, Any] | None, job: JobState) -> str:
    head = words_of("spark", run.runner)
    if plan is None:
        return f"{head}: the driver begins" + (f" ({job.trouble})" if job.trouble else "")
    rows = plan.get("partitions") or ()
    slices = sum(int(row.get("slices") or 0) for row in rows)
    uploaded = sum(len(row.get("uploaded") or ()) for row in rows)
    if uploaded < slices:
        return f"{head}: {uploaded} of {slices} slices of keys are read"
    return f"{head}: the brokers compare, and rewrite what is equal"


# Both.


def _ended(status: Obj, rows: list[Obj], now: str) -> tuple[Obj, Condition]:
    failed = [row for row in rows if row["state"] != "done"]
    status |= {"phase": "Failed" if failed else "Succeeded", "completionTime": now, "partitions": rows}
    if failed:
        why = failed[0].get("reason") or failed[0]["state"]
        reason = "Disagreement" if failed[0]["state"] == "disagreement" else "Failed"
        return status, Condition("Complete", False, reason, f"partition {failed[0]['partition']}: {why}")
    return status, Condition("Complete", True, "Succeeded", f"{len(rows)} partitions are compacted")


def _progress(rows: list[Obj]) -> str:
    return f"{sum(row['state'] not in _OPEN for row in rows)}/{len(rows)}"


def _row(told: Mapping[str, Any]) -> Obj:
    row: Obj = {"partition": int(told.get("partition", 0)), "state": str(told.get("state", ""))}
    reason = str(told.get("reason") or "")
    if offsets := told.get("disagreements"):
        reason = f"{reason or 'Spark and the key index disagree'}, first at offsets {', '.join(map(str, offsets[:8]))}"
    if reason:
        row["reason"] = reason[:_REASON_MAX]
    return row | {ours: told[theirs] for theirs, ours in _FIELDS.items() if told.get(theirs) is not None}


def beyond_history(ended: Iterable[Run], limit: int) -> list[str]:
    """Runs of one topic's schedule that have ended and are more than are kept: the oldest."""
    mine = sorted(
        (run for run in ended if run.is_scheduled and run.phase in ENDED),
        key=lambda run: (run.created, run.name),
    )
    return [run.name for run in mine[: max(0, len(mine) - limit)]]
