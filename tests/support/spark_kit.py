"""Topics of random records, and rows of DataFrames to compare them with."""

import random
from typing import Any

from pyspark.sql import DataFrame, Row

from firn.client.blocking import Client
from firn.record import Record

Rows = list[tuple[Any, ...]]


def written(
    client: Client, topic: str, seed: int, *, records: int = 3000, partitions: int = 2, keys: int = 200
) -> int:
    """A topic of random records in batches of random sizes, compacted by force in the middle: its id."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    found = client.create_topic(topic, partitions=partitions)
    for half in range(2):
        left = records // 2
        while left:
            count = min(left, rng.choice([1, 7, 300, 900]))
            left -= count
            with client.producer(topic, linger_ms=0) as producer:
                for _ in range(count):
                    value = None if rng.random() < 0.1 else rng.randbytes(rng.choice([0, 1, 30]))
                    tag = rng.choice([None, None, "red", "grün"]) if count > 7 else None
                    headers = {"from": "röd", "n": str(left)} if rng.random() < 0.05 else None
                    stamp = rng.randrange(-5, 1 << 40)
                    producer.send(b"k%d" % rng.randrange(keys), value, tag, stamp, headers)
        if half == 0:
            run = client.compact(topic, force=True, wait=True, timeout=60)
            assert run["state"] == "done"
    return int(found["topic_id"])


def row_of(record: Record) -> tuple[Any, ...]:
    return (
        record.partition, record.offset, record.timestamp * 1000, record.key, record.value, record.tag,
        dict(record.headers),
    )  # fmt: skip


def records_of(client: Client, topic: str, **options: Any) -> Rows:
    """What the client reads, in the order of partitions and offsets."""
    records = client.reader(topic, until_end=True, **options)
    return sorted(map(row_of, records), key=lambda row: row[:2])


def frame_rows(frame: DataFrame) -> Rows:
    """The rows of a read, as ``records_of`` has them."""
    found = frame.selectExpr("*", "unix_micros(timestamp) AS us").collect()
    return sorted((_frame_row(row) for row in found), key=lambda row: row[:2])


def _frame_row(row: Row) -> tuple[Any, ...]:
    return (
        row.partition, row.offset, row.us, bytes(row.key), None if row.value is None else bytes(row.value), row.tag,
        dict(row.headers or {}),
    )  # fmt: skip


def map_of(rows: Rows) -> dict[bytes, bytes]:
    """The newest value of every key that is not deleted; the offsets of a key are of one partition."""
    newest: dict[bytes, bytes | None] = {}
    for row in sorted(rows, key=lambda row: row[:2]):
        newest[row[3]] = row[4]
    return {key: value for key, value in newest.items() if value is not None}
