"""A topic's map as Parquet and back: one moment, whole or not there, and never over something newer."""

import threading
from pathlib import Path
from typing import Any

import pytest
from jobs_kit import Written, map_of, parquet_map, run_job, told

from firn.client.blocking import Client
from firn.errors import Corrupt
from firn_node.demo.process import BrokerProcess
from firn_spark import load, snapshot
from firn_spark.connection import Connection
from firn_spark.jobs import folder


def test_a_snapshot_holds_each_live_key_once_and_says_its_offsets(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any
) -> None:
    client.create_topic(topic, partitions=3)
    written = Written(client, topic, seed=1).mixed()
    target = tmp_path / "snapshot"
    assert run_job(snapshot.main, broker.address, topic, target, "-o", "json") == 0
    report = told(capsys)
    assert parquet_map(spark, target) == written.live
    assert report["records"] == len(written.live)
    ends = {p["partition"]: p["latest"] for p in client.describe(topic)["partitions"]}
    assert {p["partition"]: p["end"] for p in report["partitions"]} == ends
    found = folder.snapshot_at(str(target))
    assert found is not None
    assert found.ends == ends
    rows = spark.read.parquet(str(target)).groupBy("partition").agg({"offset": "max"}).collect()
    assert all(row[1] < ends[row[0]] for row in rows)


def test_a_snapshot_of_a_topic_without_a_live_key_is_whole(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any
) -> None:
    client.create_topic(topic, partitions=2)
    client.put(topic, b"a", b"1")
    client.delete(topic, b"a")
    assert run_job(snapshot.main, broker.address, topic, tmp_path / "none", "-o", "json") == 0
    assert told(capsys)["records"] == 0
    assert parquet_map(spark, tmp_path / "none") == {}
    assert run_job(load.main, broker.address, tmp_path / "none", f"{topic}-again", "--partitions", 1) == 0
    assert map_of(client, f"{topic}-again") == {}


def test_a_snapshot_under_writes_and_compactions_is_one_map(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    """Each round writes one number to every key and deletes nothing: a mixture of two moments shows two numbers apart."""
    client.create_topic(topic, partitions=1)
    keys = [b"key-%d" % at for at in range(300)]
    stop, rounds = threading.Event(), [0]

    def churn() -> None:
        while not stop.is_set():
            rounds[0] += 1
            with client.producer(topic) as producer:
                producer.send_many(keys, [b"%d" % rounds[0]] * len(keys)).result()
            if rounds[0] % 5 == 0:
                client.compact(topic, force=True, wait=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for at in range(3):
            taken = snapshot.take_snapshot(
                spark, Connection(bootstrap=broker.address), topic, str(tmp_path / f"at-{at}")
            )
            found = parquet_map(spark, tmp_path / f"at-{at}")
            end, newest = taken.snapshot.ends[0], {}
            for offset in range(end):  # every round has the keys in their order
                newest[keys[offset % len(keys)]] = b"%d" % (offset // len(keys) + 1)
            assert {key: row[0] for key, row in found.items()} == newest
    finally:
        stop.set()
        thread.join()
    assert rounds[0] > 1


def test_a_snapshot_that_was_interrupted_goes_on_and_shows_nothing_before_it_is_whole(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any
) -> None:
    client.create_topic(topic, partitions=3)
    written = Written(client, topic, seed=2).mixed()
    first, target = tmp_path / "first", tmp_path / "target"
    assert run_job(snapshot.main, broker.address, topic, first, "-o", "json") == 0
    told(capsys)
    # What a driver that died in the middle leaves: two whole files, a torn one, one that was never finished.
    left = tmp_path / "target.partial"
    left.mkdir()
    files = sorted(first.glob("*.parquet"))
    for file in files[:2]:
        (left / file.name).write_bytes(file.read_bytes())
    (left / files[2].name).write_bytes(files[2].read_bytes()[:-100])
    (left / f"_{files[2].name}").write_bytes(b"PAR1")
    assert run_job(snapshot.main, broker.address, topic, target, "-o", "json") == 0
    report = told(capsys)
    assert [p["resumed"] for p in report["partitions"]] == [True, True, False]
    assert parquet_map(spark, target) == written.live
    assert len(list(target.iterdir())) == 4
    assert not left.exists()


def test_a_folder_that_is_there_is_not_written_to(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any
) -> None:
    client.create_topic(topic)
    assert run_job(snapshot.main, broker.address, topic, tmp_path) == 1
    assert "is there already" in capsys.readouterr().err
    assert run_job(snapshot.main, broker.address, f"{topic}-absent", tmp_path / "new") == 1
    assert f"{topic}-absent" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_whose_file_is_gone_or_cut_is_refused(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic)
    client.put(topic, b"a", b"1")
    connection = Connection(bootstrap=broker.address)
    taken = snapshot.take_snapshot(spark, connection, topic, str(tmp_path / "s"))
    file = tmp_path / "s" / taken.snapshot.parts[0].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=r"expected \d+ bytes, it has"):
        folder.snapshot_at(str(tmp_path / "s"))
    file.unlink()
    with pytest.raises(Corrupt, match="it is not there"):
        load.load(spark, connection, str(tmp_path / "s"), f"{topic}-b", partitions=1)


def test_a_load_makes_the_same_map_in_another_number_of_partitions(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any
) -> None:
    client.create_topic(topic, partitions=3, compaction={"minDirtyRatio": 0.9})
    written = Written(client, topic, seed=3).mixed()
    assert run_job(snapshot.main, broker.address, topic, tmp_path / "s", "-o", "json") == 0
    told(capsys)
    copy = f"{topic}-copy"
    assert run_job(load.main, broker.address, tmp_path / "s", copy, "--partitions", 5, "-o", "json") == 0
    assert told(capsys)["records"] == len(written.live)
    assert map_of(client, copy) == written.live
    described = client.describe(copy)
    assert len(described["partitions"]) == 5
    assert described["spec"]["compaction"]["minDirtyRatio"] == 0.9
    assert all(client.get(copy, key) is not None for key in list(written.live)[:20]), (
        "each in its key's partition"
    )


def test_a_load_refuses_a_topic_that_is_not_empty_and_appends_when_told(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any
) -> None:
    spark.createDataFrame([("a", "old")], "key string, value string").write.parquet(str(tmp_path / "p"))
    assert run_job(load.main, broker.address, tmp_path / "p", topic) == 1
    assert "is not there: create it" in capsys.readouterr().err
    client.create_topic(topic)
    client.put(topic, b"a", b"new")
    assert run_job(load.main, broker.address, tmp_path / "p", topic) == 1
    assert "is not empty" in capsys.readouterr().err
    assert client.get(topic, b"a").value == b"new"  # type: ignore[union-attr]
    assert run_job(load.main, broker.address, tmp_path / "p", topic, "--append") == 0
    assert client.get(topic, b"a").value == b"old"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rows", "schema", "said"),
    [
        ([("a", "1")], "name string, value string", "expected the columns key and value"),
        ([(1, "1")], "key int, value string", "column key is int"),
        ([(None, "1"), ("a", "1")], "key string, value string", "1 rows have no key"),
        ([("a", "1"), ("a", "2")], "key string, value string", "key a occurs 2 times"),
    ],
)
def test_a_load_refuses_what_gives_no_map(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path, capsys: Any,
    rows: list[Any], schema: str, said: str,
) -> None:  # fmt: skip
    client.create_topic(topic)
    spark.createDataFrame(rows, schema).write.parquet(str(tmp_path / "p"))
    assert run_job(load.main, broker.address, tmp_path / "p", topic) == 1
    assert said in capsys.readouterr().err
    assert map_of(client, topic) == {}


def test_a_load_in_an_order_ends_with_the_last_row_of_each_key(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    rows = [(f"k{at % 50}", None if at % 7 == 0 else str(at), at) for at in range(2000)]
    spark.createDataFrame(rows, "key string, value string, at int").repartition(6).write.parquet(
        str(tmp_path / "p")
    )
    assert (
        run_job(load.main, broker.address, tmp_path / "p", topic, "--partitions", 3, "--order-by", "at") == 0
    )
    expected = {key.encode(): value.encode() for key, value, _ in rows[-50:] if value is not None}
    assert {key: row[0] for key, row in map_of(client, topic).items()} == expected


def test_a_snapshot_is_not_written_where_folders_are_not_renamed(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, capsys: Any
) -> None:
    client.create_topic(topic)
    assert run_job(snapshot.main, broker.address, topic, "s3://bucket/folder") == 1
    assert "rename of a folder, which s3: does not have" in capsys.readouterr().err
