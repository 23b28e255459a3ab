"""How long a broker takes to start on 1.6 GB: after a clean stop, and after SIGKILL in the middle of a load."""

from pathlib import Path

from benchmarks.compared import SECONDS, Sizes
from benchmarks.firn_broker import FirnBroker
from benchmarks.kafka_broker import KafkaBroker
from benchmarks.processes import run_child
from benchmarks.report import Row, Spread, Target

VALUE_BYTES = 1024
BURST = 20  # the load before a SIGKILL is this part of all records


def _burst(broker: FirnBroker | KafkaBroker, sizes: Sizes) -> None:
    side = "firn_client" if isinstance(broker, FirnBroker) else "kafka_client"
    records = max(1, sizes.start_records // BURST)
    run_child(
        f"{side}:produce",
        address=broker.address,
        topic="start",
        records=records,
        keys=100_000,
        value_bytes=VALUE_BYTES,
    )


def _check(broker: FirnBroker, records: int) -> None:
    found = broker.latest("start")
    if found < records:
        raise RuntimeError(f"{records} records were acknowledged, after the start there are {found}")


def measure(work: Path, sizes: Sizes, *, with_kafka: bool) -> list[Row]:
    """The two rows. Broker by broker in turn: the two sides' starts do not share the machine."""
    brokers: list[FirnBroker | KafkaBroker] = [FirnBroker(work / "firn-start")]
    if with_kafka:
        brokers.append(KafkaBroker(work / "kafka-start", is_quick=sizes.is_quick))
    clean: list[list[float]] = [[] for _ in brokers]
    killed: list[list[float]] = [[] for _ in brokers]
    acknowledged = [0 for _ in brokers]
    for at, broker in enumerate(brokers):
        broker.start()
        broker.create_topic("start")
        side = "firn_client" if isinstance(broker, FirnBroker) else "kafka_client"
        run_child(
            f"{side}:produce", address=broker.address, topic="start", records=sizes.start_records, keys=100_000,
            value_bytes=VALUE_BYTES,
        )  # fmt: skip
        acknowledged[at] += sizes.start_records
        broker.stop()
    for _ in range(sizes.runs):
        for at, broker in enumerate(brokers):
            clean[at].append(broker.start())
            if isinstance(broker, FirnBroker):
                _check(broker, acknowledged[at])
            _burst(broker, sizes)
            acknowledged[at] += max(1, sizes.start_records // BURST)
            broker.kill()
            killed[at].append(broker.start())
            if isinstance(broker, FirnBroker):
                _check(broker, acknowledged[at])
            broker.stop()
    gigabytes = sizes.start_records * (VALUE_BYTES + 16) / 1e9
    return [
        Row(
            f"start with {gigabytes:.1f} GB, {how}", SECONDS, Spread.of(found[0]), "Kafka" if with_kafka else "",
            Spread.of(found[1]) if with_kafka else None, target=Target("at most", 0.5),
        )
        for how, found in (("clean", clean), ("after SIGKILL", killed))
    ]  # fmt: skip
