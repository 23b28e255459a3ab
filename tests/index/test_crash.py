"""A process killed at any moment leaves an index whose checkpoint and entries agree."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firn_node import failpoints
from firn_node.disk import RealDisk
from firn_node.index import NewEntry, open_index

# One group appends 4 partitions' runs and states them; the flush's checkpoint is the position of the next group.
WRITER = """
import sys
from firn_node.disk import RealDisk
from firn_node.index import NewEntry, NewLight, open_index
kind, folder = sys.argv[1:3]
index = open_index(kind, folder, RealDisk(folder), memory_bytes=1 << 20)
group = index.checkpoint // 400
print("open", group, flush=True)
while True:
    entries = [NewEntry(8, p, group * 10, group * 10 + 10, group * 400 + p * 100, 100, 0, group) for p in range(4)]
    lights = [NewLight(8, 0, f"q{n % 3}", group * 400, n, group * 10 + n, 0) for n in range(10)]
    index.append(entries, lights if kind == "rocksdb" else ())
    for p in range(4):
        index.put_state(8, p, b"%d" % group)
        index.put_producer(8, p, 1, b"%8d" % group)
    group += 1
    if group % 3 == 0:
        index.flush(group * 400)
        print("flushed", group, flush=True)
"""


def run_writer(kind: str, folder: str, *, seconds: float = 60, failpoint: str | None = None) -> int:
    """The last group that the child said was flushed; the child is killed."""
    environment = {**os.environ, **({"FIRN_FAILPOINT": failpoint} if failpoint else {})}
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, kind, folder], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        flushed = int(child.stdout.readline().split()[1])
        if failpoint is None:
            time.sleep(seconds)
            child.send_signal(signal.SIGKILL)
        for line in child.stdout:
            if line.endswith("\n"):
                flushed = int(line.split()[1])
    assert child.returncode == -signal.SIGKILL
    return flushed


def check_is_consistent(kind: str, folder: str, flushed: int) -> None:
    index = open_index(kind, folder, RealDisk(folder), memory_bytes=1 << 20)
    groups, rest = divmod(index.checkpoint, 400)
    assert rest == 0
    assert groups >= flushed
    for p in range(4):
        entries = index.scan(8, p, 0, limit=1 << 20)
        assert len(entries) >= groups
        assert [e.base_offset for e in entries] == list(range(0, len(entries) * 10, 10))
        assert [e.position for e in entries] == [n * 400 + p * 100 for n in range(len(entries))]
        if groups:
            assert index.bounds(8, p, 0) == (0, len(entries) * 10)
            assert int(index.state(8, p) or b"-1") >= groups - 1
            assert int(index.producer(8, p, 1) or b"-1") >= groups - 1
    if kind == "rocksdb":
        held = len(index.scan(8, 0, 0, limit=1 << 20))
        rows = sorted((row.offset, row.name) for row in index.lights())
        assert rows == [(n, f"q{n % 10 % 3}") for n in range(held * 10)]
    index.close()


@pytest.mark.parametrize("kind", ["rocksdb", "files", "mirrored"])
def test_a_process_killed_at_random_leaves_checkpoint_and_entries_consistent(
    kind: str, tmp_path: Path
) -> None:
    chance = random.Random(7)
    folder = str(tmp_path / "index")
    for _ in range(3):
        flushed = run_writer(kind, folder, seconds=chance.uniform(0.02, 0.3))
        check_is_consistent(kind, folder, flushed)


@pytest.mark.parametrize(
    ("kind", "failpoint"),
    [
        ("rocksdb", "index.append.batched:5"),
        ("rocksdb", "index.flush.checkpointed:3"),
        ("rocksdb", "index.flush.synced:3"),
        ("files", "index.flush.entries:6"),
        ("files", "index.flush.checkpointed:2"),
        ("mirrored", "index.flush.checkpointed:3"),
        ("mirrored", "index.flush.synced:2"),
    ],
)
def test_a_process_killed_between_two_steps_goes_on_from_its_checkpoint(
    kind: str, failpoint: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "index")
    flushed = run_writer(kind, folder, failpoint=failpoint)
    check_is_consistent(kind, folder, flushed)


class Crash(BaseException):
    pass


@pytest.fixture
def crash_at():
    def install(name: str) -> None:
        def hook(step: str) -> None:
            if step == name:
                raise Crash(step)

        failpoints.hook = hook

    yield install
    failpoints.hook = None


def test_a_torn_tail_past_the_checkpoint_is_written_over(tmp_path: Path, crash_at) -> None:  # type: ignore[no-untyped-def]
    folder = str(tmp_path / "index")
    index = open_index("files", folder, RealDisk(folder), memory_bytes=0)
    index.append([NewEntry(8, 0, 0, 10, 0, 100, 0, 0)])
    index.flush(100)
    index.append([NewEntry(8, 0, 10, 20, 100, 100, 0, 0), NewEntry(8, 0, 20, 30, 200, 100, 0, 0)])
    crash_at("index.flush.entries")
    with pytest.raises(Crash):
        index.flush(300)
    failpoints.hook = None
    index.close()
    path = tmp_path / "index/files/8/0" / f"{0:020d}"
    assert path.stat().st_size == 3 * 48
    path.write_bytes(path.read_bytes()[:100] + b"\0" * 20)
    index = open_index("files", folder, RealDisk(folder), memory_bytes=0)
    assert (index.checkpoint, index.bounds(8, 0, 0)) == (100, (0, 10))
    index.append([NewEntry(8, 0, 0, 10, 0, 100, 0, 0), NewEntry(8, 0, 10, 30, 100, 200, 0, 0)])
    index.flush(300)
    index.close()
    index = open_index("files", folder, RealDisk(folder), memory_bytes=0)
    assert [e[:3] for e in index.scan(8, 0, 0)] == [(0, 10, 0), (10, 30, 100)]
    index.close()
