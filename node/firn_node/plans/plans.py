"""Plans of one broker: made, heard of, carried out, dropped.

1. ``open``: note how far each partition is dispatched, store the plan;
2. statements come in (``upload``); each is durable before it is acknowledged;
3. a partition whose slices are all here is compacted by the scheduler, as far as its key indexes agree;
4. its result is stored, its statements are removed; a crash in between compacts it again, which changes nothing;
5. once all partitions have a result, the other replicas of the group are told by the log to compact by themselves,
   and the plan is done. Who is not the master (yet, or any more) keeps it open until it is, or until nobody has asked
   for it long enough; to tell twice does no harm.

A plan is a file of the master that made it. One whose driver was silent for ``plan_ttl_ms``, whose topic is gone, or
before whose offsets data loss was accepted, is dropped with its uploads; what has been compacted stays.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from firn.errors import (
    FirnError,
    Invalid,
    NotFound,
    NotMaster,
    Unavailable,
    UnknownPartition,
    UnknownPlan,
    UnknownTopic,
)
from firn.statement import Statement
from firn_node.compaction.agreement import Agreement
from firn_node.engine.api import PartitionCompaction, TopicInfo
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.engine.scheduler import Request, Scheduler
from firn_node.failpoints import step
from firn_node.plans.folder import PlanFolder, note
from firn_node.plans.plan import Plan, PlannedPartition, PlanState
from firn_node.plans.upload import Upload

SLICE_RECORDS = 5_000_000  # a task that keeps so many keys in memory takes about 1 GiB
SLICES_MAX = 4096  # of a partition: each is a task, a file, and a row of what is missing
_AT_ONCE = 256  # partitions that are compacted together
_OPENED_AT_ONCE = 32
_AGAIN_S = 5.0
_TELL_AGAIN_S = 1.0
_TELLS = 30
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Plans:
    """``settle`` waits until what was acknowledged in a partition is dispatched, ``in_thread`` does I/O beside the event
    loop, ``force`` asks all replicas of the group for a compaction on a plan's behalf; it is None of a broker of its own.
    """

    core: Core
    partitions: Partitions
    commits: Commits
    scheduler: Scheduler
    settle: Callable[[Partition], Awaitable[None]]
    in_thread: Callable[..., Awaitable[Any]]
    force: Callable[[TopicInfo, str], Awaitable[None]] | None = None
    folder: PlanFolder = field(init=False)
    _plans: dict[int, Plan] = field(default_factory=dict)  # the newest of each topic
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _storing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _running: Request | None = None

    def __post_init__(self) -> None:
        self.folder = PlanFolder(self.core.disk, self.core.settings.data)
        self.scheduler.is_planned = self._is_planned

    async def load(self) -> None:
        """Take up the plans of this folder. *Effects*: what belongs to no open plan is removed."""
        for plan in await self.in_thread(self.folder.load):
            plan.touched = self._now()
            self._plans[plan.topic_id] = plan
        self._wake.set()

    # Asked for.

    async def open(self, topic: TopicInfo, *, run: str, slice_records: int) -> tuple[Plan, bool]:
        """The topic's open plan, the whole one of this ``run``, or a new one; and whether it is new.

        *Effects*: durable on return. *Errors*: Invalid for an internal topic or slices too small; those of opening a
        partition.
        """
        if topic.name.startswith("__"):
            raise Invalid(f"topic {topic.name!r} is internal; its brokers compact it by themselves")
        async with self._opening:
            known = self._known(topic)
            if known is not None and (
                known.is_open or (run and known.run == run and known.state == "done" and known.is_whole)
            ):
                known.touched = self._now()
                return known, False
            if known is None and (stale := self._plans.get(topic.topic_id)) is not None and stale.is_open:
                await self._drop(stale, "expired")
            parts = []
            for number in topic.partitions_in(self.core.group):
                parts.append(await self._part(topic, number, slice_records))
                if len(parts) % _OPENED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # others have a turn
            if self.core.catalogue.by_id.get(topic.topic_id) is None:
                raise UnknownTopic(f"topic {topic.name!r} was deleted", topic=topic.name)
            plan = Plan(
                self.core.randomness.bytes(8).hex(), run, topic.topic_id, self.commits.forced_epoch,
                {part.number: part for part in parts}, touched=self._now(),
            )  # fmt: skip
            await self._store(plan)
            self._plans[topic.topic_id] = plan
        self._wake.set()
        return plan, True

    async def _part(self, topic: TopicInfo, number: int, slice_records: int) -> PlannedPartition:
        partition = self.partitions.get(topic, number)
        with partition.in_use():
            await self.settle(partition)
            manifest, end = partition.log.manifest, partition.dispatched_end
            lag_ms = partition.topic.spec.compaction.min_lag_ms
            plan_end = end if not lag_ms else self.scheduler.old_enough(partition, end, lag_ms)
            result = PartitionCompaction(number, records_kept_by_min_lag=end - plan_end)
        records = manifest.rows - manifest.masked + max(plan_end - manifest.horizon, 0)
        if not manifest.rows and plan_end <= manifest.horizon:
            result.state = "done"
        slices = -(-records // slice_records)
        if slices > SLICES_MAX:
            raise Invalid(
                f"partition {number} of {topic.name!r} has {records} records: {slices} slices of {slice_records}; at most "
                f"{SLICES_MAX}, so say slice_records {-(-records // SLICES_MAX)} or more"
            )
        return PlannedPartition(number, plan_end, records, slices, result)

    def newest(self, topic: TopicInfo) -> Plan:
        """*Errors*: NotFound."""
        plan = self._known(topic)
        if plan is None:
            raise NotFound(f"topic {topic.name!r} has no plan of a forced compaction")
        return plan

    def touched(self, topic: TopicInfo, id: str, progress: dict[str, Any] | None = None) -> Plan:
        """The plan, whose driver is there. *Errors*: UnknownPlan."""
        plan = self._named(topic, id)
        plan.touched = self._now()
        if progress is not None:
            plan.progress = progress
        return plan

    def part(self, topic: TopicInfo, id: str, number: int) -> PlannedPartition:
        """One partition of a plan, whose driver is there. *Errors*: UnknownPlan, UnknownPartition."""
        part = self.touched(topic, id).partitions.get(number)
        if part is None:
            raise UnknownPartition(f"plan {id} has no partition {number} of topic {topic.name!r}")
        return part

    async def cancel(self, topic: TopicInfo, id: str) -> Plan:
        """Compact nothing more for a plan. *Effects*: its uploads are gone on return. *Errors*: UnknownPlan."""
        plan = self._plans.get(topic.topic_id)
        if plan is None or plan.id != id:
            raise self._unknown(topic, id)
        if plan.is_open:
            await self._drop(plan, "cancelled")
        return plan

    def upload(self, topic: TopicInfo, id: str, number: int, slice: int) -> Upload:
        """Where to put a statement. *Errors*: UnknownPlan, UnknownPartition, Invalid."""
        part = self.part(topic, id, number)
        if slice >= part.slices:
            raise Invalid(f"partition {number} of plan {id} has {part.slices} slices; there is none {slice}")
        return Upload(self, self._plans[topic.topic_id], part, slice)

    async def kept(
        self, plan: Plan, part: PlannedPartition, slice: int, statement: Statement, keep: Callable[[], bool]
    ) -> None:
        """Let ``keep`` take an upload, one at a time; it says whether it is new. *Errors*: UnknownPlan; those of it."""
        async with self._storing:
            self._check(plan)
            if not part.has_ended and await self.in_thread(keep):
                note(part, slice, statement)
        self._wake.set()

    def document(self, plan: Plan) -> dict[str, Any]:
        left_s = self.core.settings.plan_ttl_ms / 1000 - (self._now() - plan.touched)
        topic = self.core.catalogue.by_id.get(plan.topic_id)
        return {
            "id": plan.id, "run": plan.run, "topic": None if topic is None else topic.name, "topic_id": plan.topic_id,
            "group": self.core.group, "engine": "spark", "state": plan.state, "progress": plan.progress,
            "expires_ms": max(int(left_s * 1000), 0) if plan.is_open else None,
            "partitions": [part.document() for part in plan.partitions.values()],
        }  # fmt: skip

    # Dropped.

    async def expire(self) -> None:
        """Drop the plans whose drivers were silent for too long, and those of topics that are no more."""
        limit = self._now() - self.core.settings.plan_ttl_ms / 1000
        for plan in [p for p in self._plans.values() if p.touched < limit]:
            if plan.is_open:
                _log.warning(
                    "plan %s of topic %d: its driver is silent, it is dropped", plan.id, plan.topic_id
                )
                await self._drop(plan, "expired")
            elif plan.topic_id not in self.core.catalogue.by_id:
                del self._plans[plan.topic_id]
                await self._drop(plan, "expired")

    def topic_deleted(self, topic_id: int) -> Coroutine[Any, Any, None] | None:
        """A topic is gone; what must be awaited for its files to be gone too."""
        plan = self._plans.pop(topic_id, None)
        return None if plan is None else self._drop(plan, "expired")

    async def _drop(self, plan: Plan, state: PlanState) -> None:
        plan.state = state
        running = self._running
        if running is not None and running.run.topic_id == plan.topic_id:
            running.is_cancelled = True
        for part in plan.partitions.values():
            if not part.has_ended and part.result.state == "waiting":
                part.result.state = "cancelled"
        async with self._storing:
            await self.in_thread(self.folder.remove, plan.topic_id)

    # Carried out.

    async def run(self) -> None:
        """Compact what is ready, for as long as the broker lives."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for plan in [plan for plan in self._plans.values() if plan.is_open]:
                try:
                    await self._carry_out(plan)
                except Exception:  # this task's boundary: what is left is tried again
                    _log.exception("plan %s of topic %d", plan.id, plan.topic_id)
                    self.core.metrics["plan_failures"] += 1
                    self._later()

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(_AGAIN_S, self._wake.set)

    async def _carry_out(self, plan: Plan) -> None:
        while plan.is_open and (ready := [part for part in plan.partitions.values() if part.is_ready]):
            await self._compact(plan, ready[:_AT_ONCE])
        if plan.is_open and plan.has_ended:
            try:
                await self._tell_others(plan)
            except NotMaster as error:  # a master that has just been started is none yet
                _log.info("plan %s: the other replicas are not told now: %s", plan.id, error.message)
                self._later()
                return
            step("plan.told")
            if plan.is_open:
                plan.state = "done"
                await self._store(plan)

    async def _compact(self, plan: Plan, parts: list[PlannedPartition]) -> None:
        topic = self.core.catalogue.by_id.get(plan.topic_id)
        if topic is None:
            return
        agreements = {
            part.number: Agreement(self.core.disk, self.folder.statement_paths(plan, part), part.plan_end)
            for part in parts
        }
        rows = [part.result for part in parts]
        self._running = self.scheduler.request_agreed(topic, rows, agreements)
        try:
            await self._running.ended.wait()
        finally:
            self._running = None
        for part in parts:
            part.compared = agreements[part.number].compared
            part.disagreements = agreements[part.number].offsets
        if plan.is_open:
            await self._store(plan)
            await self.in_thread(self.folder.forget_statements, plan, parts)

    async def _tell_others(self, plan: Plan) -> None:
        """Have the other replicas of the group compact the topic by force, each by itself. *Errors*: NotMaster."""
        topic = self.core.catalogue.by_id.get(plan.topic_id)
        if self.force is None or topic is None:
            return
        for _ in range(_TELLS):
            try:
                await self.force(topic, plan.id)
                return
            except Unavailable as error:  # another change of this topic is under way, or no quorum now
                _log.info("plan %s: the other replicas are not told yet: %s", plan.id, error.message)
                await asyncio.sleep(_TELL_AGAIN_S)
            except NotMaster:
                raise
            except FirnError as error:
                _log.warning("plan %s: the other replicas are not told: %s", plan.id, error.message)
                return
        _log.warning("plan %s: the other replicas were not told; they compact when it is due", plan.id)

    def has_done(self, topic: TopicInfo, id: str) -> bool:
        """Whether the compaction by force that this plan asks all replicas for is what it has just done here."""
        plan = self._plans.get(topic.topic_id)
        return plan is not None and plan.id == id and plan.has_ended

    # Inside.

    def _is_planned(self, topic_id: int, number: int) -> bool:
        plan = self._plans.get(topic_id)
        part = plan.partitions.get(number) if plan is not None and plan.is_open else None
        return part is not None and not part.has_ended

    def _known(self, topic: TopicInfo) -> Plan | None:
        plan = self._plans.get(topic.topic_id)
        return plan if plan is not None and plan.forced_epoch == self.commits.forced_epoch else None

    def _named(self, topic: TopicInfo, id: str) -> Plan:
        plan = self._known(topic)
        if plan is None or plan.id != id:
            raise self._unknown(topic, id)
        if plan.state in ("cancelled", "expired"):
            raise UnknownPlan(
                f"plan {id} of topic {topic.name!r} was dropped ({plan.state}); plan again", state=plan.state
            )
        return plan

    def _check(self, plan: Plan) -> None:
        if self._plans.get(plan.topic_id) is not plan or plan.state in ("cancelled", "expired"):
            raise UnknownPlan(f"plan {plan.id} was dropped meanwhile; plan again")

    def _unknown(self, topic: TopicInfo, id: str) -> UnknownPlan:
        return UnknownPlan(
            f"plan {id[:64]!r} of topic {topic.name!r} is not known to this master (any more); plan again"
        )

    async def _store(self, plan: Plan) -> None:
        async with self._storing:
            if self.core.catalogue.by_id.get(plan.topic_id) is not None:
                await self.in_thread(self.folder.store, plan)

    def _now(self) -> float:
        return self.core.machine_clock.monotonic()
