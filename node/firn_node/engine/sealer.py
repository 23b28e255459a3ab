"""Seals active segments: by size, by the memory budget of all of them, never ahead of the commit log.

1. on the event loop: the active index becomes one that is *being sealed*, a new one starts at its end;
2. once all of its rows are dispatched (so durable in the log): a thread sorts it and writes its key index file
   and the manifest that names it;
3. on the event loop: it leaves memory. Until then look-ups find its rows in memory.

A compaction of the same partition may run meanwhile: it takes the rows from memory or from the file, whichever
there is, and never waits for a seal, which on a full disk does not end before a compaction has made room.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from firn.errors import FirnError
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.partition import Partition
from firn_node.engine.partitions import Partitions
from firn_node.kernels import ActiveIndex, ascending

_log = logging.getLogger(__name__)
_RETRY_S = 5.0
_STEPPED_DOWN_S = 0.2


class Sealer:
    def __init__(self, core: Core, partitions: Partitions, commits: Commits) -> None:
        self._core = core
        self._partitions = partitions
        self._commits = commits
        self._threads = ThreadPoolExecutor(1, "firn-sealer")
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._stopping = False

    def check(self, partition: Partition) -> None:
        """Seal the partition's active segment if it is full; called once per partition and dispatch."""
        if (
            partition.active is not None
            and partition.active_bytes >= partition.topic.spec.compaction.segment_bytes
        ):
            self.seal(partition)

    def check_budget(self) -> None:
        """Seal the largest active segments until all of them fit their memory budget."""
        budget = self._core.settings.memory.active_keys_bytes
        total = self._partitions.active_bytes()
        if total <= budget:
            return
        by_size = sorted(
            self._partitions, key=lambda p: p.active.nbytes if p.active is not None else 0, reverse=True
        )
        for partition in by_size:
            if total <= budget // 2 or partition.active is None or not partition.active_bytes:
                return
            total -= partition.active.nbytes
            self.seal(partition)

    def seal(self, partition: Partition) -> None:
        active = partition.active
        if active is None or active.end == active.start or self._stopping:
            return
        partition.sealing.append(active)
        partition.active = ActiveIndex(active.end)
        size, partition.active_bytes, partition.active_since_ms = partition.active_bytes, 0, 0
        before = self._tasks.get(partition.key)
        task = asyncio.get_running_loop().create_task(self._finish(partition, active, size, before))
        self._tasks[partition.key] = task

    async def stop(self) -> None:
        """End at the next safe point; what is not sealed is rebuilt at first use."""
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._threads.shutdown(wait=True)

    async def _finish(
        self, partition: Partition, active: ActiveIndex, size: int, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        while partition.dispatched_end < active.end:
            try:
                await self._commits.wait(self._core.log.written_end)
            except FirnError:  # this node is not the master any more, or stops
                await asyncio.sleep(_STEPPED_DOWN_S)
            if active not in partition.sealing:
                return  # its rows may have been cut off the log; those that stay are loaded anew
        loop = asyncio.get_running_loop()
        trouble = f"sealing {partition.topic.name}/{partition.number}"
        while not partition.deleted:
            try:
                await loop.run_in_executor(self._threads, self._write, partition, active, size)
                break
            except (
                Exception
            ) as error:  # this task's boundary: its rows stay in memory, the next try may succeed
                _log.error(
                    "%s/%d: sealing failed, trying again: %s", partition.topic.name, partition.number, error
                )
                self._core.metrics["seal_failures"] += 1
                self._core.health.troubles[trouble] = str(error)
                await asyncio.sleep(_RETRY_S)
        self._core.health.troubles.pop(trouble, None)
        if active in partition.sealing:
            partition.sealing.remove(active)
        partition.state.sealed_bytes = sum(d.bytes for d in partition.log.manifest.dirty)
        self._partitions.touch(partition)
        if self._tasks.get(partition.key) is asyncio.current_task():
            del self._tasks[partition.key]

    def _write(self, partition: Partition, active: ActiveIndex, size: int) -> None:
        start = max(active.start, partition.unsealed_start)
        if start >= active.end:
            return  # a compaction has covered it meanwhile
        rows = ascending(active.pieces(start, active.end))
        partition.log.seal(start, active.end, rows, bytes=size, max_append_ms=self._core.clock.now_ms())
