"""Erasing by a condition: what matches and nothing else, never a newer record, and told as it was."""

import json
from typing import Any

import pytest
from jobs_kit import Written, map_of, run_job, told

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark import erase
from firn_spark.connection import Connection


def test_what_the_condition_finds_is_deleted_and_nothing_else(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, capsys: Any
) -> None:
    client.create_topic(topic, partitions=3, compaction={"deleteRetention": "0s"})
    written = Written(client, topic, seed=21).mixed()
    wanted = {key for key, row in written.live.items() if key.startswith(b"k1") and row[2] == "a"}
    assert wanted
    where = "CAST(key AS STRING) LIKE 'k1%' AND tag = 'a'"
    assert run_job(erase.main, broker.address, topic, "--where", where, "--dry-run", "-o", "json") == 0
    assert told(capsys)["matched"] == len(wanted)
    assert map_of(client, topic) == written.live, "a dry run writes nothing"
    assert run_job(erase.main, broker.address, topic, "--where", where, "-o", "json") == 0
    report = told(capsys)
    assert (report["erased"], report["gone"], report["changed"]) == (len(wanted), 0, 0)
    assert [p["state"] for p in report["compaction"]["partitions"]] == ["done"] * 3
    left = {key: row for key, row in written.live.items() if key not in wanted}
    assert map_of(client, topic) == left
    assert {record.key for record in client.reader(topic, until_end=True)} == set(left), (
        "not even a tombstone"
    )
    assert run_job(erase.main, broker.address, topic, "--where", where, "-o", "json") == 0
    again = told(capsys)
    assert (again["erased"], again["compaction"]) == (0, None)


def test_only_the_newest_record_of_a_key_is_asked_the_condition(
    spark: Any, broker: BrokerProcess, client: Client, topic: str
) -> None:
    client.create_topic(topic)
    client.put(topic, b"a", b"old")
    client.put(topic, b"a", b"new")
    client.put(topic, b"b", b"old")
    connection = Connection(bootstrap=broker.address)
    found = erase.erase(spark, connection, topic, "CAST(value AS STRING) = 'old'")
    assert (found.total("erased"), found.keys["erased"]) == (1, [b"b"])
    assert {key: row[0] for key, row in map_of(client, topic).items()} == {b"a": b"new"}


def test_a_key_that_was_written_or_deleted_meanwhile_is_left_alone_and_told(
    spark: Any, broker: BrokerProcess, client: Client, topic: str
) -> None:
    client.create_topic(topic, partitions=1)
    for key in (b"a", b"b", b"c"):
        client.put(topic, key, b"1")
    connection = Connection(bootstrap=broker.address)
    with erase.found_keys(spark, connection, topic, "true") as found:
        client.put(topic, b"a", b"2")
        client.delete(topic, b"b")
        counts, keys = found.erased()
    assert {outcome: sum(of.values()) for outcome, of in counts.items()} == {
        "changed": 1,
        "gone": 1,
        "erased": 1,
    }
    assert keys == {"changed": [b"a"], "gone": [b"b"], "erased": [b"c"]}
    assert {key: row[0] for key, row in map_of(client, topic).items()} == {b"a": b"2"}


@pytest.mark.parametrize("where", ["CAST(key AS STRING) LIKE", "colour = 'red'", "1 + 1"])
def test_a_condition_that_is_none_is_refused_before_anything_is_written(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, capsys: Any, where: str
) -> None:
    client.create_topic(topic)
    client.put(topic, b"a", b"1")
    assert run_job(erase.main, broker.address, topic, "--where", where) == 1
    assert f"--where {where!r}: " in capsys.readouterr().err
    assert client.describe(topic)["partitions"][0]["latest"] == 1


def test_a_report_names_the_first_keys_and_what_stays_readable(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, capsys: Any
) -> None:
    client.create_topic(topic, retention={"time": "5h"})
    with client.producer(topic) as producer:
        producer.send_many([b"%02d" % at for at in range(30)], [b"x"] * 30).result()
    assert run_job(erase.main, broker.address, topic, "--where", "true") == 0
    printed = capsys.readouterr().out
    assert "erased: 30: 00, 01, 02, 03, 04, 05, 06, 07, 08, 09 and 20 more" in printed
    assert "retention (5h, 10Gi)" in printed
    assert json.dumps(sorted(map_of(client, topic))) == "[]"
