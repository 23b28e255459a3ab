"""The rebuild of this node, from the stream's first byte to the order that lets it ask to be in sync.

Steps, each tried again with a growing pause until it succeeds, all known again after a restart:

1. the log has begun: the master streams from its log's start, and holds that back from retention meanwhile;
2. the list: ends of partitions, producers and light queues as of the log's start go into the index, and are flushed;
3. every listed partition is pulled, by a few threads; those that are whole outlive restarts and changes of master;
4. ``PULLED`` is noted, the pulled folders take their place, the catalogue is read;
5. the log is dispatched, at least up to where the list and every pin were taken;
6. every partition is looked at: no offset is missing between what was pulled and what was dispatched;
7. a forced compaction of all that was pulled; a checkpoint;
8. the core is told (``Rebuilt``), and asks to join in sync; what is left of the rebuild is removed.

Until step 4 nothing is dispatched, compacted or checkpointed here, so the log stays whole from its first byte on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from firn.errors import FirnError, Unavailable, UnknownTopic
from firn_node.engine.core import Core
from firn_node.engine.partitions import Partitions
from firn_node.engine.scheduler import Scheduler
from firn_node.index.base import PartitionEnd
from firn_node.rebuild import folder
from firn_node.rebuild.pulling import LOST, Progress, Puller
from firn_node.rebuild.remote import Remote, Where
from firn_node.replication.doors.codec import VERSION
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.driver import GroupDriver
from firn_node.replication.state import Role

T = TypeVar("T")
log = logging.getLogger("firn.rebuild")

THREADS = 2
TRIES_MAX = 60  # without any progress in between: some eight minutes
PAUSE_S, PAUSE_MAX_S = 0.1, 10.0
_POLL_S = 0.05
_ADOPTED_AT_ONCE = 2000


class Host(Protocol):
    """The broker."""

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T: ...
    async def checkpoint(self) -> None: ...
    async def reach(self, position: int) -> None:
        """Return once the log is dispatched up to ``position``."""
        ...

    def take_over_pulled(self) -> None:
        """The compacted folder is another one now: read the catalogue anew, dispatch from here on."""
        ...


class Rebuilding:
    """``installed``: this node may dispatch, and so make checkpoints. ``whole``: ... compact and let go of its log."""

    def __init__(
        self, core: Core, partitions: Partitions, scheduler: Scheduler, group: GroupDriver, host: Host, *,
        dialling: Dialling, first_position: int, dial: Callable[[Where], Remote] = Remote,
    ) -> None:  # fmt: skip
        self._core = core
        self._partitions = partitions
        self._scheduler = scheduler
        self._group = group
        self._host = host
        self._dialling = dialling
        self._first_position = first_position
        self._dial = dial
        self._data = core.settings.data
        self._queue: deque[tuple[int, int]] = deque()
        self._remotes: set[Remote] = set()
        self.progress = Progress()
        self.installed = asyncio.Event()
        self.whole = asyncio.Event()

    @property
    def holds_dispatch(self) -> bool:
        """What precedes the own log is not in its place yet."""
        log = self._core.log
        is_whole = log.start == self._first_position and log.written_end > log.start
        return self._is_blank and not self.installed.is_set() and not is_whole

    def status(self) -> dict[str, Any] | None:
        """For ``firn status``; None when there is no rebuild."""
        found = self.progress
        if not self._is_blank or found.phase == "waiting":
            return None
        return {
            "phase": found.phase, "partitions": found.partitions, "partitions_done": found.partitions_done,
            "bytes": found.bytes, "bytes_expected": found.bytes_expected, "reason": found.reason,
        }  # fmt: skip

    async def run(self) -> None:
        """Return once this node is rebuilt, or has turned out not to need it."""
        try:
            if await self._is_needed():
                log.warning("%s: the rebuild begins at position %d", self._data, self._core.log.start)
                await self._rebuild()
                log.warning("%s: rebuilt", self._data)
        except Exception as error:  # the boundary of this task: this process ends, the next one goes on
            log.exception("%s: the rebuild failed", self._data)
            self._core.health.fail(f"the rebuild failed: {error}")
            return
        finally:
            for remote in self._remotes:
                remote.close()
        self.installed.set()
        self.whole.set()
        await self._host.in_thread(folder.forget, self._core.disk, self._data)

    @property
    def _is_blank(self) -> bool:
        return self._group.role is Role.BLANK

    async def _is_needed(self) -> bool:
        """Whether the log begins after the first record; known as soon as it has begun."""
        while self._is_blank:
            if self._group.state.log.history and self._core.log.start != self._first_position:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _rebuild(self) -> None:
        core, data = self._core, self._data
        found = folder.pulled(core.disk, data)
        if found is None:
            found = await self._pull_all()
            await self._host.in_thread(folder.note_pulled, core.disk, data, found)
            await self._host.in_thread(folder.install, core.disk, data)
        progress = self.progress
        progress.partitions = progress.partitions_done = found.partitions
        progress.bytes = progress.bytes_expected = found.bytes
        progress.phase = "dispatching"
        self.installed.set()
        self._host.take_over_pulled()
        await self._host.reach(found.upto)
        await self._adopt()
        self.whole.set()
        progress.phase = "compacting"
        await self._compact()
        await self._host.checkpoint()
        progress.phase = "joining"
        self._group.rebuilt()
        while self._is_blank:
            await asyncio.sleep(_POLL_S)

    # Steps 2 and 3.

    async def _pull_all(self) -> folder.Pulled:
        progress = self.progress
        progress.phase = "listing"
        await self._insist("the list", self._list)
        progress.phase = "pulling"
        start = self._core.log.start
        puller = Puller(
            self._core.disk, f"{self._data}/{folder.COMPACTED}",
            start=start, secret=self._core.secret, progress=progress,
        )  # fmt: skip
        work = [
            self._insist("a partition", lambda remote: self._pull_some(puller, remote))
            for _ in range(THREADS)
        ]
        await _all(work)
        return folder.Pulled(progress.upto, progress.partitions_done, progress.bytes)

    def _list(self, remote: Remote) -> None:
        """In a thread: put what precedes the log into the index, and queue the partitions. May be repeated."""
        index, start, progress = self._core.index, self._core.log.start, self.progress
        queue: deque[tuple[int, int]] = deque()
        expected = 0
        for kind, *fields in remote.rows(start):
            if kind == "partition":
                queue.append((fields[0], fields[1]))
                expected += fields[2]
            elif kind == "end":
                index.restore_end(PartitionEnd(*fields))
            elif kind == "queue":
                index.restore_queue(*fields)
            elif kind == "producer":
                index.put_producer(*fields)
            elif kind == "all":
                progress.needs(fields[0])
        index.trim(start)
        index.flush(start)
        self._queue = queue
        progress.partitions, progress.bytes_expected = len(queue), expected

    def _pull_some(self, puller: Puller, remote: Remote) -> None:
        """In a thread: partitions of the queue until it is empty; one that fails goes to its end."""
        while True:
            try:
                key = self._queue.popleft()
            except IndexError:
                return
            try:
                puller.pull(remote, *key)
            except UnknownTopic:
                self.progress.done()
            except BaseException:
                self._queue.append(key)
                raise

    async def _insist(self, what: str, work: Callable[[Remote], None]) -> None:
        """Do work that speaks with the master, over and over. *Errors*: Unavailable after too many tries."""
        failures, moved = 0, self.progress.moved
        while True:
            try:
                await self._attempt(work)
                self.progress.reason = None
                return
            except (FirnError, *LOST) as error:
                failures = failures + 1 if self.progress.moved == moved else 1
                moved = self.progress.moved
                self.progress.reason = f"{what}: {error}"
                log.info("%s: %s: %s", self._data, what, error)
                if failures >= TRIES_MAX:
                    raise Unavailable(f"{what}: {failures} tries without progress: {error}") from error
            share = 0.5 + self._core.randomness.bytes(1)[0] / 512
            await asyncio.sleep(share * min(PAUSE_S * 1.6**failures, PAUSE_MAX_S))

    async def _attempt(self, work: Callable[[Remote], None]) -> None:
        remote = self._dial(self._where())
        self._remotes.add(remote)

        def run() -> None:
            try:
                work(remote)
            finally:
                remote.hang_up()

        try:
            await self._host.in_thread(run)
        except asyncio.CancelledError:
            remote.close()
            raise
        finally:
            self._remotes.discard(remote)

    def _where(self) -> Where:
        """*Errors*: Unavailable while no master is known."""
        record, me = self._group.state.record, self._group.me
        master = record.master.log_id if record is not None and record.master is not None else None
        if record is None or master is None or master not in record.members:
            raise Unavailable("the group has no master now")
        query: dict[str, str | int] = {
            "version": VERSION,
            "group": me.group_id,
            "from": me.log_id,
            "to": master,
        }
        return Where(record.members[master].address, query, self._dialling.tls(), self._dialling.headers)

    # Steps 6 and 7.

    async def _adopt(self) -> None:
        """Open every partition once, so that it is scheduled from now on. *Errors*: Corrupt: start anew."""
        core, opened = self._core, 0
        horizons: dict[tuple[int, int], int] = {}
        for name in core.disk.list(self._partitions.root):
            topic = core.catalogue.by_id.get(int(name)) if name.isdigit() else None
            for number in core.disk.list(f"{self._partitions.root}/{name}") if topic is not None else []:
                assert topic is not None, "only its folders are listed"
                partition = self._partitions.get(topic, int(number))
                horizons[partition.key] = partition.horizon
                opened += 1
                if opened % _ADOPTED_AT_ONCE == 0:
                    await self._host.checkpoint()
        topics = frozenset(core.catalogue.by_id)
        missing = await self._host.in_thread(self._missing, horizons, topics)
        if missing is not None:
            self._group.damaged(f"the rebuild left a gap: {missing}")
            raise Unavailable(f"offsets are missing: {missing}")

    def _missing(self, horizons: dict[tuple[int, int], int], topics: frozenset[int]) -> str | None:
        """In a thread: what is neither pulled nor in the log, for people; None: nothing."""
        index = self._core.index
        for end in index.partitions():
            if end.topic_id not in topics:
                continue
            horizon = horizons.get((end.topic_id, end.partition), 0)
            entry = index.find(end.topic_id, end.partition, horizon)
            first = entry.base_offset if entry is not None else end.end_offset
            if first > horizon:
                return f"topic {end.topic_id} partition {end.partition}: [{horizon}, {first})"
        return None

    async def _compact(self) -> None:
        """What cannot be compacted now is compacted when it is due: its reason is in its partition's status."""
        core = self._core
        ids = {int(name) for name in core.disk.list(self._partitions.root) if name.isdigit()}
        runs = [
            self._scheduler.request(topic, force=True)
            for id in ids
            if (topic := core.catalogue.by_id.get(id))
        ]
        while not all(run.is_done for run in runs):
            await asyncio.sleep(_POLL_S)


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them; the first failure ends the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
