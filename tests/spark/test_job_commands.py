"""The jobs as commands: what they take, what they print, how they end."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_kit import run_job

from firn.client.blocking import Client
from firn_node.demo.process import BrokerProcess
from firn_spark import __main__ as jobs
from firn_spark import audit, copy, erase, force_compaction, load, snapshot
from firn_spark.jobs.report import key_text, keys_text

ALL = {
    "snapshot": snapshot, "load": load, "audit": audit, "erase": erase, "copy": copy,
    "force_compaction": force_compaction,
}  # fmt: skip
NEEDED = {
    "snapshot": ["t", "/data/s"], "load": ["/data/s", "t"], "audit": ["t"], "erase": ["t", "--where", "true"],
    "copy": ["t", "u", "--checkpoint", "/data/c"], "force_compaction": ["t"],
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bootstrap", "nowhere"], "'nowhere' is not an address"),
        (["--bootstrap", "a:1,b:99999"], "'b:99999' is not an address"),
        (["--timeout", "0s"], "expected more than 0s"),
        (["--timeout", "fast"], "is not a duration"),
        (["--conf", "driver.memory=1g"], "expected spark.SOMETHING=VALUE"),
        (["-o", "yaml"], "invalid choice"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_was_expected(
    name: str, arguments: list[str], said: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        ALL[name].main([*NEEDED[name], *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ALL)
def test_no_broker_is_told_in_one_sentence_before_spark_begins(name: str, capfd: Any) -> None:
    code = ALL[name].main([*NEEDED[name], "--bootstrap", "127.0.0.1:1", "--timeout", "1s"])
    assert code == (75 if name == "force_compaction" else 1)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"firn_spark.{name}: ")
    assert "127.0.0.1:1" in line


def test_an_absent_topic_ends_with_1_and_is_named(
    spark: Any, broker: BrokerProcess, topic: str, capsys: Any
) -> None:
    for name, module in ALL.items():
        if name != "load":
            arguments = [topic if argument == "t" else argument for argument in NEEDED[name]]
            assert run_job(module.main, broker.address, *arguments) == 1, name
            assert topic in capsys.readouterr().err, name


def test_what_executors_elsewhere_lack_is_told_before_the_work(
    spark: Any, client: Client, broker: BrokerProcess, topic: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:  # fmt: skip
    client.create_topic(topic)
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.9")
    monkeypatch.setattr(spark.sparkContext, "master", "spark://there:7077")
    assert run_job(audit.main, broker.address, topic) == 1
    assert "workers run another version of Python" in capsys.readouterr().err


@pytest.mark.parametrize("name", ALL)
def test_a_printed_job_runs_the_same_command_under_restricted_rules(name: str, capsys: Any) -> None:
    given = [
        *NEEDED[name],
        "--print-job",
        "--cluster=shop",
        "--image",
        "i:1",
        "--volume",
        "claim",
        "-o",
        "json",
    ]
    assert ALL[name].main(given) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    pod = job["spec"]["template"]["spec"]
    driver = pod["containers"][0]
    assert driver["command"] == ["python", "-m", f"firn_spark.{name}"]
    assert driver["args"] == [*NEEDED[name], "-o", "json", "--master", "local[*,4]"]
    assert {"name": "FIRN_BROKER", "value": "shop-bootstrap:7700"} in driver["env"]
    assert driver["image"] == "i:1"
    assert job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == name
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert driver["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}} in pod["volumes"]
    assert (job["spec"]["backoffLimit"] == 0) == (name == "load")
    assert ("podFailurePolicy" not in job["spec"]) == (name == "load"), "an ignored pod would be made anew"
    if name != "load":
        drained, usage = job["spec"]["podFailurePolicy"]["rules"]
        assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert (usage["action"], usage["onExitCodes"]["values"]) == ("FailJob", [2])
        assert usage["onExitCodes"]["containerName"] == driver["name"]
    assert pod["restartPolicy"] == "Never", "without which Kubernetes takes no such policy"


def test_the_command_that_a_topics_definition_names_for_its_copy_is_one_that_works(capsys: Any) -> None:
    definition = (Path(__file__).parents[2] / "crds/compactedtopic.yaml").read_text()
    [[name, words]] = re.findall(r"\(python -m firn_spark\.(\w+) ([^)]*)\)", definition)
    assert ALL[name] is copy
    assert copy.main([*words.split(), "--print-job"]) == 0
    driver = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]["spec"]["containers"][0]
    assert driver["args"][:2] == ["OLD", "NEW"]


def test_the_jobs_have_names_and_spark_submit_a_file_beside_which_no_module_is_shadowed(capsys: Any) -> None:
    assert jobs.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ALL)
    assert jobs.main(["none"]) == 2
    assert "no job is called 'none'" in capsys.readouterr().err
    assert jobs.main(["script"]) == 0
    script = capsys.readouterr().out.strip()
    done = subprocess.run(
        [sys.executable, script, "audit", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: firn_spark.audit")


def test_keys_are_shown_as_text_or_as_hex() -> None:
    assert [key_text(key) for key in (b"a b", b"", b"\xff\x00", b"a\n")] == ["a b", "", "0xff00", "0x610a"]
    assert keys_text([b"a", b""], 5) == "a, '' and 3 more"
