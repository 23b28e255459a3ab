"""What /proc says of a process: memory and CPU time; and running one measurement as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads since the process began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory now, and the largest since the process began or ``forget_peak``; in MB of 10**6 bytes."""
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(found["VmRSS"].split()[0]) * 1024 / 1e6, int(found["VmHWM"].split()[0]) * 1024 / 1e6


def forget_peak(pid: int) -> None:
    """The largest resident memory counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class ChildFailed(Exception):
    """A measurement did not end well; the text holds its last words."""


def run_child(function: str, **arguments: Any) -> dict[str, Any]:
    """The result of ``MODULE:NAME`` of this folder, run in a fresh process with JSON arguments.

    A process each, so that no measurement inherits another's memory, threads or warm caches.
    Errors: ChildFailed.
    """
    command = [sys.executable, "-m", "benchmarks.child", function, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ChildFailed(f"{function} {arguments}: exit {done.returncode}\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if not isinstance(result, dict):
        raise ChildFailed(f"{function} gave {result!r}")
    return result
