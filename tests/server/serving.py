"""A broker in memory with the engine's calls, for faults that a real one cannot be asked for; and a served port.

The stand-in keeps whole batches in lists, has no horizon (all is dirty) and no index. Its ``hold`` stops
produces, its ``pages`` are what the next reads give.
"""

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from firn.batch import Batch, Buffer, Identity, columns_of, encode, iterate
from firn.errors import (
    BadOffset,
    Conflict,
    FirnError,
    Invalid,
    MalformedBatch,
    NotFound,
    SnapshotExpired,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownPlan,
    UnknownTopic,
)
from firn.partitioner import partition_of
from firn.record import Record, records_of
from firn.shown import parse_shown
from firn.topicspec import TopicSpec
from firn.wire import Assembler, Message, Op, frames
from firn_node.compaction.answers import Answers, FoundRow
from firn_node.disk import RealDisk
from firn_node.engine.api import (
    Appended,
    CompactionRun,
    Found,
    Outcome,
    PartitionCompaction,
    ReadRequest,
    ReadResult,
    SnapshotInfo,
    TopicInfo,
)
from firn_node.filecache import FileCache, FileRange
from firn_node.plans.upload import Upload
from firn_node.server import ServerSettings, serve
from firn_node.settings import BrokerSettings, MemorySettings
from support.engine_kit import running


class StandIn:
    default_min_in_sync = 1
    shown = "0:4096"

    def __init__(self, *, memory: MemorySettings | None = None, connections_max: int = 100) -> None:
        self.settings = BrokerSettings(
            "nowhere", memory=memory or MemorySettings(), connections_max=connections_max
        )
        self.metrics: Counter[str] = Counter()
        self.names: dict[str, TopicInfo] = {}
        self.logs: dict[tuple[int, int], list[bytes]] = {}
        self.ends: dict[tuple[int, int], int] = {}
        self.produced: list[int] = []  # bytes of each call
        self.hold: asyncio.Event | None = None
        self.pages: list[ReadResult] = []
        self.snapshots: set[str] = set()
        self.committed: dict[tuple[str, str], dict[int, tuple[int, int | None]]] = {}
        self.runs: dict[str, CompactionRun] = {}
        self.changed = asyncio.Event()
        self.failure: BaseException | None = None
        self.unknown: FirnError | None = None  # what who names an unknown id is told

    def floor_in(self, shown: str) -> int:
        return parse_shown(shown).get(0, 0)

    def topic(self, name: str) -> TopicInfo:
        if name not in self.names:
            raise UnknownTopic(f"no topic {name!r}")
        return self.names[name]

    def topic_of_id(self, topic_id: int) -> TopicInfo | None:
        return next((topic for topic in self.names.values() if topic.topic_id == topic_id), None)

    def unknown_id(self, topic_id: int) -> FirnError:
        return self.unknown or UnknownTopic(f"no topic has the id {topic_id}")

    def topics(self, *, after: str = "", limit: int = 1000) -> list[TopicInfo]:
        return [self.names[n] for n in sorted(self.names) if n > after][:limit]

    async def create_topic(self, name: str, spec: TopicSpec) -> TopicInfo:
        if name in self.names:
            raise TopicExists(f"topic {name} is there")
        self.names[name] = TopicInfo(name, 8 * (len(self.names) + 1), spec)
        return self.names[name]

    async def update_topic(self, name: str, spec: TopicSpec) -> TopicInfo:
        self.names[name] = replace(self.topic(name), spec=spec)
        return self.names[name]

    async def delete_topic(self, name: str) -> None:
        self.topic(name)
        del self.names[name]

    async def tell_topics(self, group: int, has: tuple[int, int], wait_s: float) -> dict[str, Any]:
        return {"epoch": 1, "position": 8, "whole": True, "topics": [], "deleted": []}

    async def describe(self, name: str, *, after: int = -1, limit: int = 1000) -> dict[str, Any]:
        count = self.topic(name).spec.partitions
        return {"partitions": [{"partition": p} for p in range(count)[after + 1 : after + 1 + limit]]}

    async def produce(self, data: Buffer, *, conditions: Any = None) -> list[Outcome]:
        if self.failure is not None:
            raise self.failure
        self.produced.append(len(data))
        if self.hold is not None:
            await self.hold.wait()
        outcomes: list[Outcome] = []
        try:
            for at, batch in enumerate(iterate(data)):
                outcomes.append(self._append(batch, conditions[at] if conditions else None))
        except MalformedBatch as error:
            outcomes.append(error)
        self.changed.set()
        self.changed = asyncio.Event()
        return outcomes

    def begin_produce(
        self, data: Buffer, *, conditions: Any = None
    ) -> tuple[list[Outcome], Coroutine[Any, Any, None]]:
        outcomes: list[Outcome] = []

        async def later() -> None:
            outcomes.extend(await self.produce(data, conditions=conditions))

        return outcomes, later()

    def _append(self, batch: Batch, condition: int | None) -> Outcome:
        h = batch.header
        key = (h.topic_id, h.partition)
        info = next((t for t in self.names.values() if t.topic_id == h.topic_id), None)
        if info is None or h.partition >= info.spec.partitions:
            return UnknownTopic(f"no topic with the id {h.topic_id}")
        try:
            batch.verify()
            _ = batch.columns
        except MalformedBatch as error:
            return error
        if condition is not None:
            newest = self._newest(info, h.partition, batch.key_list()[0])
            found = -1 if newest is None or (condition == -1 and newest.value is None) else newest.offset
            if found != condition:
                return Conflict("another is newer", newest_offset=found)
        base = self.ends.get(key, 0)
        columns = batch.columns
        columns = replace(columns, offsets=columns.offsets - columns.offsets[0] + base)
        stored = encode(columns, Identity(topic_id=h.topic_id, partition=h.partition))
        self.logs.setdefault(key, []).append(stored)
        self.ends[key] = base + h.records
        return Appended(h.topic_id, h.partition, base, h.records)

    def _newest(self, info: TopicInfo, partition: int, key: bytes) -> Record | None:
        found = None
        for data in self.logs.get((info.topic_id, partition), []):
            for record in records_of(Batch(data), info.name):
                if record.key == key:
                    found = record
        return found

    async def get(
        self, topic: str, keys: Any, *, partition: int | None = None, floor: int | None = None
    ) -> list[Found | None]:
        info = self.topic(topic)
        found: list[Found | None] = []
        for key in keys:
            where = partition_of(key, info.spec.partitions) if partition is None else partition
            newest = self._newest(info, where, key)
            if newest is None or newest.value is None:
                found.append(None)
            else:
                n = newest
                found.append(Found(where, n.offset, n.timestamp, newest.value, n.tag, n.headers))
        return found

    def get_now(self, topic: str, key: bytes) -> list[Found | None] | None:
        return None

    async def get_many(self, topic: str, keys: Any, starts: Any, *, floor: int | None = None) -> Answers:
        wanted = [keys[a:b].tobytes() for a, b in pairwise(starts.tolist())]
        answers = Answers(len(wanted))
        for pick, found in enumerate(await self.get(topic, wanted)):
            if found is not None:
                answers.partitions[pick] = found.partition
                row = FoundRow(found.offset, found.timestamp, found.value, found.tag, found.headers)
                answers.put(pick, row, is_known=True)
        return answers

    async def read(self, request: ReadRequest) -> ReadResult:
        if self.pages:
            return self.pages.pop(0)
        info = self.topic(request.topic)
        if request.partition >= info.spec.partitions:
            raise UnknownPartition(f"no partition {request.partition}")
        if request.snapshot is not None and request.snapshot not in self.snapshots:
            raise SnapshotExpired("no such snapshot")
        deadline = asyncio.get_running_loop().time() + request.wait_ms / 1000
        while True:
            found = self._read_now(info, request)
            left = deadline - asyncio.get_running_loop().time()
            if found.parts or left <= 0:
                return found
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), left)

    def _read_now(self, info: TopicInfo, request: ReadRequest) -> ReadResult:
        key = (info.topic_id, request.partition)
        end = self.ends.get(key, 0)
        if request.offset > end:
            raise BadOffset(f"offset {request.offset} is past the end {end}", end=end)
        parts, size, following = [], 0, request.offset
        for data in self.logs.get(key, []):
            header = Batch(data).header
            if header.last_offset < request.offset:
                continue
            if parts and size + header.size > request.max_bytes:
                break
            parts.append(data[: 104 + header.keys_bytes] if request.keys_only else data)
            size += header.size
            following = header.last_offset + 1
        return ReadResult(info.topic_id, list(parts), following, end, 0, 0)

    async def offset_of_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self.ends.get((self.topic(topic).topic_id, partition), 0)

    async def query(self, topic: str, key: bytes, since_ms: int, until_ms: int) -> list[Record]:
        info = self.topic(topic)
        return [
            record
            for p in range(info.spec.partitions)
            for data in self.logs.get((info.topic_id, p), [])
            for record in records_of(Batch(data), topic)
            if record.key == key and since_ms <= record.timestamp < until_ms
        ]

    async def find_id(self, topic: str, id: str) -> Record | None:
        self.topic(topic)
        return None

    async def compact(self, topic: str, *, force: bool) -> CompactionRun:
        run = CompactionRun("1", topic, self.topic(topic).topic_id, force, [PartitionCompaction(0, "done")])
        self.runs[topic] = run
        return run

    def compaction(self, topic: str) -> CompactionRun | None:
        self.topic(topic)
        return self.runs.get(topic)

    def cancel_compaction(self, topic: str) -> CompactionRun:
        if topic not in self.runs:
            raise NotFound("no compaction")
        return self.runs[topic]

    async def open_plan(self, topic: str, *, run: str, slice_records: int) -> tuple[dict[str, Any], bool]:
        return {"topic_id": self.topic(topic).topic_id, "run": run, "partitions": []}, True

    def plan(self, topic: str) -> dict[str, Any]:
        self.topic(topic)
        raise NotFound("no plan")

    def touch_plan(self, topic: str, id: str, progress: dict[str, Any] | None) -> dict[str, Any]:
        return self.plan(topic)

    def planned_partition(self, topic: str, id: str, partition: int) -> dict[str, Any]:
        return self.plan(topic)

    async def cancel_plan(self, topic: str, id: str) -> dict[str, Any]:
        return self.plan(topic)

    def upload_to_plan(self, topic: str, id: str, partition: int, slice: int) -> Upload:
        self.plan(topic)
        raise UnknownPlan("no plan")

    async def snapshot(self, topic: str) -> SnapshotInfo:
        self.topic(topic)
        self.snapshots.add("s1")
        return SnapshotInfo("s1", topic, {0: {"end": 0, "horizon": 0, "generation": 0}}, 1)

    def renew(self, id: str) -> SnapshotInfo:
        if id not in self.snapshots:
            raise SnapshotExpired("no such snapshot")
        return SnapshotInfo(id, "t", {}, 2)

    def close_snapshot(self, id: str) -> None:
        self.snapshots.discard(id)

    async def commit_offsets(self, group: str, topic: str, offsets: Any) -> None:
        self.topic(topic)
        self.committed.setdefault((group, topic), {}).update(offsets)

    async def fetch_offsets(self, group: str, topic: str) -> dict[int, tuple[int, int | None]]:
        self.topic(topic)
        return self.committed.get((group, topic), {})

    async def switch_over(self, group: int, to: str | None) -> dict[str, Any]:
        raise Unavailable("nobody is in sync")

    async def accept_data_loss(self, group: int, node: str, by: str) -> dict[str, Any]:
        return {"group": group, "to": node, "by": by}

    async def rebuild(self, reason: str) -> None:
        raise Invalid("this broker is no replica of a group")

    async def rebuild_source(self, start: int) -> Any:
        return self.pinned_source()

    def pinned_source(self) -> Any:
        raise Unavailable("this broker is not part of a group")

    def status(self, *, limit: int = 1000) -> dict[str, Any]:
        row = {"node": "n", "role": "master", "in_sync": True, "read_only": False, "epoch": 1}
        return {"brokers": [row], "topics": []}

    def is_ready(self) -> bool:
        return self.failure is None


def run(main: Callable[[], Coroutine[Any, Any, None]], *, seconds: float = 60.0) -> None:
    """Run a test's coroutine; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await main()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def served(broker: Any, settings: ServerSettings | None = None) -> AsyncIterator["Served"]:
    server = await serve(broker, host="127.0.0.1", port=0, settings=settings)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        found = Served(server, session)
        try:
            yield found
        finally:
            await server.stop()


@contextlib.asynccontextmanager
async def real(
    partitions: int = 1, settings: ServerSettings | None = None, **spec: Any
) -> AsyncIterator["Served"]:
    """A real broker behind a real port, with a topic ``t``; a restart at the end must show the same records."""
    with tempfile.TemporaryDirectory() as folder:
        async with running(folder) as kit:
            topic_id = await kit.create("t", partitions=partitions, **spec)
            async with served(kit.broker, settings) as found:
                found.broker, found.topic_id, found.kit = kit.broker, topic_id, kit
                yield found


class Served:
    broker: Any
    kit: Any
    topic_id: int

    def __init__(self, server: Any, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session
        self.address = server.address
        self.context = server.context

    async def ask(self, method: str, target: str, **options: Any) -> tuple[int, Any, Any]:
        """Status, decoded body (JSON where it is) and headers."""
        from yarl import URL

        url = URL(f"http://{self.address}{target}", encoded=True)
        async with self.session.request(method, url, **options) as response:
            body: Any = await response.read()
            if response.content_type == "application/json":
                import json

                body = json.loads(body)
            return response.status, body, response.headers

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator["Peer"]:
        async with self.session.ws_connect(f"ws://{self.address}/v1/stream", max_msg_size=0) as socket:
            yield Peer(socket)


@contextlib.asynccontextmanager
async def raw(
    address: str, *, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection, cut at the end whatever it still has to send."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Peer:
    """A client of the stream that hides nothing."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._assembler = Assembler(bytes_max=1 << 30)

    async def send(self, op: int, id: int, meta: dict[str, Any] | None = None, data: bytes = b"") -> None:
        for frame in frames(op, id, meta, data):
            await self.socket.send_bytes(frame)

    async def receive(self) -> Message:
        while True:
            frame = await self.socket.receive_bytes()
            if (message := self._assembler.feed(frame)) is not None:
                return message

    async def ask(self, op: int, id: int, meta: dict[str, Any] | None = None, data: bytes = b"") -> Message:
        await self.send(op, id, meta, data)
        return await self.receive()

    async def is_alive(self) -> bool:
        await self.send(Op.PING, 999_999)
        while True:
            found = await self.receive()
            if found.id == 999_999:
                return found.op == Op.OK


def batch(topic_id: int, *records: tuple[bytes, bytes | None], partition: int = 0, **options: Any) -> bytes:
    keys, values = [k for k, _ in records], [v for _, v in records]
    return encode(columns_of(keys, values, 1000, **options), Identity(topic_id=topic_id, partition=partition))


@contextlib.contextmanager
def file_ranges(folder: Path, *contents: bytes) -> Iterator[list[FileRange]]:
    """The contents as leased ranges of one real file each."""
    cache = FileCache(RealDisk(str(folder)), 16)
    found = []
    for number, content in enumerate(contents):
        path = folder / f"part-{number}"
        path.write_bytes(b"head" + content + b"tail")
        found.append(FileRange(cache.lease(str(path)), 4, len(content)))
    yield found
    cache.close()


def error_of(document: Any) -> FirnError:
    from firn.errors import from_document

    return from_document(document)
