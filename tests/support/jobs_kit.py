"""Random topics for the jobs around Spark, and damage in real files that no checksum tells."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from google_crc32c import value as crc32c

from firn.batch import HEADER_BYTES, iterate
from firn.client.blocking import Client

Row = tuple[bytes, int, str | None]  # value, timestamp in ms, tag


@dataclass
class Written:
    """A topic with random records, and the map that must be left of them."""

    client: Client
    topic: str
    seed: int
    live: dict[bytes, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def write(self, records: int, *, keys: int, deletes: float = 0.2) -> None:
        """So many records of so many keys; some of them tombstones."""
        chance = self.chance
        names = [b"" if at == 0 else b"k%d" % at for at in (chance.randrange(keys) for _ in range(records))]
        values = [
            None if chance.random() < deletes else chance.randbytes(chance.randrange(40)) for _ in names
        ]
        stamps = [1_600_000_000_000 + chance.randrange(1 << 30) for _ in names]
        tags = [chance.choice((None, "a", "b")) for _ in names]
        with self.client.producer(self.topic) as producer:
            producer.send_many(names, values, timestamps=stamps, tags=tags).result()
        for name, value, stamp, tag in zip(names, values, stamps, tags, strict=True):
            if value is None:
                self.live.pop(name, None)
            else:
                self.live[name] = (value, stamp, tag)

    def mixed(self) -> "Written":
        """Compacted records below newer ones that are not."""
        self.write(3000, keys=700)
        self.client.compact(self.topic, force=True, wait=True)
        self.write(1500, keys=700)
        return self


def map_of(client: Client, topic: str) -> dict[bytes, Row]:
    """The map that a reader of the topic ends with."""
    found: dict[bytes, Row] = {}
    for record in client.reader(topic, until_end=True):
        if record.value is None:
            found.pop(record.key, None)
        else:
            found[record.key] = (record.value, record.timestamp, record.tag)
    return found


def parquet_map(spark: Any, folder: Path) -> dict[bytes, Row]:
    """The rows of a snapshot; a key that is there twice is an error."""
    rows = (
        spark.read.parquet(str(folder))
        .selectExpr("key", "value", "unix_millis(timestamp) AS ms", "tag")
        .collect()
    )
    found = {bytes(row.key): (bytes(row.value), row.ms, row.tag) for row in rows}
    assert len(found) == len(rows), "a key has two rows"
    return found


def told(capsys: Any) -> dict[str, Any]:
    """The one JSON object that a job has printed with ``-o json``."""
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def run_job(main: Callable[[list[str]], int], address: str, *arguments: object) -> int:
    """A job's exit code, run in this process and in the session of the tests."""
    return main([*map(str, arguments), "--bootstrap", address])


def plant(data: Path, old: bytes, new: bytes) -> None:
    """Put ``new`` in the place of ``old`` in a stopped broker's compacted log, and make its checksums right again."""
    assert len(old) == len(new)
    for path in data.glob("compacted/*/*/*.segment"):
        whole = path.read_bytes()
        at = 0
        for batch in iterate(whole[: int.from_bytes(whole[-48:-40], "little")]):
            head = batch.header
            bytes_ = bytearray(whole[at : at + head.size])
            if old in bytes_:
                spot = bytes_.index(old)
                bytes_[spot : spot + len(new)] = new
                split = HEADER_BYTES + head.keys_bytes
                crcs = crc32c(bytes(bytes_[HEADER_BYTES:split])), crc32c(bytes(bytes_[split:]))
                bytes_[:HEADER_BYTES] = replace(head, keys_crc=crcs[0], values_crc=crcs[1]).encode()
                path.write_bytes(whole[:at] + bytes_ + whole[at + head.size :])
                return
            at += head.size
    raise AssertionError(f"{old!r} is in no segment")
