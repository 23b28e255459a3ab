"""Rows of firn alone: what no peer was measured at. Each has a broker and a data folder of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.compared import RATE, SECONDS, Sizes
from benchmarks.firn_broker import FirnBroker
from benchmarks.processes import run_child
from benchmarks.report import Row, Spread

BATCH = 20  # records of a batch where partitions are named
MB = "MB"


def _one(title: str, unit: str, value: float, note: str = "") -> Row:
    return Row(title, unit, Spread.of([value]), note=note)


def write_amplification(broker: FirnBroker, sizes: Sizes) -> list[Row]:
    """1 % of the keys of a large clean prefix are written anew and compacted, round by round, each time others."""
    keys, rounds = sizes.alone_keys, sizes.alone_rounds
    topic = "amplification"
    broker.create_topic(topic, compaction={"maxLag": "1s", "minDirtyRatio": 0, "maxSegmentAge": "1s"})
    common = {"address": broker.address, "topic": topic, "keys": keys}
    run_child("firn_client:write_and_wait", **common, rounds=[keys])
    first, row_bytes = broker.metric("firn_compaction_bytes_written_total"), broker.row_bytes(topic)
    run_child("firn_client:write_and_wait", **common, rounds=[keys // 100] * rounds)
    written = broker.metric("firn_compaction_bytes_written_total") - first
    died = rounds * (keys // 100) * row_bytes
    said = f"{keys:,} keys, {rounds} rounds of 1 %"
    return [_one("bytes written per byte that died, 1 % of the keys anew", "ratio", written / died, said)]


def partitions(broker: FirnBroker, sizes: Sizes) -> list[Row]:
    """The same records into topics of more and more partitions."""
    rows = []
    for count in sizes.partitions:
        for how in ("by key", "by name"):
            topic = f"spread-{count}-{how.replace(' ', '-')}"
            broker.create_topic(topic, partitions=count)
            common = {"address": broker.address, "topic": topic, "value_bytes": 100}
            if how == "by key":
                records = sizes.spread_records
                rate = run_child("firn_client:produce", **common, records=records, keys=records)["rate"]
                title = f"send_many, 100 B, {count:,} partitions by key hash"
            else:
                records = sizes.spread_records // 5
                rate = run_child(
                    "firn_client:produce_spread", **common, records=records, partitions=count, batch=BATCH
                )["rate"]
                title = f"send_many, 100 B, {count:,} partitions in turn, {BATCH} records each"
            rows.append(_one(title, RATE, rate))
            broker.delete_topic(topic)
    rows.append(_one("resident memory after it, peak", MB, broker.memory()[1]))
    return rows


def light_queues(broker: FirnBroker, sizes: Sizes) -> list[Row]:
    before, _ = broker.memory()
    broker.create_topic("devices")
    found = run_child(
        "firn_client:light_queues",
        address=broker.address,
        topic="devices",
        queues=sizes.queues,
        value_bytes=100,
        probes=200,
    )
    broker.settle()
    title = f"{sizes.queues:,} light queues"
    return [
        _one(f"{title}, a record to each", RATE, found["rate"]),
        _one(f"{title}, reading one", "ms", found["read_p50_ms"]),
        _one(f"{title}, broker's memory grew by, peak", MB, broker.memory()[1] - before),
    ]


def table(broker: FirnBroker, sizes: Sizes) -> list[Row]:
    keys = sizes.table_keys
    broker.create_topic("table")
    run_child(
        "firn_client:produce", address=broker.address, topic="table", records=keys, keys=keys, value_bytes=100
    )
    broker.settle()
    found = run_child("firn_client:table", address=broker.address, topic="table", keys=keys)
    data = keys * 116 / 1e6
    return [
        _one(f"Table of {keys:,} keys, until caught up", SECONDS, found["seconds"]),
        _one(
            f"Table of {keys:,} keys, memory",
            MB,
            found["memory_mb"],
            f"keys and values alone are {data:,.0f} MB",
        ),
    ]


def distinct_keys(broker: FirnBroker, sizes: Sizes) -> list[Row]:
    """A compaction in which no key comes twice, in a budget of 64 MiB."""
    keys = sizes.distinct_keys
    broker.create_topic("distinct")
    run_child(
        "firn_client:produce",
        address=broker.address,
        topic="distinct",
        records=keys,
        keys=keys,
        value_bytes=8,
    )
    broker.settle()
    produced = broker.memory()[1]
    broker.forget_peak()
    before, _ = broker.memory()
    found = run_child(
        "firn_client:compact", address=broker.address, topic="distinct", pid=broker.pid, live=keys
    )
    title = f"compaction of {keys:,} distinct keys in 64 MiB"
    return [
        _one(title, SECONDS, found["seconds"], f"{found['rounds']} rounds"),
        _one(
            f"{title}, the process grew by, peak", MB, broker.memory()[1] - before, "target: at most 167 MB"
        ),
        _one(f"{title}, resident memory before it, peak", MB, produced),
    ]


def clean_restart(broker: FirnBroker, sizes: Sizes) -> list[Row]:
    value_bytes = 4096
    records = sizes.restart_bytes // value_bytes
    broker.create_topic("large")
    run_child(
        "firn_client:produce",
        address=broker.address,
        topic="large",
        records=records,
        keys=100_000,
        value_bytes=value_bytes,
    )
    stopped = broker.stop()
    starts = []
    for _ in range(sizes.runs):
        starts.append(broker.start())
        found = broker.latest("large")
        if found != records:
            raise RuntimeError(f"{found} records after a clean restart, expected {records}")
        broker.stop()
    broker.start()
    title = f"restart with {sizes.restart_bytes / 1e9:g} GB of log"
    return [
        Row(f"{title}, clean", SECONDS, Spread.of(starts), note="target: under 2 s"),
        _one(f"{title}, the stop before it", SECONDS, stopped),
    ]


ALONE: dict[str, Callable[[FirnBroker, Sizes], list[Row]]] = {
    "amplification": write_amplification,
    "partitions": partitions,
    "queues": light_queues,
    "table": table,
    "distinct": distinct_keys,
    "restart": clean_restart,
}


def measure(name: str, work: Path, sizes: Sizes) -> list[Row]:
    """One of ``ALONE`` on a fresh broker, whose data are removed afterwards."""
    folder = work / f"firn-{name}"
    broker = FirnBroker(folder)
    broker.start()
    try:
        return ALONE[name](broker, sizes)
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)
