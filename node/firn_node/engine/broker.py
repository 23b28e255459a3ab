"""The broker: one data folder, opened, recovered, served and closed; the engine's one face to the server.

Everything runs on the event loop but for syncs, index flushes, sealing, compaction and key query files, which
have threads of their own. Start, in order:

1. lock the folder, empty it if it is to start anew, read or make its identity;
2. open the partition index: its checkpoint tells how far dispatch is durable;
3. open the commit log, verified from there on, torn tail cut;
4. load the catalogue from ``__topics``;
5. dispatch the log from the checkpoint on;
6. remove what belongs to no topic; scan the partitions' states (in the background).
"""

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from firn.batch import Batch, Buffer
from firn.errors import (
    BadOffset,
    Corrupt,
    FirnError,
    Invalid,
    InvariantBroken,
    MalformedBatch,
    NotFound,
    OffsetExpired,
    SnapshotExpired,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from firn.partitioner import partition_of, partitions_in
from firn.record import Record
from firn.shown import parse_shown, shown_text
from firn.topicspec import TopicSpec, default_min_in_sync
from firn.types import TOPICS_TOPIC
from firn.wire import items
from firn_node.clock import Clock, LogClock, Randomness, RealClock, RealRandomness
from firn_node.compaction.ahead import AHEAD
from firn_node.compaction.answers import ANSWER_BYTES_MAX, I64, Answers, Wanted, joined
from firn_node.compaction.log import BLOCK_CACHE
from firn_node.disk import Disk, RealDisk
from firn_node.engine import messages, status
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
from firn_node.engine.appender import Appender, Written, WrittenRecord
from firn_node.engine.catalogue import Catalogue, Told
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core, Health
from firn_node.engine.dispatcher import Dispatcher
from firn_node.engine.flusher import Flusher
from firn_node.engine.groupcommits import GroupCommits
from firn_node.engine.groups import Committed, Groups
from firn_node.engine.identity import load_identity
from firn_node.engine.lookup import Lookup, found_list
from firn_node.engine.partition import Partition, unpack_state
from firn_node.engine.partitions import Partitions
from firn_node.engine.reader import Reader
from firn_node.engine.reserve import Reserve
from firn_node.engine.retention import current_plan, holders
from firn_node.engine.scheduler import Scheduler
from firn_node.engine.sealer import Sealer
from firn_node.engine.snapshots import Snapshots
from firn_node.engine.topics import FOLLOW_S, Topics
from firn_node.filecache import FileCache
from firn_node.index import open_index
from firn_node.kernels import jit
from firn_node.log import CommitLog, KeyQueryIndex
from firn_node.plans.plans import Plans
from firn_node.rebuild import folder
from firn_node.settings import BrokerSettings

if TYPE_CHECKING:
    from firn_node.coordinator import Coordinator
    from firn_node.engine.following import Followers, Following
    from firn_node.plans.plan import Plan
    from firn_node.plans.upload import Upload
    from firn_node.rebuild.source import Source
    from firn_node.rebuild.standby import Rebuilding
    from firn_node.replication.doors.peers import Dialling
    from firn_node.replication.driver import GroupDriver

T = TypeVar("T")

_log = logging.getLogger(__name__)
_HOUSEKEEPING_S = 1.0
_UNWRITABLE_CHECKS = 2
_PRODUCERS_CHECK_S = 600.0
_PRODUCERS_HELD_MAX = 64  # of one partition, in memory beyond a checkpoint; the others are in the index
_STATES_AT_ONCE = 2000
_SWEEP_AT_ONCE = 1000
_COMPACTED = "compacted"
_FIRST_POSITION = 4096  # of a new log: a topic's id is a position, and no topic has the id 0, 1 or 2
_CATALOGUE_BYTES = 4 << 20
_DISPATCH_BATCHES = 256  # at once: about 2 ms, after which the event loop serves whoever waits
_GET_ON_LOOP = 512  # keys that are looked up on the event loop at once: a few ms
_GET_PARTITIONS = 256  # that are held open for one list of keys


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
        self._source: Source | None = None
        self._rebuilding: Rebuilding | None = None
        self._followers: Followers | None = None  # of group 0 of several groups
        self._following: Following | None = None  # of the others
        self._state = "starting"
        self._closing = contextlib.ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._in_threads: set[asyncio.Future[Any]] = set()
        self._stopped = asyncio.Event()
        self._checkpoint_lock = asyncio.Lock()
        self._unwritable = 0  # checks of the disk in a row before which writes had failed
        self._left_after = -1  # records appended when this node last handed over because of its disk

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
            await self._open(data)
        except BaseException:
            self._closing.close()
            raise

    async def _open(self, data: str) -> None:
        settings, disk = self.settings, self._disk
        identity = load_identity(disk, data, self._randomness)
        cache = FileCache(disk, settings.open_files_max)
        self._closing.callback(cache.close)
        disk.make_folder(f"{data}/log")
        disk.make_folder(f"{data}/{_COMPACTED}")
        touched_bytes = settings.memory.index_bytes // 3
        BLOCK_CACHE.limit(touched_bytes)
        rocks_bytes = settings.memory.index_bytes - touched_bytes
        index = open_index(settings.index, f"{data}/index", disk, memory_bytes=rocks_bytes)
        self._closing.callback(index.close)
        log = CommitLog.open(
            disk,
            cache,
            f"{data}/log",
            segment_bytes=settings.log_segment_bytes,
            verify_from=index.checkpoint,
            create_at=_FIRST_POSITION,
        )
        self._closing.callback(log.close)
        self._closing.callback(AHEAD.settle, drops=True)  # it reads all of these
        secret = identity.secret_words()
        group = 0 if settings.group is None else settings.group.group
        self.core = core = Core(
            settings=settings,
            disk=disk,
            machine_clock=self._clock,
            randomness=self._randomness,
            clock=LogClock(self._clock, log.last_append_ms),
            cache=cache,
            log=log,
            index=index,
            key_query=KeyQueryIndex(log, disk, cache, f"{data}/log", secret),
            identity=identity,
            secret=secret,
            catalogue=Catalogue(self._topic_deleted, group),
            health=Health(),
            reserve=Reserve(disk, data, self._randomness),
        )
        self.metrics = core.metrics
        self.partitions = Partitions(core)
        self._lookup = Lookup(core, self.partitions)
        self._dispatcher = Dispatcher(core, self.partitions, self._dispatched)
        alone = settings.group is None
        self._commits: Commits = Flusher(core, self._on_durable) if alone else GroupCommits(core)
        self._appender = Appender(core, self.partitions, self._commits, self._lookup)
        self._snapshots = Snapshots(core)
        self._reader = Reader(core, self.partitions, self._commits, self._lookup, self._snapshots)
        self._sealer = Sealer(core, self.partitions, self._commits)
        self._scheduler = Scheduler(core, self.partitions, self._commits)
        self._topics = Topics(core, self._appender, self._commits)
        self._groups = Groups(core, self.partitions, self._appender, self._commits, self._lookup)
        self._plans = Plans(
            core, self.partitions, self._commits, self._scheduler, self._reader.settle,
            self.in_thread, None if alone else self._topics.force_compaction,
        )  # fmt: skip
        await self._plans.load()
        self.knows_states = False
        self._producers_checked = float("-inf")
        core.dispatched_position = max(index.checkpoint, log.start)
        self._load_catalogue()
        core.catalogue.on_force = self._compact_by_force
        if isinstance(self._commits, GroupCommits):
            self._join(self._commits)
        else:
            await self._replay()
        self._scheduler.start()
        self._spawn(self._plans.run())
        self._spawn(self._housekeeping())
        self._spawn(self._checkpoints())
        self._spawn(self._scan_states())

    def _join(self, commits: GroupCommits) -> None:
        """Become a replica: the group says what is committed, and so what is dispatched."""
        # A broker of its own starts a tenth of a second sooner without these.
        from firn_node.engine.membership import join_group
        from firn_node.engine.replica import Replica
        from firn_node.rebuild.source import Source
        from firn_node.rebuild.standby import Rebuilding
        from firn_node.replication.doors.peers import Dialling

        jit.prepare()  # a replica that stood still for so long once it has joined might be replaced
        core, place = self.core, self.settings.group
        if place is None or self._coordinator is None:
            raise InvariantBroken("a replica needs its place and the coordinator of its group")
        replica = Replica(
            core, self.partitions, self._lookup, self._dispatcher, self._appender, commits,
            first_position=_FIRST_POSITION,
        )  # fmt: skip
        self._closing.callback(replica.close)
        self.group = join_group(core, replica, place, self._coordinator, self._dialling)
        commits.join(self.group)
        replica.join(self.group)
        self._replica = replica
        self._source = Source(core, self.partitions, self._scheduler)
        self._rebuilding = Rebuilding(
            core, self.partitions, self._scheduler, self.group, self,
            dialling=self._dialling or Dialling(), first_position=_FIRST_POSITION,
        )  # fmt: skip
        rebuilding = self._rebuilding
        replica.holds = lambda: rebuilding.holds_dispatch
        if place.groups > 1:
            self._join_cluster(self.group, self._coordinator)
        self.group.start()
        self._spawn(rebuilding.run())

    def _join_cluster(self, group: "GroupDriver", coordinator: "Coordinator") -> None:
        """Know the other groups; tell them of topics, or take theirs over from group 0."""
        from firn_node.engine.following import Followers, Following
        from firn_node.engine.others import Others

        core = self.core
        core.others = Others(coordinator, core.groups, core.group, lambda: group.state.record)
        self._spawn(core.others.run())
        if core.group == FIRST_GROUP:
            self._followers = Followers(core, lambda: (group.epoch, group.forced_epoch))
            self._topics.lead(self._followers)
            return
        self._following = Following(
            core, core.others, self._topics.take_over,
            lambda: group.epoch if group.is_master and group.is_settled else None,
            self.settings.security.as_client(),
        )  # fmt: skip
        core.catalogue.whole_to = self._following.whole_to
        self._spawn(self._following.run())

    def _load_catalogue(self) -> None:
        partition = self.partitions.get(self.core.catalogue.named(TOPICS_TOPIC), 0)
        offset = 0
        while offset < partition.horizon:
            parts, offset = partition.log.read(offset, _CATALOGUE_BYTES)
            result = ReadResult(partition.topic.topic_id, parts, offset, offset, offset, 0)
            try:
                for item in items(result.take()):
                    item.batch.verify()  # a wrong name or id would delete a topic's files
                    self._apply_topics(item.batch, item.masked)
            except MalformedBatch as error:
                folder = self.partitions.folder(*partition.key)
                raise Corrupt(f"{folder}: the topics cannot be read: {error.message}", file=folder) from error
        for batch in self.partitions.raw_batches(*partition.key, partition.horizon, partition.dispatched_end):
            self._apply_topics(batch, None)
        self.core.catalogue.applied_end = partition.dispatched_end

    def _apply_topics(self, batch: Batch, masked: NDArray[np.bool_] | None) -> None:
        for row, (key, value) in enumerate(zip(batch.key_list(), batch.value_list(), strict=True)):
            if masked is None or not masked[row]:
                self.core.catalogue.apply(key.decode(), value)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread; ``stop`` waits for it even when its caller was cancelled."""
        return await asyncio.shield(self._start_thread(function, *arguments))

    async def reach(self, position: int) -> None:
        """Return once the log is dispatched up to ``position``."""
        await self._commits.wait(position)

    def take_over_pulled(self) -> None:
        """Other files are in the compacted folder now: read the catalogue off them, and dispatch the log."""
        self.partitions.forget_all()
        self._load_catalogue()
        self._replica.release()

    async def rebuild_source(self, start: int) -> "Source":
        """What a standby whose log begins at ``start`` is rebuilt from; its list misses no producer below that.

        *Errors*: NotMaster, Unavailable.
        """
        self._check_reading()
        source = self.pinned_source()
        if not self.knows_states:
            raise Unavailable("this broker has just started; ask again")
        if self.core.index.checkpoint < start:
            await self.checkpoint()
        return source

    def pinned_source(self) -> "Source":
        """What holds the pins: they are good, whoever is master by now. *Errors*: Unavailable."""
        self._check_serving()
        if self._source is None:
            raise Unavailable("this broker is not part of a group")
        return self._source

    async def _replay(self) -> None:
        """Dispatch what the log holds beyond the checkpoint."""
        log = self.core.log
        for position, chunk in log.scan(self.core.dispatched_position, log.written_end):
            self._dispatcher.replay(position, chunk)
            self.metrics["replayed_bytes"] += len(chunk)
            await asyncio.sleep(0)
        self.core.dispatched_position = log.written_end

    async def stop(self) -> None:
        """Sync, seal off and close; the next start has nothing to replay."""
        if self._state in ("starting", "stopped"):
            return
        if self._state == "stopping":
            await self._stopped.wait()
            return
        self._state = "stopping"
        self._reader.is_closing = True
        for partition in self.partitions:
            partition.wake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What a cancelled task has begun in a thread goes on there: nothing is closed under it.
        await asyncio.gather(*self._in_threads, return_exceptions=True)
        await self._scheduler.stop()
        if self._source is not None:
            self._source.take_all_back()
        if self.group is not None:
            await self.group.stop()
        await self._commits.stop()
        await self._sealer.stop()
        self._snapshots.close_all()
        if self.core.health.failed is None and not self._is_being_pulled:
            with contextlib.suppress(OSError, FirnError):
                await self.checkpoint()
        await asyncio.gather(*self._in_threads, return_exceptions=True)
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
    def _is_being_pulled(self) -> bool:
        """Nothing is dispatched, and no checkpoint is made, until what precedes the log is here."""
        return self._rebuilding is not None and self._rebuilding.holds_dispatch

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
        return None if self._rebuilding is None else self._rebuilding.status()

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
        return self._appender.begin(data, conditions)

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
            return await self._reader.read(request)
        await self._admit_read(request.floor)
        try:
            return await self._reader.read(request)
        except (BadOffset, OffsetExpired, SnapshotExpired, UnknownTopic, UnknownPartition):
            if self.group.is_master:
                raise
            raise self.group.not_master() from None  # a standby may be behind, or have let go earlier

    async def _admit_read(self, floor: int | None) -> None:
        """Of a read that any replica may answer which has dispatched as far as ``floor``; None: the master."""
        self._check_serving()
        if floor is None:
            self._commits.check_read()
        else:
            await self._commits.admit_read(floor)

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
        info = self._topic_shown(topic, floor)
        if not keys:
            return []
        if partition is None and len(keys) > 1:
            answers = await self.get_many(topic, *joined(keys), bytes_max=sys.maxsize, floor=floor)
            return found_list(answers)
        number = partition if partition is not None else partition_of(keys[0], info.spec.partitions)
        chosen = self.partitions.get(info, number)
        if chosen.pending:
            with chosen.in_use():
                await self._reader.settle(chosen)
        return self._lookup.get(chosen, keys)

    def get_now(self, topic: str, key: bytes) -> list[Found | None] | None:
        """What ``get`` of one key gives; None when records that were appended have to be dispatched first."""
        self._check_reading()
        info = self.core.catalogue.named(topic)
        partition = self.partitions.get(info, partition_of(key, info.spec.partitions))
        return None if partition.pending else self._lookup.get(partition, [key])

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
        answers = Answers(len(starts) - 1, bytes_max=bytes_max)
        wanted = self._lookup.wanted(info.topic_id, keys, starts)
        if info.spec.partitions == 1:
            await self._get_some(info, [(0, np.arange(len(answers)))], wanted, answers)
            return answers
        numbers = partitions_in(keys, starts, info.spec.partitions)
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order], prepend=-1)).tolist()
        parts = [(int(numbers[order[a]]), order[a:b]) for a, b in pairwise([*cuts, len(order)])]
        for at in range(0, len(parts), _GET_PARTITIONS):
            await self._get_some(info, parts[at : at + _GET_PARTITIONS], wanted, answers)
        return answers

    async def _get_some(
        self, info: TopicInfo, parts: Sequence[tuple[int, I64]], wanted: Wanted, answers: Answers
    ) -> None:
        """Answer the keys of some partitions; many of them in a thread, so that the event loop goes on."""
        with contextlib.ExitStack() as using:
            chosen = []
            for number, picks in parts:
                partition = self.partitions.get(info, number)
                using.enter_context(partition.in_use())
                await self._reader.settle(partition)
                chosen.append((partition, picks))
            steps = [self._lookup.bulk(partition, wanted, picks, answers) for partition, picks in chosen]

            def run() -> None:
                for step in steps:
                    step()

            if sum(len(picks) for _, picks in parts) <= _GET_ON_LOOP:
                run()
                return
            running = self._start_thread(run)
            held = using.pop_all()  # until the thread is done, even when who waits for it is cancelled
            running.add_done_callback(lambda _: held.close())
            await asyncio.shield(running)

    async def query(
        self, topic: str, key: bytes, since_ms: int = 0, until_ms: int = (1 << 63) - 1
    ) -> list[Record]:
        """The raw records of a key in a time range, oldest first."""
        self._check_reading()
        info = self.core.catalogue.named(topic)
        await self._commits.wait(self.core.log.written_end)
        return await self.in_thread(
            lambda: list(messages.records_by_key(self.core, info, key, since_ms, until_ms))
        )

    async def find_id(self, topic: str, id: str) -> Record | None:
        self._check_reading()
        info = self.core.catalogue.named(topic)
        await self._commits.wait(self.core.log.written_end)
        return messages.record_by_id(self.core, self._lookup.batches, info, id)

    async def offset_of_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        self._check_reading()
        found = self.partitions.get(self.core.catalogue.named(topic), partition)
        with found.in_use():
            await self._reader.settle(found)
        return self._reader.offset_of_time(found, timestamp_ms)

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
        return await self._topics.create(name, spec, wait_s=wait_s)

    async def update_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None = FOLLOW_S) -> TopicInfo:
        self._check_deciding()
        return await self._topics.update(name, spec, wait_s=wait_s)

    async def delete_topic(self, name: str, *, wait_s: float | None = FOLLOW_S) -> None:
        self._check_deciding()
        await self._topics.delete(name, wait_s=wait_s)

    async def tell_topics(self, group: int, has: Told, wait_s: float) -> dict[str, Any]:
        """What another group's master, which has taken over the state ``has`` of the topics, has yet to take over.

        Waits for news. *Errors*: NotMaster for whom only group 0's master can tell.
        """
        self._check_deciding()
        if self._followers is None:
            raise Invalid("this cluster has one broker group: nobody follows it")
        found = await self._followers.tell(group, has, wait_s)
        self._check_deciding()
        return found

    async def followed(self, wait_s: float) -> list[int]:
        """The groups that still lack, after this time, a topic as it is now; none as soon as none does."""
        if self._followers is None:
            return []
        return await self._followers.wait(self._followers.changed_at, wait_s)

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
        return self._topics.listed(after=after, limit=limit)

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
        if self._followers is not None:
            found["lacking"] = self._followers.lacking_topic(topic)
        return found

    # Compaction, snapshots, groups --------------------------------------------------------------------------

    async def compact(self, topic: str, *, force: bool = False) -> CompactionRun:
        """Ask for a compaction: of this broker's own; by force, of every replica of its group, each by itself."""
        self._check_reading()
        info = self.core.catalogue.named(topic)
        if not force or self.group is None or info.name.startswith("__"):
            return self._scheduler.request(info, force=force)
        known = self.compaction(topic)
        if known is not None and not known.is_done and known.force:
            return known
        await self._topics.force_compaction(info)  # begun here too as soon as its record is dispatched
        run = self.compaction(topic)
        if run is None:
            raise Unavailable(f"topic {topic!r}: the compaction has not begun; try again")
        return run

    def compaction(self, topic: str) -> CompactionRun | None:
        request = self._scheduler.requests.get(self.core.catalogue.named(topic).topic_id)
        return request.run if request is not None else None

    def cancel_compaction(self, topic: str) -> CompactionRun:
        run = self._scheduler.cancel(self.core.catalogue.named(topic).topic_id)
        if run is None:
            raise NotFound(f"topic {topic!r} has no compaction to cancel")
        return run

    async def open_plan(self, topic: str, *, run: str, slice_records: int) -> tuple[dict[str, Any], bool]:
        """The plan of a forced compaction by Spark, and whether it is new: ``firn_node.plans``."""
        self._check_reading()
        plan, is_new = await self._plans.open(
            self.core.catalogue.named(topic), run=run, slice_records=slice_records
        )
        return self._plan_document(plan), is_new

    def plan(self, topic: str) -> dict[str, Any]:
        self._check_reading()
        return self._plan_document(self._plans.newest(self.core.catalogue.named(topic)))

    def touch_plan(self, topic: str, id: str, progress: dict[str, Any] | None) -> dict[str, Any]:
        self._check_reading()
        return self._plan_document(self._plans.touched(self.core.catalogue.named(topic), id, progress))

    def planned_partition(self, topic: str, id: str, partition: int) -> dict[str, Any]:
        self._check_reading()
        return self._plans.part(self.core.catalogue.named(topic), id, partition).document()

    async def cancel_plan(self, topic: str, id: str) -> dict[str, Any]:
        self._check_reading()
        return self._plan_document(await self._plans.cancel(self.core.catalogue.named(topic), id))

    def upload_to_plan(self, topic: str, id: str, partition: int, slice: int) -> "Upload":
        self._check_reading()
        return self._plans.upload(self.core.catalogue.named(topic), id, partition, slice)

    def _plan_document(self, plan: "Plan") -> dict[str, Any]:
        """``shown``: whoever has dispatched so far has all that the plan is about."""
        return {**self._plans.document(plan), "shown": self.shown}

    async def snapshot(self, topic: str) -> SnapshotInfo:
        self._check_reading()
        info = self.core.catalogue.named(topic)
        with contextlib.ExitStack() as used:
            opened = [self.partitions.get(info, number) for number in info.partitions_in(self.core.group)]
            for partition in opened:
                used.enter_context(partition.in_use())
            for partition in opened:
                await self._reader.settle(partition)
            if any(partition.deleted for partition in opened):
                raise UnknownTopic(f"topic {topic!r} was deleted", topic=topic)
            return self._snapshots.open(info, opened)

    def renew(self, id: str) -> SnapshotInfo:
        return self._snapshots.renew(id)

    def close_snapshot(self, id: str) -> None:
        self._snapshots.close(id)

    async def commit_offsets(self, group: str, topic: str, offsets: Committed) -> None:
        self._check_deciding()
        await self._groups.commit(group, self.core.catalogue.named(topic), offsets)

    async def fetch_offsets(self, group: str, topic: str) -> Committed:
        self._check_deciding()
        return await self._groups.fetch(group, self.core.catalogue.named(topic))

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
                    rebuild=self._rebuilding.status() if self._rebuilding is not None else None,
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
        self._commits.check_read()

    def _check_reading(self) -> None:
        self._check_serving()
        self._commits.check_read()

    def _on_durable(self, end: int) -> bool:
        """On the event loop, after a sync: dispatch the next of what it covered; whether that was all."""
        written = self._appender.written
        ready: list[Written | WrittenRecord] = []
        batches = 0
        while written and written[0].end <= end and batches < _DISPATCH_BATCHES:
            write = written.popleft()
            ready.append(write)
            batches += len(write.chosen) if isinstance(write, Written) else 1
        if not ready:
            return True
        try:
            self._dispatcher.dispatch(ready)
        except BaseException:
            written.extendleft(reversed(ready))  # idempotent: tried again as a whole
            raise
        return not written or written[0].end > end

    def _dispatched(self, partition: Partition) -> None:
        self._sealer.check(partition)

    def _topic_deleted(self, topic: TopicInfo) -> None:
        core = self.core
        self._snapshots.drop_topic(topic.topic_id)
        self._scheduler.forget(topic.topic_id)
        if (dropping := self._plans.topic_deleted(topic.topic_id)) is not None:
            self._spawn(dropping)
        gone = self.partitions.drop_topic(topic)
        core.index.delete_topic(topic.topic_id)
        self._spawn(self._remove_files(topic.topic_id, gone))

    def _compact_by_force(self, topic: TopicInfo) -> None:
        if self._plans.has_done(topic):
            self._scheduler.count_forced(topic, self.core.catalogue.forced[topic.topic_id])
        else:
            self._scheduler.request(topic, force=True)

    async def _remove_files(self, topic_id: int, gone: list[Partition]) -> None:
        while any(p.compacting or p.sealing for p in gone):
            await asyncio.sleep(0.02)
        folder = self.partitions.folder(topic_id)
        for partition in gone:
            await self.in_thread(partition.log.remove)
        await self.in_thread(self._disk.remove_tree, folder)

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            with self._reported("the check of the disk"):
                await self._leave_to_who_can_write()
                await self._check_disk()
            with self._reported("housekeeping"):
                self._snapshots.expire()
                if self._source is not None:
                    self._source.expire()
                await self._plans.expire()
                self._sealer.check_budget()
            if self.knows_states:
                with self._reported("retention"):
                    await self._retain()
            with self._reported("the key query index"):
                await self.in_thread(self.core.key_query.build_missing, 1)
            with self._reported("the expiry of producers"):
                await self._expire_producers()

    async def _expire_producers(self) -> None:
        """Forget the producers that have written nothing for long."""
        core, loop = self.core, asyncio.get_running_loop()
        if loop.time() < self._producers_checked + _PRODUCERS_CHECK_S:
            return
        self._producers_checked = loop.time()
        expired = core.clock.now_ms() - self.settings.producer_expiry_ms
        for partition in self.partitions:
            partition.producers = {
                id: row
                for id, row in partition.producers.items()
                if row.last_use_ms >= expired or id in partition.producers_touched
            }
        await self.in_thread(core.index.delete_producers, expired)

    async def _retain(self) -> None:
        """Let go of commit log segments, and of what the index knows of them."""
        core = self.core
        plan = current_plan(core, self.partitions.states)
        self._scheduler.held_back = holders(self.partitions.states, plan.expired)
        if plan.release > core.log.start:
            await self.in_thread(core.log.release, plan.release)
            core.index.trim(core.log.start)
            self.metrics["segments_released"] += 1
            if self.group is not None:
                self.group.released(core.log.start)
        await self.in_thread(core.index.sweep, core.log.start, _SWEEP_AT_ONCE)

    async def _leave_to_who_can_write(self) -> None:
        """Hand the mastership over when the disk took no writes for ``_UNWRITABLE_CHECKS`` checks in a row.

        Once until something was appended here again: it does not go round where all replicas share a full disk.
        """
        self._unwritable = self._unwritable + 1 if self.core.health.read_only is not None else 0
        if self._unwritable < _UNWRITABLE_CHECKS or self.group is None or not self.group.is_master:
            return
        appended = self.metrics["append_records"]
        if appended != self._left_after:
            self._left_after = appended
            from firn_node.engine.operating import leave_to_who_can_write

            await leave_to_who_can_write(self.group)

    async def _check_disk(self) -> None:
        """Stop produces below the reserve; take them again, without a restart, once there is room."""
        free, total = self._disk.free()
        health, reserve = self.core.health, self.settings.disk_reserve
        if free < reserve * total:
            health.read_only = (
                f"{free >> 20} MiB of the disk are free, below diskReserve ({reserve:.0%}); free some space, "
                "compaction goes on"
            )
            if self.group is not None:
                self.group.let_go_of_log()
            await self.in_thread(self.core.reserve.set_aside)
        elif health.read_only is not None:
            _log.warning("the disk has room again: taking writes")
            health.read_only = None
            await self.in_thread(self.core.reserve.give_back)

    async def _checkpoints(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if self._is_being_pulled:
                continue
            behind = self.core.dispatched_position - self.core.index.checkpoint
            late = (loop.time() - last) * 1000 >= self.settings.checkpoint_ms
            if behind >= self.settings.checkpoint_bytes or (late and (behind or self.partitions.touched)):
                with self._reported("checkpoint"):
                    await self.checkpoint()
                last = loop.time()

    async def checkpoint(self) -> None:
        """Make what is dispatched durable in the index, with the partitions' states and producers, atomically."""
        async with self._checkpoint_lock:
            core = self.core
            position = core.dispatched_position
            touched, self.partitions.touched = self.partitions.touched, set()
            started = time.perf_counter()
            try:
                for key in touched:
                    state = self.partitions.states.get(key)
                    if state is not None:
                        core.index.put_state(*key, state.pack())
                for partition in self.partitions:
                    if partition.producers_touched:
                        self._put_producers(partition)
                await self.in_thread(core.index.flush, position)
                if self.group is not None and self.group.failed is None:
                    await self.group.checkpoint(position)
            except BaseException:
                self.partitions.touched |= {key for key in touched if key in self.partitions.states}
                raise
            self.partitions.evict()
            self.metrics["checkpoints"] += 1
            self.metrics["checkpoint_ms"] += int((time.perf_counter() - started) * 1000)

    def _put_producers(self, partition: Partition) -> None:
        """Store the producers' rows, of what is dispatched; those with more to come stay marked."""
        left: set[int] = set()
        for producer_id in partition.producers_touched:
            row = partition.producers.get(producer_id)
            if row is None:
                continue
            packed = row.pack(before=partition.dispatched_end)
            if packed is not None:
                self.core.index.put_producer(*partition.key, producer_id, packed)
            if row.end > partition.dispatched_end:
                left.add(producer_id)
        partition.producers_touched = left
        if len(partition.producers) > _PRODUCERS_HELD_MAX:
            partition.producers = {id: partition.producers[id] for id in left}

    async def _scan_states(self) -> None:
        """After start: learn what is to be scheduled, and remove what belongs to no topic.

        Of a node that is being rebuilt the catalogue is known once the log is dispatched.
        """
        if self._rebuilding is not None:
            await self._rebuilding.whole.wait()
        while not self.knows_states:
            with self._reported("state scan"):
                await self._scan_states_once()
                self.knows_states = True
                self._scheduler.request_forgotten()
                return
            await asyncio.sleep(_HOUSEKEEPING_S)

    async def _scan_states_once(self) -> None:
        unknown: set[int] = set()
        states = self.core.index.states()
        for number, (topic_id, partition, data) in enumerate(states):
            if topic_id not in self.core.catalogue.by_id:
                unknown.add(topic_id)
            else:
                self.partitions.states.setdefault((topic_id, partition), unpack_state(data))
            if number % _STATES_AT_ONCE == _STATES_AT_ONCE - 1:
                await asyncio.sleep(0)
        for topic_id in unknown:
            self.core.index.delete_topic(topic_id)
        folder = f"{self.settings.data}/{_COMPACTED}"
        for name in self._disk.list(folder):
            if not name.isdigit() or int(name) not in self.core.catalogue.by_id:
                await self.in_thread(self._disk.remove_tree, f"{folder}/{name}")

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """A background task's boundary: what goes wrong is logged, counted and shown, and the task goes on."""
        health = self.core.health
        try:
            yield
        except Exception as error:
            expected = isinstance(error, OSError | FirnError)
            _log.error("%s failed, trying again: %s", what, error, exc_info=None if expected else error)
            self.metrics[f"{what.removeprefix('the ').replace(' ', '_')}_failures"] += 1
            health.troubles[what] = str(error)
            if self.core.log.is_broken:  # a sync of this task failed: the same as one of the flusher's
                health.fail(f"{what}: fsync failed: {error}; the page cache cannot be trusted")
        else:
            health.troubles.pop(what, None)

    def _start_thread(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        future = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return future

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks = [t for t in self._tasks if not t.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))
