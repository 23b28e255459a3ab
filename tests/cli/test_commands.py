"""Exit codes, sentences and topics: 0 done, 1 failed with one sentence on stderr, 2 wrong usage."""

import json
from pathlib import Path

import pytest
import yaml

from support.firn_cli.calls import Run


def sentence(found) -> str:  # type: ignore[no-untyped-def]
    """The one line on stderr."""
    (line,) = found.stderr.decode().splitlines()
    assert line.startswith("firn: ")
    return line


def test_a_topic_is_created_listed_described_and_deleted(firn: Run) -> None:
    firn(
        "topics",
        "create",
        "born",
        "--partitions",
        "3",
        "--set",
        "compaction.minDirtyRatio=0.2",
        "--set",
        "retention.time=7d",
    )
    assert "born" in [t["name"] for t in json.loads(firn("topics", "list", "-o", "json").stdout)]
    assert b"born" in firn("topics", "list").stdout
    described = json.loads(firn("topics", "describe", "born", "-o", "json").stdout)
    assert described["spec"]["compaction"]["minDirtyRatio"] == 0.2
    assert described["spec"]["retention"]["time"] == "7d"
    assert len(described["partitions"]) == 3
    assert b"minDirtyRatio 0.2" in firn("topics", "describe", "born").stdout
    assert "--yes" in sentence(firn("topics", "delete", "born", code=1))
    firn("topics", "delete", "born", "--yes")
    assert "born" not in [t["name"] for t in json.loads(firn("topics", "list", "-o", "json").stdout)]
    assert "does not exist" in sentence(firn("topics", "delete", "born", "--yes", code=1))


def test_yaml_says_what_json_says(firn: Run, topic: str) -> None:
    firn("produce", topic, input="straße\t1\n".encode())
    for command in (("get", topic, "straße"), ("topics", "describe", topic)):
        as_json, as_yaml = (firn(*command, "-o", form).stdout.decode() for form in ("json", "yaml"))
        found, wanted = yaml.safe_load(as_yaml), json.loads(as_json)
        assert (found.keys(), found.get("spec"), found.get("key")) == (
            wanted.keys(), wanted.get("spec"), wanted.get("key"),
        )  # fmt: skip
    assert "straße" in firn("get", topic, "straße", "-o", "yaml").stdout.decode()


def test_a_topic_that_exists_is_not_created_again(firn: Run, topic: str) -> None:
    assert topic in sentence(firn("topics", "create", topic, code=1))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["topics", "create", "x", "--set", "compaction.minDirtyRation=0.2"], "compaction.minDirtyRation"),
        (["topics", "create", "x", "--set", "partitions"], "FIELD=VALUE"),
        (["topics", "create", "x", "--partitions", "0"], "spec.partitions"),
        (["topics", "create", "a/b"], "topic name"),
        (["consume", "x", "--view", "cooked"], "--view"),
        (["consume", "x", "--from", "yesterday"], "--from"),
        (["consume", "x", "--until-end", "--follow"], "--follow"),
        (["produce", "x", "--format", "xml"], "--format"),
        (["query", "x", "--key", "k", "--since", "noon"], "RFC 3339"),
        (["compact", "x", "--engine", "steam"], "--engine"),
        (["--broker", "nowhere", "status"], "HOST:PORT"),
        (["status", "--timeout", "5"], "duration"),
        (["status", "-o", "xml"], "json, yaml or table"),
        (["nonsense"], "nonsense"),
        (["get", "x"], "Missing argument 'key'"),
    ],
)
def test_wrong_usage_is_2_and_names_what_is_wrong(bare: Run, arguments: list[str], named: str) -> None:
    found = bare(*arguments, code=2)
    assert named in found.stderr.decode()
    assert found.stdout == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "x", "k"], ["status"], ["topics", "list"], ["consume", "x"], ["produce", "x"], ["compact", "x"],
        ["query", "x", "--key", "k"],
    ],
)  # fmt: skip
def test_without_a_broker_a_command_fails_soon_and_says_what_to_do(bare: Run, arguments: list[str]) -> None:
    found = bare(*arguments, "--broker", "127.0.0.1:1", "--timeout", "3s", code=1, input=b"a\t1\n")
    assert "127.0.0.1:1" in sentence(found)
    assert "firn up" in sentence(found)


@pytest.mark.parametrize(
    "arguments",
    [["get", "absent", "k"], ["consume", "absent"], ["query", "absent", "--key", "k"], ["compact", "absent"]],
)
def test_an_absent_topic_is_named(firn: Run, arguments: list[str]) -> None:
    assert "'absent' does not exist" in sentence(firn(*arguments, code=1))


def test_producing_to_an_absent_topic_fails_before_any_input_is_taken(firn: Run) -> None:
    found = firn("produce", "absent", input=b"a\t1\n", code=1)
    assert "'absent' does not exist" in sentence(found)
    assert b"acknowledged" not in found.stdout


def test_an_engine_that_is_not_there_is_said_so(bare: Run, tmp_path: Path) -> None:
    found = bare("compact", "x", "--engine", "spark", code=1, JAVA_HOME=str(tmp_path))
    assert "Java" in sentence(found)


def test_the_broker_is_found_by_flag_before_or_behind_the_command_and_by_variable(
    firn: Run, bare: Run, broker
) -> None:  # type: ignore[no-untyped-def]
    address = broker.address
    for arguments in (["status", "--broker", address], ["--broker", address, "status"]):
        assert address.encode() in bare(*arguments, FIRN_BROKER="127.0.0.1:1").stdout
    assert address.encode() in bare("status", FIRN_BROKER=address).stdout


def test_commands_of_a_package_that_is_not_installed_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from typer.testing import CliRunner

    from firn.cli import main
    from firn.cli.running import Failure

    monkeypatch.setattr(main, "entry_points", lambda group: [])
    app = main.build()
    for name in main.NODE_COMMANDS:
        found = CliRunner().invoke(app, [name, "--data", "d"])
        assert isinstance(found.exception, Failure)
        assert "pip install 'firn[node]'" in str(found.exception)


def test_the_version_is_told(bare: Run) -> None:
    assert bare("--version").stdout == b"firn 0.1.0\n"
