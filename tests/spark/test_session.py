"""Early words on what would keep Spark from running."""

import os
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from firn.errors import Invalid
from firn_spark.session import PUSHDOWN, check_here, check_workers, chosen_master, register


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_a_machine_without_java_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Invalid, match="needs Java 17 or newer: there is no java on the PATH"):
        check_here()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Invalid, match=r"\$JAVA_HOME is "):
        check_here()


def test_a_java_that_is_too_old_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    script(tmp_path / "java", "echo 'openjdk version \"1.8.0_402\"' >&2\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Invalid, match=r"java is openjdk version .1\.8\.0_402"):
        check_here()


def test_another_python_for_workers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", script(tmp_path / "python", "echo 3.9\n"))
    with pytest.raises(Invalid, match=r"which is Python 3\.9; this is 3\.\d+"):
        check_here()
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "none"))
    with pytest.raises(Invalid, match="cannot be run"):
        check_here()


def test_a_python_without_the_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    words = "ModuleNotFoundError: No module named 'firn_spark'"
    python = script(tmp_path / "python", f'echo {here}\necho "{words}" >&2\nexit 1\n')
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    with pytest.raises(Invalid, match=r"lacks a package: .*firn_spark"):
        check_here()


def test_this_machine_passes_and_so_do_its_workers(spark: SparkSession) -> None:
    check_here()
    check_workers(spark)


def test_a_worker_that_has_only_what_spark_brings_is_told(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = "PYTHONPATH=$(echo $PYTHONPATH | tr : '\\n' | grep 'zip$' | paste -sd :)"
    python = script(tmp_path / "python", f'{brought} exec {sys.executable} -S "$@"\n')
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python)
    with pytest.raises(Invalid, match=rf"a worker lacks the package firn_spark: .*\({python}\)"):
        check_workers(spark)


def test_workers_of_another_version_are_told(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.9")
    with pytest.raises(Invalid, match="workers run another version of Python"):
        check_workers(spark)


def test_a_task_has_several_attempts_where_no_master_is_named(spark: SparkSession) -> None:
    assert spark.sparkContext.master == "local[*,4]"
    assert chosen_master("local[*]") == "local[*,4]", "as Spark says when nobody names one"
    assert chosen_master("local[3]") == "local[3]"
    assert chosen_master("spark://there:7077") == "spark://there:7077"


def test_registering_again_changes_nothing(spark: SparkSession) -> None:
    before = dict(spark.sparkContext.environment)
    register(spark)
    assert dict(spark.sparkContext.environment) == before
    assert spark.conf.get(PUSHDOWN) == "true"
