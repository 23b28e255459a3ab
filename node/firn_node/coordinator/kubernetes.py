"""Group records in Kubernetes: one ``coordination.k8s.io/Lease`` per group carries the whole record.

=============================== ====================================================================================
annotation ``firn.dev/group-record``  the record, as one JSON document (``replication.record``); absent: no record yet
``spec.holderIdentity``         for people: the master's node
``spec.leaseTransitions``       for people: the epoch
``spec.acquireTime, renewTime`` for people: when this master was elected, when it renewed last
``spec.leaseDurationSeconds``   for people: ``leaseTtl``
=============================== ====================================================================================

The operator makes the Lease, empty, with its group, and never again; a broker has no right to. Invariants:

- a change is one PATCH under the ``resourceVersion`` that was read with the version it replaces. A renewal counts, so
  that every change changes something: one that does not leaves the ``resourceVersion`` as it was;
- a conflict is looked into: where the record's version is still the expected one, somebody touched something else
  (a label), and the change is tried again;
- reads go to the API server without a version, which makes them consistent; what a watch tells is never newer, and
  where it contradicts what this handle has seen, a read decides;
- a Lease that is not there (any more) is no ``Absent``: nobody may start a group anew because of it;
- a swap is answered within ``answer_s``, whatever becomes of it; nothing is sent twice.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from firn.errors import Corrupt
from firn_node.clock import Clock, Randomness, RealClock, RealRandomness
from firn_node.coordinator.api import (
    Absent,
    Done,
    Found,
    Reading,
    Seen,
    Swap,
    Unknown,
    Unreachable,
    Unusable,
    decide,
)
from firn_node.kubernetes.api import CONFLICT, MERGE_PATCH, NOT_FOUND, Api, ApiError, Denied, Object
from firn_node.kubernetes.collection import Pending
from firn_node.replication.record import NO_VERSION, GroupId, GroupRecord, from_document

RECORD = "firn.dev/group-record"
FIELD_MANAGER = "firn-broker"
_PAUSE_S, _PAUSE_MAX_S = 0.05, 2.0
_WATCH_S = 300  # the server ends a watch after so long, and a new one begins with a read

log = logging.getLogger("firn.coordinator")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A Lease as it was answered."""

    resource_version: str
    record: GroupRecord | None

    @property
    def version(self) -> int:
        return NO_VERSION if self.record is None else self.record.version

    @property
    def reading(self) -> Found | Absent:
        return Absent() if self.record is None else Found(self.record)


@dataclass(slots=True, eq=False)
class _Slot:
    """The newest reading of a watch, until somebody takes it; what comes before it is taken is left out."""

    reading: Reading | None = None
    is_ended: bool = False
    something: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, reading: Reading) -> None:
        self.reading = reading
        self.something.set()

    def end(self) -> None:
        self.is_ended = True
        self.something.set()

    async def next(self) -> Reading | None:
        """None once it has ended, whatever was left."""
        await self.something.wait()
        if self.is_ended:
            return None
        self.something.clear()
        return self.reading


class KubernetesCoordinator:
    """A handle of the Leases of one cluster; it owns ``api``, a connection that the lease shares with nothing.

    ``lease_of``: the name of a group's Lease. ``lease_ttl_s``: a quarter of it bounds each answer, so that a swap that
    got none is tried again in time; a watch that told nothing for half of it, while masters renew every sixth, is
    compared with a read.
    """

    def __init__(
        self, api: Api, namespace: str, lease_of: Callable[[GroupId], str], *, lease_ttl_s: float,
        clock: Clock | None = None, randomness: Randomness | None = None,
    ) -> None:  # fmt: skip
        self._api = api
        self._namespace = namespace
        self._lease_of = lease_of
        self._lease_ttl_s = lease_ttl_s
        self._answer_s = lease_ttl_s / 4
        self._silent_s = lease_ttl_s / 2
        self._clock = clock or RealClock()
        self._randomness = randomness or RealRandomness()
        self._seen = Seen()
        self._stored: dict[GroupId, _Stored] = {}
        self._slots: dict[_Slot, asyncio.Task[None]] = {}
        self._is_closed = False

    async def read(self, group_id: GroupId) -> Reading:
        found = await self._look(group_id)
        return found.reading if isinstance(found, _Stored) else found

    async def compare_and_set(self, new: GroupRecord, *, expected_version: int) -> Swap:
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._swap(new, expected_version)
        except TimeoutError:
            self._stored.pop(new.group_id, None)
            return Unknown(f"{self._name(new.group_id)}: no answer within {self._answer_s:g} s")

    async def _swap(self, new: GroupRecord, expected_version: int) -> Swap:
        group_id = new.group_id
        found: _Stored | Unreachable | Unusable | None = self._stored.get(group_id)
        if self._is_closed or not isinstance(found, _Stored) or found.version != expected_version:
            found = await self._look(group_id)
        while isinstance(found, _Stored):
            refused = decide(found.record, new, expected_version)
            if refused is not None:
                return refused
            try:
                lease = await self._patch(found, new)
                self._note(group_id, _parse(lease, group_id))
                return Done(new)
            except Denied as error:
                if error.status not in (CONFLICT, NOT_FOUND):
                    return self._unknown(group_id, error)
            except (ApiError, Corrupt) as error:
                return self._unknown(group_id, error)
            found = await self._look(group_id)
        return Unknown(found.reason) if isinstance(found, Unreachable) else found

    def _unknown(self, group_id: GroupId, error: Exception) -> Unknown:
        self._stored.pop(group_id, None)
        return Unknown(f"{self._name(group_id)}: {error}")

    async def _patch(self, found: _Stored, new: GroupRecord) -> Object:
        """Errors: ApiError."""
        now = datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        master = None if new.master is None else new.members[new.master.log_id].node
        spec: Object = {
            "holderIdentity": master,
            "leaseTransitions": new.epoch,
            "leaseDurationSeconds": max(1, round(self._lease_ttl_s)),
            "renewTime": now,
        }
        if found.record is None or found.record.epoch != new.epoch:
            spec["acquireTime"] = now
        document = json.dumps(new.to_document(), separators=(",", ":"))
        metadata = {"resourceVersion": found.resource_version, "annotations": {RECORD: document}}
        return await self._api.request(
            "PATCH", self._path(new.group_id), query={"fieldManager": FIELD_MANAGER},
            body={"metadata": metadata, "spec": spec}, content=MERGE_PATCH, within_s=self._answer_s,
        )  # fmt: skip

    async def _look(self, group_id: GroupId) -> _Stored | Unreachable | Unusable:
        """The Lease now, consistently."""
        while not self._is_closed:
            seen = self._seen.versions.get(group_id, NO_VERSION)
            try:
                lease = await self._api.request("GET", self._path(group_id), within_s=self._answer_s)
                found = _parse(lease, group_id)
            except Corrupt as error:
                return Unusable(f"{self._name(group_id)}: {error.message}")
            except Denied as error:
                if error.status == NOT_FOUND:
                    return self._missing(group_id, seen)
                return Unreachable(f"{self._name(group_id)}: {error}")
            except ApiError as error:
                return Unreachable(f"{self._name(group_id)}: {error}")
            if found.version < seen:
                return Unusable(f"{self._name(group_id)}: {self._seen.meet(group_id, found.record)}")
            if found.version >= self._seen.versions.get(group_id, NO_VERSION):
                self._note(group_id, found)
                return found
            # A swap was answered meanwhile: what was read is older than what this handle has told.
        return Unreachable(f"{self._name(group_id)}: this handle is closed")

    def _missing(self, group_id: GroupId, seen: int) -> Unreachable | Unusable:
        if seen:
            return Unusable(
                f"{self._name(group_id)}: version {seen} was there, and now there is no such Lease; put it back, "
                "with its annotations, from a backup"
            )
        return Unreachable(
            f"{self._name(group_id)}: there is no such Lease yet; the operator makes it with the group"
        )

    def _note(self, group_id: GroupId, found: _Stored) -> None:
        if found.version >= self._seen.versions.get(group_id, NO_VERSION):
            self._seen.meet(group_id, found.record)
            self._stored[group_id] = found

    async def watch(self, group_id: GroupId, *, late_s: float = 0.0) -> AsyncGenerator[Reading, None]:
        if self._is_closed:
            return
        slot = _Slot()
        task = asyncio.create_task(self._observe(group_id, slot.tell), name=f"firn lease watch {group_id}")
        task.add_done_callback(lambda _: slot.end())
        self._slots[slot] = task
        told: Reading | None = None
        try:
            while (reading := await slot.next()) is not None:
                if reading != told:
                    told = reading
                    yield reading
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        finally:
            del self._slots[slot]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _observe(self, group_id: GroupId, tell: Callable[[Reading], None]) -> None:
        """Tell what is there, then each change, until cancelled."""
        failures = 0
        while True:
            found = await self._look(group_id)
            tell(found.reading if isinstance(found, _Stored) else found)
            failures += 1
            if isinstance(found, _Stored):
                heard = [0]
                try:
                    await self._follow(group_id, found, tell, heard)
                except ApiError as error:
                    log.info("%s: the watch broke off: %s", self._name(group_id), error)
                if heard[0]:  # a watch that tells nothing is asked for less and less often
                    failures = 0
            pause = min(_PAUSE_MAX_S, _PAUSE_S * 2.0 ** min(failures, 10))
            await asyncio.sleep(pause * self._randomness.uniform(0.5, 1.0))

    async def _follow(
        self, group_id: GroupId, found: _Stored, tell: Callable[[Reading], None], heard: list[int]
    ) -> None:
        """Tell the changes after ``found``; return when the watch has ended, or is no good any more. ``heard`` counts
        its events.

        Errors: ApiError.
        """
        query = {
            "fieldSelector": f"metadata.name={self._lease_of(group_id)}",
            "resourceVersion": found.resource_version,
            "timeoutSeconds": str(_WATCH_S),
        }
        version = found.version
        async with Pending(self._api.watch(self._leases(), query, within_s=self._answer_s)) as events:
            while True:
                told: _Stored | Unusable | None = None
                with contextlib.suppress(TimeoutError):
                    event = await events.next(self._silent_s)
                    if event is None:
                        return
                    heard[0] += 1
                    told = self._told_by(event, group_id)
                now = await self._look(group_id) if told is None else told
                tell(now.reading if isinstance(now, _Stored) else now)
                if not isinstance(now, _Stored) or (told is None and now.version > version):
                    return  # it has missed something: begin again
                version = now.version

    def _told_by(self, event: Object, group_id: GroupId) -> _Stored | Unusable | None:
        """What an event tells; None: nothing that could be believed without a read."""
        if event.get("type") not in ("ADDED", "MODIFIED"):
            return None
        try:
            found = _parse(event.get("object"), group_id)
        except Corrupt as error:
            return Unusable(f"{self._name(group_id)}: {error.message}")
        if found.version < self._seen.versions.get(group_id, NO_VERSION):
            return None
        self._note(group_id, found)
        return found

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for slot, task in list(self._slots.items()):
            slot.end()
            task.cancel()
        await asyncio.gather(*self._slots.values(), return_exceptions=True)
        await self._api.close()

    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    def _path(self, group_id: GroupId) -> str:
        return f"{self._leases()}/{self._lease_of(group_id)}"

    def _name(self, group_id: GroupId) -> str:
        return f"Lease {self._namespace}/{self._lease_of(group_id)}"


def _parse(lease: Any, group_id: GroupId) -> _Stored:
    """Errors: Corrupt."""
    metadata = lease.get("metadata") if isinstance(lease, dict) else None
    resource_version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(resource_version, str):
        raise Corrupt(f"this is no Lease: {str(lease)[:80]}")
    text = (metadata.get("annotations") or {}).get(RECORD)
    if text is None:
        return _Stored(resource_version, None)
    try:
        record = from_document(json.loads(text))
    except ValueError as error:
        raise Corrupt(f"annotation {RECORD}: not JSON: {error}") from error
    if record.group_id != group_id:
        raise Corrupt(f"annotation {RECORD}: the record is of group {record.group_id}, not of {group_id}")
    return _Stored(resource_version, record)
