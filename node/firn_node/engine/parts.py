"""The parts of the engine above one data folder, made in the order in which they need one another.

1. the partition index: its checkpoint tells how far dispatch is durable;
2. the commit log, verified from there on, its torn tail cut;
3. everything that works on the two.

Nothing runs before ``Broker`` starts it.
"""

import asyncio
import contextlib

from firn_node.clock import Clock, LogClock, Randomness
from firn_node.compaction.ahead import AHEAD
from firn_node.compaction.log import BLOCK_CACHE
from firn_node.disk import Disk
from firn_node.engine.api import TopicInfo
from firn_node.engine.appender import Appender, Written, WrittenRecord
from firn_node.engine.background import Background
from firn_node.engine.catalogue import Catalogue
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core, Health
from firn_node.engine.dispatcher import Dispatcher
from firn_node.engine.flusher import Flusher
from firn_node.engine.groupcommits import GroupCommits
from firn_node.engine.groups import Groups
from firn_node.engine.identity import load_identity
from firn_node.engine.lookup import Lookup
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.engine.reader import Reader
from firn_node.engine.reserve import Reserve
from firn_node.engine.scheduler import Scheduler
from firn_node.engine.sealer import Sealer
from firn_node.engine.snapshots import Snapshots
from firn_node.engine.topics import Topics
from firn_node.engine.upkeep import Upkeep
from firn_node.engine.values import Values
from firn_node.filecache import FileCache
from firn_node.index import open_index
from firn_node.log import CommitLog, KeyQueryIndex
from firn_node.plans.plans import Plans
from firn_node.settings import BrokerSettings

FIRST_POSITION = 4096  # of a new log: a topic's id is a position, and no topic has the id 0, 1 or 2
_DISPATCH_BATCHES = 256  # at once: about 2 ms, after which the event loop serves whoever waits


def open_core(
    settings: BrokerSettings, disk: Disk, clock: Clock, randomness: Randomness, closing: contextlib.ExitStack,
    catalogue: Catalogue,
) -> Core:  # fmt: skip
    """The folder's files, open; ``closing`` closes them. *Errors*: Corrupt for damage below the durable end."""
    data = settings.data
    identity = load_identity(disk, data, randomness)
    cache = FileCache(disk, settings.open_files_max)
    closing.callback(cache.close)
    disk.make_folder(f"{data}/log")
    disk.make_folder(f"{data}/compacted")
    touched_bytes = settings.memory.index_bytes // 3
    BLOCK_CACHE.limit(touched_bytes)
    rocks_bytes = settings.memory.index_bytes - touched_bytes
    index = open_index(settings.index, f"{data}/index", disk, memory_bytes=rocks_bytes)
    closing.callback(index.close)
    log = CommitLog.open(
        disk, cache, f"{data}/log", segment_bytes=settings.log_segment_bytes, verify_from=index.checkpoint,
        create_at=FIRST_POSITION,
    )  # fmt: skip
    closing.callback(log.close)
    closing.callback(AHEAD.settle, drops=True)  # it reads all of these
    secret = identity.secret_words()
    return Core(
        settings=settings,
        disk=disk,
        machine_clock=clock,
        randomness=randomness,
        clock=LogClock(clock, log.last_append_ms),
        cache=cache,
        log=log,
        index=index,
        key_query=KeyQueryIndex(log, disk, cache, f"{data}/log", secret),
        identity=identity,
        secret=secret,
        catalogue=catalogue,
        health=Health(),
        reserve=Reserve(disk, data, randomness),
        dispatched_position=max(index.checkpoint, log.start),
    )


class Parts:
    def __init__(
        self, settings: BrokerSettings, disk: Disk, clock: Clock, randomness: Randomness,
        closing: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        """Errors: as ``open_core``."""
        group = 0 if settings.group is None else settings.group.group
        catalogue = Catalogue(self._topic_deleted, group)
        self.core = core = open_core(settings, disk, clock, randomness, closing, catalogue)
        self.background = background = Background()
        self.partitions = partitions = Partitions(core)
        self.lookup = Lookup(core, partitions)
        self.dispatcher = Dispatcher(core, partitions, self._dispatched)
        alone = settings.group is None
        self.commits: Commits = Flusher(core, self._on_durable) if alone else GroupCommits(core)
        self.appender = Appender(core, partitions, self.commits, self.lookup)
        self.snapshots = Snapshots(core)
        self.reader = Reader(core, partitions, self.commits, self.lookup, self.snapshots)
        self.sealer = Sealer(core, partitions, self.commits)
        self.scheduler = Scheduler(core, partitions, self.commits)
        self.topics = Topics(core, self.appender, self.commits)
        self.groups = Groups(core, partitions, self.appender, self.commits, self.lookup)
        self.plans = Plans(
            core, partitions, self.commits, self.scheduler, self.reader.settle,
            background.in_thread, None if alone else self.topics.force_compaction,
        )  # fmt: skip
        self.values = Values(core, partitions, self.commits, self.lookup, self.reader, background)
        self.upkeep = Upkeep(
            core, partitions, self.scheduler, self.snapshots, self.sealer, self.plans, background
        )

    def _on_durable(self, end: int) -> bool:
        """On the event loop, after a sync: dispatch the next of what it covered; whether that was all."""
        written = self.appender.written
        ready: list[Written | WrittenRecord] = []
        batches = 0
        while written and written[0].end <= end and batches < _DISPATCH_BATCHES:
            write = written.popleft()
            ready.append(write)
            batches += len(write.chosen) if isinstance(write, Written) else 1
        if not ready:
            return True
        try:
            self.dispatcher.dispatch(ready)
        except BaseException:
            written.extendleft(reversed(ready))  # idempotent: tried again as a whole
            raise
        return not written or written[0].end > end

    def _dispatched(self, partition: Partition) -> None:
        self.sealer.check(partition)

    def _topic_deleted(self, topic: TopicInfo) -> None:
        self.snapshots.drop_topic(topic.topic_id)
        self.scheduler.forget(topic.topic_id)
        if (dropping := self.plans.topic_deleted(topic.topic_id)) is not None:
            self.background.spawn(dropping)
        gone = self.partitions.drop_topic(topic)
        self.core.index.delete_topic(topic.topic_id)
        self.background.spawn(self._remove_files(topic.topic_id, gone))

    async def _remove_files(self, topic_id: int, gone: list[Partition]) -> None:
        while any(p.compacting or p.sealing for p in gone):
            await asyncio.sleep(0.02)
        folder = self.partitions.folder(topic_id)
        for partition in gone:
            await self.background.in_thread(partition.log.remove)
        await self.background.in_thread(self.core.disk.remove_tree, folder)

    def compact_by_force(self, topic: TopicInfo, plan: str) -> None:
        """A record of the log asks every replica to; ``plan``: on whose behalf, where it is a plan's."""
        if self.plans.has_done(topic, plan):
            self.scheduler.count_forced(topic, self.core.catalogue.forced[topic.topic_id])
        else:
            self.scheduler.request(topic, force=True)
