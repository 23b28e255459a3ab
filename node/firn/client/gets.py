"""The newest records of keys: what is asked for within one turn of the event loop goes out together.

A request costs the broker several times what one more key in it does. So a ``get`` waits for the end of the turn, and a
long list goes out in a few large parts, of which the broker answers one while the client unpacks another. What many
tasks ask for in one turn stays one request: two, of which one could be answered while the other's tasks go on, were
measured to cost the broker half as much again.
"""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from firn.client.stream import Stream, expect
from firn.client.transport import Transport
from firn.errors import FirnError, Timeout
from firn.limits import FRAME_BYTES_MAX
from firn.record import Record
from firn.values import pack_keys, unpack_values
from firn.wire import Message, Op

PART_KEYS = 32_768
PART_BYTES = 1 << 20
PARTS_AT_ONCE = 3
_POSTED_BYTES_MAX = FRAME_BYTES_MAX // 2  # of keys: one frame, with room for its head

Asked = tuple[bytes, "asyncio.Future[Record | None]"]


class Gets:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._asked: dict[str, list[Asked]] = {}  # by topic: what goes out at the end of this turn
        self._tasks: set[asyncio.Task[None]] = set()

    async def one(self, topic: str, key: bytes) -> Record | None:
        """The newest record of a key."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Record | None] = loop.create_future()
        asked = self._asked.get(topic)
        if asked is None:
            asked = self._asked[topic] = []
            loop.call_soon(self._send, topic)
        asked.append((key, answer))
        return await answer

    def _send(self, topic: str) -> None:
        asked = [(key, answer) for key, answer in self._asked.pop(topic) if not answer.done()]
        if not asked:
            return
        stream = self._transport.open_stream
        data = pack_keys([key for key, _ in asked])
        if stream is None or not stream.has_room or len(data) > _POSTED_BYTES_MAX:
            self._spawn(topic, asked, self._transport.timeout)
        else:
            self._post(stream, topic, asked, data)

    def _post(self, stream: Stream, topic: str, asked: list[Asked], data: bytes) -> None:
        """Ask without a task. Only what does not go well gets one, for the time that is left."""
        loop = asyncio.get_running_loop()
        timeout = self._transport.timeout
        deadline = loop.time() + timeout

        def settle(found: Message | FirnError) -> None:
            expiry.cancel()
            if isinstance(found, FirnError):
                if len(asked) == 1 and not found.retry:
                    _fail(asked, found)
                else:
                    self._spawn(topic, asked, deadline - loop.time())
                return
            try:
                records, later = unpack_values(
                    topic, [key for key, _ in asked], expect(found, Op.VALUES).data
                )
            except FirnError as error:
                _fail(asked, error)
                return
            if later:
                self._spawn(topic, [asked[at] for at in later], deadline - loop.time())
            _settle(asked, records, but=later)

        def expire() -> None:
            _fail(asked, Timeout(f"get from {topic}: no answer within {timeout:g} s"))

        expiry = loop.call_later(timeout, expire)
        try:
            stream.post(Op.GET, {"topic": topic, "keys": len(asked)}, data, settle)
        except FirnError:  # the connection has ended since a line ago
            expiry.cancel()
            self._spawn(topic, asked, timeout)

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
        parts = _parts(keys)
        if len(parts) == 1:
            return await self._part(topic, keys, timeout)
        at_once = asyncio.Semaphore(PARTS_AT_ONCE)

        async def part(start: int, end: int) -> list[Record | None]:
            async with at_once:
                return await self._part(topic, keys[start:end], timeout)

        tasks = [asyncio.create_task(part(*ends)) for ends in parts]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [record for records in found for record in records]

    async def _part(self, topic: str, keys: Sequence[bytes], timeout: float | None) -> list[Record | None]:
        found, later = await self._request(topic, keys, timeout)
        while later:
            more, still = await self._request(topic, [keys[at] for at in later], timeout)
            for at, record in zip(later, more, strict=True):
                found[at] = record
            later = [later[at] for at in still]
        return found

    async def _request(
        self, topic: str, keys: Sequence[bytes], timeout: float | None
    ) -> tuple[list[Record | None], list[int]]:
        meta, data = {"topic": topic, "keys": len(keys)}, pack_keys(keys)

        async def attempt() -> tuple[list[Record | None], list[int]]:
            stream = await self._transport.stream()
            answer = expect(await stream.ask(Op.GET, meta, data), Op.VALUES)
            return unpack_values(topic, keys, answer.data)

        return await self._transport.retried(attempt, what=f"get from {topic}", timeout=timeout)


def _settle(asked: Sequence[Asked], records: Sequence[Record | None], *, but: Sequence[int] = ()) -> None:
    """Hand the records out, but for those that were left out."""
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
