"""A topic copied while it is written to: every key's newest record arrives, whatever stops the copy on its way."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs_kit import Written, map_of, run_job, told

from firn.client.blocking import Client
from firn.errors import Invalid, Unavailable
from firn_node.demo.process import BrokerProcess
from firn_spark import copy
from firn_spark.connection import Connection
from firn_spark.copy import Copied, Following, Wish, report_of
from firn_spark.jobs import command, topics
from firn_spark.jobs.copystate import CUT_OVER, LOCK, CopyState, Lag
from firn_spark.script import firn_job

WAIT_S = 120.0


class Background:
    """A writer of records in a thread, until it is told to stop."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):  # what two cores keep up with beside Spark
            self._written.write(200, keys=300)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _run_until(spark: Any, broker: BrokerProcess, wish: Wish, reached: Callable[[str], bool]) -> Copied:
    """Copy until a line that it says is the one looked for."""
    stopped = threading.Event()
    until = time.monotonic() + WAIT_S

    def say(line: str) -> None:
        if reached(line):
            stopped.set()

    return copy.copy(
        spark, Connection(bootstrap=broker.address), wish, say=say,
        is_stopped=lambda: stopped.is_set() or time.monotonic() > until,
    )  # fmt: skip


def test_a_topic_under_load_is_copied_into_other_partitions_over_a_restart_in_the_middle(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic, partitions=3)
    written = Written(client, topic, seed=31).mixed()
    wish = Wish(source=topic, target=f"{topic}-5", checkpoint=tmp_path / "c", partitions=5, in_step_s=60.0)
    writer = Background(written)
    try:
        first = _run_until(spark, broker, wish, lambda line: line.startswith("in step"))
        assert not first.is_cut_over
        second = _run_until(spark, broker, wish, lambda line: line.startswith("in step"))
        assert second.map_records is None, "the map is not written again"
        assert sum(second.copied.values()) > sum(first.copied.values()), "it went on where it was"
    finally:
        writer.stop()
    (tmp_path / "c" / CUT_OVER).touch()
    last = _run_until(spark, broker, wish, lambda line: False)
    assert last.is_cut_over
    assert map_of(client, f"{topic}-5") == written.live
    assert len(client.describe(f"{topic}-5")["partitions"]) == 5
    with pytest.raises(Invalid, match="was cut over"):
        _run_until(spark, broker, wish, lambda line: False)


def test_a_key_deleted_between_two_tries_to_write_the_map_is_deleted_in_the_target(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic)
    client.put(topic, b"stays", b"1")
    client.put(topic, b"goes", b"1")
    client.create_topic(f"{topic}-2")
    client.put(f"{topic}-2", b"goes", b"1")  # what the try that died has written
    described, target = client.describe(topic), client.describe(f"{topic}-2")
    CopyState(
        source=topic, source_id=described["topic_id"], target=f"{topic}-2", target_id=target["topic_id"], key="key",
        value="value", ends={0: 2},
    ).write(tmp_path / "c")  # fmt: skip
    client.delete(topic, b"goes")
    wish = Wish(source=topic, target=f"{topic}-2", checkpoint=tmp_path / "c", cut_over=True)
    assert _run_until(spark, broker, wish, lambda line: False).is_cut_over
    assert {key: row[0] for key, row in map_of(client, f"{topic}-2").items()} == {b"stays": b"1"}


def test_keys_and_values_become_what_sql_makes_of_them_and_tombstones_follow(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic, partitions=2)
    for key, value in ((b"A", b"one"), (b"B", b"two"), (b"C", b"three")):
        client.put(topic, key, value)
    wish = Wish(
        source=topic, target=f"{topic}-2", checkpoint=tmp_path / "c", partitions=1, key="lower(CAST(key AS STRING))",
        value="CAST(upper(CAST(value AS STRING)) AS BINARY)",
    )  # fmt: skip
    _run_until(spark, broker, wish, lambda line: line.startswith("in step"))
    client.delete(topic, b"B")
    client.put(topic, b"D", b"four")
    (tmp_path / "c" / CUT_OVER).touch()
    assert _run_until(spark, broker, wish, lambda line: False).is_cut_over
    found = {key: row[0] for key, row in map_of(client, f"{topic}-2").items()}
    assert found == {b"a": b"ONE", b"c": b"THREE", b"d": b"FOUR"}


def test_a_deleted_key_stays_deleted_whatever_sql_makes_a_value_of_nothing(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic)
    client.put(topic, b"stays", b"1")
    client.put(topic, b"goes", b"1")
    wish = Wish(source=topic, target=f"{topic}-2", checkpoint=tmp_path / "c", partitions=1, value="key")
    _run_until(spark, broker, wish, lambda line: line.startswith("in step"))
    client.delete(topic, b"goes")
    (tmp_path / "c" / CUT_OVER).touch()
    assert _run_until(spark, broker, wish, lambda line: False).is_cut_over
    assert {key: row[0] for key, row in map_of(client, f"{topic}-2").items()} == {b"stays": b"stays"}


def test_a_source_that_is_made_anew_meanwhile_is_not_taken_for_copied(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic)
    client.put(topic, b"a", b"1")
    made_anew = False

    def make_anew(line: str) -> bool:
        nonlocal made_anew
        if line.startswith("in step") and not made_anew:
            made_anew = True
            client.delete_topic(topic)
            client.create_topic(topic)
            (tmp_path / "c" / CUT_OVER).touch()
        return False

    wish = Wish(source=topic, target=f"{topic}-2", checkpoint=tmp_path / "c", partitions=1)
    with pytest.raises(Exception, match="made anew"):
        _run_until(spark, broker, wish, make_anew)
    state = CopyState.read(tmp_path / "c")
    assert state is not None
    assert state.phase == "changes", "the copy has not ended"


def test_what_cannot_be_copied_is_refused_with_the_reason(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    client.create_topic(topic)
    client.put(topic, b"a", b"1")
    connection = Connection(bootstrap=broker.address)

    def refused(said: str, **changes: Any) -> None:
        given = {"source": topic, "target": f"{topic}-2", "checkpoint": tmp_path / "c", **changes}
        with pytest.raises(Exception, match=said):
            copy.copy(spark, connection, Wish(**given), is_stopped=lambda: True)

    refused("must be two topics", target=topic)
    refused("is not there: create it")
    client.create_topic(f"{topic}-2")
    refused("--key 'nothing'", key="nothing")
    client.put(f"{topic}-2", b"x", b"1")
    refused("is not empty")
    refused("gives null", key="CAST(NULL AS BINARY)", append=True, checkpoint=tmp_path / "null")
    CopyState(
        source="another", source_id=1, target=f"{topic}-2", target_id=2, key="key", value="value", ends={0: 1}
    ).write(tmp_path / "other")
    refused("is the checkpoint of another copy: its source is 'another'", checkpoint=tmp_path / "other")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_copy_that_a_signal_stops_does_not_end_as_if_it_were_cut_over(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Any, number: signal.Signals,
) -> None:  # fmt: skip
    client.create_topic(topic)
    client.put(topic, b"a", b"1")
    monkeypatch.setattr(command, "say", lambda line: signal.raise_signal(number))
    arguments = (topic, f"{topic}-2", "--partitions", 1, "--checkpoint", tmp_path / "c")
    before = signal.getsignal(number)
    assert run_job(copy.main, broker.address, *arguments, "-o", "json") == 128 + number
    assert told(capsys)["cut_over"] is False
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    assert run_job(copy.main, broker.address, *arguments, "--cut-over") == 0


def test_a_copy_that_is_cut_over_has_ended_well_whatever_signal_came() -> None:
    wish = Wish(source="t", target="u", checkpoint=Path("c"))
    assert report_of(Copied(wish, True, 1, {0: 1}, 0.0), ended_by=signal.SIGTERM).code == 0


def test_the_lag_counts_from_when_the_source_first_had_what_is_missing() -> None:
    lag = Lag()
    lag.saw(10.0, {0: 5})
    assert lag.behind(11.0, {0: 4}) == float("inf"), "nothing that was seen has been copied"
    lag.saw(12.0, {0: 7})
    assert lag.behind(12.5, {0: 5}) == 2.5
    assert lag.behind(13.0, {0: 7}) == 1.0
    lag.saw(14.0, {0: 7})
    assert lag.behind(14.0, {0: 7}) == 0.0


@pytest.mark.slow
def test_a_copy_run_by_spark_submit_and_killed_goes_on_where_it_was(
    spark: Any, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    """Another process, so that SIGKILL takes driver and JVM; by spark-submit, whose path of imports is another, and
    which hands both outputs of Python on to stdout."""
    client.create_topic(topic, partitions=2)
    written = Written(client, topic, seed=32).mixed()
    submit = Path(sys.executable).with_name("spark-submit")
    arguments = ["copy", topic, f"{topic}-2", "--partitions", "3", "--checkpoint", str(tmp_path / "c")]
    process = subprocess.Popen(
        [submit, "--master", "local[1]", "--conf", "spark.ui.enabled=false", firn_job.__file__, *arguments],
        env={**os.environ, "FIRN_BROKER": broker.address, "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    with process:
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("in step"):
                    break
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert any(line.startswith("in step") for line in lines), "".join(lines)
    with (tmp_path / "c" / LOCK).open() as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # spark-submit is gone; its driver takes as long as the kernel takes with it
    written.write(300, keys=700)
    wish = Wish(source=topic, target=f"{topic}-2", checkpoint=tmp_path / "c", cut_over=True)
    last = _run_until(spark, broker, wish, lambda line: False)
    assert last.is_cut_over
    assert last.map_records is None
    assert map_of(client, f"{topic}-2") == written.live


def test_partitions_that_a_group_does_not_tell_of_are_not_taken_for_copied(tmp_path: Path) -> None:
    described: dict[str, Any] = {
        "name": "t", "spec": {"partitions": 2}, "silent": {"1": "no master answers"},
        "partitions": [{"partition": 0, "latest": 5, "earliest": 0}],
    }  # fmt: skip
    for offsets in (topics.latest, topics.earliest):
        with pytest.raises(Unavailable, match="1 of 2 partitions are told of: no master answers"):
            offsets(described)
    whole = {
        **described, "silent": {}, "partitions": [*described["partitions"], {"partition": 1, "latest": 7}],
    }  # fmt: skip
    answers = iter([described, described, whole, described, whole, whole])
    asked: list[Any] = []

    def ends() -> topics.Offsets:
        asked.append(next(answers))
        return topics.latest(asked[-1])

    wish = Wish(source="t", target="u", checkpoint=tmp_path, cut_over=True)
    state = CopyState(
        source="t", source_id=1, target="u", target_id=2, key="key", value="value", ends={0: 5, 1: 7}
    )
    following = Following(Connection(bootstrap="127.0.0.1:1"), wish, state, lambda line: None)
    following._query = cast(Any, SimpleNamespace(isActive=True))
    assert following.run(ends, lambda: False)
    assert asked[-1] is whole
