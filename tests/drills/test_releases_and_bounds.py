"""Replicas of another release in a drill, what a drill passes with, and the command's options for both."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import firn_node
from firn.cli.main import build
from firn_node.drills import command
from firn_node.drills.catalogue import DRILLS, GROWTH_BYTES
from firn_node.drills.processes import Node, environment_of
from firn_node.drills.verdict import Drill, Result, Settings, broken_bounds

THIS = Path(firn_node.__file__).parents[1]
_OTHER = "import os, pathlib; pathlib.Path(os.environ['FIRN_FAULTS']).with_name('said').write_text(__file__)"


@pytest.fixture
def other_release(tmp_path: Path) -> Path:
    """One whose broker says where it was imported from, and ends."""
    package = tmp_path / "other" / "firn_node"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(_OTHER)
    return package.parent


def test_a_replica_of_another_release_is_imported_from_that_releases_folder(
    other_release: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        node = Node(tmp_path, 0, 1, ())
        node.release = str(other_release)
        await node.start()
        said = tmp_path / "said"
        async with asyncio.timeout(60):
            while not (said.exists() and said.read_text()):
                await asyncio.sleep(0.01)
        await node.kill()
        assert Path(said.read_text()) == other_release / "firn_node" / "__main__.py"

    asyncio.run(story())


def test_the_folder_that_a_drill_is_started_in_decides_about_no_release(other_release: Path) -> None:
    """``cd OTHER; firn drill run upgrade --release .`` would else never leave the other release."""
    ask = [sys.executable, "-c", "import firn_node; print(firn_node.__file__)"]
    for release, folder in ((None, THIS), (str(other_release), other_release)):
        said = subprocess.run(
            ask, env=environment_of(release), cwd=other_release, capture_output=True, text=True, check=True
        )
        assert Path(said.stdout.strip()) == folder / "firn_node" / "__init__.py"


@pytest.mark.parametrize("name", ["rolling-restart", "switchovers", "upgrade"])
def test_a_planned_change_passes_only_without_a_failed_write(name: str) -> None:
    result = Result(name, 1, elections=20, gap_s=0.5, healthy_s=1.0)
    settings = Settings(ttl_s=3.0)
    assert broken_bounds(DRILLS[name].bounds, result, settings) == []
    result.failed_writes, result.errors = 2, {"Timeout": 2}
    [sentence] = broken_bounds(DRILLS[name].bounds, result, settings)
    assert sentence.startswith("2 writes were not acknowledged")


def test_a_killed_master_may_cost_writes_their_answer() -> None:
    result = Result("kill-master", 1, elections=1, gap_s=4.0, healthy_s=1.0, failed_writes=2)
    assert broken_bounds(DRILLS["kill-master"].bounds, result, Settings(ttl_s=3.0)) == []


class Eater:
    """A broker that takes some memory whenever one looks at it."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._bytes = 0

    @property
    def resident_bytes(self) -> int:
        self._bytes += self._step
        return self._bytes


@pytest.mark.parametrize(("step", "fails"), [(GROWTH_BYTES, False), (GROWTH_BYTES + 1, True)])
def test_a_broker_that_grows_and_grows_under_random_faults_fails_the_drill(step: int, fails: bool) -> None:
    failures: list[str] = []
    stage: Any = SimpleNamespace(
        nodes=[Eater(0), Eater(step)], seconds=0.0, ttl_s=1.0, chance=random.Random(1),
        note=lambda event: None, fail=failures.append,
    )  # fmt: skip
    asyncio.run(DRILLS["random"].story(stage))
    assert failures == (["a broker has grown by more than 256 MiB"] if fails else [])


def test_a_broker_that_ends_while_one_looks_at_its_memory_has_none(
    other_release: Path, tmp_path: Path
) -> None:
    async def story() -> None:
        node = Node(tmp_path, 0, 1, ())
        node.release = str(other_release)
        await node.start()
        async with asyncio.timeout(60):
            while not node.ends:
                assert node.resident_bytes >= 0
                await asyncio.sleep(0)
        assert node.resident_bytes == 0
        await node.kill()

    asyncio.run(story())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The drills that the command ran, without running them, and the release that each was given."""
    names: list[tuple[str, str | None]] = []

    async def passes(drill: Drill, seed: int, settings: Settings) -> Result:
        names.append((drill.name, settings.release))
        return Result(drill.name, seed, acknowledged=7, gap_s=0.1, healthy_s=0.1)

    monkeypatch.setattr(command, "run_drill", passes)
    return names


def firn(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["drill", *words])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_the_table_of_the_file_that_was_named_gets_the_result(
    ran: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    page = tmp_path / "drills.md"
    page.write_text("before\n<!-- results -->\n<!-- end of results -->\nafter\n")
    assert firn("run", "kill-master", "--seed", "5", "--write-table", str(page))[0] == 0
    [row] = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert row.startswith("| `kill-master` | 1 |")
    assert row.endswith("| 5 | passed |")


def test_an_upgrade_is_given_the_folder_of_another_release(
    ran: list[tuple[str, str | None]], other_release: Path
) -> None:
    assert firn("run", "upgrade", "--release", str(other_release))[0] == 0
    assert ran == [("upgrade", str(other_release))]


def test_an_upgrade_without_another_release_is_refused_and_left_out_of_all(
    ran: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    code, said = firn("run", "upgrade")
    assert (code, "--release" in said) == (2, True)
    code, said = firn("run", "upgrade", "--release", str(tmp_path))
    assert (code, "no firn_node lies there" in said) == (1, True)
    code, said = firn("run", "upgrade", "--release", str(THIS))
    assert (code, "that is this release" in said) == (1, True)
    assert ran == []
    assert firn("all")[0] == 0
    assert {name for name, _ in ran} == DRILLS.keys() - {"upgrade"}
