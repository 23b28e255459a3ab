"""What is said of pods that are not ready: how far their rebuild is, or that they are stuck. Part of ``plan``.

A rebuild may take hours, so it is stuck when it gets no further, not when it is long. Anything else that keeps a pod
from being ready is given five minutes from the moment at which it was ready last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from firn_operator.certificates import parse_time
from firn_operator.observe import GroupState
from firn_operator.steps import Plan

STUCK_AFTER = timedelta(minutes=5)
# Phases that count nothing while they last: the log is dispatched; every partition is compacted.
_QUIET = {"dispatching": timedelta(hours=1), "compacting": timedelta(hours=1)}


@dataclass(frozen=True, slots=True)
class Rebuild:
    """How far a replica that is being rebuilt is, as it told last; all empty: it has not told yet."""

    phase: str
    partitions: int
    partitions_done: int
    bytes: int
    bytes_expected: int
    reason: str  # why its last try failed
    moved: str  # when it last got further

    def __str__(self) -> str:
        """For people; begins with a colon when there is anything to say."""
        said = [self.phase] if self.phase else []
        if self.partitions:
            said.append(f"{self.partitions_done} of {self.partitions} partitions")
        if self.bytes_expected:
            said.append(f"{min(100, 100 * self.bytes // self.bytes_expected)}%")
        return "".join(f": {each}" for each in (", ".join(said), self.reason) if each)


def rebuilds_of(group: GroupState) -> dict[str, Rebuild]:
    """The replicas of a group that are being rebuilt, by pod: their master says so, or they do themselves."""
    return {
        str(member["node"]): _parse(member.get("rebuild") or {})
        for member in group.status.get("members") or ()
        if "rebuild" in member or member.get("state") == "rebuilding"
    }


def _parse(told: Mapping[str, Any]) -> Rebuild:
    return Rebuild(
        str(told.get("phase") or ""), int(told.get("partitions") or 0), int(told.get("partitionsDone") or 0),
        int(told.get("bytes") or 0), int(told.get("bytesExpected") or 0), str(told.get("reason") or ""),
        str(told.get("lastProgressTime") or ""),
    )  # fmt: skip


def report_unready(group: GroupState, plan: Plan, now: datetime) -> None:
    """*Effects*: in ``plan``, a wait for each rebuild that goes on, a trouble for each pod that is stuck."""
    rebuilds = rebuilds_of(group)
    for pod in group.pods:
        if pod.is_leaving or not pod.unready_since:
            continue
        rebuild, since, limit = rebuilds.get(pod.name), parse_time(pod.unready_since), STUCK_AFTER
        if rebuild is not None:
            since = max(since, parse_time(rebuild.moved)) if rebuild.moved else since
            limit = _QUIET.get(rebuild.phase, STUCK_AFTER)
        left = limit - (now - since)
        if left > timedelta():
            plan.again_in(left + timedelta(seconds=1))
            if rebuild is not None:
                plan.waits.append(f"{pod.name} is rebuilt from its master{rebuild}")
        elif rebuild is not None and pod.is_running:
            plan.troubles.append(("RebuildStuck", f"the rebuild of {pod.name} gets no further{rebuild}"))
        else:
            why = f": {pod.trouble}" if pod.trouble else ""
            plan.troubles.append(("PodStuck", f"{pod.name} is not ready{why}"))
