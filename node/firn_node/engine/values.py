"""Records by key, id and time: single ones, long lists, histories.

Who may ask is ``Broker``'s to say. A list of many keys is looked up in a thread, partition by partition, so that the
event loop goes on.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from firn.partitioner import partition_of, partitions_in
from firn.record import Record
from firn_node.compaction.answers import I64, Answers, Wanted, joined
from firn_node.engine import messages
from firn_node.engine.api import Found, TopicInfo
from firn_node.engine.background import Background
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.lookup import Lookup, found_list
from firn_node.engine.partitions import Partitions
from firn_node.engine.reader import Reader

_GET_ON_LOOP = 512  # keys that are looked up on the event loop at once: a few ms
_GET_PARTITIONS = 256  # that are held open for one list of keys


class Values:
    def __init__(
        self, core: Core, partitions: Partitions, commits: Commits, lookup: Lookup, reader: Reader,
        background: Background,
    ) -> None:  # fmt: skip
        self._core = core
        self._partitions = partitions
        self._commits = commits
        self._lookup = lookup
        self._reader = reader
        self._background = background

    async def get(
        self, topic: TopicInfo, keys: Sequence[bytes], *, partition: int | None = None
    ) -> list[Found | None]:
        """The newest record of each key, in order; None for none or a tombstone."""
        if not keys:
            return []
        if partition is None and len(keys) > 1:
            return found_list(await self.get_many(topic, *joined(keys), bytes_max=sys.maxsize))
        number = partition if partition is not None else partition_of(keys[0], topic.spec.partitions)
        chosen = self._partitions.get(topic, number)
        if chosen.pending:
            with chosen.in_use():
                await self._reader.settle(chosen)
        return self._lookup.get(chosen, keys)

    def get_now(self, topic: TopicInfo, key: bytes) -> list[Found | None] | None:
        """What ``get`` of one key gives; None when records that were appended have to be dispatched first."""
        partition = self._partitions.get(topic, partition_of(key, topic.spec.partitions))
        return None if partition.pending else self._lookup.get(partition, [key])

    async def get_many(
        self, topic: TopicInfo, keys: NDArray[np.uint8], starts: NDArray[np.int64], *, bytes_max: int
    ) -> Answers:
        """The newest record of each key; what is left out when ``bytes_max`` of values are found is LATER.

        *Shape*: ``starts`` says where in ``keys`` each key begins, and where the last one ends.
        """
        answers = Answers(len(starts) - 1, bytes_max=bytes_max)
        wanted = self._lookup.wanted(topic.topic_id, keys, starts)
        if topic.spec.partitions == 1:
            await self._get_some(topic, [(0, np.arange(len(answers)))], wanted, answers)
            return answers
        numbers = partitions_in(keys, starts, topic.spec.partitions)
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order], prepend=-1)).tolist()
        parts = [(int(numbers[order[a]]), order[a:b]) for a, b in pairwise([*cuts, len(order)])]
        for at in range(0, len(parts), _GET_PARTITIONS):
            await self._get_some(topic, parts[at : at + _GET_PARTITIONS], wanted, answers)
        return answers

    async def _get_some(
        self, topic: TopicInfo, parts: Sequence[tuple[int, I64]], wanted: Wanted, answers: Answers
    ) -> None:
        """Answer the keys of some partitions; many of them in a thread, so that the event loop goes on."""
        with contextlib.ExitStack() as using:
            chosen = []
            for number, picks in parts:
                partition = self._partitions.get(topic, number)
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
            running = self._background.start_thread(run)
            held = using.pop_all()  # until the thread is done, even when who waits for it is cancelled
            running.add_done_callback(lambda _: held.close())
            await asyncio.shield(running)

    async def query(self, topic: TopicInfo, key: bytes, since_ms: int, until_ms: int) -> list[Record]:
        """The raw records of a key in a time range, oldest first."""
        await self._commits.wait(self._core.log.written_end)
        return await self._background.in_thread(
            lambda: list(messages.records_by_key(self._core, topic, key, since_ms, until_ms))
        )

    async def find_id(self, topic: TopicInfo, id: str) -> Record | None:
        await self._commits.wait(self._core.log.written_end)
        return messages.record_by_id(self._core, self._lookup.batches, topic, id)

    async def offset_of_time(self, topic: TopicInfo, partition: int, timestamp_ms: int) -> int:
        found = self._partitions.get(topic, partition)
        with found.in_use():
            await self._reader.settle(found)
        return self._reader.offset_of_time(found, timestamp_ms)
