"""SIGKILL at every numbered step of every write path: afterwards all acknowledged records are there.

The steps are found in the source, so a new one is tested without being listed here; one that the workload never
reaches fails the test, unless it is named below with the reason.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import crash_child
import firn_node
import pytest
from engine_kit import Kit, run, settings
from firn_node.engine.broker import Broker

STEP = re.compile(r"(?:failpoints\.)?\bstep\(\s*f?\"([a-z0-9_.]+)\"")
# Steps of paths that this workload does not take, and the tests that take them.
ELSEWHERE = re.compile(r"^(log\.truncate|index\.migrate|index\.files|compaction\.repair)")


def steps() -> list[str]:
    found: set[str] = set()
    for source in Path(firn_node.__file__).parent.rglob("*.py"):
        found |= set(STEP.findall(source.read_text()))
    return sorted(s for s in found if not ELSEWHERE.match(s) and s != "name")


def child(folder: Path, start: int, *, failpoint: str = "", index: str = "rocksdb") -> tuple[int, list[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FIRN_FAILPOINT": failpoint}
    done = subprocess.run(
        [sys.executable, crash_child.__file__, str(folder), str(start), index],
        env=environment, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode not in (0, -signal.SIGKILL):
        pytest.fail(f"{failpoint}: the child failed: {done.stderr.decode()[-3000:]}")
    return done.returncode, done.stdout.split()


async def look(folder: Path, acknowledged: int) -> int:
    """How many operations the folder shows; all acknowledged ones must be among them."""
    kit = Kit(Broker(settings(folder)))
    await kit.broker.start()
    try:
        if not kit.broker.topics():
            assert acknowledged == 0
            return 0
        shown = await kit.map("t")
        got = {key: value for key in crash_child.model(60) if (value := await kit.get("t", key)) is not None}
    finally:
        await kit.broker.stop()
    for operations in (acknowledged, acknowledged + 1):
        if shown == crash_child.model(operations):
            assert {k: v for k, v in shown.items() if k in got} == got
            return operations
    raise AssertionError(f"{acknowledged} operations were acknowledged; the view is that of no such state")


@pytest.mark.parametrize("step", steps())
def test_what_was_acknowledged_survives_a_kill_at(step, tmp_path):
    done = 0
    for nth in (1, 3):
        code, lines = child(tmp_path, done, failpoint=f"{step}:{nth}")
        acknowledged = max([done, *(int(line) + 1 for line in lines if line != b"end")])
        if nth == 1:
            assert code == -signal.SIGKILL, f"the workload never reaches {step}"
        done = run(look(tmp_path, acknowledged))
        if lines and lines[-1] == b"end":
            break
    code, lines = child(tmp_path, done)
    assert (code, lines[-1]) == (0, b"end")
    assert run(look(tmp_path, crash_child.OPERATIONS)) == crash_child.OPERATIONS
