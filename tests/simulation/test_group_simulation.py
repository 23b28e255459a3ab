"""A simulated group under every fault of ``firn_sim.group``: nothing acknowledged is lost, and it comes back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from firn_sim.group import Group, NotLive
from firn_sim.runs import run_for

SECONDS = float(os.environ.get("FIRN_SIMULATE_SECONDS", "120"))
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
@pytest.mark.parametrize(("mixture", "share"), [("all", 0.75), ("failovers", 0.25)])
def test_new_seeds_break_no_invariant_and_the_group_comes_back(mixture: str, share: float) -> None:
    first = time.time_ns() // 1_000_000 % 10**10 * 1000
    tally = run_for(SECONDS * share, first, mixture)
    print(tally.summary())
    assert not tally.failures, tally.failures[0][1]
    assert tally.counts.elections > tally.seeds, "the runs are too tame"


def test_a_failing_seed_tells_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Group) -> None:
        raise NotLive("as asked for")

    monkeypatch.setattr(Group, "run", fails)
    tally = run_for(60.0, 17, "failovers")
    assert [seed for seed, _ in tally.failures] == [17]
    assert tally.failures[0][1].endswith("replay: make simulate SEED=17 FAULTS=failovers")


OF_A_GROUP = """
import sys
from firn_sim.firnlog import FirnLog
from firn_sim.group import Group
from firn_sim.replicalog import ReplicaLog
from firn_sim.runs import MIXTURES
make_log = {"ReplicaLog": ReplicaLog, "FirnLog": FirnLog}[sys.argv[3]]
g = Group(int(sys.argv[1]), draw=MIXTURES[sys.argv[2]], make_log=make_log)
g.run()
print(g.counts, g.world.happened, g.network.sent, g.checkers.committed, g.coordinator.record.version)
"""
OF_A_REBUILD = """
import sys
from firn_sim.rebuild.group import RebuildGroup
g = RebuildGroup(int(sys.argv[1]))
print(g.run(), g.now, g.story)
"""


def trace(hashes: int, program: str, *arguments: str) -> str:
    """A run in a process of its own, under a seed of Python's string hashes."""
    paths = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": str(hashes)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("make_log", ["ReplicaLog", "FirnLog"])
@pytest.mark.parametrize("mixture", ["all", "failovers"])
def test_one_seed_is_one_run_whatever_the_string_hashes(mixture: str, make_log: str) -> None:
    assert trace(1, OF_A_GROUP, "7", mixture, make_log) == trace(2, OF_A_GROUP, "7", mixture, make_log)


def test_one_seed_is_one_rebuild_whatever_the_string_hashes() -> None:
    assert trace(1, OF_A_REBUILD, "7") == trace(2, OF_A_REBUILD, "7")


def test_another_seed_is_another_run() -> None:
    first, second = Group(11), Group(12)
    first.run()
    second.run()
    assert first.world.happened != second.world.happened
