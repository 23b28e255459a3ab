"""The audit: it finds what is planted, finds nothing else, and says what it compared with."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs_kit import Written, plant, run_job, told

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark import audit, snapshot


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose files may be damaged."""
    options = ("--log-segment-bytes", "64Ki", "--checkpoint-bytes", "64Ki", "--compaction-check", "50ms")
    made = BrokerProcess(tmp_path / "data", *options)
    made.start()
    yield made
    made.kill()


def _retention_passes(client: Client, topic: str) -> None:
    """Returns when every partition's raw view begins above 0."""
    until = time.monotonic() + 60
    while not all(p["earliest"] for p in client.describe(topic)["partitions"]):
        assert time.monotonic() < until, client.describe(topic)
        time.sleep(0.05)


def test_a_sound_topic_has_no_difference(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, capsys: Any
) -> None:
    client.create_topic(topic, partitions=3, compaction={"deleteRetention": "0s"})
    written = Written(client, topic, seed=11).mixed()
    assert run_job(audit.main, broker.address, topic, "-o", "json") == 0
    report = told(capsys)
    assert (report["keys"], report["differences"], report["first"]) == (len(written.live), 0, [])
    assert [p["source"] for p in report["partitions"]] == ["raw view"] * 3
    assert run_job(audit.main, broker.address, topic) == 0
    assert "no difference" in capsys.readouterr().out


def test_a_value_and_a_key_that_were_changed_on_disk_are_found_and_named(
    spark: Any, own_broker: BrokerProcess, capsys: Any
) -> None:
    with Client(own_broker.address) as client:
        client.create_topic("t", partitions=2)
        keys = [b"key-%04d" % at for at in range(500)]
        with client.producer("t") as producer:
            producer.send_many(keys, [b"value-" + key for key in keys]).result()
        client.compact("t", force=True, wait=True)
    assert run_job(audit.main, own_broker.address, "t") == 0
    capsys.readouterr()
    assert own_broker.stop() == 0
    plant(own_broker.data, b"value-key-0123", b"VALUE-key-0123")
    plant(own_broker.data, b"key-0077", b"key-XX77")
    own_broker.start()
    assert run_job(audit.main, own_broker.address, "t", "-o", "json") == 1
    printed = capsys.readouterr()
    found = {(d["key"], d["kind"]) for d in json.loads(printed.out)["first"]}
    assert found == {("key-0123", "different"), ("key-0077", "missing"), ("key-XX77", "resurrected")}
    assert "differs in 3 keys" in printed.err


def test_where_the_raw_view_no_longer_starts_at_0_an_earlier_snapshot_is_needed_and_enough(
    spark: Any, own_broker: BrokerProcess, tmp_path: Path, capsys: Any
) -> None:
    address = own_broker.address
    with Client(address) as client:
        client.create_topic("t", partitions=2, retention={"size": "1"})
        client.create_topic("other")
        written = Written(client, "t", seed=12)
        for _ in range(10):  # batches of both partitions in every segment of the commit log
            written.write(200, keys=400)
        client.compact("t", force=True, wait=True)
        assert run_job(snapshot.main, address, "t", tmp_path / "s", "-o", "json") == 0
        told(capsys)
        written.write(50, keys=400)
        _retention_passes(client, "t")
        assert run_job(audit.main, address, "t") == 1
        assert "give --snapshot FOLDER" in capsys.readouterr().err
        assert run_job(audit.main, address, "t", "--snapshot", tmp_path / "nothing") == 1
        assert "no snapshot is there" in capsys.readouterr().err
        assert run_job(audit.main, address, "other", "--snapshot", tmp_path / "s") == 1
        assert "is a snapshot of t" in capsys.readouterr().err
        assert run_job(audit.main, address, "t", "--snapshot", tmp_path / "s", "-o", "json") == 0
        report = told(capsys)
        assert report["keys"] == len(written.live)
        assert all("raw view since" in p["source"] for p in report["partitions"])
