"""What /proc says of a process: memory and CPU time; and running one measurement as a process of its own."""

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import child

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
    """The result of ``MODULE:NAME`` of this folder, run in a fresh process.

    Errors: ChildFailed.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child.answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        result, fault = ours.recv()
    except EOFError:
        process.join()
        raise ChildFailed(f"{function} {arguments}: exit {process.exitcode}") from None
    finally:
        ours.close()
        process.kill()  # it has answered, or nobody waits for its answer any more
        process.join()
    if fault is not None:
        raise ChildFailed(f"{function} {arguments}: {fault[-3000:]}")
    if not isinstance(result, dict):
        raise ChildFailed(f"{function} gave {result!r}")
    return result


def preload(modules: Sequence[str]) -> None:
    """Modules that measurements import; to be called before the first one."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
