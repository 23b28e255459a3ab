"""What a broker does by itself, again and again: checkpoints, retention, the disk's room, what has expired.

Nothing here decides what is acknowledged or read. A step that fails is logged, counted, shown and tried again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from firn.errors import FirnError
from firn_node.engine.background import Background
from firn_node.engine.core import Core
from firn_node.engine.partition import Partition, unpack_state
from firn_node.engine.partitions import Partitions
from firn_node.engine.retention import current_plan, holders
from firn_node.engine.scheduler import Scheduler
from firn_node.engine.sealer import Sealer
from firn_node.engine.snapshots import Snapshots
from firn_node.plans.plans import Plans

if TYPE_CHECKING:
    from firn_node.engine.membership import Membership

_log = logging.getLogger(__name__)
_HOUSEKEEPING_S = 1.0
_UNWRITABLE_CHECKS = 2
_PRODUCERS_CHECK_S = 600.0
_PRODUCERS_HELD_MAX = 64  # of one partition, in memory beyond a checkpoint; the others are in the index
_STATES_AT_ONCE = 2000
_SWEEP_AT_ONCE = 1000


class Upkeep:
    """``knows_states``: the partitions' states were read, so that retention sees all of them."""

    def __init__(
        self, core: Core, partitions: Partitions, scheduler: Scheduler, snapshots: Snapshots, sealer: Sealer,
        plans: Plans, background: Background,
    ) -> None:  # fmt: skip
        self._core = core
        self._partitions = partitions
        self._scheduler = scheduler
        self._snapshots = snapshots
        self._sealer = sealer
        self._plans = plans
        self._background = background
        self._member: Membership | None = None
        self.knows_states = False
        self._producers_checked = float("-inf")
        self._checkpoint_lock = asyncio.Lock()
        self._unwritable = 0  # checks of the disk in a row before which writes had failed
        self._left_after = -1  # records appended when this node last handed over because of its disk

    def start(self, member: "Membership | None") -> None:
        """``member``: of a group."""
        self._member = member
        for work in (self._keep_house(), self._keep_checkpoints(), self._scan_states()):
            self._background.spawn(work)

    @property
    def is_being_pulled(self) -> bool:
        """Nothing is dispatched, and no checkpoint is made, until what precedes the log is here."""
        return self._member is not None and self._member.rebuilding.holds_dispatch

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            with self._reported("the check of the disk"):
                await self._leave_to_who_can_write()
                await self.check_disk()
            with self._reported("housekeeping"):
                self._snapshots.expire()
                if self._member is not None:
                    self._member.source.expire()
                await self._plans.expire()
                self._sealer.check_budget()
            if self.knows_states:
                with self._reported("retention"):
                    await self.retain()
            with self._reported("the key query index"):
                dispatched = self._core.dispatched_position
                await self._background.in_thread(self._core.key_query.build_missing, 1, dispatched)
            with self._reported("the expiry of producers"):
                await self._expire_producers()

    async def _expire_producers(self) -> None:
        """Forget the producers that have written nothing for long."""
        core, loop = self._core, asyncio.get_running_loop()
        if loop.time() < self._producers_checked + _PRODUCERS_CHECK_S:
            return
        self._producers_checked = loop.time()
        expired = core.clock.now_ms() - self._core.settings.producer_expiry_ms
        for partition in self._partitions:
            partition.producers = {
                id: row
                for id, row in partition.producers.items()
                if row.last_use_ms >= expired or id in partition.producers_touched
            }
        await self._background.in_thread(core.index.delete_producers, expired)

    async def retain(self) -> None:
        """Let go of commit log segments, and of what the index knows of them."""
        core = self._core
        plan = current_plan(core, self._partitions.states)
        self._scheduler.held_back = holders(self._partitions.states, plan.expired)
        if plan.release > core.log.start:
            await self._background.in_thread(core.log.release, plan.release)
            core.index.trim(core.log.start)
            self._core.metrics["segments_released"] += 1
            if self._member is not None:
                self._member.group.released(core.log.start)
        await self._background.in_thread(core.index.sweep, core.log.start, _SWEEP_AT_ONCE)

    async def _leave_to_who_can_write(self) -> None:
        """Hand the mastership over when the disk took no writes for ``_UNWRITABLE_CHECKS`` checks in a row.

        Once until something was appended here again: it does not go round where all replicas share a full disk.
        """
        self._unwritable = self._unwritable + 1 if self._core.health.read_only is not None else 0
        group = None if self._member is None else self._member.group
        if self._unwritable < _UNWRITABLE_CHECKS or group is None or not group.is_master:
            return
        appended = self._core.metrics["append_records"]
        if appended != self._left_after:
            self._left_after = appended
            from firn_node.engine.operating import leave_to_who_can_write

            await leave_to_who_can_write(group)

    async def check_disk(self) -> None:
        """Stop produces below the reserve; take them again, without a restart, once there is room."""
        free, total = self._core.disk.free()
        health, reserve = self._core.health, self._core.settings.disk_reserve
        if free < reserve * total:
            health.read_only = (
                f"{free >> 20} MiB of the disk are free, below diskReserve ({reserve:.0%}); free some space, "
                "compaction goes on"
            )
            if self._member is not None:
                self._member.group.let_go_of_log()
            await self._background.in_thread(self._core.reserve.set_aside)
        elif health.read_only is not None:
            _log.warning("the disk has room again: taking writes")
            health.read_only = None
            await self._background.in_thread(self._core.reserve.give_back)

    async def _keep_checkpoints(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if self.is_being_pulled:
                continue
            behind = self._core.dispatched_position - self._core.index.checkpoint
            late = (loop.time() - last) * 1000 >= self._core.settings.checkpoint_ms
            if behind >= self._core.settings.checkpoint_bytes or (
                late and (behind or self._partitions.touched)
            ):
                with self._reported("checkpoint"):
                    await self.checkpoint()
                last = loop.time()

    async def checkpoint(self) -> None:
        """Make what is dispatched durable in the index, with the partitions' states and producers, atomically."""
        async with self._checkpoint_lock:
            core = self._core
            position = core.dispatched_position
            touched, self._partitions.touched = self._partitions.touched, set()
            started = time.perf_counter()
            try:
                for key in touched:
                    state = self._partitions.states.get(key)
                    if state is not None:
                        core.index.put_state(*key, state.pack())
                for partition in self._partitions:
                    if partition.producers_touched:
                        self._put_producers(partition)
                await self._background.in_thread(core.index.flush, position)
                if self._member is not None and self._member.group.failed is None:
                    await self._member.group.checkpoint(position)
            except BaseException:
                self._partitions.touched |= {key for key in touched if key in self._partitions.states}
                raise
            self._partitions.evict()
            self._core.metrics["checkpoints"] += 1
            self._core.metrics["checkpoint_ms"] += int((time.perf_counter() - started) * 1000)

    def _put_producers(self, partition: Partition) -> None:
        """Store the producers' rows, of what is dispatched; those with more to come stay marked."""
        left: set[int] = set()
        for producer_id in partition.producers_touched:
            row = partition.producers.get(producer_id)
            if row is None:
                continue
            packed = row.pack(before=partition.dispatched_end)
            if packed is not None:
                self._core.index.put_producer(*partition.key, producer_id, packed)
            if row.end > partition.dispatched_end:
                left.add(producer_id)
        partition.producers_touched = left
        if len(partition.producers) > _PRODUCERS_HELD_MAX:
            partition.producers = {id: partition.producers[id] for id in left}

    async def _scan_states(self) -> None:
        """After start: learn what is to be scheduled, and remove what belongs to no topic.

        Of a node that is being rebuilt the catalogue is known once the log is dispatched.
        """
        if self._member is not None:
            await self._member.rebuilding.whole.wait()
        while not self.knows_states:
            with self._reported("state scan"):
                await self._scan_states_once()
                self.knows_states = True
                self._scheduler.request_forgotten()
                return
            await asyncio.sleep(_HOUSEKEEPING_S)

    async def _scan_states_once(self) -> None:
        unknown: set[int] = set()
        states = self._core.index.states()
        for number, (topic_id, partition, data) in enumerate(states):
            if topic_id not in self._core.catalogue.by_id:
                unknown.add(topic_id)
            else:
                self._partitions.states.setdefault((topic_id, partition), unpack_state(data))
            if number % _STATES_AT_ONCE == _STATES_AT_ONCE - 1:
                await asyncio.sleep(0)
        for topic_id in unknown:
            self._core.index.delete_topic(topic_id)
        folder = f"{self._core.settings.data}/compacted"
        for name in self._core.disk.list(folder):
            if not name.isdigit() or int(name) not in self._core.catalogue.by_id:
                await self._background.in_thread(self._core.disk.remove_tree, f"{folder}/{name}")

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """A background task's boundary: what goes wrong is logged, counted and shown, and the task goes on."""
        health = self._core.health
        try:
            yield
        except Exception as error:
            expected = isinstance(error, OSError | FirnError)
            _log.error("%s failed, trying again: %s", what, error, exc_info=None if expected else error)
            self._core.metrics[f"{what.removeprefix('the ').replace(' ', '_')}_failures"] += 1
            health.troubles[what] = str(error)
            if self._core.log.is_broken:  # a sync of this task failed: the same as one of the flusher's
                health.fail(f"{what}: fsync failed: {error}; the page cache cannot be trusted")
        else:
            health.troubles.pop(what, None)
