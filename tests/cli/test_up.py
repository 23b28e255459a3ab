"""``firn up``: starts, says what a person must know, refuses what it must not do, stops cleanly."""

import json
import signal
from pathlib import Path

import pytest

from firn_node.demo.process import BrokerProcess
from support.firn_cli.calls import Run, Running, call

TOPIC = """
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: flights}
spec: {partitions: %d, compaction: {minDirtyRatio: %s}}
"""


def up(data: Path, *options: str) -> Running:
    return Running("up", "--data", str(data), "--listen", "127.0.0.1:0", "--print-ready", *options)


def address(running: Running) -> str:
    line = running.line().decode()
    assert line.startswith("READY 127.0.0.1:"), line + running.stop().stderr.decode()
    return line.split()[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_is_the_only_line_on_stdout_and_a_signal_ends_it_with_0(data: Path, number: int) -> None:
    with up(data) as running:
        where = address(running)
        assert call("topics", "create", "t", address=where).returncode == 0
        assert call("produce", "t", address=where, input=b"a\t1\n").stdout == b"1 records acknowledged\n"
        ended = running.stop(number)
        assert (ended.returncode, ended.stdout) == (0, b"")


def test_topics_of_files_are_made_kept_and_updated_and_their_partitions_cannot_change(
    data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "topics.yaml"
    for text, ratio in ((TOPIC % (3, "0.2"), 0.2), (TOPIC % (3, "0.7"), 0.7)):
        file.write_text(text)
        with up(data, "-f", str(file)) as running:
            found = json.loads(
                call("topics", "describe", "flights", "-o", "json", address=address(running)).stdout
            )
            assert (len(found["partitions"]), found["spec"]["compaction"]["minDirtyRatio"]) == (3, ratio)
            assert running.stop().returncode == 0
    file.write_text(TOPIC % (4, "0.7"))
    with up(data, "-f", str(file)) as running:
        ended = running.end()
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"flights has 3 partition(s) and its file says 4" in ended.stderr


def test_a_folder_in_use_and_a_port_in_use_are_said_so(broker: BrokerProcess, data: Path) -> None:
    in_use = call("up", "--data", str(broker.data), "--listen", "127.0.0.1:0", code=1)
    assert b"in use by another process" in in_use.stderr
    assert len(in_use.stderr.splitlines()) == 1
    taken = call("up", "--data", str(data), "--listen", broker.address, code=1)
    assert b"another process does" in taken.stderr


@pytest.mark.parametrize("source", ["flag", "file", "variable"])
def test_settings_come_from_flags_a_file_and_variables(data: Path, tmp_path: Path, source: str) -> None:
    file = tmp_path / "firn.yaml"
    file.write_text("node: by-file\n")
    options = ["--config", str(file)] if source != "variable" else []
    options += ["--node", "by-flag"] if source == "flag" else []
    arguments = ["up", "--data", str(data), "--listen", "127.0.0.1:0", "--print-ready", *options]
    with Running(*arguments, FIRN_NODE="by-variable", FIRN_FLUSH_INTERVALL="1s") as running:
        found = json.loads(call("status", "-o", "json", address=address(running)).stdout)
        assert found["brokers"][0]["node"] == f"by-{source}"
        assert b"$FIRN_FLUSH_INTERVALL is no setting" in running.stop().stderr


def test_wrong_settings_are_refused_by_name(bare: Run, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "firn.yaml"
    file.write_text("flushIntervall: 1s\n")
    assert (
        b"flushIntervall: unknown setting"
        in bare("up", "--data", str(data), "--config", str(file), code=1).stderr
    )
    assert b"--flush-interval" in bare("up", "--data", str(data), "--flush-interval", "soon", code=2).stderr
    assert b"--flush-intervall" in bare("up", "--data", str(data), "--flush-intervall", "1s", code=2).stderr
    assert b"--data" in bare("up", code=2).stderr
    found = bare("up", "--data", str(data), code=1, FIRN_MIN_DEAD_RATIO="2")
    assert b"$FIRN_MIN_DEAD_RATIO: expected a number from 0 to 1, found '2'" in found.stderr
    assert not data.exists()


def test_a_broker_is_never_open_by_accident(bare: Run, data: Path) -> None:
    found = bare("up", "--data", str(data), "--listen", "0.0.0.0:0", code=1)
    assert b"--insecure" in found.stderr
    assert not data.exists()


def test_what_cannot_go_with_replicas_is_refused_before_anything_is_made(bare: Run, data: Path) -> None:
    for options, why in (
        (["--tls", "--tls-cert", "x", "--tls-key", "y"], b"makes its own certificates"),
        (["--coordinator", "x"], b"give one of them"),
    ):
        assert why in bare("up", "--data", str(data), "--replicas", "2", *options, code=2).stderr
    found = bare("up", "--data", str(data), "--coordinator", "x", "--listen", "127.0.0.1:0", code=2)
    assert b"give --listen with a port" in found.stderr
    beyond = ("--coordinator", "x", "--listen", "127.0.0.1:7700", "--group", "2", "--groups", "2")
    found = bare("up", "--data", str(data), *beyond, code=2)
    assert b"--group 2: of 2 groups the last is 1" in found.stderr
    assert not data.exists()
