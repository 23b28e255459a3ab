"""CompactedTopics become topics: group 0's master watches those of its cluster and answers in their status.

What is decided about one resource is pure (``plan``); the rest carries it out, through the log, whoever else is up.

- A resource belongs to the cluster that ``spec.clusterRef`` names, without it to the one of its own name.
- A topic that no resource names is left alone; one that a resource begins to name is changed into what that says.
- A topic goes only for a resource that is being deleted with the policy ``Delete``, read once more before it goes.
- Status is written by server-side apply, only where it says something else than what is there: a group in its steady
  state, and a new master, write nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from firn.errors import FirnError, Invalid, NotMaster, UnknownTopic
from firn.runs import principals_of_runs
from firn.topicspec import TopicSpec, check_topic_name, parse_spec
from firn_node.clock import Clock, Randomness
from firn_node.engine.api import TopicInfo
from firn_node.kubernetes.api import APPLY_PATCH, NOT_FOUND, Api, ApiError, Denied, Object
from firn_node.kubernetes.collection import Collection
from firn_node.kubernetes.conditions import FIELD_MANAGER, condition, differs, moment

APPLIED = "Applied"
AT_ONCE = 16
POLL_S = 0.2
_PAUSE_S, _PAUSE_MAX_S = 0.5, 10.0

log = logging.getLogger("firn.kubernetes")


@dataclass(frozen=True, slots=True)
class Ours:
    """Which resources are this cluster's."""

    namespace: str
    cluster: str

    def has(self, resource: Object) -> bool:
        spec, name = resource.get("spec") or {}, resource["metadata"]["name"]
        return bool((spec.get("clusterRef") or {}).get("name", name) == self.cluster)


@dataclass(frozen=True, slots=True)
class Create:
    spec: TopicSpec


@dataclass(frozen=True, slots=True)
class Update:
    spec: TopicSpec


@dataclass(frozen=True, slots=True)
class Keep:
    """It is as it is to be."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Also when it is gone already: that is to be said."""


@dataclass(frozen=True, slots=True)
class Refuse:
    message: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The resource goes, and its topic stays."""


Step = Create | Update | Keep | Delete | Refuse | Leave


def plan(resource: Object, known: TopicInfo | None, ours: Ours, *, default_min_in_sync: int) -> Step:
    """What a resource asks for, given its topic as it is.

    ``minInSync`` that it leaves out is the default for a new topic and stays as it is for one that there is.
    """
    spec = resource.get("spec") or {}
    if resource["metadata"].get("deletionTimestamp"):
        return Leave() if spec.get("deletionPolicy") == "Retain" else Delete()
    try:
        name = check_topic_name(resource["metadata"]["name"])
        least = default_min_in_sync if known is None else known.spec.durability.min_in_sync
        access = [*(spec.get("access") or own_access(ours)), run_access(ours, name)]
        wanted = parse_spec({**spec, "access": access}, min_in_sync=least)
    except Invalid as error:
        return Refuse(error.message)
    if known is None:
        return Create(wanted)
    if known.spec.partitions != wanted.partitions:
        return Refuse(
            f"topic {name} has {known.spec.partitions} partition(s) and this resource says {wanted.partitions}: the "
            "number cannot change, because keys would move; say the old number, or make a topic under another name"
        )
    return Keep() if known.spec == wanted else Update(wanted)


def own_access(ours: Ours) -> list[dict[str, Any]]:
    """The rules of a topic that gives none: service accounts of its namespace may read and write."""
    return [{"principals": [f"system:serviceaccount:{ours.namespace}:*"], "allow": ["read", "write"]}]


def run_access(ours: Ours, topic: str) -> dict[str, Any]:
    """The rule that every topic has beside its own: runs of Spark that the operator starts may read and compact it."""
    return {"principals": principals_of_runs(ours.namespace, topic), "allow": ["read", "compact"]}


def status_of(resource: Object, topic: TopicInfo | None, applied: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resource's status that is the brokers'."""
    found: dict[str, Any] = {"conditions": [applied]}
    if topic is not None:
        found["topicId"] = str(topic.topic_id)
        found["partitions"] = topic.spec.partitions
        found["minInSync"] = topic.spec.durability.min_in_sync
    return found


class Host(Protocol):
    """The part of the broker that this needs."""

    @property
    def default_min_in_sync(self) -> int: ...
    def decides(self) -> bool:
        """Whether it is the master of group 0, and settled."""
        ...

    def topic(self, name: str) -> TopicInfo: ...
    async def create_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None) -> TopicInfo: ...
    async def update_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None) -> TopicInfo: ...
    async def delete_topic(self, name: str, *, wait_s: float | None) -> None: ...


class TopicKeeper:
    """``may_begin``: set once it is known how many replicas the group is to have (the default of minInSync)."""

    def __init__(
        self, host: Host, api: Api, ours: Ours, may_begin: asyncio.Event, clock: Clock, randomness: Randomness
    ) -> None:
        self._host = host
        self._api = api
        self._ours = ours
        self._may_begin = may_begin
        self._clock = clock
        self._randomness = randomness
        self._path = f"/apis/firn.dev/v1alpha1/namespaces/{ours.namespace}/compactedtopics"
        self._due: dict[str, float] = {}  # name -> when to look at it, in time of the loop
        self._failures: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look after the topics whenever this broker decides on them, until cancelled."""
        await self._may_begin.wait()
        while True:
            if self._host.decides():
                await self._decide()
            await asyncio.sleep(POLL_S)

    async def _decide(self) -> None:
        """From a list that is read now, so that nothing older than this mastership counts, until it ends."""
        self._due.clear()
        self._failures.clear()
        self._collection = Collection(self._api, self._path, self._note, self._randomness)
        watching = asyncio.create_task(self._collection.run(), name="firn topics of Kubernetes")
        try:
            while self._host.decides() and not watching.done():
                await self._settle_some()
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _note(self, name: str) -> None:
        self._failures.pop(name, None)
        self._due[name] = 0.0
        self._changed.set()

    async def _settle_some(self) -> None:
        now = asyncio.get_running_loop().time()
        ready = [name for name, at in self._due.items() if at <= now][:AT_ONCE]
        if not ready:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_S)
            return
        for name in ready:
            del self._due[name]
        await asyncio.gather(*(self._settle(name) for name in ready))

    async def _settle(self, name: str) -> None:
        """Bring one topic about, and say so; what fails is tried again, later each time."""
        resource = self._collection.objects.get(name)
        if resource is None:
            return
        try:
            if not self._ours.has(resource):
                return
            await self._bring_about(name, resource)
            self._failures.pop(name, None)
            return
        except NotMaster:
            return  # the next master does it
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # what no schema let through
            log.exception("CompactedTopic %s/%s is malformed", self._ours.namespace, name)
            with contextlib.suppress(ApiError):
                await self._say(resource, None, "False", "Refused", f"it is malformed: {error!r}")
            return
        except FirnError as error:
            log.info("topic %s: %s", name, error.message)
            await self._say_waiting(resource, error.message)
        except ApiError as error:
            log.info("CompactedTopic %s/%s: %s", self._ours.namespace, name, error)
            if isinstance(error, Denied) and error.status == NOT_FOUND:
                return  # it is gone
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        pause = min(_PAUSE_MAX_S, _PAUSE_S * 2.0 ** min(failures - 1, 10))
        at = asyncio.get_running_loop().time() + pause * self._randomness.uniform(0.5, 1.0)
        self._due.setdefault(name, at)

    async def _bring_about(self, name: str, resource: Object) -> None:
        """Errors: FirnError, ApiError."""
        known = self._known(name)
        step = plan(resource, known, self._ours, default_min_in_sync=self._host.default_min_in_sync)
        if isinstance(step, Leave):
            return
        if isinstance(step, Refuse):
            await self._say(resource, known, "False", "Refused", step.message)
            return
        if isinstance(step, Delete):
            await self._delete(name, resource, known)
            return
        reason = "Created"
        if isinstance(step, Create):
            await self._host.create_topic(name, step.spec, wait_s=None)
        elif isinstance(step, Update):
            reason = "Updated"
            await self._host.update_topic(name, step.spec, wait_s=None)
        else:
            before = condition(resource, APPLIED)
            if before is not None and before.get("status") == "True":
                reason = before["reason"]
        await self._say(resource, self._known(name), "True", reason, "")

    def _known(self, name: str) -> TopicInfo | None:
        try:
            return self._host.topic(name)
        except UnknownTopic:
            return None

    async def _delete(self, name: str, resource: Object, known: TopicInfo | None) -> None:
        if known is not None:
            now = await self._api.request("GET", f"{self._path}/{name}")
            is_same = now["metadata"].get("uid") == resource["metadata"].get("uid")
            step = plan(now, known, self._ours, default_min_in_sync=self._host.default_min_in_sync)
            if not is_same or not isinstance(step, Delete):
                return  # another one of this name, or it is to be retained: the watch is about to tell
            await self._host.delete_topic(name, wait_s=None)
            log.warning("topic %s is deleted, as its resource", name)
        await self._say(resource, None, "False", "Deleted", "the topic and its records are gone")

    async def _say_waiting(self, resource: Object, why: str) -> None:
        """Once; what it waits for may change its words with every try."""
        before = condition(resource, APPLIED) or {}
        generation = resource["metadata"].get("generation")
        if before.get("reason") == "Waiting" and before.get("observedGeneration") == generation:
            return
        with contextlib.suppress(ApiError):
            await self._say(resource, self._known(resource["metadata"]["name"]), "False", "Waiting", why)

    async def _say(
        self, resource: Object, topic: TopicInfo | None, status: str, reason: str, message: str
    ) -> None:
        """Write the status, if it says something else. *Errors*: ApiError."""
        metadata = resource["metadata"]
        before = condition(resource, APPLIED)
        at = moment(self._clock)
        if before is not None and before.get("status") == status:
            at = before.get("lastTransitionTime", at)
        applied = {
            "type": APPLIED, "status": status, "reason": reason, "message": message[:2048],
            "observedGeneration": metadata.get("generation", 0), "lastTransitionTime": at,
        }  # fmt: skip
        wanted = status_of(resource, topic, applied)
        if not differs(resource.get("status"), wanted):
            return
        found = await self._api.request(
            "PATCH", f"{self._path}/{metadata['name']}/status", query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body={
                "apiVersion": "firn.dev/v1alpha1", "kind": "CompactedTopic",
                "metadata": {"name": metadata["name"], "uid": metadata["uid"]}, "status": wanted,
            }, content=APPLY_PATCH,
        )  # fmt: skip
        self._collection.keep(found)
