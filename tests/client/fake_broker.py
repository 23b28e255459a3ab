"""A broker in memory for fault cases: it drops connections around an append, refuses, answers twice, lags.

It speaks the parts of HTTP and of ``/v1/stream`` that the client uses, keeps the rules of idempotent producers, and
keeps every PRODUCE it ever saw, so that tests can compare the bytes of repeated ones.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from aiohttp import WSMsgType, web

from firn.batch import HEADER_BYTES, Batch, Identity, columns_of, encode, iterate
from firn.errors import (
    Conflict,
    Corrupt,
    Fenced,
    FirnError,
    NotFound,
    NotMaster,
    SequenceGap,
    SnapshotExpired,
    Unavailable,
    UnknownTopic,
)
from firn.record import Record, records_of
from firn.values import LATER, NONE, pack_values, unpack_keys
from firn.wire import BATCHES_TYPE, Assembler, Message, Op, frames


@dataclass
class Partition:
    batches: list[bytes] = field(default_factory=list)  # as stored; compaction by tests replaces the list
    end: int = 0
    horizon: int = 0
    tombstone_floor: int = 0
    producers: dict[int, tuple[int, dict[int, int]]] = field(
        default_factory=dict
    )  # id -> epoch, sequence -> offset


class Drop(Exception):
    """Cut the connection now."""


class FakeBroker:
    """``script`` holds the fates of the next PRODUCE messages; when it is empty all goes well.

    ================= =======================================================
    drop_before       the connection is cut, nothing appended
    drop_after        appended, then the connection is cut
    unavailable       refused
    no_lease          refused by a master that may no longer be one, and knows no other
    unavailable_after appended, and refused all the same
    first_unavailable the first batch is refused, which makes gaps of the others
    hang              never answered
    ================= =======================================================
    """

    def __init__(self) -> None:
        self.topics: dict[str, tuple[int, int]] = {}
        self.partitions: defaultdict[tuple[int, int], Partition] = defaultdict(Partition)
        self.groups: dict[tuple[str, str], dict[str, Any]] = {}
        self.script: deque[str] = deque()
        self.reads: deque[FirnError] = deque()  # errors of the next reads by HTTP
        self.produced: list[bytes] = []
        self.gets: list[int] = []  # keys of each GET
        self.values_max = 1 << 20  # of one answer to GET; below 0 none is given
        self.cut_gets = 0  # at so many GETs the connection is cut
        self.bad_key: bytes | None = None  # a GET with this key is refused
        self.connections = 0
        self.fetches: list[dict[str, Any]] = []
        self.cut_after_data = 0  # so many DATA messages, then the connection is cut
        self._changed = asyncio.Event()
        self._sockets: set[web.WebSocketResponse] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, name: str, partitions: int = 1) -> int:
        topic_id = 8 * (len(self.partitions) + len(self.topics) + 10)
        self.topics[name] = (topic_id, partitions)
        return topic_id

    def partition(self, name: str, number: int = 0) -> Partition:
        return self.partitions[self._id(name), number]

    def _id(self, name: str) -> int:
        if name not in self.topics:
            raise UnknownTopic(f"no topic {name}")
        return self.topics[name][0]

    def records(self, name: str, number: int = 0) -> list[Record]:
        return [r for data in self.partition(name, number).batches for r in records_of(Batch(data), name)]

    def write(
        self, name: str, number: int, keys: list[bytes], values: list[bytes | None], at: int | None = None
    ) -> None:
        """Append records; ``at``: only a gap of offsets before them, as compaction leaves one."""
        partition = self.partition(name, number)
        base = partition.end if at is None else at
        columns = columns_of(keys, values, 1000, base_offset=base)
        partition.batches.append(encode(columns, Identity(topic_id=self._id(name), partition=number)))
        partition.end = base + len(keys)
        self.changed()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def append(self, data: bytes, condition: int | None = None) -> list[int]:
        batch = Batch(data)
        batch.verify()
        h = batch.header
        if h.topic_id not in {topic_id for topic_id, _ in self.topics.values()}:
            raise UnknownTopic("no such topic")
        partition = self.partitions[h.topic_id, h.partition]
        epoch, known = partition.producers.get(h.producer_id, (h.producer_epoch, {}))
        if h.producer_epoch < epoch:
            raise Fenced("an older epoch")
        if h.producer_epoch > epoch:
            known = {}
        if h.sequence in known:
            return [h.partition, known[h.sequence]]
        if h.sequence != (max(known) + 1 if known else 0):
            raise SequenceGap(f"sequence {h.sequence} after {sorted(known)[-3:]}")
        if condition is not None:
            newest = max((r.offset for r in self._all(partition) if r.key == batch.key_list()[0]), default=-1)
            if newest != condition:
                raise Conflict("another one is newer", newest_offset=newest)
        base = partition.end
        header = replace(h, base_offset=base, last_offset=base + h.records - 1)
        partition.batches.append(header.encode() + data[HEADER_BYTES:])
        partition.end += h.records
        partition.producers[h.producer_id] = (h.producer_epoch, {**known, h.sequence: base})
        self.changed()
        return [h.partition, base]

    def _all(self, partition: Partition) -> list[Record]:
        return [r for data in partition.batches for r in records_of(Batch(data), "")]

    def page(
        self, name: str, number: int, offset: int, since: int | None, max_bytes: int
    ) -> tuple[dict[str, int], bytes]:
        partition = self.partition(name, number)
        if since is not None and partition.tombstone_floor > max(offset, since):
            raise SnapshotExpired("tombstones are gone")
        found, size, next_offset = [], 0, max(offset, partition.end)
        for data in partition.batches:
            h = Batch(data).header
            if h.last_offset < offset:
                continue
            if found and size + len(data) > max_bytes:
                next_offset = h.base_offset
                break
            found.append(data)
            size += len(data)
        meta = {
            "topic_id": self._id(name), "next_offset": next_offset, "end": partition.end,
            "horizon": partition.horizon, "tombstone_floor": partition.tombstone_floor, "generation": 1,
        }  # fmt: skip
        return meta, b"".join(found)

    # HTTP

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except FirnError as error:
            return web.json_response(error.document(), status=error.status)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")[1:]
        match request.method, parts:
            case "GET", ["stream"]:
                return await self._stream(request)
            case "GET", ["topics", name]:
                topic_id, partitions = self._id(name), self.topics[name][1]
                return web.json_response(
                    {"name": name, "topic_id": topic_id, "spec": {"partitions": partitions}}
                )
            case "GET", ["topics", name, "partitions", number]:
                return await self._read(request, name, int(number))
            case "PUT", ["groups", group, "offsets", name]:
                body = await request.json()
                self.groups.setdefault((group, name), {}).update(body["offsets"])
                return web.json_response({})
            case "GET", ["groups", group, "offsets", name]:
                return web.json_response({"offsets": self.groups.get((group, name), {})})
        raise NotFound(f"no route {request.path}")

    async def _read(self, request: web.Request, name: str, number: int) -> web.Response:
        if self.reads:
            raise self.reads.popleft()
        query = request.query
        since = int(query["since"]) if "since" in query else None
        meta, data = self.page(name, number, int(query["offset"]), since, int(query["max_bytes"]))
        headers = {f"Firn-{k.replace('_', '-').title()}": str(v) for k, v in meta.items()}
        return web.Response(body=data, headers=headers, content_type=BATCHES_TYPE)

    # The stream

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=1 << 20)
        await socket.prepare(request)
        self.connections += 1
        self._sockets.add(socket)
        assembler = Assembler(bytes_max=1 << 28)
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            async for frame in socket:
                if frame.type is WSMsgType.BINARY and (message := assembler.feed(frame.data)) is not None:
                    await self._message(socket, message, tasks)
        except (Drop, ConnectionError):
            pass
        finally:
            self._sockets.discard(socket)
            for task in tasks.values():
                task.cancel()
            if request.transport is not None:
                request.transport.abort()
        return socket

    async def _message(
        self, socket: web.WebSocketResponse, message: Message, tasks: dict[int, asyncio.Task[None]]
    ) -> None:
        async def say(op: Op, meta: dict[str, Any], data: bytes = b"") -> None:
            for frame in frames(op, message.id, meta, data):
                await socket.send_bytes(frame)

        if message.op == Op.HELLO:
            await say(Op.OK, {"version": 1, "node": "fake", "limits": {}})
        elif message.op == Op.PRODUCE:
            await self._produce(message, say)
        elif message.op == Op.GET:
            if self.cut_gets:
                self.cut_gets -= 1
                raise Drop
            if self.values_max < 0:
                return
            try:
                found = self._get(message)
            except FirnError as error:
                await say(Op.ERROR, error.document())
            else:
                await say(Op.VALUES, {}, found)
        elif message.op == Op.FETCH:
            self.fetches.append(message.meta)
            tasks[message.id] = asyncio.create_task(self._fetch(socket, message.meta, say))
        elif message.op == Op.CANCEL and message.id in tasks:
            tasks.pop(message.id).cancel()

    async def _produce(self, message: Message, say: Any) -> None:
        fate = self.script.popleft() if self.script else "ok"
        datas = [bytes(batch.data) for batch in iterate(message.data)]
        self.produced += datas
        if fate == "drop_before":
            raise Drop
        if fate == "hang":
            return
        if fate == "no_lease":
            await say(Op.ERROR, NotMaster("no lease", address=None).document())
            return
        if fate == "unavailable":
            await say(Op.ERROR, Unavailable("not now").document())
            return
        conditions = message.meta.get("if_offset") or [None] * len(datas)
        results: list[Any] = []
        for at, (data, condition) in enumerate(zip(datas, conditions, strict=True)):
            try:
                if fate == "first_unavailable" and at == 0:
                    raise Unavailable("not this one")
                results.append(self.append(data, condition))
            except FirnError as error:
                results.append(error.document())
        if fate == "drop_after":
            raise Drop
        if fate == "unavailable_after":
            results = [Unavailable("written, perhaps").document() for _ in results]
        await say(Op.ACK, {"results": results})

    def _get(self, message: Message) -> bytes:
        """At most ``values_max`` values in one answer."""
        name = message.meta["topic"]
        newest = {r.key: r for number in range(self.topics[name][1]) for r in self.records(name, number)}
        raw, starts = unpack_keys(message.data, message.meta["keys"])
        self.gets.append(len(starts) - 1)
        keys = [raw[a:b].tobytes() for a, b in pairwise(starts.tolist())]
        if self.bad_key in keys:
            raise Corrupt(f"{self.bad_key!r} is damaged")
        found = [newest.get(key) for key in keys]
        found = [r if r is None or r.value is not None else None for r in found]
        left_out = [at for at, r in enumerate(found) if r is not None][self.values_max :]
        lengths = np.array([NONE if r is None else len(r.value or b"") for r in found], np.int64)
        lengths[left_out] = LATER
        values = b"".join(
            r.value or b"" for at, r in enumerate(found) if r is not None and at not in left_out
        )
        return pack_values(
            np.array([0 if r is None else r.offset for r in found], np.int64),
            np.array([0 if r is None else r.timestamp for r in found], np.int64),
            lengths,
            np.array([0 if r is None else r.partition for r in found], np.int32),
            np.frombuffer(values, np.uint8),
            {at: (r.tag, r.headers) for at, r in enumerate(found) if r is not None and (r.tag or r.headers)},
        )

    async def _fetch(self, socket: web.WebSocketResponse, meta: dict[str, Any], say: Any) -> None:
        offset, since = meta["offset"], meta["since"]
        told = None
        while True:
            changed = self._changed
            try:
                found, data = self.page(meta["topic"], meta["partition"], offset, since, meta["max_bytes"])
            except FirnError as error:
                await say(Op.ERROR, error.document())
                return
            if found != told:
                told = found
                offset = found["next_offset"]
                since = found["horizon"] if since is None else min(since, found["horizon"])
                await say(Op.DATA, found, data)
                if self.cut_after_data:
                    self.cut_after_data -= 1
                    if not self.cut_after_data:
                        await self.cut()
                        return
            else:
                await changed.wait()

    async def cut(self) -> None:
        """Cut every stream."""
        for socket in list(self._sockets):
            request = socket._req  # the only way to a socket's transport
            if request is not None and request.transport is not None:
                request.transport.abort()


@asynccontextmanager
async def fake_broker() -> AsyncIterator[tuple[FakeBroker, str]]:
    """A running one, and its address."""
    broker = FakeBroker()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", broker.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield broker, f"127.0.0.1:{port}"
    finally:
        await broker.cut()
        await runner.cleanup()
