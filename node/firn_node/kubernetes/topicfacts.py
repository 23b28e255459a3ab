"""How compaction of each topic stands, in the topic's status: one row of a group, written by that group's master.

======================  ==========================================================================
``group``               the key of the row
``partitions``          how many of the topic's live in the group
``dirty``               of their bytes, how many are not compacted, in steps of 5 %
``dirtiest``            the partition with the largest share, ``dirtiestDirty``: that share
``lastCompaction``      when the newest run of one of them began
``failed``              the partition whose newest run failed, and why; left out: none
======================  ==========================================================================

A cluster at rest is written nothing to: a row is told when it says something else and has come to rest, or while it does
not, every few minutes (``Pace``); of a topic that has nothing to compact and never had, nothing is told at all. All of it
is for people: nothing is decided by it, so that it may be old.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from firn_node.engine.api import TopicInfo
from firn_node.engine.partition import DirtyState
from firn_node.kubernetes.api import APPLY_PATCH, NOT_FOUND, Api, ApiError, Denied, Object
from firn_node.kubernetes.conditions import FIELD_MANAGER
from firn_node.kubernetes.topics import Ours

PORTION = 50  # partitions looked at in a tick: 1,000 topics of one in 20 s
WRITES = 5  # in a tick
STEP = 5  # per cent

log = logging.getLogger("firn.kubernetes")


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. Of one topic: what has been the same for ``rest_s`` is told, ``pause_s`` after the last time; what keeps
    changing, ``again_s`` after it.
    """

    tick_s: float = 1.0
    rest_s: float = 10.0
    pause_s: float = 60.0
    again_s: float = 300.0


class Host(Protocol):
    """The part of the broker that this needs."""

    def leads(self) -> bool:
        """Whether it is the master of its group, and settled."""
        ...

    def topics_here(self) -> list[TopicInfo]:
        """Topics of users with partitions in this group."""
        ...

    def dirty_states(self, topic: TopicInfo) -> Mapping[int, DirtyState]:
        """Of the topic's partitions in this group, by number; none is opened for it."""
        ...


def row_of(group: int, states: Mapping[int, DirtyState]) -> dict[str, Any] | None:
    """What is told of a topic's partitions; None: nothing yet."""
    dirty = sum(state.dirty_bytes for state in states.values())
    total = dirty + sum(state.clean_bytes for state in states.values())
    begun = max((state.last_started_ms for state in states.values()), default=-1)
    if not total and begun < 0:
        return None
    dirtiest = max(states, key=lambda number: (_share(states[number]), -number))
    row: dict[str, Any] = {
        "group": group, "partitions": len(states), "dirty": _percent(dirty / total if total else 0.0),
        "dirtiest": dirtiest, "dirtiestDirty": _percent(_share(states[dirtiest])),
    }  # fmt: skip
    if begun >= 0:
        row["lastCompaction"] = datetime.fromtimestamp(begun // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    failed = [number for number, state in sorted(states.items()) if state.last_result == "failed"]
    if failed:
        row["failed"] = f"partition {failed[0]}: {states[failed[0]].last_reason}"[:512]
    return row


def _share(state: DirtyState) -> float:
    total = state.dirty_bytes + state.clean_bytes
    return state.dirty_bytes / total if total else 0.0


def _percent(share: float) -> str:
    return f"{STEP * round(100 * share / STEP)}%"


@dataclass(slots=True)
class _Told:
    """What the resource of a topic shows; ``uid`` empty: there is no resource of ours. And what was seen last."""

    topic_id: int
    uid: str
    row: dict[str, Any] | None
    seen: dict[str, Any] | None
    seen_at: float
    told_at: float = float("-inf")

    def is_due(self, row: dict[str, Any], now: float, pace: Pace) -> bool:
        if row != self.seen:
            self.seen, self.seen_at = row, now
        if row == self.row or now < self.told_at + pace.pause_s:
            return False
        return now >= self.seen_at + pace.rest_s or now >= self.told_at + pace.again_s


class TopicFacts:
    def __init__(self, host: Host, api: Api, ours: Ours, group: int, *, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._host = host
        self._api = api
        self._ours = ours
        self._group = group
        self._path = f"/apis/firn.dev/v1alpha1/namespaces/{ours.namespace}/compactedtopics"
        self._told: dict[str, _Told] = {}
        self._after = ""  # the last topic that was looked at

    async def run(self) -> None:
        """Tell of the topics whenever this broker is its group's master, until cancelled."""
        while True:
            await asyncio.sleep(self._pace.tick_s)
            if not self._host.leads():
                self._told.clear()
                continue
            try:
                await self._tick(asyncio.get_running_loop().time())
            except ApiError as error:
                log.info("facts of the topics of group %s: %s", self._group, error)

    async def _tick(self, now: float) -> None:
        """Errors: ApiError."""
        writes = 0
        for topic in self._portion():
            row = row_of(self._group, self._host.dirty_states(topic))
            told = self._told.get(topic.name)
            if row is None:
                continue
            if told is None or told.topic_id != topic.topic_id:
                told = self._told[topic.name] = _Told(topic.topic_id, "", None, row, now)
            if not told.is_due(row, now, self._pace):
                continue
            told.told_at = now
            if not told.uid:
                told.uid, told.row = await self._look(topic)
            if told.uid and row != told.row:
                await self._tell(topic.name, told, row)
                writes += 1
            if writes >= WRITES:
                self._after = topic.name
                return

    def _portion(self) -> Iterable[TopicInfo]:
        """The next topics in the order of their names, with about ``PORTION`` partitions."""
        topics = sorted(self._host.topics_here(), key=lambda topic: topic.name)
        ahead = [topic for topic in topics if topic.name > self._after] or topics
        taken: list[TopicInfo] = []
        count = 0
        for topic in ahead:
            taken.append(topic)
            count += len(topic.partitions_in(self._group))
            if count >= PORTION:
                break
        else:
            self._after = ""
            return taken
        self._after = taken[-1].name
        return taken

    async def _look(self, topic: TopicInfo) -> tuple[str, dict[str, Any] | None]:
        """The uid of the topic's resource, empty without one, and the row that it shows. *Errors*: ApiError."""
        try:
            resource = await self._api.request("GET", f"{self._path}/{topic.name}")
        except Denied as error:
            if error.status != NOT_FOUND:
                raise
            return "", None
        status: Object = resource.get("status") or {}
        if not self._ours.has(resource) or status.get("topicId") not in (None, str(topic.topic_id)):
            return "", None
        rows = status.get("compaction") or ()
        row = next((dict(each) for each in rows if each.get("group") == self._group), None)
        return str(resource["metadata"]["uid"]), row

    async def _tell(self, name: str, told: _Told, row: dict[str, Any]) -> None:
        """Errors: ApiError."""
        body: Object = {
            "apiVersion": "firn.dev/v1alpha1", "kind": "CompactedTopic", "metadata": {"name": name, "uid": told.uid},
            "status": {"compaction": [row]},
        }  # fmt: skip
        try:
            await self._api.request(
                "PATCH", f"{self._path}/{name}/status",
                query={"fieldManager": f"{FIELD_MANAGER}-{self._group}", "force": "true"}, body=body, content=APPLY_PATCH,
            )  # fmt: skip
        except Denied as error:
            if error.status != NOT_FOUND:
                raise
            told.uid = ""
        told.row = row
