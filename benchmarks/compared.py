"""The workloads that both sides run: the same records, the same durability, interleaved, in one run.

``interval`` (firn) and ``acks=1`` (Kafka) acknowledge what is written to the page cache; ``sync`` and
``flush.messages=1`` with ``acks=all`` what is on the disk. Both brokers live through all of it, so that their peak
memory is that of the whole.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.firn_broker import FirnBroker
from benchmarks.kafka_broker import KafkaBroker
from benchmarks.processes import run_child
from benchmarks.report import Target

MS = "ms"
RATE = "records/s"
SECONDS = "s"
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each workload does."""

    runs: int
    records: int  # of 100 B; of 1 KiB a sixth of them
    one_at_a_time: int
    in_flight: int
    compaction: int  # records of 100 B; of 1 KiB an eighth, for RocketMQ's figure a quarter of them
    get_keys: int
    gets: int
    start_records: int  # of 1 KiB
    alone_keys: int  # write amplification
    alone_rounds: int
    spread_records: int  # by key hash; by name a fifth of them
    partitions: tuple[int, ...]
    queues: int
    table_keys: int
    distinct_keys: int
    restart_bytes: int
    rebuild_bytes: int
    link_seconds: float  # of a full link
    spark_records: int  # of 100 B
    spark_compaction: int  # records of 100 B, a fifth as many keys, in 10 partitions
    is_quick: bool = False  # only to show that the harness works


FULL = Sizes(
    runs=5, records=3_000_000, one_at_a_time=5_000, in_flight=100_000, compaction=8_000_000, get_keys=1_000_000,
    gets=10_000, start_records=1_550_000, alone_keys=2_000_000, alone_rounds=50, spread_records=2_000_000,
    partitions=(1, 1_000, 100_000), queues=1_000_000, table_keys=10_000_000, distinct_keys=50_000_000,
    restart_bytes=10_000_000_000, rebuild_bytes=5_000_000_000, link_seconds=10.0,
    spark_records=6_000_000, spark_compaction=50_000_000,
)  # fmt: skip
QUICK = Sizes(
    runs=1, records=60_000, one_at_a_time=200, in_flight=2_000, compaction=80_000, get_keys=10_000, gets=500,
    start_records=20_000, alone_keys=20_000, alone_rounds=1, spread_records=20_000, partitions=(1, 100), queues=2_000,
    table_keys=20_000, distinct_keys=100_000, restart_bytes=20_000_000, rebuild_bytes=8_000_000, link_seconds=0.2,
    spark_records=20_000, spark_compaction=20_000, is_quick=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Brokers:
    firn: FirnBroker
    kafka: KafkaBroker | None


@dataclass(frozen=True, slots=True)
class RowOf:
    """One row of the table from the figures that a workload gives. ``figure``: the peer's, from elsewhere."""

    title: str
    unit: str
    firn: str
    target: Target | None = None
    kafka: str | None = None
    peer: str = "Kafka"
    figure: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """``firn`` and ``kafka`` run it once, on a topic of their own, and give figures by name."""

    name: str
    rows: tuple[RowOf, ...]
    firn: Callable[[FirnBroker, str, Sizes], Figures]
    kafka: Callable[[KafkaBroker, str, Sizes], Figures] | None = None
    records: Callable[[Sizes], int] = lambda sizes: sizes.records  # what `{records}` in a title stands for


def _at_least(factor: float) -> Target:
    return Target("at least", factor)


def _at_most(factor: float) -> Target:
    return Target("at most", factor)


# Produce


def _firn_produce(
    broker: FirnBroker, topic: str, records: int, keys: int, value_bytes: int, flush: str
) -> Figures:
    found: Figures = {}
    for by in ("send", "send_many", "send_blocking"):
        own = f"{topic}-{by}"
        broker.create_topic(own, flush=flush)
        arguments = {"records": records, "keys": keys, "value_bytes": value_bytes}
        if by == "send_blocking":
            done = run_child("firn_client:produce_blocking", address=broker.address, topic=own, **arguments)
        else:
            done = run_child("firn_client:produce", address=broker.address, topic=own, by=by, **arguments)
        found[by] = done["rate"]
        broker.delete_topic(own)
    return found


def _kafka_produce(
    broker: KafkaBroker,
    topic: str,
    records: int,
    keys: int,
    value_bytes: int,
    *,
    is_synced: bool,
    with_java: bool,
) -> Figures:
    settings = {"flush.messages": "1"} if is_synced else {}
    acks = "all" if is_synced else "1"
    broker.create_topic(topic, settings)
    done = run_child(
        "kafka_client:produce", address=broker.address, topic=topic, records=records, keys=keys,
        value_bytes=value_bytes, acks=acks,
    )  # fmt: skip
    broker.delete_topic(topic)
    if not with_java:
        return {"produce": done["rate"]}
    broker.create_topic(f"{topic}-java", settings)
    printed = broker.tool(
        "org.apache.kafka.tools.ProducerPerformance", "--topic", f"{topic}-java", "--num-records", str(records),
        "--record-size", str(value_bytes), "--throughput", "-1", "--producer-props",
        f"bootstrap.servers={broker.address}", "linger.ms=5", "batch.size=1048576", f"acks={acks}",
    )  # fmt: skip
    broker.delete_topic(f"{topic}-java")
    java = float(printed.strip().splitlines()[-1].split(" records/sec")[0].split()[-1])
    return {"produce": done["rate"], "java": java}


def _produce(name: str, title: str, value_bytes: int, *, is_synced: bool, many: Target) -> Workload:
    with_java = value_bytes == 100 and not is_synced  # its figure is of use once

    def records(sizes: Sizes) -> int:
        return sizes.records // (3 if is_synced else 1) // (1 if value_bytes <= 100 else 6)

    def firn(broker: FirnBroker, topic: str, sizes: Sizes) -> Figures:
        flush = "sync" if is_synced else "interval"
        return _firn_produce(broker, topic, records(sizes), 100_000, value_bytes, flush)

    def kafka(broker: KafkaBroker, topic: str, sizes: Sizes) -> Figures:
        return _kafka_produce(
            broker, topic, records(sizes), 100_000, value_bytes, is_synced=is_synced, with_java=with_java
        )

    rows: tuple[RowOf, ...] = (
        RowOf(f"{title}, send", RATE, "send", _at_least(1), "produce"),
        RowOf(f"{title}, send_many", RATE, "send_many", many, "produce"),
        RowOf(f"{title}, send of the blocking client", RATE, "send_blocking", None, "produce"),
    )
    if with_java:
        rows += (RowOf(f"{title}, send, Kafka's Java tool", RATE, "send", None, "java", peer="Java tool"),)
    return Workload(name, rows, firn, kafka)


def _firn_one_at_a_time(broker: FirnBroker, topic: str, sizes: Sizes) -> Figures:
    broker.create_topic(topic)
    one = run_child(
        "firn_client:one_at_a_time",
        address=broker.address,
        topic=topic,
        count=sizes.one_at_a_time,
        value_bytes=100,
    )
    many = run_child(
        "firn_client:in_flight",
        address=broker.address,
        topic=topic,
        count=sizes.in_flight,
        value_bytes=100,
        depth=64,
    )
    return {**one, **many}


def _kafka_one_at_a_time(broker: KafkaBroker, topic: str, sizes: Sizes) -> Figures:
    broker.create_topic(topic)
    one = run_child(
        "kafka_client:one_at_a_time",
        address=broker.address,
        topic=topic,
        count=sizes.one_at_a_time,
        value_bytes=100,
    )
    many = run_child(
        "kafka_client:in_flight",
        address=broker.address,
        topic=topic,
        count=sizes.in_flight,
        value_bytes=100,
        depth=64,
    )
    return {**one, **many}


ONE_AT_A_TIME = Workload(
    "latency",
    (
        RowOf("one at a time, 100 B, p50", MS, "p50_ms", _at_most(1), "p50_ms"),
        RowOf("one at a time, 100 B, p99", MS, "p99_ms", _at_most(1), "p99_ms"),
        RowOf("64 in flight, no linger", RATE, "rate", _at_least(1), "rate"),
    ),
    _firn_one_at_a_time,
    _kafka_one_at_a_time,
)


# Read


def _firn_read(broker: FirnBroker, topic: str, sizes: Sizes) -> Figures:
    broker.create_topic(topic)
    run_child(
        "firn_client:produce",
        address=broker.address,
        topic=topic,
        records=sizes.records,
        keys=100_000,
        value_bytes=100,
    )
    broker.settle()
    return {
        by: run_child("firn_client:read", address=broker.address, topic=topic, records=sizes.records, by=by)[
            "rate"
        ]
        for by in ("records", "pages", "arrow")
    }


def _kafka_read(broker: KafkaBroker, topic: str, sizes: Sizes) -> Figures:
    broker.create_topic(topic)
    common = {"address": broker.address, "topic": topic, "records": sizes.records}
    run_child("kafka_client:produce", **common, keys=100_000, value_bytes=100)
    read = run_child("kafka_client:read", **common)["rate"]
    printed = broker.tool(
        "org.apache.kafka.tools.ConsumerPerformance", "--bootstrap-server", broker.address, "--topic", topic,
        "--num-records", str(sizes.records),
    )  # fmt: skip
    header, line = (part.split(",") for part in printed.strip().splitlines()[-2:])
    columns = {name.strip(): value.strip() for name, value in zip(header, line, strict=True)}
    # The tool's total includes joining the group; its rate of fetching alone is the kinder figure.
    return {"read": read, "java": float(columns["fetch.nMsg.sec"])}


READ = Workload(
    "read",
    (
        RowOf("read all, 100 B, async for record", RATE, "records", _at_least(1.5), "read"),
        RowOf("read all, 100 B, pages()", RATE, "pages", _at_least(1.5), "read"),
        RowOf("read all, 100 B, arrow()", RATE, "arrow", _at_least(2), "java", peer="Java tool"),
    ),
    _firn_read,
    _kafka_read,
)


# Compaction

_UNCLEANED = {
    "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1.0", "segment.bytes": str(64 << 20),
    "segment.ms": "604800000",
}  # fmt: skip


def _compaction(
    name: str,
    *,
    share: int,
    live_percent: int,
    value_bytes: int,
    rows: tuple[RowOf, ...],
    peer: bool = True,
) -> Workload:
    def data(sizes: Sizes) -> dict[str, int]:
        records = sizes.compaction // share
        return {"records": records, "keys": records * live_percent // 100, "value_bytes": value_bytes}

    def firn(broker: FirnBroker, topic: str, sizes: Sizes) -> Figures:
        shape = data(sizes)
        broker.create_topic(topic)
        before = broker.cpu()
        run_child("firn_client:produce", address=broker.address, topic=topic, **shape)
        broker.settle()
        found = run_child(
            "firn_client:compact", address=broker.address, topic=topic, pid=broker.pid, live=shape["keys"]
        )
        found["all_cpu_s"] = broker.cpu() - before
        run_child(
            "firn_client:read",
            address=broker.address,
            topic=topic,
            records=shape["keys"],
            by="arrow",
            view="compacted",
        )
        broker.delete_topic(topic)
        return found

    def kafka(broker: KafkaBroker, topic: str, sizes: Sizes) -> Figures:
        shape = data(sizes)
        broker.create_topic(topic, _UNCLEANED)
        before = broker.cpu()
        run_child("kafka_client:produce", address=broker.address, topic=topic, **shape)
        # The active segment is never cleaned: one more record rolls it. The cleaner gets to work only then.
        broker.set_topic(topic, {"segment.ms": "1000"})
        time.sleep(1.1)
        run_child(
            "kafka_client:produce",
            address=broker.address,
            topic=topic,
            records=1,
            keys=1,
            value_bytes=value_bytes,
        )
        mark, cpu = broker.log_mark(), broker.cpu()
        broker.set_topic(topic, {"min.cleanable.dirty.ratio": "0.0001"})
        seconds = broker.wait_for_cleaning(topic, shape["records"], since=mark)
        found = {"seconds": seconds, "cpu_s": broker.cpu() - cpu, "all_cpu_s": broker.cpu() - before}
        broker.delete_topic(topic)
        return found

    return Workload(name, rows, firn, kafka if peer else None, lambda sizes: sizes.compaction // share)


def _compaction_rows(title: str, target: Target) -> tuple[RowOf, ...]:
    return (
        RowOf(title, SECONDS, "seconds", target, "seconds"),
        RowOf(f"{title}: broker's CPU", "CPU s", "cpu_s", None, "cpu_s"),
        RowOf(f"{title}: broker's CPU, produce included", "CPU s", "all_cpu_s", _at_most(1), "all_cpu_s"),
    )


# Get


def _firn_get(broker: FirnBroker, topic: str, sizes: Sizes) -> Figures:
    broker.create_topic(topic)
    run_child(
        "firn_client:produce", address=broker.address, topic=topic, records=sizes.get_keys, keys=sizes.get_keys,
        value_bytes=100,
    )  # fmt: skip
    broker.settle()
    found: Figures = {}
    for state in ("dirty", "clean"):
        done = run_child(
            "firn_client:get", address=broker.address, topic=topic, keys=sizes.get_keys, count=sizes.gets
        )
        found.update({f"{state}_{metric}": value for metric, value in done.items()})
        if state == "dirty":
            run_child(
                "firn_client:compact",
                address=broker.address,
                topic=topic,
                pid=broker.pid,
                live=sizes.get_keys,
            )
    broker.delete_topic(topic)
    return found


_NATS = "NATS KV 2.9, nats-py"
GET = Workload(
    "get",
    tuple(
        row
        for state, said in (("clean", "compacted"), ("dirty", "not compacted"))
        for row in (
            RowOf(
                f"get one at a time, {said}, p50", MS, f"{state}_one_p50_ms", _at_most(1), None, _NATS, 0.20
            ),
            RowOf(
                f"get one at a time, {said}, p99", MS, f"{state}_one_p99_ms", _at_most(1), None, _NATS, 0.27
            ),
            RowOf(
                f"get, 64 in flight, {said}", RATE, f"{state}_flight_rate", _at_least(1), None, _NATS, 28_000
            ),
            RowOf(f"get_many, {said}", RATE, f"{state}_many_rate", _at_least(10), None, _NATS, 28_000),
        )
    ),
    _firn_get,
)

_ROCKET = "compaction, {records} x 100 B, 25 % live"


def _beside_kafka(
    name: str, title: str, factor: float, *, share: int, live_percent: int, value_bytes: int
) -> Workload:
    rows = _compaction_rows(title, _at_most(factor))
    return _compaction(name, share=share, live_percent=live_percent, value_bytes=value_bytes, rows=rows)


WORKLOADS: tuple[Workload, ...] = (
    _produce("produce-100", "produce 100 B", 100, is_synced=False, many=_at_least(3)),
    _produce("produce-1k", "produce 1 KiB", 1024, is_synced=False, many=_at_least(1)),
    _produce("produce-sync", "produce 100 B, fsync", 100, is_synced=True, many=_at_least(1)),
    ONE_AT_A_TIME,
    READ,
    _beside_kafka("compact-25", "compaction, {records} x 100 B, 25 % live", 0.2, share=1, live_percent=25, value_bytes=100),
    _beside_kafka("compact-5", "compaction, {records} x 100 B, 5 % live", 0.2, share=1, live_percent=5, value_bytes=100),
    _beside_kafka("compact-1k", "compaction, {records} x 1 KiB, 25 % live", 0.5, share=8, live_percent=25, value_bytes=1024),
    GET,
    _compaction(
        "compact-2m", share=4, live_percent=25, value_bytes=100, peer=False,
        rows=(RowOf(_ROCKET, SECONDS, "seconds", _at_most(0.1), None, "RocketMQ 5.3.3", 4.8, "1.8 M records there"),),
    ),
)  # fmt: skip
