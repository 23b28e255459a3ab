"""A topic's ``forceCompaction.schedule``: five fields of cron, in UTC. When it is due, a ForceCompaction is made.

What must not be forgotten is in the topic's status: which schedule counts, and up to which moment it has been seen to. A
schedule that is new or changed counts from now on, so nothing that lies behind it is made up for. A run is named after its
moment: two operators make one. When the operator was away, at most the last one is made up for, and only within an hour;
while a run that the schedule asked for has not ended, the next one is passed over.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cronsim import CronSim, CronSimError

from firn.errors import Conflict
from firn_operator.certificates import parse_time
from firn_operator.compactions import ENDED, parse_run
from firn_operator.events import Events
from firn_operator.kube import COMPACTION, TOPIC, Kube, Obj, name_of, namespace_of
from firn_operator.names import API_VERSION, LABEL_MANAGED_BY, LABEL_NAME, LABEL_SCHEDULED, MANAGER
from firn_operator.observe import Cache
from firn_operator.same import digest
from firn_operator.spec import TopicWish, parse_topic

LATE_MAX = timedelta(hours=1)
KEPT_S = 30 * 86_400  # of a run that has ended; most go before, by historyLimit
_TOPIC_MAX = 200  # characters of a topic's name in the name of a run
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is to be done for a schedule now."""

    due: datetime | None = None  # a run is to be made for this moment
    missed: datetime | None = None  # a moment that is passed over
    status: Obj | None = field(default=None, hash=False)
    trouble: tuple[str, str] | None = None
    look_again: timedelta | None = None


def plan_schedule(topic: TopicWish, known: Mapping[str, Any], now: datetime, *, is_busy: bool) -> Schedule:
    """``known``: the schedule's part of the topic's status; ``is_busy``: a run of this schedule has not ended."""
    expression = topic.forced.schedule
    if expression is None:
        return Schedule()
    try:
        following = next(CronSim(expression, now))
        last = next(CronSim(expression, now + timedelta(seconds=1), reverse=True))
    except (CronSimError, StopIteration) as error:
        said = str(error) or "no such day"
        return Schedule(
            trouble=("BadSchedule", f"forceCompaction.schedule {expression!r} is no schedule: {said}")
        )
    seen = parse_time(str(known["lastTime"])) if known.get("lastTime") else None
    is_new = known.get("expression") != expression or seen is None
    status: Obj = {"expression": expression, "lastTime": _text(now), "nextTime": _text(following)}
    look_again = max(following - now, timedelta(seconds=1))
    if is_new or seen is None:
        return Schedule(status=status, look_again=look_again)
    if last <= seen:
        return Schedule(status={**status, "lastTime": _text(seen)}, look_again=look_again)
    status["lastTime"] = _text(last)
    is_passed_over = is_busy or now - last > LATE_MAX
    return Schedule(
        None if is_passed_over else last, last if is_passed_over else None, status, None, look_again
    )


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime(_TIME)


def scheduled_run(topic: TopicWish, moment: datetime) -> Obj:
    """The ForceCompaction of a moment."""
    name = topic.id.name
    if len(name) > _TOPIC_MAX:
        name = f"{name[: _TOPIC_MAX - 17].rstrip('-.')}-{digest(name)}"
    owner = {"apiVersion": API_VERSION, "kind": TOPIC.kind, "name": topic.id.name, "uid": topic.id.uid}
    meta: Obj = {
        "name": f"{name}-{int(moment.timestamp()) // 60}", "namespace": topic.id.namespace, "ownerReferences": [owner],
        "labels": {LABEL_NAME: "firn", LABEL_MANAGED_BY: MANAGER, LABEL_SCHEDULED: "true"},
    }  # fmt: skip
    spec: Obj = {"topicRef": {"name": topic.id.name}, "ttlSecondsAfterFinished": KEPT_S, **topic.forced.run}
    return {"apiVersion": API_VERSION, "kind": COMPACTION.kind, "metadata": meta, "spec": spec}


def is_busy(topic: str, runs: Iterable[Obj]) -> bool:
    """Whether a run that a topic's schedule asked for has not ended."""
    found = [parse_run(each) for each in runs]
    return any(each.topic == topic and each.is_scheduled and each.phase not in ENDED for each in found)


class Schedules:
    def __init__(self, kube: Kube, cache: Cache, events: Events, now: Callable[[], datetime]) -> None:
        self._kube = kube
        self._cache = cache
        self._events = events
        self._now = now

    async def work(self, resource: Obj) -> Schedule:
        """Make the run that is due. The status is to be written behind it: a run that is there is not made twice."""
        topic = parse_topic(resource)
        if topic.forced.schedule is None:
            return Schedule()
        known = (resource.get("status") or {}).get("schedule") or {}
        busy = is_busy(name_of(resource), self._cache.all(COMPACTION, namespace_of(resource)))
        found = plan_schedule(topic, known, self._now(), is_busy=busy)
        if found.due is not None:
            body = scheduled_run(topic, found.due)
            try:
                await self._kube.create(COMPACTION, namespace_of(resource), body)
            except Conflict:
                pass  # made before, by this operator or another one
            await self._events.post(
                resource, "CompactionScheduled", f"{name_of(body)} was asked for by the schedule"
            )
        elif found.missed is not None:
            why = "the run before it has not ended" if busy else "the operator was away"
            await self._events.post(
                resource, "ScheduleMissed", f"{_text(found.missed)} is passed over: {why}", is_warning=True
            )
        return found
