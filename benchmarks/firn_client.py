"""firn's side of each workload, by the Python client; run in a process of its own (``child.py``)."""

import asyncio
import importlib
import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.processes import cpu_seconds, memory_mb

from firn.bench import workloads
from firn.bench.data import POOL, Data
from firn.client import Client
from firn.client import blocking as twin
from firn.errors import FirnError

TIMEOUT_S = 600.0


def _client(address: str, credentials: Mapping[str, str] | None = None) -> Client:
    return Client(address, timeout=TIMEOUT_S, **(credentials or {}))


async def produce(
    address: str, topic: str, records: int, keys: int, value_bytes: int, by: str = "send_many",
    credentials: Mapping[str, str] | None = None,
) -> dict[str, float]:  # fmt: skip
    """``by``: send, send_many; ``credentials``: where TLS is spoken."""
    run = workloads.send_each if by == "send" else workloads.send_lists
    async with _client(address, credentials) as client:
        seconds = await run(client, topic, Data(records, keys, value_bytes))
    return {"rate": records / seconds, "seconds": seconds}


def produce_blocking(address: str, topic: str, records: int, keys: int, value_bytes: int) -> dict[str, float]:
    """``send`` of the blocking client, one per record."""
    data = Data(records, keys, value_bytes)
    names, pool = data.key_list(0, records), data.pool
    with twin.Client(address, timeout=TIMEOUT_S) as client:
        producer = client.producer(topic)
        began = time.perf_counter()
        for i in range(records):
            producer.send(names[i], pool[i % POOL])
        producer.flush()
        seconds = time.perf_counter() - began
    return {"rate": records / seconds, "seconds": seconds}


async def one_at_a_time(address: str, topic: str, count: int, value_bytes: int) -> dict[str, float]:
    async with _client(address) as client:
        found = await workloads.send_one_at_a_time(client, topic, count, value_bytes)
    return {"p50_ms": found.ms(0.5), "p99_ms": found.ms(0.99)}


async def in_flight(address: str, topic: str, count: int, value_bytes: int, depth: int) -> dict[str, float]:
    async with _client(address) as client:
        seconds = await workloads.send_in_flight(client, topic, count, value_bytes, depth)
    return {"rate": count / seconds}


async def read(address: str, topic: str, records: int, by: str, view: str = "raw") -> dict[str, float]:
    """``by``: records, pages, arrow."""
    run = {"records": workloads.read_records, "pages": workloads.read_pages, "arrow": workloads.read_arrow}[
        by
    ]
    if by == "arrow":
        importlib.import_module("pyarrow")  # half a second that is not the reader's
    async with _client(address) as client:
        count, seconds = await run(client, topic, view=view)
    workloads.checked_count(count, records, f"reading {topic} by {by}")
    return {"rate": count / seconds, "seconds": seconds}


async def get(address: str, topic: str, keys: int, count: int) -> dict[str, float]:
    """``get`` one at a time, 64 in flight, and ``get_many``; the more, the faster it is. All keys are there."""
    chosen = workloads.some_keys(keys, count * 10)
    async with _client(address) as client:
        one, hits = await workloads.get_one_at_a_time(client, topic, chosen[: count // 4])
        workloads.checked_count(hits, count // 4, f"get from {topic}")
        flight, hits = await workloads.get_in_flight(client, topic, chosen[:count], 64)
        workloads.checked_count(hits, count, f"get from {topic}, 64 in flight")
        many, hits = await workloads.get_lists(client, topic, chosen)
        workloads.checked_count(hits, len(chosen), f"get_many from {topic}")
    return {
        "one_p50_ms": one.ms(0.5), "one_p99_ms": one.ms(0.99), "flight_rate": count / flight,
        "many_rate": len(chosen) / many,
    }  # fmt: skip


async def compact(address: str, topic: str, pid: int, live: int) -> dict[str, Any]:
    """A forced compaction with the broker's CPU seconds; ``live``: rows that must be left."""
    async with _client(address) as client:
        before = cpu_seconds(pid)
        document, seconds = await workloads.compact(client, topic)
        cpu = cpu_seconds(pid) - before
    if document["state"] != "done":
        raise workloads.WrongResult(f"the compaction of {topic} ended as {document}")
    workloads.checked_count(_sum(document, "records_after"), live, f"compacting {topic}")
    own = max(part["seconds"] for part in document["partitions"])
    return {"seconds": seconds, "cpu_s": cpu, "own_seconds": own, "rounds": _sum(document, "rounds")}


def _sum(document: dict[str, Any], name: str) -> int:
    """Over the partitions of a compaction."""
    return sum(int(part[name]) for part in document["partitions"])


async def write_and_wait(address: str, topic: str, keys: int, rounds: list[int]) -> dict[str, list[float]]:
    """So many records a round, over ``keys`` keys, each time until a compaction has covered them. A round has other
    keys than those before it, until all had their turn.

    The topic compacts by itself, a second after a write: nothing is forced, so only what must change is written.
    """
    seconds = []
    async with _client(address) as client:
        end = await _covered(client, topic)
        for records in rounds:
            await workloads.send_lists(client, topic, Data(records, keys, 100, first=end % keys))
            end += records
            began = time.perf_counter()
            while await _covered(client, topic) < end:
                await asyncio.sleep(workloads.COMPACTION_POLL_S)
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


async def _covered(client: Client, topic: str) -> int:
    """How many records of a topic compactions have covered."""
    return sum(int(part["horizon"]) for part in (await client.describe(topic))["partitions"])


async def produce_spread(
    address: str, topic: str, records: int, value_bytes: int, partitions: int, batch: int
) -> dict[str, float]:
    """``send_many`` of ``batch`` records to one named partition after the other."""
    data = Data(records, records, value_bytes)
    keys, values = data.key_list(0, records), data.value_list(0, records)
    order = random.Random(partitions).sample(range(partitions), min(partitions, 100_000))
    async with _client(address) as client:
        producer = client.producer(topic)
        began = time.perf_counter()
        for number, at in enumerate(range(0, records, batch)):
            partition = order[number % len(order)]
            await producer.send_many(keys[at : at + batch], values[at : at + batch], partition=partition)
        await producer.flush()
        seconds = time.perf_counter() - began
        await producer.close()
    return {"rate": records / seconds}


async def light_queues(
    address: str, topic: str, queues: int, value_bytes: int, probes: int
) -> dict[str, float]:
    """One record to each of ``queues`` light queues; then some of them are read by name."""
    value = b"x" * value_bytes
    step = 50_000
    async with _client(address) as client:
        producer = client.producer(topic)
        seconds = 0.0
        for start in range(0, queues, step):
            count = min(step, queues - start)
            names = [(f"device-{number}",) for number in range(start, start + count)]
            keys = [b"%016d" % number for number in range(start, start + count)]
            began = time.perf_counter()
            await producer.send_many(keys, [value] * count, queues=names)
            seconds += time.perf_counter() - began
        began = time.perf_counter()
        await producer.flush()
        seconds += time.perf_counter() - began
        read_ms = []
        chosen = random.Random(queues)
        for _ in range(probes):
            number = chosen.randrange(queues)
            began = time.perf_counter()
            found = [
                record.key async for record in client.reader(topic, queue=f"device-{number}", until_end=True)
            ]
            read_ms.append((time.perf_counter() - began) * 1e3)
            if found != [b"%016d" % number]:
                raise workloads.WrongResult(f"light queue {number} holds {found!r}")
    return {"rate": queues / seconds, "read_p50_ms": sorted(read_ms)[probes // 2]}


async def table(address: str, topic: str, keys: int) -> dict[str, float]:
    """A ``Table`` of a topic: seconds until it is caught up, and what this process grew by."""
    import os

    before, _ = memory_mb(os.getpid())
    async with _client(address) as client:
        began = time.perf_counter()
        found = await client.table(topic)
        await found.caught_up()
        seconds = time.perf_counter() - began
        workloads.checked_count(len(found), keys, f"the table of {topic}")
        now, peak = memory_mb(os.getpid())
    return {"seconds": seconds, "memory_mb": now - before, "peak_mb": peak - before}


async def rebuild(
    address: str, standby: str, node: str, topic: str, value_bytes: int, rate: float,
    credentials: Mapping[str, str],
) -> dict[str, float]:  # fmt: skip
    """Let ``node`` at ``standby`` start anew; seconds until it is in sync again, and until everything was pulled.

    ``rate``: records a second that are produced meanwhile; ``kept``: the share of them that came about.
    """
    async with _client(address, credentials) as client, _client(standby, credentials) as asked:
        stopping = asyncio.Event()
        load = asyncio.create_task(_paced(client, topic, value_bytes, rate, stopping))
        await asyncio.sleep(1.0 if rate else 0.0)  # so that it is under way
        began = time.perf_counter()
        await client.rebuild(node, reason="measured")
        pulled = 0.0
        is_seen = False
        while True:
            await asyncio.sleep(0.05)
            try:
                row = (await asked.status())["brokers"][0]
            except FirnError:
                continue
            is_seen = is_seen or not row["in_sync"]
            now = time.perf_counter() - began
            if row["rebuild"] is not None and row["rebuild"]["phase"] in ("listing", "pulling"):
                pulled = now
            if is_seen and row["rebuild"] is None and row["in_sync"]:
                break
        stopping.set()
        kept = await load
    return {"seconds": now, "pulled_s": pulled or now, "kept": kept}


async def _paced(client: Client, topic: str, value_bytes: int, rate: float, stopping: asyncio.Event) -> float:
    """Produce at a rate until told to stop; which share of it came about."""
    if not rate:
        return 1.0
    many = 500
    keys, values = [b"%016d" % at for at in range(many)], [b"x" * value_bytes] * many
    producer = client.producer(topic)
    began, sent = time.perf_counter(), 0
    while not stopping.is_set():
        ahead = sent / rate - (time.perf_counter() - began)
        if ahead > 0:
            await asyncio.sleep(ahead)
        await producer.send_many(keys, values)
        sent += many
    await producer.close()
    return sent / rate / (time.perf_counter() - began)
