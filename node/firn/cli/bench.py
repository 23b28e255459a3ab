"""``firn bench``: how fast one broker answers this client, with records that it makes itself.

Each measurement prints one row: what was done, how often, in how many seconds, the rate, and latencies where single
requests are timed. ``make bench`` compares with other systems; this answers "is my broker slow?".
"""

from typing import Annotated, Any

import typer

from firn.cli.printing import print_document
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, connect, run
from firn.errors import TopicExists

# The measured loops bring numpy, which other commands start without: imported where they run.
SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}  # of the latencies that are printed

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
        from firn.bench import workloads
        from firn.bench.data import Data

        async with connect(broker, timeout) as client:
            try:
                await client.create_topic(topic, partitions=partitions, durability={"flush": flush})
            except TopicExists:
                pass
            data = Data(records, keys, size)
            seconds = await workloads.send_lists(client, topic, data)
        return row("produce", records, seconds, size_bytes=data.bytes)

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
        from firn.bench import workloads

        async with connect(broker, timeout) as client:
            records, seconds = await workloads.read_pages(client, topic, view=view)
        return row("consume", records, seconds)

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
        from firn.bench import workloads
        from firn.bench.data import Data

        async with connect(broker, timeout) as client:
            wanted = Data(records, keys, 0).key_list(0, records)
            taken, hits = await workloads.get_one_at_a_time(client, topic, wanted)
            many, _ = await workloads.get_lists(client, topic, wanted)
        latencies = {f"{name}_ms": round(taken.ms(share), 3) for name, share in SHARES.items()}
        return {
            **row("get", records, taken.seconds), "hits": hits, **latencies,
            "get_many_per_second": round(records / max(many, 1e-9)),
        }  # fmt: skip

    show(run(work()), output)


def compact(
    topic: TopicArgument = "bench",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Force a compaction and wait for its end."""

    async def work() -> dict[str, Any]:
        from firn.bench import workloads

        async with connect(broker, timeout) as client:
            found, seconds = await workloads.compact(client, topic)
        parts = found["partitions"]
        before, after = (sum(p[name] for p in parts) for name in ("records_before", "records_after"))
        return {
            **row("compact", before, seconds, size_bytes=sum(p["bytes_read"] for p in parts)),
            "state": found["state"],
            "records_after": after,
        }

    show(run(work()), output)


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


def show(found: dict[str, Any], output: str | None) -> None:
    if print_document(found, output):
        return
    for name, value in found.items():
        print(f"{name:<22}{value:,}" if isinstance(value, int | float) else f"{name:<22}{value}")
