"""The newest records of keys: what is asked for within one turn of the event loop goes out together.

One request costs the broker about as much as thirty keys in it do. So a ``get`` waits for the end of the turn, and a
long list goes out in a few large parts, of which the broker answers one while the client unpacks another.
"""

import asyncio
from collections.abc import Sequence

from firn.client.stream import expect
from firn.client.transport import Transport
from firn.errors import FirnError
from firn.record import Record
from firn.values import pack_keys, unpack_values
from firn.wire import Op

PART_KEYS = 32_768
PART_BYTES = 1 << 20
PARTS_AT_ONCE = 3

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
        self._spawn(topic, [(key, answer) for key, answer in self._asked.pop(topic) if not answer.done()])

    def _spawn(self, topic: str, asked: list[Asked]) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(topic, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, topic: str, asked: list[Asked]) -> None:
        try:
            records = await self.many(topic, [key for key, _ in asked])
        except FirnError as error:
            if len(asked) > 1:  # one key's error is not another's
                for alone in asked:
                    self._spawn(topic, [alone])
            elif not asked[0][1].done():
                asked[0][1].set_exception(error)
            return
        except BaseException:
            for _, answer in asked:
                answer.cancel()
            raise
        for (_, answer), record in zip(asked, records, strict=True):
            if not answer.done():
                answer.set_result(record)

    async def many(self, topic: str, keys: Sequence[bytes]) -> list[Record | None]:
        """The newest record of each key, in the order of ``keys``."""
        if len(keys) == 1:
            return await self._part(topic, keys)
        parts = _parts(keys)
        if len(parts) == 1:
            return await self._part(topic, keys)
        at_once = asyncio.Semaphore(PARTS_AT_ONCE)

        async def part(start: int, end: int) -> list[Record | None]:
            async with at_once:
                return await self._part(topic, keys[start:end])

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part(*ends)) for ends in parts]
        return [record for task in tasks for record in task.result()]

    async def _part(self, topic: str, keys: Sequence[bytes]) -> list[Record | None]:
        found, later = await self._request(topic, keys)
        while later:
            more, still = await self._request(topic, [keys[at] for at in later])
            for at, record in zip(later, more, strict=True):
                found[at] = record
            later = [later[at] for at in still]
        return found

    async def _request(self, topic: str, keys: Sequence[bytes]) -> tuple[list[Record | None], list[int]]:
        meta, data = {"topic": topic, "keys": len(keys)}, pack_keys(keys)

        async def attempt() -> tuple[list[Record | None], list[int]]:
            stream = await self._transport.stream()
            answer = expect(await stream.ask(Op.GET, meta, data), Op.VALUES)
            return unpack_values(topic, keys, answer.data)

        return await self._transport.retried(attempt, what=f"get from {topic}")


def _parts(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """Where the keys are cut into requests."""
    if len(keys) <= PART_KEYS and sum(map(len, keys)) <= PART_BYTES:
        return [(0, len(keys))] if keys else []
    cuts, size = [0], 0
    for at, key in enumerate(keys):
        if at - cuts[-1] >= PART_KEYS or (at > cuts[-1] and size + len(key) > PART_BYTES):
            cuts.append(at)
            size = 0
        size += len(key)
    return list(zip(cuts, [*cuts[1:], len(keys)], strict=True))
