"""The broker: one data folder, opened, recovered, served and closed; the engine's one face to the server.

Everything runs on the event loop but for syncs, index flushes, sealing, compaction and key query files, which
have threads of their own. Start, in order:

1. lock the folder, empty it if it is to start anew;
2. open its files and make the parts that work on them (``parts``);
3. load the catalogue from ``__topics``;
4. dispatch the log from the checkpoint on; of a replica, join the group, which says how far (``membership``);
5. remove what belongs to no topic; scan the partitions' states (in the background, ``upkeep``).

Longer than other modules, because each call of the server has its short method here: who may ask, and which part answers.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from firn.batch import Buffer
from firn.errors import (
    BadOffset,
    Corrupt,
    FirnError,
    Invalid,
    InvariantBroken,
    NotFound,
    OffsetExpired,
    SnapshotExpired,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from firn.record import Record
from firn.shown import parse_shown, shown_text
from firn.topicspec import TopicSpec, default_min_in_sync
from firn_node.clock import Clock, Randomness, RealClock, RealRandomness
from firn_node.compaction.answers import ANSWER_BYTES_MAX, Answers
from firn_node.disk import Disk, RealDisk
from firn_node.engine import status
from firn_node.engine.api import (
    FIRST_GROUP,
    CompactionRun,
    Found,
    Outcome,
    ReadRequest,
    ReadResult,
    SnapshotInfo,
    TopicInfo,
)
from firn_node.engine.catalogue import Told
from firn_node.engine.groups import Committed
from firn_node.engine.loading import load_catalogue, replay
from firn_node.engine.parts import Parts
from firn_node.engine.topics import FOLLOW_S
from firn_node.kernels import jit
from firn_node.rebuild import folder
from firn_node.settings import BrokerSettings, GroupSettings

if TYPE_CHECKING:
    from firn_node.coordinator import Coordinator
    from firn_node.engine.following import Followers
    from firn_node.engine.membership import Membership
    from firn_node.plans.plan import Plan
    from firn_node.plans.upload import Upload
    from firn_node.rebuild.source import Source
    from firn_node.replication.doors.peers import Dialling
    from firn_node.replication.driver import GroupDriver

T = TypeVar("T")


class Broker:
    """One broker process's engine. Use ``start`` and ``stop`` once each."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        coordinator: "Coordinator | None" = None,
        dialling: "Dialling | None" = None,
    ) -> None:
        """``coordinator`` and ``dialling``: of a replica (``settings.group``), which closes neither."""
        self.settings = settings
        self.address = settings.address
        self._disk: Disk = disk or RealDisk(settings.data)
        self._clock: Clock = clock or RealClock()
        self._randomness: Randomness = randomness or RealRandomness()
        self._coordinator = coordinator
        # How many replicas its group is to have, where that may change while it runs.
        self.wished_replicas = 0 if settings.group is None else settings.group.replicas
        self._dialling = dialling
        self.group: GroupDriver | None = None
        self.member: Membership | None = None  # what it has as a replica of its group
        self._state = "starting"
        self._closing = contextlib.ExitStack()
        self._stopped = asyncio.Event()

    # Life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the folder and take work.

        A replica whose folder is damaged starts anew, where another one has everything.
        Errors: Unavailable when another process has the folder, Corrupt for damage below the durable end.
        """
        try:
            await self._start()
        except Corrupt as error:
            if not await self._starts_anew_after(error):
                raise
            await self._start()
        self._state = "serving"

    async def _starts_anew_after(self, error: Corrupt) -> bool:
        place, coordinator = self.settings.group, self._coordinator
        if place is None or coordinator is None:
            return False
        from firn_node.rebuild.damage import start_anew_after
        from firn_node.replication.record import GroupId

        return await start_anew_after(
            error, self._disk, self.settings.data, self._randomness, coordinator, GroupId(str(place.group))
        )

    async def _start(self) -> None:
        settings, disk = self.settings, self._disk
        data = settings.data
        disk.make_folder(data)
        try:
            self._closing.enter_context(disk.lock(f"{data}/LOCK"))
        except BlockingIOError as error:
            raise Unavailable(
                f"data folder {data} is in use by another process; stop that one first"
            ) from error
        try:
            folder.carry_out(disk, data)
            folder.install(disk, data)
            await self._open()
        except BaseException:
            self._closing.close()
            raise

    async def _open(self) -> None:
        self.parts = parts = Parts(self.settings, self._disk, self._clock, self._randomness, self._closing)
        self.core = core = parts.core
        self.metrics = core.metrics
        self.partitions = parts.partitions
        await parts.plans.load()
        load_catalogue(core, parts.partitions)
        core.catalogue.on_force = parts.compact_by_force
        if self.settings.group is None:
            await replay(core, parts.dispatcher)
        else:
            self._join(self.settings.group)
        parts.scheduler.start()
        parts.background.spawn(parts.plans.run())
        parts.upkeep.start(self.member)

    def _join(self, place: GroupSettings) -> None:
        # A broker of its own starts a tenth of a second sooner without it.
        from firn_node.engine.membership import become_replica

        jit.prepare()  # a replica that stood still for so long once it has joined might be replaced
        if self._coordinator is None:
            raise InvariantBroken("a replica needs the coordinator of its group")
        self.member = become_replica(
            self.parts, self, place, self._coordinator, self._dialling, self._closing
        )
        self.group = self.member.group

    # What its own rebuild asks (``rebuild.standby.Host``).

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread; ``stop`` waits for it even when its caller was cancelled."""
        return await self.parts.background.in_thread(function, *arguments)

    async def checkpoint(self) -> None:
        """Make what is dispatched durable in the index, with the partitions' states and producers, atomically."""
        await self.parts.upkeep.checkpoint()

    async def reach(self, position: int) -> None:
        """Return once the log is dispatched up to ``position``."""
        await self.parts.commits.wait(position)

    def take_over_pulled(self) -> None:
        """Other files are in the compacted folder now: read the catalogue off them, and dispatch the log."""
        if self.member is None:
            raise InvariantBroken("nothing is pulled by a broker of its own")
        self.partitions.forget_all()
        load_catalogue(self.core, self.partitions)
        self.member.replica.release()

    async def rebuild_source(self, start: int) -> "Source":
        """What a standby whose log begins at ``start`` is rebuilt from; its list misses no producer below that.

        *Errors*: NotMaster, Unavailable.
        """
        self._check_reading()
        source = self.pinned_source()
        if not self.parts.upkeep.knows_states:
            raise Unavailable("this broker has just started; ask again")
        if self.core.index.checkpoint < start:
            await self.checkpoint()
        return source

    def pinned_source(self) -> "Source":
        """What holds the pins: they are good, whoever is master by now. *Errors*: Unavailable."""
        self._check_serving()
        if self.member is None:
            raise Unavailable("this broker is not part of a group")
        return self.member.source

    async def stop(self) -> None:
        """Sync, seal off and close; the next start has nothing to replay."""
        if self._state in ("starting", "stopped"):
            return
        if self._state == "stopping":
            await self._stopped.wait()
            return
        self._state, parts = "stopping", self.parts
        parts.reader.is_closing = True
        for partition in self.partitions:
            partition.wake()
        await parts.background.end()
        await parts.scheduler.stop()
        if self.member is not None:
            self.member.source.take_all_back()
            await self.member.group.stop()
        await parts.commits.stop()
        await parts.sealer.stop()
        parts.snapshots.close_all()
        if self.core.health.failed is None and not parts.upkeep.is_being_pulled:
            with contextlib.suppress(OSError, FirnError):
                await self.checkpoint()
        await parts.background.threads_ended()
        self._closing.close()
        self._state = "stopped"
        self._stopped.set()

    async def rebuild(self, reason: str) -> None:
        """Let this standby start anew, as a blank one under another log_id; this process ends its part in the group.

        *Effects*: the order is durable on return, the master is told. *Errors*: Invalid for a master and for a
        broker of its own; Unavailable while no other replica is known to be in sync.
        """
        self._check_serving()
        group = self.group
        if group is None:
            raise Invalid("this broker is no replica of a group: there is nobody to rebuild it from")
        if group.state.mastery is not None:
            raise Invalid("this node is the master of its group: hand over first (`firn switchover`)")
        if not group.has_others_in_sync:
            raise Unavailable("no other replica is known to be in sync: nobody could give the records back")
        group.damaged(f"a rebuild was asked for: {reason}")

    @property
    def starts_anew(self) -> bool:
        """This process has ended its part in the group, and the next one begins with an empty folder."""
        return folder.is_ordered(self._disk, self.settings.data)

    def is_ready(self) -> bool:
        if self._state != "serving" or self.core.health.failed is not None:
            return False
        return self.group is None or self.group.is_settled

    def decides(self) -> bool:
        """Whether it is the master of group 0, and takes writes."""
        return (
            self.group is not None
            and self.group.is_master
            and self.is_ready()
            and self.core.group == FIRST_GROUP
        )

    def rebuild_status(self) -> dict[str, Any] | None:
        """How far the rebuild of this standby is; None when there is none."""
        return None if self.member is None else self.member.rebuilding.status()

    def end_process(self, reason: str) -> None:
        """End this process: another one is to start from the folder."""
        self.core.health.fail(reason)

    def why_unready(self) -> str | None:
        """Why it is not to be counted on: it neither serves as master nor is an in-sync standby; None when it is.

        May be asked by any thread.
        """
        if self._state != "serving":
            return f"this broker is {self._state}"
        group, failed = self.group, self.core.health.failed
        if failed is not None or group is None:
            return failed
        return group.hindrance or (None if group.is_in_sync else "this standby is not in sync yet")

    async def failed(self) -> str:
        """Return, with the reason, once this process must end."""
        await self.core.health.stopped.wait()
        return self.core.health.failed or "unknown"

    # Records ------------------------------------------------------------------------------------------------

    async def produce(self, data: Buffer, *, conditions: Sequence[int | None] | None = None) -> list[Outcome]:
        """One outcome per batch of ``data``, in order; a refused batch does not touch the others.

        ``conditions``: ``if_offset`` per batch (such a batch has one record).
        """
        outcomes, durable = self.begin_produce(data, conditions=conditions)
        if durable is not None:
            await durable
        return outcomes

    def begin_produce(
        self, data: Buffer, *, conditions: Sequence[int | None] | None = None
    ) -> tuple[list[Outcome], Awaitable[None] | None]:
        """As ``produce``, appended on return; outcomes may be told once the second result, if any, was awaited."""
        self._check_serving()
        return self.parts.appender.begin(data, conditions)

    @property
    def shown(self) -> str:
        """How far a reader has been shown this broker's log, when it has been answered (``firn.shown``)."""
        return shown_text({self._group_number: self.core.dispatched_position})

    def floor_in(self, shown: str) -> int:
        """How far it was shown the log of this broker's group. *Errors*: Invalid."""
        return parse_shown(shown).get(self._group_number, 0)

    @property
    def _group_number(self) -> int:
        return self.settings.group.group if self.settings.group is not None else 0

    async def read(self, request: ReadRequest) -> ReadResult:
        if request.floor is None or self.group is None:
            self._check_reading()
            return await self.parts.reader.read(request)
        await self._admit_read(request.floor)
        try:
            return await self.parts.reader.read(request)
        except (BadOffset, OffsetExpired, SnapshotExpired, UnknownTopic, UnknownPartition):
            if self.group.is_master:
                raise
            raise self.group.not_master() from None  # a standby may be behind, or have let go earlier

    async def _admit_read(self, floor: int | None) -> None:
        """Of a read that any replica may answer which has dispatched as far as ``floor``; None: the master."""
        self._check_serving()
        if floor is None:
            self.parts.commits.check_read()
        else:
            await self.parts.commits.admit_read(floor)

    def _topic_shown(self, topic: str, floor: int | None) -> TopicInfo:
        """The topic; one that a standby does not know yet, or no more, is its master's to judge."""
        try:
            return self.core.catalogue.named(topic)
        except UnknownTopic:
            if floor is None or self.group is None or self.group.is_master:
                raise
            raise self.group.not_master() from None

    async def get(
        self, topic: str, keys: Sequence[bytes], *, partition: int | None = None, floor: int | None = None
    ) -> list[Found | None]:
        """The newest record of each key, in order; None for none or a tombstone. ``floor``: as of ``ReadRequest``."""
        await self._admit_read(floor)
        return await self.parts.values.get(self._topic_shown(topic, floor), keys, partition=partition)

    def get_now(self, topic: str, key: bytes) -> list[Found | None] | None:
        """What ``get`` of one key gives; None when records that were appended have to be dispatched first."""
        self._check_reading()
        return self.parts.values.get_now(self.core.catalogue.named(topic), key)

    async def get_many(
        self,
        topic: str,
        keys: NDArray[np.uint8],
        starts: NDArray[np.int64],
        *,
        bytes_max: int = ANSWER_BYTES_MAX,
        floor: int | None = None,
    ) -> Answers:
        """The newest record of each key; what is left out when ``bytes_max`` of values are found is LATER.

        *Shape*: ``starts`` says where in ``keys`` each key begins, and where the last one ends; ``floor``: as of
        ``ReadRequest``.
        """
        await self._admit_read(floor)
        info = self._topic_shown(topic, floor)
        return await self.parts.values.get_many(info, keys, starts, bytes_max=bytes_max)

    async def query(
        self, topic: str, key: bytes, since_ms: int = 0, until_ms: int = (1 << 63) - 1
    ) -> list[Record]:
        """The raw records of a key in a time range, oldest first."""
        self._check_reading()
        return await self.parts.values.query(self.core.catalogue.named(topic), key, since_ms, until_ms)

    async def find_id(self, topic: str, id: str) -> Record | None:
        self._check_reading()
        return await self.parts.values.find_id(self.core.catalogue.named(topic), id)

    async def offset_of_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        self._check_reading()
        return await self.parts.values.offset_of_time(
            self.core.catalogue.named(topic), partition, timestamp_ms
        )

    # Topics -------------------------------------------------------------------------------------------------

    @property
    def default_min_in_sync(self) -> int:
        """``minInSync`` of topics that do not say it: by what the group is to be, or is, if that is more."""
        place, group = self.settings.group, self.group
        if place is None or group is None:
            return default_min_in_sync(1)
        record = group.state.record
        nodes = {member.node for member in record.members.values()} if record is not None else set()
        return default_min_in_sync(max(self.wished_replicas, len(nodes)))

    async def create_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None = FOLLOW_S) -> TopicInfo:
        """``wait_s``: for the other groups of the cluster; None: not at all."""
        self._check_deciding()
        return await self.parts.topics.create(name, spec, wait_s=wait_s)

    async def update_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None = FOLLOW_S) -> TopicInfo:
        self._check_deciding()
        return await self.parts.topics.update(name, spec, wait_s=wait_s)

    async def delete_topic(self, name: str, *, wait_s: float | None = FOLLOW_S) -> None:
        self._check_deciding()
        await self.parts.topics.delete(name, wait_s=wait_s)

    async def tell_topics(self, group: int, has: Told, wait_s: float) -> dict[str, Any]:
        """What another group's master, which has taken over the state ``has`` of the topics, has yet to take over.

        Waits for news. *Errors*: NotMaster for whom only group 0's master can tell.
        """
        self._check_deciding()
        if (followers := self._followers) is None:
            raise Invalid("this cluster has one broker group: nobody follows it")
        found = await followers.tell(group, has, wait_s)
        self._check_deciding()
        return found

    async def followed(self, wait_s: float) -> list[int]:
        """The groups that still lack, after this time, a topic as it is now; none as soon as none does."""
        if (followers := self._followers) is None:
            return []
        return await followers.wait(followers.changed_at, wait_s)

    def topic(self, name: str) -> TopicInfo:
        """Errors: UnknownTopic; of a replica that may answer no reads, and so cannot know, why it may not."""
        if name not in self.core.catalogue.by_name:
            self._check_reading()
        return self.core.catalogue.named(name)

    def topic_of_id(self, topic_id: int) -> TopicInfo | None:
        return self.core.catalogue.by_id.get(topic_id)

    def unknown_id(self, topic_id: int) -> FirnError:
        """What who names this id is told, by which nobody learns whether there is such a topic."""
        try:
            self._check_reading()
        except FirnError as error:
            return error
        return self.core.catalogue.unknown(topic_id)

    def topics(self, *, after: str = "", limit: int = 1000) -> list[TopicInfo]:
        return self.parts.topics.listed(after=after, limit=limit)

    async def describe(self, name: str, *, after: int = -1, limit: int = 1000) -> dict[str, Any]:
        """Spec and state of a topic's partitions that live in this group, those after number ``after``."""
        self._check_reading()
        topic = self.core.catalogue.named(name)
        numbers = [n for n in topic.partitions_in(self.core.group) if n > after][:limit]
        row = status.topic_row(self.core, self.partitions, topic, numbers)
        return {**row, "spec": topic.spec.document(), **await self._places_of(topic)}

    async def _places_of(self, topic: TopicInfo) -> dict[str, Any]:
        """Of a cluster of several groups: which the topic is dealt to, where all are, which lack it (group 0 knows)."""
        others = self.core.others
        if others is None:
            return {}
        await others.look()
        found: dict[str, Any] = {
            "groups": list(topic.groups),
            "cluster": [p.document() for p in others.places()],
        }
        if (followers := self._followers) is not None:
            found["lacking"] = followers.lacking_topic(topic)
        return found

    @property
    def _followers(self) -> "Followers | None":
        return None if self.member is None else self.member.followers

    # Compaction, snapshots, groups --------------------------------------------------------------------------

    async def compact(self, topic: str, *, force: bool = False) -> CompactionRun:
        """Ask for a compaction: of this broker's own; by force, of every replica of its group, each by itself."""
        self._check_reading()
        info = self.core.catalogue.named(topic)
        if not force or self.group is None or info.name.startswith("__"):
            return self.parts.scheduler.request(info, force=force)
        known = self.compaction(topic)
        if known is not None and not known.is_done and known.force:
            return known
        await self.parts.topics.force_compaction(info)  # begun here too as soon as its record is dispatched
        run = self.compaction(topic)
        if run is None:
            raise Unavailable(f"topic {topic!r}: the compaction has not begun; try again")
        return run

    def compaction(self, topic: str) -> CompactionRun | None:
        request = self.parts.scheduler.requests.get(self.core.catalogue.named(topic).topic_id)
        return request.run if request is not None else None

    def cancel_compaction(self, topic: str) -> CompactionRun:
        run = self.parts.scheduler.cancel(self.core.catalogue.named(topic).topic_id)
        if run is None:
            raise NotFound(f"topic {topic!r} has no compaction to cancel")
        return run

    async def open_plan(self, topic: str, *, run: str, slice_records: int) -> tuple[dict[str, Any], bool]:
        """The plan of a forced compaction by Spark, and whether it is new: ``firn_node.plans``."""
        self._check_reading()
        plan, is_new = await self.parts.plans.open(
            self.core.catalogue.named(topic), run=run, slice_records=slice_records
        )
        return self._plan_document(plan), is_new

    def plan(self, topic: str) -> dict[str, Any]:
        self._check_reading()
        return self._plan_document(self.parts.plans.newest(self.core.catalogue.named(topic)))

    def touch_plan(self, topic: str, id: str, progress: dict[str, Any] | None) -> dict[str, Any]:
        self._check_reading()
        return self._plan_document(self.parts.plans.touched(self.core.catalogue.named(topic), id, progress))

    def planned_partition(self, topic: str, id: str, partition: int) -> dict[str, Any]:
        self._check_reading()
        return self.parts.plans.part(self.core.catalogue.named(topic), id, partition).document()

    async def cancel_plan(self, topic: str, id: str) -> dict[str, Any]:
        self._check_reading()
        return self._plan_document(await self.parts.plans.cancel(self.core.catalogue.named(topic), id))

    def upload_to_plan(self, topic: str, id: str, partition: int, slice: int) -> "Upload":
        self._check_reading()
        return self.parts.plans.upload(self.core.catalogue.named(topic), id, partition, slice)

    def _plan_document(self, plan: "Plan") -> dict[str, Any]:
        """``shown``: whoever has dispatched so far has all that the plan is about."""
        return {**self.parts.plans.document(plan), "shown": self.shown}

    async def snapshot(self, topic: str) -> SnapshotInfo:
        self._check_reading()
        info = self.core.catalogue.named(topic)
        with contextlib.ExitStack() as used:
            opened = [self.partitions.get(info, number) for number in info.partitions_in(self.core.group)]
            for partition in opened:
                used.enter_context(partition.in_use())
            for partition in opened:
                await self.parts.reader.settle(partition)
            if any(partition.deleted for partition in opened):
                raise UnknownTopic(f"topic {topic!r} was deleted", topic=topic)
            return self.parts.snapshots.open(info, opened)

    def renew(self, id: str) -> SnapshotInfo:
        return self.parts.snapshots.renew(id)

    def close_snapshot(self, id: str) -> None:
        self.parts.snapshots.close(id)

    async def commit_offsets(self, group: str, topic: str, offsets: Committed) -> None:
        self._check_deciding()
        await self.parts.groups.commit(group, self.core.catalogue.named(topic), offsets)

    async def fetch_offsets(self, group: str, topic: str) -> Committed:
        self._check_deciding()
        return await self.parts.groups.fetch(group, self.core.catalogue.named(topic))

    def status(self, *, limit: int = 1000) -> dict[str, Any]:
        """This broker's part of ``firn status -o json``; at most ``limit`` topics and partitions of each."""
        topics = [
            status.topic_row(self.core, self.partitions, t, list(t.partitions_in(self.core.group)[:limit]))
            for t in self.topics(limit=limit)
        ]
        now = self._clock.monotonic()
        place = status.place_of(self.core, self.group, now)
        state = "waiting" if self._state == "serving" and place.hindrance is not None else self._state
        return {
            "brokers": [
                status.broker_row(
                    self.core,
                    state=state,
                    address=self.address,
                    place=place,
                    rebuild=self.rebuild_status(),
                )
            ],
            "groups": status.group_rows(self.core, self.group, now),
            "topics": topics,
        }

    # The group ----------------------------------------------------------------------------------------------

    async def switch_over(self, group: int, to: str | None) -> dict[str, Any]:
        """Hand over to a standby: ``engine.operating``."""
        found = self._group_numbered(group)
        from firn_node.engine.operating import switch_over

        return await switch_over(found, to)

    async def accept_data_loss(self, group: int, node: str, by: str) -> dict[str, Any]:
        """Become master whatever others hold: ``engine.operating``."""
        found = self._group_numbered(group)
        if node != self.settings.node:
            raise Invalid(f"this is {self.settings.node}; only {node} itself can be asked to become master")
        from firn_node.engine.operating import force_mastership

        return await force_mastership(found, by)

    async def step_aside(self) -> None:
        """Before a planned stop: ``engine.operating``."""
        if self.group is not None and self.core.health.failed is None:
            from firn_node.engine.operating import step_aside

            await step_aside(self.group)

    def _group_numbered(self, group: int) -> "GroupDriver":
        self._check_serving()
        if self.group is None:
            raise Invalid("this broker is alone, without standbys; `firn up --replicas 3` runs a group")
        if self.settings.group is None or self.settings.group.group != group:
            raise Invalid(f"{self.settings.node} is no broker of group {group}")
        return self.group

    # Inside -------------------------------------------------------------------------------------------------

    def _check_serving(self) -> None:
        if self._state != "serving":
            raise Unavailable(f"this broker is {self._state}; try again")
        self.core.health.check_serving()

    def _check_deciding(self) -> None:
        """Topics, and the offsets of consumer groups, are the first group's; its master alone knows them as they are."""
        self._check_serving()
        if self.core.group != FIRST_GROUP:
            raise self.core.elsewhere("topics and offsets are kept by", FIRST_GROUP)
        self.parts.commits.check_read()

    def _check_reading(self) -> None:
        self._check_serving()
        self.parts.commits.check_read()
