"""The BrokerGroup of a broker: how many replicas are wished, which the broker obeys, and a status, which its master
writes.

- The status is a copy of the group record, with what its master knows of the members, for people and the operator; it
  is never read for a decision. It is written when more than renewals changed, at most once in ``WRITE_S``.
- A member whose ordinal is the wished number or more is on its way out: its master takes it out of ``in_sync`` and then
  out of ``members``, and it asks for neither again. One that is wished again after that starts anew.
- How far a rebuild is, only who is being rebuilt knows: it says so itself, under a field manager of its own, with the
  time at which it last got further (``lastProgressTime``), by which the operator tells a long one from a stuck one.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from firn_node.clock import Clock, Randomness
from firn_node.kubernetes.api import APPLY_PATCH, Api, ApiError, Object
from firn_node.kubernetes.collection import Collection
from firn_node.kubernetes.conditions import FIELD_MANAGER, condition, differs, moment
from firn_node.replication.driver import GroupDriver
from firn_node.replication.record import GroupRecord, LogId, Member
from firn_node.replication.state import State
from firn_node.settings import GroupSettings

SERVING = "Serving"
POLL_S = 0.25
WRITE_S = 1.0
PROGRESS_S = 10.0
LEAVE_S = 10.0
_FAILED_S = 5.0
_NEEDED_TTLS = 3
_OUR_MEMBER_FIELDS = "address"  # by which a member of the status is the master's to list

log = logging.getLogger("firn.kubernetes")


class Host(Protocol):
    """The part of the broker that this needs."""

    group: GroupDriver | None
    wished_replicas: int

    def rebuild_status(self) -> dict[str, Any] | None: ...

    def end_process(self, reason: str) -> None:
        """End this process's part in its group; a new process starts from the folder."""
        ...


def status_of(state: State, now: float, hindrance: str | None) -> dict[str, Any]:
    """What a master has to say of its group; ``conditions`` without a time."""
    record = state.record
    assert record is not None
    master = None if record.master is None else record.members[record.master.log_id].node
    newest = _newest(record, state)
    found: dict[str, Any] = {
        "epoch": record.epoch,
        "version": record.version,
        "inSync": sorted(record.members[log_id].node for log_id in record.in_sync),
        "members": [
            {
                "node": member.node, "address": member.address, "ordinal": member.ordinal, "logId": log_id,
                "inSync": log_id in record.in_sync, "state": _state_of(state, log_id, now),
            }
            for log_id, member in newest
        ],
        "conditions": [
            {
                "type": SERVING,
                "status": "True" if hindrance is None else "False",
                "reason": "MasterServes" if hindrance is None else "MasterWaits",
                "message": hindrance or "",
            }
        ],
    }  # fmt: skip
    return found if master is None else {**found, "currentMaster": master}


def _newest(record: GroupRecord, state: State) -> list[tuple[LogId, Member]]:
    """One log of each node: a list by nodes has no room for the one that a lost disk left behind."""
    by_node: dict[str, tuple[LogId, Member]] = {}
    for log_id, member in record.members.items():
        known = by_node.get(member.node)
        if known is None or log_id in record.in_sync or known[0] not in record.in_sync | state.heard.keys():
            by_node[member.node] = log_id, member
    return sorted(by_node.values(), key=lambda pair: (pair[1].ordinal, pair[1].node))


def _state_of(state: State, log_id: LogId, now: float) -> str:
    record, mastery = state.record, state.mastery
    if log_id == state.me.log_id:
        return "serving"
    heard = state.heard.get(log_id)
    if heard is None or mastery is None or heard.epoch != mastery.epoch:
        return "silent"
    if now - heard.at > state.timing.lease_ttl:
        return "silent"
    if not heard.is_rebuilt:
        return "rebuilding"
    return "following" if record is not None and log_id in record.in_sync else "catching-up"


def is_news(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether the status that is there says something else; the version alone is no news."""
    if differs(found, {name: value for name, value in wanted.items() if name != "version"}):
        return True
    listed = (found or {}).get("members") or ()
    nodes = {member["node"] for member in wanted["members"]}
    gone = any(_OUR_MEMBER_FIELDS in member and member["node"] not in nodes for member in listed)
    return gone or ("currentMaster" in (found or {}) and "currentMaster" not in wanted)


def _reached(progress: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """How far a rebuild is; a reason alone is no progress."""
    return tuple((progress or {}).get(name) for name in ("phase", "partitions_done", "bytes"))


class GroupKeeper:
    """``known``: set once it is known how many replicas are wished."""

    def __init__(
        self, host: Host, api: Api, place: GroupSettings, clock: Clock, randomness: Randomness
    ) -> None:
        self.known = asyncio.Event()
        self._host = host
        self._api = api
        self._place = place
        self._clock = clock
        self._name = place.object_of(place.group)
        self._path = f"/apis/firn.dev/v1alpha1/namespaces/{place.namespace}/brokergroups"
        self._collection = Collection(api, self._path, self._note, randomness, name=self._name)
        self._next_write = self._next_progress = 0.0
        self._progress: (
            dict[str, Any] | None
        ) = {}  # as told; at first nobody knows what an earlier process told
        self._moved_at = ""  # when the rebuild got as far as was told last
        self._has_left = False
        self._taken_out: dict[LogId, int] = {}  # by this process, as master; their ordinals

    def _note(self, name: str) -> None:
        found = self._collection.objects.get(name)
        replicas = ((found or {}).get("spec") or {}).get("replicas")
        if isinstance(replicas, int) and replicas >= 1:
            self._host.wished_replicas = replicas
            self.known.set()

    async def run(self) -> None:
        """Look after the group, until cancelled."""
        watching = asyncio.create_task(self._collection.run(), name="firn BrokerGroup of Kubernetes")
        try:
            while not watching.done():
                await asyncio.sleep(POLL_S)
                if (group := self._host.group) is not None and self.known.is_set():
                    await self._look(group)
            watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _look(self, group: GroupDriver) -> None:
        if group.is_master:
            self._take_out(group)
        elif self._place.ordinal >= self._host.wished_replicas:
            await self._leave(group)
            if self._has_left and self._is_needed(group):
                self._host.end_process("this replica was leaving, and its group needs it to have a master")
        elif self._has_left:
            self._host.end_process("this replica had left its group, and is wanted again")
        try:
            await self._tell(group)
        except ApiError as error:
            log.info("BrokerGroup %s/%s: %s", self._place.namespace, self._name, error)
            self._next_write = self._next_progress = asyncio.get_running_loop().time() + _FAILED_S

    def _take_out(self, group: GroupDriver) -> None:
        """Nobody is out who is wished, and nobody in who is not; the master itself stays until it has handed over."""
        record, mastery = group.state.record, group.state.mastery
        if record is None or mastery is None:
            return
        for log_id, ordinal in list(self._taken_out.items()):
            if ordinal < self._host.wished_replicas:
                del self._taken_out[log_id]
                group.readmit(log_id)
        for log_id, member in record.members.items():
            is_surplus = member.ordinal >= self._host.wished_replicas and log_id != group.me.log_id
            if is_surplus and log_id not in mastery.removing:
                log.warning("group %s: %s is taken out", group.me.group_id, member.node)
                self._taken_out[log_id] = member.ordinal
                group.remove(log_id)

    async def _leave(self, group: GroupDriver) -> None:
        """Only from a master that can be followed: a group that has none may need this replica to get one."""
        if self._has_left or not group.is_following:
            return
        self._has_left = True
        log.warning("group %s: this replica is not wished any more: it leaves", group.me.group_id)
        try:
            async with asyncio.timeout(LEAVE_S):
                await group.leave()
        except TimeoutError:
            log.warning("group %s: its master takes this replica out later", group.me.group_id)

    def _is_needed(self, group: GroupDriver) -> bool:
        """Nobody renews the lease any more, and this replica, which stands for nothing, may be who has to."""
        silent = self._clock.monotonic() - group.state.record_at
        return group.is_in_sync and silent > _NEEDED_TTLS * group.state.timing.lease_ttl

    async def _tell(self, group: GroupDriver) -> None:
        """Errors: ApiError."""
        now = asyncio.get_running_loop().time()
        found = self._collection.objects.get(self._name)
        if found is None:
            return
        if group.is_master and group.state.record is not None and now >= self._next_write:
            await self._tell_group(group, found, now)
        elif now >= self._next_progress:
            await self._tell_progress(group, found, now)

    async def _tell_group(self, group: GroupDriver, found: Object, now: float) -> None:
        wanted = status_of(group.state, self._clock.monotonic(), group.hindrance)
        if not is_news(found.get("status"), wanted):
            return
        self._next_write = now + WRITE_S
        [serving] = wanted["conditions"]
        before = condition(found, SERVING) or {}
        is_same = before.get("status") == serving["status"]
        serving["lastTransitionTime"] = (is_same and before.get("lastTransitionTime")) or moment(self._clock)
        await self._apply(found, FIELD_MANAGER, wanted)

    async def _tell_progress(self, group: GroupDriver, found: Object, now: float) -> None:
        progress = self._rebuild(group)
        if progress is None and not self._has_told(found):
            self._progress = None
        if progress == self._progress:
            return
        self._next_progress = now + PROGRESS_S
        members: list[dict[str, Any]] = []
        if progress is not None:
            if _reached(progress) != _reached(self._progress):
                self._moved_at = moment(self._clock)
            names = {"partitions_done": "partitionsDone", "bytes_expected": "bytesExpected"}
            rebuild = {names.get(name, name): value for name, value in progress.items()}
            rebuild["reason"] = str(rebuild.get("reason") or "")[:1024]
            rebuild["lastProgressTime"] = self._moved_at
            members = [{"node": self._node, "rebuild": rebuild}]
        await self._apply(found, f"{FIELD_MANAGER}-{self._node}", {"members": members})
        self._progress = progress

    def _rebuild(self, group: GroupDriver) -> dict[str, Any] | None:
        """How far the rebuild is; once it has ended, ``joined`` for one more turn: the pod is ready a moment later."""
        progress, told = self._host.rebuild_status(), self._progress
        if progress is not None or not told or told["phase"] == "joined":
            return progress
        return {**told, "phase": "joined" if group.is_in_sync else "catching-up", "reason": None}

    def _has_told(self, found: Object) -> bool:
        """Whether the status shows a rebuild of this replica."""
        listed = (found.get("status") or {}).get("members") or ()
        return any(member["node"] == self._node and "rebuild" in member for member in listed)

    @property
    def _node(self) -> str:
        assert self._host.group is not None
        return self._host.group.me.member.node

    async def _apply(self, found: Object, manager: str, status: Mapping[str, Any]) -> None:
        metadata = {"name": self._name, "uid": found["metadata"]["uid"]}
        body = {
            "apiVersion": "firn.dev/v1alpha1", "kind": "BrokerGroup", "metadata": metadata, "status": dict(status),
        }  # fmt: skip
        answered = await self._api.request(
            "PATCH", f"{self._path}/{self._name}/status", query={"fieldManager": manager, "force": "true"},
            body=body, content=APPLY_PATCH,
        )  # fmt: skip
        self._collection.keep(answered)
