"""Ranges of partitions as record batches: exactly the rows asked for, whatever the batches hold."""

import pickle
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from spark_kit import records_of, written

from firn.client.blocking import Client
from firn.client.cursor import Page
from firn.errors import BadOffset, SnapshotExpired, Unavailable, UnknownTopic
from firn_spark.columns import arrow_schema
from firn_spark.connection import Connection
from firn_spark.fetch import Link, Range, pages, read

SEEDS = [1, 2, 3]


def rows(batches: Any) -> list[tuple[Any, ...]]:
    found = []
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(arrow_schema("records"))
        stamps = batch.column("timestamp").cast("int64").to_pylist()
        for row, stamp in zip(batch.to_pylist(), stamps, strict=True):
            headers = dict(row["headers"]) if row["headers"] is not None else {}
            found.append(
                (row["partition"], row["offset"], stamp, row["key"], row["value"], row["tag"], headers)
            )
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_both_views_are_read_as_the_client_reads_them(
    seed: int, client: Client, connection: Connection, topic: str
) -> None:
    topic_id = written(client, topic, seed)
    with client.snapshot(topic) as snapshot:
        for view, id in (("raw", None), ("compacted", snapshot.id)):
            kept = snapshot if id else None
            expected = records_of(client, topic, view=view, snapshot=kept)
            ranges = [
                Range(topic=topic, topic_id=topic_id, partition=p, start=0, end=end, view=view, snapshot=id)  # type: ignore[arg-type]
                for p, end in snapshot.ends.items()
            ]
            assert rows(read(connection, ranges)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_of_a_partition_make_the_whole_and_overlap_nowhere(
    seed: int, client: Client, connection: Connection, topic: str
) -> None:
    topic_id = written(client, topic, seed, records=1500, partitions=1)
    rng = random.Random(seed)
    with client.snapshot(topic) as snapshot:
        end = snapshot.ends[0]
        whole = Range(topic=topic, topic_id=topic_id, partition=0, start=0, end=end, snapshot=snapshot.id)
        cuts = sorted({0, end, *(rng.randrange(end) for _ in range(6))})
        parts = [
            Range(topic=topic, topic_id=topic_id, partition=0, start=a, end=b, snapshot=snapshot.id)
            for a, b in pairwise(cuts)
        ]
        expected = rows(read(connection, [whole]))
        assert len(expected) > 200
        assert rows(read(connection, parts)) == expected


def test_the_keys_projection_has_every_row_and_no_value(
    client: Client, connection: Connection, topic: str
) -> None:
    topic_id = written(client, topic, 4)
    whole = [
        Range(topic=topic, topic_id=topic_id, partition=p, start=0, end=row["latest"], view="raw")
        for p, row in enumerate(client.describe(topic)["partitions"])
    ]
    expected = [(r[1], r[3], r[4] is None, r[5]) for r in rows(read(connection, whole))]
    asked = [Range(**{**vars_of(each), "projection": "keys"}) for each in whole]
    found = []
    for batch in read(connection, asked):
        assert batch.schema.equals(arrow_schema("keys"))
        found += [(row["offset"], row["key"], row["tombstone"], row["tag"]) for row in batch.to_pylist()]
    assert found == expected
    pieces = [piece for page in pages(connection, asked[0]) for piece in page.pieces]
    assert sum(piece.batch.header.records for piece in pieces) >= len(expected) // 4
    assert sum(len(piece.batch.columns.values) for piece in pieces) == 0


def vars_of(asked: Range) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in Range.__dataclass_fields__}


def test_small_batches_are_joined_and_large_ones_parted(
    client: Client, connection: Connection, topic: str
) -> None:
    topic_id = client.create_topic(topic, partitions=1)["topic_id"]
    with client.producer(topic) as producer:
        for _ in range(60):
            producer.send_many([b"k%d" % n for n in range(50)], [b"v"] * 50).result()
        for n in range(5):
            producer.send(b"large", bytes([n]) * (10 << 20))
    end = client.describe(topic)["partitions"][0]["latest"]
    asked = Range(topic=topic, topic_id=topic_id, partition=0, start=0, end=end, view="raw")
    batches = list(read(connection, [asked]))
    assert batches[0].num_rows >= 3000
    assert sum(batch.num_rows for batch in batches) == 3005
    assert len(batches) >= 5
    values = [value for batch in batches for value in batch.column("value").to_pylist() if len(value) > 1]
    assert values == [bytes([n]) * (10 << 20) for n in range(5)]


def test_keys_of_no_byte_and_of_64_kib_come_whole(client: Client, connection: Connection, topic: str) -> None:
    topic_id = client.create_topic(topic, partitions=1)["topic_id"]
    keys = [b"", bytes(range(256)) * 256, b"\x00"]
    for key in keys:
        client.put(topic, key, b"v")
    asked = Range(topic=topic, topic_id=topic_id, partition=0, start=0, end=3, view="raw")
    assert [row[3] for row in rows(read(connection, [asked]))] == keys


def test_an_empty_range_asks_nobody() -> None:
    nobody = Connection(bootstrap="127.0.0.1:1", timeout=1)
    assert list(read(nobody, [Range(topic="t", topic_id=1, partition=0, start=5, end=5)])) == []


def test_a_range_and_its_connection_survive_pickling(connection: Connection) -> None:
    asked = Range(topic="t", topic_id=1, partition=0, start=0, end=9, snapshot="a,b", since=4)
    assert pickle.loads(pickle.dumps((connection, asked))) == (connection, asked)


def test_options_and_connection_say_the_same() -> None:
    given = Connection(bootstrap="a:1,b:2", tls_ca="ca.pem", token_file="token", timeout=4.5)
    assert Connection.of_options(given.options()) == given


def test_a_read_that_goes_on_at_the_master_still_knows_the_least_horizon_that_it_has_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Range] = []

    def of_feed(link: Link, part: Range, target: Any) -> Iterator[Page]:
        asked.append(part)
        if part.read_from == "any":
            yield Page(partition=0, start=0, pieces=[], next_offset=10, since=3, size=0, horizon=3)
            raise BadOffset("this standby has not come so far", end=10)
        yield Page(partition=0, start=10, pieces=[], next_offset=20, since=3, size=0, horizon=50)

    async def somewhere(link: Link, topic: str, topic_id: int | None = None) -> object:
        return object()

    monkeypatch.setattr(Link, "_pages", of_feed)
    monkeypatch.setattr(Link, "target", somewhere)
    whole = Range(topic="t", topic_id=1, partition=0, start=0, end=20, read_from="any")
    list(pages(Connection(bootstrap="127.0.0.1:1"), whole))
    assert [(part.start, part.since, part.read_from) for part in asked] == [
        (0, None, "any"), (10, 3, "master"),
    ]  # fmt: skip


class TestFailures:
    def test_a_lost_snapshot_fails_by_name_and_nothing_else_is_read(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        topic_id = written(client, topic, 5, records=100, partitions=1)
        with client.snapshot(topic) as snapshot:
            asked = Range(topic=topic, topic_id=topic_id, partition=0, start=0, end=50, snapshot=snapshot.id)
        with pytest.raises(SnapshotExpired, match=snapshot.id):
            list(read(connection, [asked]))

    def test_a_topic_made_anew_is_not_read_for_the_one_before(
        self, client: Client, connection: Connection, topic: str
    ) -> None:
        topic_id = written(client, topic, 6, records=100, partitions=1)
        client.delete_topic(topic)
        asked = Range(topic=topic, topic_id=topic_id, partition=0, start=0, end=50, view="raw")
        with pytest.raises(UnknownTopic):
            list(read(connection, [asked]))
        written(client, topic, 6, records=100, partitions=1)
        with pytest.raises(SnapshotExpired, match="created anew"):
            list(read(connection, [asked]))

    def test_an_unreachable_broker_is_named(self) -> None:
        nobody = Connection(bootstrap="127.0.0.1:1", timeout=1)
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            list(read(nobody, [Range(topic="t", topic_id=1, partition=0, start=0, end=5)]))

    def test_an_end_that_nobody_has_is_no_end_of_the_range(
        self, client: Client, broker: Any, topic: str
    ) -> None:
        topic_id = written(client, topic, 7, records=100, partitions=1)
        end = client.describe(topic)["partitions"][0]["latest"]
        asked = Range(topic=topic, topic_id=topic_id, partition=0, start=0, end=end + 5, view="raw")
        with pytest.raises(Unavailable, match=f"from offset {end} to {end + 5}"):
            list(read(Connection(bootstrap=broker.address, timeout=2), [asked]))
