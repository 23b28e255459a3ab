"""``firn bench``: how fast one broker answers this client, with records that it makes itself.

Each measurement prints one row: what was done, how often, in how many seconds, the rate, and latencies where single
requests are timed. ``make bench`` compares with other systems; this answers "is my broker slow?".
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from firn.cli.printing import compact_json
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, connect, run
from firn.errors import TopicExists

CHUNK = 10_000
GET_MANY = 1_000
POLL_SECONDS = 0.05

TopicArgument = Annotated[str, typer.Argument(metavar="[TOPIC]")]
RecordsOption = Annotated[int, typer.Option("--records", min=1, help="How many records or look-ups.")]
KeysOption = Annotated[int, typer.Option("--keys", min=1, help="How many different keys of 16 bytes.")]
SizeOption = Annotated[int, typer.Option("--size", min=0, max=1 << 20, help="Bytes of each value.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Measure a broker.", no_args_is_help=True, rich_markup_mode=None)
    for name, command in (("produce", produce), ("consume", consume), ("get", get), ("compact", compact)):
        group.command(name, help=(command.__doc__ or "").splitlines()[0])(command)
    app.add_typer(group, name="bench")


def produce(
    topic: TopicArgument = "bench",
    records: RecordsOption = 1_000_000,
    keys: KeysOption = 100_000,
    size: SizeOption = 100,
    partitions: Annotated[int, typer.Option("--partitions", min=1)] = 1,
    flush: Annotated[str, typer.Option("--flush", metavar="sync|interval")] = "sync",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Produce records, all acknowledged; makes the topic when there is none."""
    if flush not in ("sync", "interval"):
        raise typer.BadParameter(f"--flush: {flush!r} is unknown; expected sync or interval")

    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            try:
                await client.create_topic(topic, partitions=partitions, durability={"flush": flush})
            except TopicExists:
                pass
            value, numbers = b"x" * size, [key(i * 2_654_435_761 % keys) for i in range(CHUNK)]
            producer = client.producer(topic)
            began = time.perf_counter()
            for first in range(0, records, CHUNK):
                count = min(CHUNK, records - first)
                chosen = numbers[:count] if keys <= CHUNK else spread(first, count, keys)
                await producer.send_many(chosen, [value] * count)
            await producer.flush()
            seconds = time.perf_counter() - began
            await producer.close()
        return row("produce", records, seconds, size_bytes=records * (16 + size))

    show(run(work()), output)


def consume(
    topic: TopicArgument = "bench",
    view: Annotated[str, typer.Option("--view", metavar="compacted|raw")] = "compacted",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Read a topic from its start to its end."""
    if view not in ("compacted", "raw"):
        raise typer.BadParameter(f"--view: {view!r} is unknown; expected compacted or raw")

    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            records = size = 0
            began = time.perf_counter()
            async for page in client.reader(topic, view=view, until_end=True).pages():
                records += len(page)
                size += sum(len(r.key) + len(r.value or b"") for r in page)
            return row("consume", records, time.perf_counter() - began, size_bytes=size)

    show(run(work()), output)


def get(
    topic: TopicArgument = "bench",
    records: RecordsOption = 10_000,
    keys: KeysOption = 100_000,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Look keys up one at a time, then many at a time."""

    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            wanted = spread(0, records, keys)
            taken, hits = [], 0
            began = time.perf_counter()
            for name in wanted:
                start = time.perf_counter()
                hits += await client.get(topic, name) is not None
                taken.append(time.perf_counter() - start)
            found = row("get", records, time.perf_counter() - began)
            began = time.perf_counter()
            for first in range(0, records, GET_MANY):
                await client.get_many(topic, wanted[first : first + GET_MANY])
            many = records / max(time.perf_counter() - began, 1e-9)
        return {**found, "hits": hits, **percentiles(taken), "get_many_per_second": round(many)}

    show(run(work()), output)


def compact(
    topic: TopicArgument = "bench",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Force a compaction and wait for its end."""

    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            began = time.perf_counter()
            found = await client.compact(topic, force=True)
            while found["state"] in ("waiting", "running"):
                await asyncio.sleep(POLL_SECONDS)
                found = await client.compaction(topic) or found
            seconds = time.perf_counter() - began
        parts = found["partitions"]
        before, after = (sum(p[name] for p in parts) for name in ("records_before", "records_after"))
        return {
            **row("compact", before, seconds, size_bytes=sum(p["bytes_read"] for p in parts)),
            "state": found["state"],
            "records_after": after,
        }

    show(run(work()), output)


def key(number: int) -> bytes:
    return b"%016d" % number


def spread(first: int, count: int, keys: int) -> list[bytes]:
    """Keys of the records ``first`` to ``first + count``, in an order that looks random and repeats."""
    return [key(i * 2_654_435_761 % keys) for i in range(first, first + count)]


def row(what: str, records: int, seconds: float, *, size_bytes: int = 0) -> dict[str, Any]:
    """One measurement; rates are per second."""
    seconds = max(seconds, 1e-9)
    found: dict[str, Any] = {
        "what": what,
        "records": records,
        "seconds": round(seconds, 4),
        "records_per_second": round(records / seconds),
    }
    if size_bytes:
        found["mb_per_second"] = round(size_bytes / seconds / 1e6, 1)
    return found


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in ms."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 3),
        "p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 3),
        "max_ms": round(ordered[-1] * 1e3, 3),
    }


def show(found: dict[str, Any], output: str | None) -> None:
    if output == "json":
        print(compact_json(found))
        return
    for name, value in found.items():
        print(f"{name:<22}{value:,}" if isinstance(value, int | float) else f"{name:<22}{value}")
