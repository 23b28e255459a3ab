"""``produce``, ``consume``, ``get``, ``query`` and ``compact`` as people call them, against a real broker."""

import json
import os
import re
import time
from typing import Any

from firn_node.demo.process import BrokerProcess
from support.firn_cli.calls import Ended, Run, Running


def lines(output: bytes) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


def values(output: bytes) -> list[tuple[str, str | None]]:
    return [(r["key"], r["value"]) for r in lines(output)]


def test_tsv_goes_in_and_comes_out_as_json_with_keys_in_their_order(firn: Run, topic: str) -> None:
    made = firn("produce", topic, input=b"a\t1\nb\t2\tx\na\t3\n")
    assert made.stdout == b"3 records acknowledged\n"
    found = firn("consume", topic, "--view", "raw")
    assert values(found.stdout) == [("a", "1"), ("b", "2\tx"), ("a", "3")]
    first = lines(found.stdout)[0]
    assert list(first) == ["topic", "partition", "offset", "timestamp", "key", "value", "tag", "headers"]
    assert abs(first["timestamp"] - time.time_ns() / 1e6) < 60_000
    assert firn("consume", topic, "--format", "tsv").stdout == b"a\t1\nb\t2\tx\na\t3\n"


def test_an_empty_value_is_a_tombstone_only_when_asked_for(firn: Run, topic: str) -> None:
    firn("produce", topic, input=b"a\t1\na\t\n")
    assert firn("get", topic, "a").stdout == b""
    firn("produce", topic, "--tombstone-on-empty", input=b"a\t\n")
    gone = firn("get", topic, "a", code=1)
    assert gone.stdout == b""
    assert b"no such key" in gone.stderr
    assert values(firn("consume", topic).stdout)[-1] == ("a", None)


def test_another_separator_may_be_given(firn: Run, topic: str) -> None:
    firn("produce", topic, "--key-separator", "::", input=b"a::1:2\n")
    assert values(firn("consume", topic).stdout) == [("a", "1:2")]


def test_acks_are_one_line_a_record_in_input_order(firn: Run, topic: str) -> None:
    count = 5000
    found = firn("produce", topic, "--acks", input=b"".join(b"k%d\tv\n" % i for i in range(count)))
    assert lines(found.stdout) == [{"partition": 0, "offset": i} for i in range(count)]
    assert found.stdout.startswith(b'{"partition":0,"offset":0}\n')


def test_an_ack_comes_at_once_while_the_input_is_still_open(broker: BrokerProcess, topic: str) -> None:
    with Running("produce", topic, "--acks", address=broker.address) as running:
        for number in range(3):
            running.write(b"k\tv%d\n" % number)
            assert running.line() == b'{"partition":0,"offset":%d}\n' % number
        assert running.end() == Ended(0, b"", b"")


def test_a_bad_line_is_named_and_what_came_before_is_written_and_counted(firn: Run, topic: str) -> None:
    found = firn("produce", topic, input=b"a\t1\nb\t2\nno separator\nc\t3\n", code=1)
    assert found.stdout == b"2 records acknowledged\n"
    assert b"line 3: " in found.stderr
    assert values(firn("consume", topic).stdout) == [("a", "1"), ("b", "2")]
    found = firn(
        "produce",
        topic,
        "--format",
        "jsonl",
        "--acks",
        input=b'{"key":"c","value":"3"}\n{"value":"4"}\n',
        code=1,
    )
    assert lines(found.stdout) == [{"partition": 0, "offset": 2}]
    assert b"line 2: " in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_record_that_the_limits_refuse_is_named_by_its_line(firn: Run, topic: str) -> None:
    found = firn("produce", topic, input=b"a\t1\n" + b"k" * 70_000 + b"\t2\n", code=1)
    assert found.stdout == b"1 records acknowledged\n"
    assert re.match(rb"firn: line 2: a key of 70000 bytes; at most 65536", found.stderr)


def test_what_consume_prints_produce_takes(firn: Run, topic: str) -> None:
    record = {
        "topic": "elsewhere", "partition": 0, "offset": 99, "timestamp": 1357034400000, "key_base64": "/w==",
        "value": "grün\n\t\"", "tag": "red", "headers": {"a": "1"}, "queues": ["device-17"],
    }  # fmt: skip
    sent = json.dumps(record) + '\n{"key":"gone"}\n'
    assert (
        firn("produce", topic, "--format", "jsonl", input=sent.encode()).stdout == b"2 records acknowledged\n"
    )
    first, second = lines(firn("consume", topic).stdout)
    assert first == record | {"topic": topic, "offset": 0}
    assert (second["key"], second["value"], second["offset"]) == ("gone", None, 1)
    again = firn("produce", topic, "--format", "jsonl", input=firn("consume", topic).stdout)
    assert again.stdout == b"2 records acknowledged\n"
    queued = firn("consume", topic, "--queue", "device-17")
    assert [r["offset"] for r in lines(queued.stdout)] == [0, 2]


def test_reading_begins_at_an_offset_a_time_or_the_end(firn: Run, topic: str) -> None:
    sent = "".join(
        json.dumps({"key": f"k{i}", "value": "v", "timestamp": 1000 * i}) + "\n" for i in range(10)
    )
    firn("produce", topic, "--format", "jsonl", input=sent.encode())

    def offsets(*options: str) -> list[int]:
        return [r["offset"] for r in lines(firn("consume", topic, *options).stdout)]

    assert offsets("--from", "7") == [7, 8, 9]
    assert offsets("--from", "latest") == []
    assert offsets("--from", "earliest", "--max", "2") == [0, 1]
    assert offsets("--from", "@1000000") == []
    assert 5 in offsets("--from", "1970-01-01T00:00:05Z")
    assert offsets("--max", "0") == []
    assert offsets("--partition", "0", "--until-end") == list(range(10))
    assert b"partition 4" in firn("consume", topic, "--partition", "4", code=1).stderr


def test_a_group_goes_on_behind_what_it_printed(firn: Run, topic: str) -> None:
    firn("produce", topic, input=b"".join(b"k%d\tv\n" % i for i in range(10)))

    def offsets(*options: str) -> list[int]:
        return [r["offset"] for r in lines(firn("consume", topic, "--group", "g", *options).stdout)]

    assert offsets("--max", "3") == [0, 1, 2]
    assert offsets("--max", "4") == [3, 4, 5, 6]
    assert offsets() == [7, 8, 9]
    assert offsets() == []
    assert offsets("--from", "8") == [8, 9]
    firn("produce", topic, input=b"more\tv\n")
    assert offsets() == [10]


def test_follow_prints_records_as_they_come_and_ends_by_a_signal(
    broker: BrokerProcess, firn: Run, topic: str
) -> None:
    with Running("consume", topic, "--follow", "--group", "g", address=broker.address) as running:
        for number in range(2):
            firn("produce", topic, input=b"k\tv%d\n" % number)
            assert json.loads(running.line())["offset"] == number
        assert running.stop() == Ended(0, b"", b"")
    assert firn("consume", topic, "--group", "g").stdout == b""


def test_a_reader_that_closes_the_pipe_hears_no_complaint(
    broker: BrokerProcess, firn: Run, topic: str
) -> None:
    firn("produce", topic, input=b"".join(b"k%d\t%s\n" % (i, b"v" * 500) for i in range(5000)))
    with Running("consume", topic, address=broker.address) as running:
        assert json.loads(running.line())["offset"] == 0
        running.close_stdout()
        assert running.process.wait(60) == 0
        assert running.process.stderr is not None
        assert running.process.stderr.read() == b""


def test_get_gives_the_bytes_of_the_newest_value(firn: Run, topic: str) -> None:
    firn("produce", topic, input=b"a\t\xff\x00\na\t\xfe\n")
    assert firn("get", topic, "a").stdout == b"\xfe"
    document = json.loads(firn("get", topic, "a", "-o", "json").stdout)
    assert (document["offset"], document["value_base64"]) == (1, "/g==")
    assert firn("get", topic, os.fsdecode(b"\xff"), code=1).stdout == b""


def test_query_gives_a_keys_history_between_two_times(firn: Run, topic: str) -> None:
    sent = "".join(
        json.dumps({"key": "ab"[i % 2], "value": str(i), "timestamp": 1000 * i}) + "\n" for i in range(10)
    )
    firn("produce", topic, "--format", "jsonl", input=sent.encode())
    assert [r["value"] for r in lines(firn("query", topic, "--key", "a").stdout)] == ["0", "2", "4", "6", "8"]
    found = firn("query", topic, "--key", "a", "--since", "@2000", "--until", "1970-01-01T00:00:06Z")
    assert [r["value"] for r in lines(found.stdout)] == ["2", "4"]
    assert firn("query", topic, "--key", "none").stdout == b""


def test_a_forced_compaction_leaves_one_record_a_key(firn: Run, topic: str) -> None:
    firn("produce", topic, "--tombstone-on-empty", input=b"a\t1\nb\t2\na\t3\nb\t\n")
    found = firn("compact", topic, "--force", "--wait", "-o", "json")
    document = json.loads(found.stdout.splitlines()[-1])
    assert list(document) == ["topic", "engine", "partitions"]
    partition = document["partitions"][0]
    wanted = {
        "partition", "state", "records_before", "records_after", "bytes_before", "bytes_after", "bytes_read",
        "bytes_written", "tombstones_dropped", "rounds", "seconds",
    }  # fmt: skip
    assert wanted <= set(partition)
    assert (partition["state"], partition["records_before"], partition["records_after"]) == ("done", 4, 2)
    assert values(firn("consume", topic).stdout) == [("a", "3"), ("b", None)]
    assert values(firn("consume", topic, "--view", "raw").stdout) == [
        ("a", "1"),
        ("b", "2"),
        ("a", "3"),
        ("b", None),
    ]
    assert b"done" in firn("compact", topic, "--force", "--wait", "--engine", "auto").stdout


def test_status_has_the_fields_of_the_interface(firn: Run, topic: str) -> None:
    firn("produce", topic, input=b"a\t1\n")
    firn("compact", topic, "--force", "--wait")
    document = json.loads(firn("status", "-o", "json").stdout)
    wanted = {
        "node", "pid", "group", "role", "epoch", "address", "in_sync", "committed_position", "log_start", "log_end",
        "lag_bytes", "lag_seconds", "state", "read_only", "reason",
    }  # fmt: skip
    assert wanted <= set(document["brokers"][0])
    (found,) = [t for t in document["topics"] if t["name"] == topic]
    wanted = {
        "earliest", "latest", "horizon", "live_records", "dirty_ratio", "raw_bytes", "compacted_bytes", "last_compaction",
    }  # fmt: skip
    assert wanted <= set(found["partitions"][0])
    assert set(found["partitions"][0]["last_compaction"]) >= {"started", "seconds", "result", "reason"}
    assert topic.encode() in firn("status").stdout
