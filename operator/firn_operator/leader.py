"""Who of several operators acts: one Lease, judged by a clock that nobody sets.

An operator takes the Lease when it has seen it unchanged for ``TAKE_AFTER_S`` by its own monotonic clock: times in the Lease
are for people. It renews by compare-and-set; what it may do ends ``ACT_S`` after the last successful renewal was *sent*,
which is before anybody else can have taken over. One that has stopped leading ends its process: whatever it knew is old.

Invariant: two operators never act in the same moment, as long as no clock runs more than a third faster than another's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from random import Random
from typing import Any, TypeVar

from firn.errors import Conflict, FirnError
from firn_operator.brokers import Brokers, Way
from firn_operator.kube import LEASE, Kind, Kube, Obj
from firn_operator.names import LABEL_NAME

_log = logging.getLogger(__name__)

RENEW_S, ACT_S, TAKE_AFTER_S = 3.0, 10.0, 15.0
RETRY_S = 1.0  # after a renewal that failed: one bad answer in three must not cost the lead
_Clock = Callable[[], float]
T = TypeVar("T")


class Leader:
    """``identity``: of this process, and of no other one ever."""

    def __init__(
        self, kube: Kube, namespace: str, name: str, identity: str, *, clock: _Clock, randomness: Random
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._clock = clock
        self._randomness = randomness
        self._seen: tuple[str, float] | None = None  # version of the Lease, and since when it is that
        self._version = ""
        self._until = float("-inf")
        self.last_tick = clock()

    def is_leading(self) -> bool:
        """Whether this process may act now."""
        return self.left_s() > 0

    def left_s(self) -> float:
        """For how many seconds more this process may act."""
        return self._until - self._clock()

    async def lead(self) -> None:
        """Return when this process leads."""
        while not await self.tick():
            await asyncio.sleep(RENEW_S * self._randomness.uniform(0.5, 1.0))

    async def keep(self) -> None:
        """Renew for as long as that works; return when this process does not lead any more."""
        pause = RENEW_S
        while True:
            await asyncio.sleep(pause * self._randomness.uniform(0.8, 1.0))
            before = self._until
            # Asked before the tick: what was not renewed in time is not taken back as if nothing had been.
            if not self.is_leading() or not await self.tick():
                return
            pause = RENEW_S if self._until > before else RETRY_S

    async def tick(self) -> bool:
        """One look at the Lease, and one try to have it; whether this process leads."""
        self.last_tick = self._clock()
        try:
            lease = await self._kube.get(LEASE, self._namespace, self._name)
            if lease is None:
                sent = self._clock()
                self._hold(await self._kube.create(LEASE, self._namespace, self._body(None)), sent)
            elif self._may_take(lease):
                sent = self._clock()
                taken = await self._kube.patch(LEASE, self._namespace, self._name, self._body(lease))
                if taken is not None:
                    self._hold(taken, sent)
        except Conflict:
            pass  # somebody else was quicker
        except FirnError as error:
            _log.warning("the Lease %s: %s", self._name, error.message)
        return self.is_leading()

    async def release(self) -> None:
        """Let the next one take over at once."""
        if not self.is_leading():
            return
        self._until = float("-inf")
        meta: Obj = {"resourceVersion": self._version}
        body: Obj = {"metadata": meta, "spec": {"holderIdentity": ""}}
        try:
            await self._kube.patch(LEASE, self._namespace, self._name, body)
        except FirnError as error:
            _log.warning("the Lease %s was not released: %s", self._name, error.message)

    def _hold(self, lease: Obj, sent: float) -> None:
        self._version = str(lease["metadata"].get("resourceVersion", ""))
        self._until = sent + ACT_S

    def _may_take(self, lease: Obj) -> bool:
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        if holder in ("", self.identity):
            return True
        version, now = str(lease["metadata"].get("resourceVersion", "")), self._clock()
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] >= TAKE_AFTER_S

    def _body(self, lease: Obj | None) -> Obj:
        spec = (lease or {}).get("spec") or {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = spec.get("holderIdentity") != self.identity
        wanted: Obj = {
            "holderIdentity": self.identity, "leaseDurationSeconds": int(TAKE_AFTER_S), "renewTime": now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (1 if is_new and lease else 0),
        }  # fmt: skip
        if is_new:
            wanted["acquireTime"] = now
        meta: Obj = {
            "name": self._name,
            "namespace": self._namespace,
            "labels": {LABEL_NAME: "firn-operator"},
        }
        if lease is not None:
            meta = {"resourceVersion": lease["metadata"].get("resourceVersion")}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": wanted}


class Deposed(FirnError):
    """This operator does not lead any more: it writes nothing."""


class Fencing:
    """``Kube`` and ``Brokers`` that change things only while this process leads.

    A request is given up when the time to act is over: what it asked for may still be done, in the time until another
    operator can have taken over, and not later.
    """

    def __init__(self, kube: Kube, brokers: Brokers, left_s: Callable[[], float]) -> None:
        self._kube = kube
        self._brokers = brokers
        self._left_s = left_s

    async def _while_leading(self, ask: Callable[[], Awaitable[T]]) -> T:
        left = self._left_s()
        if left <= 0:
            raise Deposed("this operator does not lead any more")
        try:
            async with asyncio.timeout(left):
                return await ask()
        except TimeoutError as error:
            raise Deposed(
                "this operator leads no more, and it is not known what came of a request"
            ) from error

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        return await self._kube.get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> list[Obj]:
        return await self._kube.list(kind, namespace, selector=selector)

    async def create(self, kind: Kind, namespace: str, body: Obj) -> Obj:
        return await self._while_leading(lambda: self._kube.create(kind, namespace, body))

    async def apply(self, kind: Kind, namespace: str, body: Obj, *, sub: str = "") -> Obj | None:
        return await self._while_leading(lambda: self._kube.apply(kind, namespace, body, sub=sub))

    async def patch(self, kind: Kind, namespace: str, name: str, body: Obj) -> Obj | None:
        return await self._while_leading(lambda: self._kube.patch(kind, namespace, name, body))

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, orphan: bool = False
    ) -> None:
        await self._while_leading(lambda: self._kube.delete(kind, namespace, name, uid=uid, orphan=orphan))

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        return await self._while_leading(lambda: self._kube.evict(namespace, pod, uid))

    async def switch_over(self, way: Way, group: int, to: str) -> None:
        await self._while_leading(lambda: self._brokers.switch_over(way, group, to))

    async def compact(self, way: Way, topic: str) -> Mapping[str, Any]:
        return await self._while_leading(lambda: self._brokers.compact(way, topic))

    async def compaction(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        return await self._brokers.compaction(way, topic)

    async def cancel(self, way: Way, topic: str) -> None:
        await self._while_leading(lambda: self._brokers.cancel(way, topic))

    async def describe(self, way: Way, topic: str) -> Mapping[str, Any]:
        return await self._brokers.describe(way, topic)

    async def plan(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        return await self._brokers.plan(way, topic)

    async def cancel_plan(self, way: Way, topic: str) -> None:
        await self._while_leading(lambda: self._brokers.cancel_plan(way, topic))
