"""What ``firn_node.memory`` gives back is not missed."""

import os
import subprocess
import sys
from pathlib import Path

from firn_node.memory import unwritten

CHILD = """
import numba
from pathlib import Path
from firn_node import memory

def resident_kb():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

@numba.njit
def doubled(value):
    return value * 2

assert doubled(4) == 8
before = resident_kb()
memory.release_compiler()
given = before - resident_kb()
assert given > 10_000, f"{given} KiB were given back"
assert doubled(2.5) == 5.0  # compiled now: LLVM works on
assert next(memory.unwritten(Path("/proc/self/smaps"), "libllvmlite"))
assert not list(memory.unwritten(Path("/proc/self/none"), "libllvmlite"))
"""


def test_llvm_works_on_after_its_pages_were_given_up() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_mappings_with_pages_of_their_own_are_left_alone(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-3000 r-xp 0 fe:00 1 /lib/libllvmlite.so\nRss: 8 kB\nAnonymous: 0 kB\n"
        "3000-4000 r--p 0 fe:00 1 /lib/libllvmlite.so\nAnonymous: 4 kB\n"
        "4000-5000 rw-p 0 fe:00 1 /lib/libllvmlite.so\nAnonymous: 0 kB\n"
        "5000-6000 r-xp 0 fe:00 1 /lib/libother.so\nAnonymous: 0 kB\n"
    )
    assert list(unwritten(smaps, "libllvmlite")) == [(0x1000, 0x2000)]
