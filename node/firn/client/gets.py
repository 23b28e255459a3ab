"""The newest records of keys: what is asked for within one turn of the event loop goes out together.

A request costs the broker several times what one more key in it does. So what many tasks ask for goes out at the end
of the turn, and a long list in a few large parts, of which the broker answers one while the client unpacks another.
What many tasks ask for in one turn stays one request: two, of which one could be answered while the other's tasks go
on, were measured to cost the broker half as much again.

Who asks for one key at a time would wait for the end of the turn in vain: after a few requests of one key in a row,
the next one is written at once while none is under way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import msgpack

from firn.client.routes import Target
from firn.client.stream import Stream, expect
from firn.client.transport import Transport
from firn.errors import FirnError, NotMaster, Timeout
from firn.limits import FRAME_BYTES_MAX
from firn.partitioner import partitions_of
from firn.record import Record
from firn.values import pack_keys, unpack_values
from firn.wire import SMALL_BYTES_MAX, Message, Op

PART_KEYS = 32_768
PART_BYTES = 1 << 20
PARTS_AT_ONCE = 3
_POSTED_BYTES_MAX = FRAME_BYTES_MAX // 2  # of keys: one frame, with room for its head
_META_OF_ONE_MAX = 1024  # topics whose meta for one key is kept packed
_ALONE_MIN = 4  # requests of one key in a row that are taken for a habit

FindTarget = Callable[[str, float | None], Awaitable[Target]]
Asked = tuple[bytes, "asyncio.Future[Record | None]"]


class _Request:
    """A GET under way: it is called with what comes for it."""

    __slots__ = ("_gets", "asked", "deadline", "topic")

    def __init__(self, gets: "Gets", topic: str, asked: list[Asked], deadline: float) -> None:
        self._gets = gets
        self.topic = topic
        self.asked = asked
        self.deadline = deadline

    def __call__(self, found: Message | FirnError) -> None:
        self._gets._settle(self, found)


class Gets:
    """Of a cluster of several broker groups, each key is asked of its group: that takes what is known of the topic.

    Invariant: requests under way are in the order of their deadlines; the first one's is watched.
    """

    def __init__(
        self, transport: Transport, find_target: FindTarget, forget_target: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._find_target = find_target
        self._forget_target = forget_target
        self._asked: dict[str, list[Asked]] = {}  # by topic: what goes out at the end of this turn
        self._under_way: dict[_Request, None] = {}
        self._watching: asyncio.TimerHandle | None = None
        self._alone = 0  # requests of one key since one of several
        self._metas_of_one: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def one(self, topic: str, key: bytes) -> "asyncio.Future[Record | None]":
        """The newest record of a key, once it is known."""
        stream = self._transport.open_stream
        if self._alone >= _ALONE_MIN and stream is not None and self._may_go_alone(stream):
            answer: asyncio.Future[Record | None] = stream.loop.create_future()
            self._post(stream, topic, [(key, answer)])
            return answer
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        asked = self._asked.get(topic)
        if asked is None:
            asked = self._asked[topic] = []
            # Where others are under way, their answers of this turn may ask for more: that goes along.
            loop.call_soon(self._send_next_turn if self._under_way else self._send, topic)
        asked.append((key, answer))
        return answer

    def _may_go_alone(self, stream: Stream) -> bool:
        return not self._under_way and not self._asked and stream.has_room

    def _send_next_turn(self, topic: str) -> None:
        asyncio.get_running_loop().call_soon(self._send, topic)

    def _send(self, topic: str) -> None:
        asked = [(key, answer) for key, answer in self._asked.pop(topic) if not answer.done()]
        if not asked:
            return
        is_any = self._transport.reads_any
        stream = self._transport.open_stream
        if stream is None or stream.groups > 1 or not stream.has_room or is_any:
            self._spawn(topic, asked, self._transport.timeout)
        else:
            self._alone = self._alone + 1 if len(asked) == 1 else 0
            self._post(stream, topic, asked)

    def _post(self, stream: Stream, topic: str, asked: list[Asked]) -> None:
        """Ask without a task. Only what does not go well gets one, for the time that is left."""
        timeout = self._transport.timeout
        request = _Request(self, topic, asked, stream.loop.time() + timeout)
        data = pack_keys([key for key, _ in asked])
        try:
            if len(asked) == 1 and len(data) <= SMALL_BYTES_MAX:
                stream.post_small(Op.GET, self._meta_of_one(topic), data, request)
            elif len(data) <= _POSTED_BYTES_MAX:
                stream.post(Op.GET, {"topic": topic, "keys": len(asked)}, data, request)
            else:
                self._spawn(topic, asked, timeout)
                return
        except FirnError:  # the connection has ended since a line ago
            self._spawn(topic, asked, timeout)
            return
        self._under_way[request] = None
        if self._watching is None:
            self._watching = stream.loop.call_at(request.deadline, self._expire)

    def _meta_of_one(self, topic: str) -> bytes:
        found = self._metas_of_one.get(topic)
        if found is None:
            if len(self._metas_of_one) >= _META_OF_ONE_MAX:
                self._metas_of_one.clear()
            found = self._metas_of_one[topic] = msgpack.packb({"topic": topic, "keys": 1})
        return found

    def _expire(self) -> None:
        """Give up what is under way for too long, and watch the next one."""
        loop, self._watching = asyncio.get_running_loop(), None
        for request in list(self._under_way):
            if request.deadline > loop.time():
                self._watching = loop.call_at(request.deadline, self._expire)
                return
            del self._under_way[request]
            timeout = self._transport.timeout
            _fail(request.asked, Timeout(f"get from {request.topic}: no answer within {timeout:g} s"))

    def _settle(self, request: _Request, found: Message | FirnError) -> None:
        self._under_way.pop(request, None)
        topic, asked = request.topic, request.asked
        if isinstance(found, FirnError):
            if len(asked) == 1 and not found.retry:
                _fail(asked, found)
            else:
                self._spawn(topic, asked, self._left(request))
            return
        try:
            records, later = unpack_values(topic, [key for key, _ in asked], expect(found, Op.VALUES).data)
        except FirnError as error:
            _fail(asked, error)
            return
        if later:
            self._spawn(topic, [asked[at] for at in later], self._left(request))
        _settle(asked, records, but=later)

    def _left(self, request: _Request) -> float:
        """Seconds until its deadline."""
        return request.deadline - asyncio.get_running_loop().time()

    def _spawn(self, topic: str, asked: list[Asked], timeout: float) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(topic, asked, timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, topic: str, asked: list[Asked], timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            records = await self.many(topic, [key for key, _ in asked], timeout=timeout)
        except FirnError as error:
            if len(asked) == 1:
                _fail(asked, error)
                return
            for alone in asked:  # one key's error is not another's
                self._spawn(topic, [alone], deadline - asyncio.get_running_loop().time())
            return
        except BaseException:
            for _, answer in asked:
                answer.cancel()
            raise
        _settle(asked, records)

    async def many(
        self, topic: str, keys: Sequence[bytes], *, timeout: float | None = None
    ) -> list[Record | None]:
        """The newest record of each key, in the order of ``keys``. ``timeout``: seconds for each request."""
        stream = self._transport.open_stream
        if stream is None:
            stream = await self._transport.retried(
                self._transport.stream, what=f"get from {topic}", timeout=timeout
            )
        if stream.groups == 1:
            return await self._of_group(self._transport, topic, keys, timeout)
        try:
            return await self._of_groups(topic, keys, timeout)
        except NotMaster as error:
            if "group" not in error.details:
                raise
        self._forget_target(topic)  # it was of an earlier creation of the topic
        return await self._of_groups(topic, keys, timeout)

    async def _of_groups(
        self, topic: str, keys: Sequence[bytes], timeout: float | None
    ) -> list[Record | None]:
        """``many`` of several broker groups: each is asked for its keys."""
        target = await self._find_target(topic, timeout)
        rows: dict[Transport, list[int]] = {}
        for row, partition in enumerate(partitions_of(keys, target.partitions).tolist()):
            rows.setdefault(target.transport_of(partition), []).append(row)
        parts = await asyncio.gather(
            *(self._of_group(t, topic, [keys[row] for row in chosen], timeout) for t, chosen in rows.items())
        )
        found: list[Record | None] = [None] * len(keys)
        for chosen, records in zip(rows.values(), parts, strict=True):
            for row, record in zip(chosen, records, strict=True):
                found[row] = record
        return found

    async def _of_group(
        self, transport: Transport, topic: str, keys: Sequence[bytes], timeout: float | None
    ) -> list[Record | None]:
        parts = _parts(keys)
        if len(parts) == 1:
            return await self._part(transport, topic, keys, timeout)
        at_once = asyncio.Semaphore(PARTS_AT_ONCE)

        async def part(start: int, end: int) -> list[Record | None]:
            async with at_once:
                return await self._part(transport, topic, keys[start:end], timeout)

        tasks = [asyncio.create_task(part(*ends)) for ends in parts]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [record for records in found for record in records]

    async def _part(
        self, transport: Transport, topic: str, keys: Sequence[bytes], timeout: float | None
    ) -> list[Record | None]:
        found, later = await self._request(transport, topic, keys, timeout)
        while later:
            more, still = await self._request(transport, topic, [keys[at] for at in later], timeout)
            for at, record in zip(later, more, strict=True):
                found[at] = record
            later = [later[at] for at in still]
        return found

    async def _request(
        self, transport: Transport, topic: str, keys: Sequence[bytes], timeout: float | None
    ) -> tuple[list[Record | None], list[int]]:
        data = pack_keys(keys)

        async def attempt() -> tuple[list[Record | None], list[int]]:
            stream = await transport.stream()
            meta = {"topic": topic, "keys": len(keys), **transport.reading()}
            answer = expect(await stream.ask(Op.GET, meta, data), Op.VALUES)
            transport.note_shown(answer.meta.get("shown"))
            return unpack_values(topic, keys, answer.data)

        return await transport.retried(attempt, what=f"get from {topic}", timeout=timeout)


def _settle(asked: Sequence[Asked], records: Sequence[Record | None], *, but: Sequence[int] = ()) -> None:
    """Hand the records out, but for those that were left out."""
    if len(asked) == 1 and not but:
        if not (answer := asked[0][1]).done():
            answer.set_result(records[0])
        return
    left_out = set(but)
    for at, ((_, answer), record) in enumerate(zip(asked, records, strict=True)):
        if at not in left_out and not answer.done():
            answer.set_result(record)


def _fail(asked: Sequence[Asked], error: FirnError) -> None:
    for _, answer in asked:
        if not answer.done():
            answer.set_exception(error)


def _parts(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """Where the keys are cut into requests, which have about the same number of keys."""
    if not keys:
        return []
    count = -(-len(keys) // PART_KEYS)
    cuts = [len(keys) * number // count for number in range(count + 1)]
    return [part for ends in pairwise(cuts) for part in _fitting(keys, *ends)]


def _fitting(keys: Sequence[bytes], start: int, end: int) -> list[tuple[int, int]]:
    """``[start, end)``, halved until no part has too many bytes."""
    if end - start == 1 or sum(map(len, keys[start:end])) <= PART_BYTES:
        return [(start, end)]
    middle = (start + end) // 2
    return [*_fitting(keys, start, middle), *_fitting(keys, middle, end)]
