"""Produce with one synchronous standby, beside one broker and beside Kafka with two: all of it on this one machine.

firn: ``firn up --replicas 2``, ``minInSync: 2``, ``flush: interval``; Kafka: two nodes, two replicas, two of them in
sync, ``acks=all``. Both acknowledge what is written, not yet synced, on both sides.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.compared import RATE, Sizes
from benchmarks.firn_broker import FirnBroker
from benchmarks.kafka_broker import KafkaBroker
from benchmarks.processes import run_child
from benchmarks.report import Row, Spread, Target

VALUE_BYTES = 100
KEYS = 100_000
WARM_UP = 50  # this part of all records goes ahead: the standby is in sync, the paths are compiled
KEPT = 0.6  # of the single broker's rate
KAFKA = {"min.insync.replicas": "2"}


def measure(work: Path, sizes: Sizes, *, with_kafka: bool) -> list[Row]:
    """The runs in turn: the brokers that are not being measured run, and do nothing."""
    with ExitStack() as stack:
        alone = FirnBroker(work / "firn-alone")
        group = FirnBroker(work / "firn-group", "--replicas", "2")
        for broker in (alone, group):
            broker.start()
            stack.callback(broker.stop)
        sides: dict[str, Callable[[str], float]] = {
            f"{name} {by}": _firn(broker, sizes, by, in_sync)
            for name, broker, in_sync in (("alone", alone, 1), ("group", group, 2))
            for by in ("send", "send_many")
        }
        if with_kafka:
            first = KafkaBroker(work / "kafka-1", is_quick=sizes.is_quick)
            second = KafkaBroker(work / "kafka-2", is_quick=sizes.is_quick, joins=first)
            for node in (first, second):
                node.start()
                stack.callback(node.stop)
            sides["kafka"] = _kafka(first, sizes)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(sizes.runs):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for name in order:
                rates[name].append(sides[name](f"replicated-{name.replace(' ', '-')}-{number}"))
    rows = []
    for by in ("send", "send_many"):
        title, ours = f"produce 100 B, `{by}`, one synchronous standby", Spread.of(rates[f"group {by}"])
        one = Spread.of(rates[f"alone {by}"])
        rows.append(Row(title, RATE, ours, "firn, one broker", one, target=Target("at least", KEPT)))
        if with_kafka:
            theirs = Spread.of(rates["kafka"])
            rows.append(Row(title, RATE, ours, "Kafka, two brokers", theirs, target=Target("at least", 1)))
    return rows


def _firn(broker: FirnBroker, sizes: Sizes, by: str, in_sync: int) -> Callable[[str], float]:
    def run(topic: str) -> float:
        broker.create_topic(topic, min_in_sync=in_sync)
        common = {"address": broker.address, "topic": topic, "value_bytes": VALUE_BYTES, "by": by}
        run_child("firn_client:produce", records=sizes.records // WARM_UP, keys=KEYS, **common)
        rate = run_child("firn_client:produce", records=sizes.records, keys=KEYS, **common)["rate"]
        broker.delete_topic(topic)
        return rate

    return run


def _kafka(broker: KafkaBroker, sizes: Sizes) -> Callable[[str], float]:
    def run(topic: str) -> float:
        broker.create_topic(topic, KAFKA, replicas=2)
        common = {"address": broker.address, "topic": topic, "value_bytes": VALUE_BYTES, "acks": "all"}
        run_child("kafka_client:produce", records=sizes.records // WARM_UP, keys=KEYS, **common)
        rate = run_child("kafka_client:produce", records=sizes.records, keys=KEYS, **common)["rate"]
        broker.delete_topic(topic)
        return rate

    return run
