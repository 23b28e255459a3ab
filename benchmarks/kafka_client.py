"""Kafka's side of each workload, by confluent-kafka; run in a process of its own (``child.py``)."""

import random
import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from firn.bench.data import POOL, Data

POLL_EVERY = 4096  # records between two polls for acknowledgements


def _producer(address: str, acks: str, linger_ms: float = 5) -> Any:
    return Producer(
        {
            "bootstrap.servers": address, "acks": acks, "linger.ms": linger_ms, "batch.size": 1 << 20,
            "queue.buffering.max.messages": 2_000_000, "queue.buffering.max.kbytes": 2_000_000,
        }
    )  # fmt: skip


def produce(
    address: str, topic: str, records: int, keys: int, value_bytes: int, acks: str = "1"
) -> dict[str, float]:
    """One ``produce`` per record, as firn's ``send_each``."""
    data = Data(records, keys, value_bytes)
    names, pool = data.key_list(0, records), data.pool
    producer = _producer(address, acks)
    began = time.perf_counter()
    for i in range(records):
        while True:
            try:
                producer.produce(topic, pool[i % POOL], names[i])
                break
            except BufferError:
                producer.poll(0.05)
        if not i % POLL_EVERY:
            producer.poll(0)
    left = producer.flush()
    seconds = time.perf_counter() - began
    assert left == 0, f"{left} records were not acknowledged"
    return {"rate": records / seconds, "seconds": seconds}


def one_at_a_time(address: str, topic: str, count: int, value_bytes: int) -> dict[str, float]:
    """Each record is sent when the one before it is acknowledged."""
    producer = _producer(address, "1", 0)
    value = b"x" * value_bytes
    done: list[object] = []

    def acknowledged(*outcome: object) -> None:
        done.append(outcome)

    found = []
    for number in range(-min(count, 200), count):
        done.clear()
        began = time.perf_counter_ns()
        producer.produce(topic, value, b"%016d" % abs(number), on_delivery=acknowledged)
        while not done:
            producer.poll(1)
        if number >= 0:
            found.append(time.perf_counter_ns() - began)
    found.sort()
    return {"p50_ms": found[count // 2] / 1e6, "p99_ms": found[count * 99 // 100] / 1e6}


def in_flight(address: str, topic: str, count: int, value_bytes: int, depth: int) -> dict[str, float]:
    """``depth`` records unacknowledged at any time, without linger."""
    producer = _producer(address, "1", 0)
    value = b"x" * value_bytes
    under_way = 0

    def acknowledged(_error: object, _message: object) -> None:
        nonlocal under_way
        under_way -= 1

    began = time.perf_counter()
    for number in range(count):
        while under_way >= depth:
            producer.poll(1)
        producer.produce(topic, value, b"%016d" % number, on_delivery=acknowledged)
        under_way += 1
    producer.flush()
    return {"rate": count / (time.perf_counter() - began)}


def read(address: str, topic: str, records: int) -> dict[str, float]:
    """All records from the earliest on, by lists of 10,000."""
    consumer = Consumer(
        {
            "bootstrap.servers": address, "group.id": f"bench-{random.getrandbits(32)}", "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "fetch.message.max.bytes": 8 << 20, "queued.min.messages": 1_000_000,
            "check.crcs": False,
        }
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, 0, 0)])
    count = 0
    began = time.perf_counter()
    while count < records:
        # No more than are left: it would wait for the rest of a list until the timeout.
        messages = consumer.consume(min(10_000, records - count), 10.0)
        failed = [message.error() for message in messages if message.error()]
        assert messages, f"no more came after {count} of {records} records"
        assert not failed, f"reading failed: {failed[0]}"
        count += len(messages)
    seconds = time.perf_counter() - began
    consumer.close()
    return {"rate": count / seconds, "seconds": seconds}
