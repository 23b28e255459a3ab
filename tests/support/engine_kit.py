"""A broker without a network, for tests of the engine: real files, real indexes, one event loop per test.

``running`` checks the whole folder at the end: it closes, opens again and compares every topic's compacted view,
record by record, before and after. So every test that uses it checks recovery too.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from firn.batch import Codecs, Identity, columns_of, encode
from firn.record import Record, records_of
from firn.topicspec import TopicSpec, parse_spec
from firn.wire import items
from firn_node.engine.api import Appended, CompactionRun, Outcome, ReadRequest, outcomes_or_raise
from firn_node.engine.broker import Broker
from firn_node.settings import BrokerSettings

T = TypeVar("T")
NOW = 1_700_000_000_000


def run(coroutine: Coroutine[Any, Any, T], seconds: float = 120) -> T:
    """Run a test's coroutine, bounded in time."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def settings(folder: Path | str, **changes: Any) -> BrokerSettings:
    quick: dict[str, Any] = {
        "checkpoint_ms": 3_600_000,
        "compaction_check_ms": 3_600_000,
        "disk_reserve": 0.0,
    }
    return BrokerSettings(data=str(folder), **{**quick, **changes})


@dataclass
class Kit:
    broker: Broker
    timestamp: int = NOW
    sequences: dict[int, int] = field(default_factory=dict)

    def spec(self, document: dict[str, Any]) -> TopicSpec:
        return parse_spec(document)

    async def create(self, name: str = "t", **spec: Any) -> int:
        return (await self.broker.create_topic(name, parse_spec(spec) if spec else TopicSpec())).topic_id

    def batch(
        self,
        topic: str,
        rows: Sequence[tuple[bytes, bytes | None]],
        *,
        partition: int = 0,
        codecs: Codecs | None = None,
        producer: tuple[int, int, int] = (0, 0, 0),
        **columns: Any,
    ) -> bytes:
        keys, values = [k for k, _ in rows], [v for _, v in rows]
        stamps = columns.pop("timestamps", self.timestamp)
        identity = Identity(
            topic_id=self.broker.topic(topic).topic_id,
            partition=partition,
            producer_id=producer[0],
            producer_epoch=producer[1],
            sequence=producer[2],
        )
        return encode(columns_of(keys, values, stamps, **columns), identity, codecs)

    async def put(self, topic: str, rows: Sequence[tuple[bytes, bytes | None]], **options: Any) -> Appended:
        outcomes = await self.broker.produce(self.batch(topic, rows, **options))
        return outcomes_or_raise(outcomes)[0]

    async def put_if(self, topic: str, key: bytes, value: bytes | None, condition: int) -> Outcome:
        return (await self.broker.produce(self.batch(topic, [(key, value)]), conditions=[condition]))[0]

    async def get(self, topic: str, key: bytes) -> bytes | None:
        found = (await self.broker.get(topic, [key]))[0]
        return None if found is None else found.value

    async def read(
        self, topic: str, *, view: str = "compacted", partition: int = 0, **options: Any
    ) -> list[Record]:
        """All records of one partition, from ``offset`` (0) to the end at the start of the read."""
        offset, found, limit = options.pop("offset", 0), [], None
        while True:
            request = ReadRequest(topic=topic, partition=partition, view=view, offset=offset, **options)  # type: ignore[arg-type]
            result = await self.broker.read(request)
            limit = max(result.end if limit is None else limit, result.horizon if view == "compacted" else 0)
            for item in items(result.take()):
                item.batch.verify()
                rows = list(records_of(item.batch, topic))
                found += [
                    r
                    for i, r in enumerate(rows)
                    if r.offset >= offset and (item.masked is None or not item.masked[i])
                ]
            assert result.next_offset > offset or result.next_offset >= limit, "a read without progress"
            offset = result.next_offset
            if offset >= limit:
                return found

    async def map(self, topic: str, **options: Any) -> dict[bytes, bytes]:
        """The key-value map that a reader of the view ends with."""
        found: dict[bytes, bytes] = {}
        for record in await self.read(topic, **options):
            if record.value is None:
                found.pop(record.key, None)
            else:
                found[record.key] = record.value
        return found

    async def compact(self, topic: str, *, force: bool = True) -> CompactionRun:
        compaction = await self.broker.compact(topic, force=force)
        while not compaction.is_done:
            await asyncio.sleep(0.005)
        return compaction

    async def compact_here(self, topic: str) -> None:
        """Compact by force, whoever may be served by this broker."""
        compaction = self.broker.parts.scheduler.request(self.broker.topic(topic), force=True)
        while not compaction.is_done:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(folder: Path | str, **changes: Any) -> AsyncIterator[Kit]:
    """A started broker; at the end it is closed, opened again, and must show the same compacted views."""
    kit = Kit(Broker(settings(folder, **changes)))
    await kit.broker.start()
    try:
        yield kit
        before = await _views(kit)
    finally:
        await kit.broker.stop()
    again = Kit(Broker(settings(folder, **changes)))
    await again.broker.start()
    try:
        after = await _views(again)
    finally:
        await again.broker.stop()
    assert after == before, "a restart changed a compacted view"


async def _views(kit: Kit) -> dict[tuple[str, int], list[Record]]:
    return {
        (topic.name, number): await kit.read(topic.name, partition=number)
        for topic in kit.broker.topics()
        for number in range(min(topic.spec.partitions, 8))
    }
