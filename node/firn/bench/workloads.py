"""One workload a function: runs it through the Python client as a user would write it, and returns what it measured.

Data are made outside of the measured time. Rates are records per second, times are seconds unless named.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firn.bench.data import POOL, Data
from firn.errors import LimitExceeded

if TYPE_CHECKING:  # the command line imports this module at every start, the client when it connects
    from firn.client import Client

YIELD_EVERY = 4096  # records between two turns of the event loop
MANY = 100_000  # records of one `send_many`
COMPACTION_POLL_S = 0.02


class WrongResult(Exception):
    """What was measured did not do what it should: its figure means nothing."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of single operations, sorted, in ns."""

    ns: list[int]

    def ms(self, share: float) -> float:
        """The latency that ``share`` of all operations stay within."""
        return self.ns[min(len(self.ns) - 1, int(len(self.ns) * share))] / 1e6

    @property
    def seconds(self) -> float:
        """Of all of them, one after another."""
        return sum(self.ns) / 1e9


async def send_each(client: "Client", topic: str, data: Data, **settings: Any) -> float:
    """Seconds for one ``send`` per record, until all are acknowledged."""
    keys, pool = data.key_list(0, data.records), data.pool
    producer = client.producer(topic, **settings)
    began = time.perf_counter()
    for i in range(data.records):
        while True:
            try:
                producer.send(keys[i], pool[i % POOL])
                break
            except LimitExceeded:
                await producer.wait_for_room()
        if not i % YIELD_EVERY:
            await asyncio.sleep(0)
    await producer.flush()
    seconds = time.perf_counter() - began
    await producer.close()
    return seconds


async def send_lists(client: "Client", topic: str, data: Data, **settings: Any) -> float:
    """Seconds for ``send_many`` of lists, until all are acknowledged; making the lists is not counted."""
    seconds = 0.0
    producer = client.producer(topic, **settings)
    for start in range(0, data.records, 10 * MANY):
        parts = [
            (data.key_list(at, end), data.value_list(at, end))
            for at in range(start, min(data.records, start + 10 * MANY), MANY)
            for end in [min(data.records, start + 10 * MANY, at + MANY)]
        ]
        began = time.perf_counter()
        for keys, values in parts:
            await producer.send_many(keys, values)
        if start + 10 * MANY >= data.records:
            await producer.flush()
        seconds += time.perf_counter() - began
    await producer.close()
    return seconds


async def send_one_at_a_time(client: "Client", topic: str, count: int, value_bytes: int) -> Latencies:
    """Each record is sent when the one before it is acknowledged."""
    producer = client.producer(topic, linger_ms=0)
    value = b"x" * value_bytes

    async def one(number: int) -> None:
        await producer.send(b"%016d" % number, value)

    found = await _timed(count, one)
    await producer.close()
    return found


async def send_in_flight(client: "Client", topic: str, count: int, value_bytes: int, depth: int) -> float:
    """Seconds for ``count`` records, ``depth`` of them unacknowledged at any time, without linger."""
    producer = client.producer(topic, linger_ms=0)
    value = b"x" * value_bytes

    async def one(number: int) -> None:
        await producer.send(b"%016d" % number, value)

    seconds = await _at_once(count, depth, one)
    await producer.close()
    return seconds


async def read_records(client: "Client", topic: str, *, view: str = "raw") -> tuple[int, float]:
    """Records and seconds of ``async for record``."""
    count, began = 0, time.perf_counter()
    async for _record in client.reader(topic, view=view, until_end=True):
        count += 1
    return count, time.perf_counter() - began


async def read_pages(client: "Client", topic: str, *, view: str = "raw") -> tuple[int, float]:
    """Records and seconds of ``pages()``."""
    count, began = 0, time.perf_counter()
    async for page in client.reader(topic, view=view, until_end=True).pages():
        count += len(page)
    return count, time.perf_counter() - began


async def read_arrow(client: "Client", topic: str, *, view: str = "raw") -> tuple[int, float]:
    """Rows and seconds of ``arrow()``."""
    count, began = 0, time.perf_counter()
    async for batch in client.reader(topic, view=view, until_end=True).arrow():
        count += batch.num_rows
    return count, time.perf_counter() - began


def some_keys(keys: int, count: int) -> list[bytes]:
    """``count`` keys of ``Data`` at random, always the same."""
    chosen = random.Random(keys)
    return [b"%016d" % chosen.randrange(keys) for _ in range(count)]


async def get_one_at_a_time(client: "Client", topic: str, keys: Sequence[bytes]) -> tuple[Latencies, int]:
    """One ``get`` after another, and how many of the keys had a record."""
    found: set[int] = set()

    async def one(number: int) -> None:
        record = await client.get(topic, keys[number])
        if record is not None and record.key == keys[number]:
            found.add(number)

    return await _timed(len(keys), one), len(found)


async def get_in_flight(client: "Client", topic: str, keys: Sequence[bytes], depth: int) -> tuple[float, int]:
    """Seconds for one ``get`` per key, ``depth`` of them at a time, and how many had a record."""
    hits = 0

    async def one(number: int) -> None:
        nonlocal hits
        record = await client.get(topic, keys[number])
        hits += record is not None and record.key == keys[number]

    return await _at_once(len(keys), depth, one), hits


async def get_lists(client: "Client", topic: str, keys: Sequence[bytes]) -> tuple[float, int]:
    """Seconds for one ``get_many`` of all keys, and how many had a record."""
    began = time.perf_counter()
    found = await client.get_many(topic, keys)
    seconds = time.perf_counter() - began
    return seconds, sum(
        record is not None and record.key == key for key, record in zip(keys, found, strict=True)
    )


async def compact(client: "Client", topic: str, *, force: bool = True) -> tuple[dict[str, Any], float]:
    """The compaction's final document, and seconds from the request until it says that it is over."""
    began = time.perf_counter()
    document = await client.compact(topic, force=force)
    while document["state"] in ("waiting", "running"):
        await asyncio.sleep(COMPACTION_POLL_S)
        document = await client.compaction(topic) or document
    return document, time.perf_counter() - began


def checked_count(found: int, expected: int, what: str) -> None:
    """Errors: WrongResult when they differ."""
    if found != expected:
        raise WrongResult(f"{what}: {found} records, expected {expected}")


async def _timed(count: int, one: Callable[[int], Awaitable[None]]) -> Latencies:
    warm = min(200, count)
    for number in range(warm):
        await one(number)
    found = []
    for number in range(count):
        began = time.perf_counter_ns()
        await one(number)
        found.append(time.perf_counter_ns() - began)
    return Latencies(sorted(found))


async def _at_once(count: int, depth: int, one: Callable[[int], Awaitable[None]]) -> float:
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await one(number)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(depth)))
    return time.perf_counter() - began
