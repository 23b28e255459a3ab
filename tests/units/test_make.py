"""What a target of the Makefile would run, by make itself."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNUSED = "KUBECONFIG of the environment is not used"


def would_run(*words: str, **environment: str) -> str:
    """Nothing runs. What the make above a test run has told its children is left out."""
    ours = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "MAKEFLAGS")}
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, env={**ours, **environment}, capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout


def test_the_tests_run_on_a_cluster_that_make_is_given() -> None:
    told = would_run("test-cluster", "KUBECONFIG=theirs", KUBECONFIG="production")
    assert "FIRN_TEST_KUBECONFIG=theirs " in told
    assert UNUSED not in told


@pytest.mark.parametrize(("environment", "times"), [({"KUBECONFIG": "production"}, 1), ({}, 0)])
def test_a_cluster_of_the_environment_is_not_used_and_that_is_said(
    environment: dict[str, str], times: int
) -> None:
    told = would_run("test-cluster", **environment)
    assert "FIRN_TEST_KUBECONFIG= " in told
    assert told.count(UNUSED) == times
