"""SIGKILL at every numbered step of every write path: afterwards all acknowledged records are there.

The steps are found in the source, so a new one is tested without being listed here; one that the workload never
reaches fails the test, unless it is named below with the reason.
"""

import os
import re
import signal
import tempfile
from pathlib import Path

import crash_child
import pytest
from engine_kit import Kit, run, settings

import firn_node
from firn_node.engine.broker import Broker

STEP = re.compile(r"(?:failpoints\.)?\bstep\(\s*f?\"([a-z0-9_.]+)\"")
# Steps of paths that a kill does not lead to (a torn tail needs a lost page cache: tests/log has it on the
# simulated disk; an empty log that begins further on, as replication lets it: tests/log/test_copies.py; the index on
# files and migration: tests/index; a standby that starts anew: tests/rebuild, tests/groups/test_rebuild.py).
ELSEWHERE = re.compile(
    r"^(rebuild\.|log\.truncate|log\.begin\.|log\.recover\.(unlinked|dropped|rewritten)|index\.(migrate|retire|flush\.(entries|synced|checkpointed)))"
)


def steps() -> list[str]:
    found: set[str] = set()
    for source in Path(firn_node.__file__).parent.rglob("*.py"):
        found |= set(STEP.findall(source.read_text()))
    return sorted(s for s in found if not ELSEWHERE.match(s) and s != "name")


@pytest.fixture
def memory_path():
    """A folder in memory where there is one: a killed process loses no page cache, so no disk is needed."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="firn-crash-") as folder:
        yield Path(folder)


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


def advance(folder: Path, done: int, failpoint: str = "") -> tuple[int, int, bool]:
    """Let a child go on after ``done`` operations: its exit code, those acknowledged now, whether it came to its end."""
    code, lines = crash_child.play(folder, done, failpoint=failpoint)
    ended = lines[-1:] == [b"end"]
    return code, max([done, *(int(line) + 1 for line in lines if line != b"end")]), ended


@pytest.mark.parametrize("step", steps())
def test_what_was_acknowledged_survives_a_kill_at(step, memory_path):
    done = 0
    if step.startswith("log.recover"):  # recovery has work only where a kill went before
        _, done, _ = advance(memory_path, 0, "append.synced:9")
    for nth in (1, 3):
        code, acknowledged, ended = advance(memory_path, done, f"{step}:{nth}")
        if nth == 1:
            assert code == -signal.SIGKILL, f"the workload never reaches {step}"
        done = run(look(memory_path, acknowledged))
        if ended:
            break
    assert advance(memory_path, done) == (0, crash_child.OPERATIONS, True)
    assert run(look(memory_path, crash_child.OPERATIONS)) == crash_child.OPERATIONS
