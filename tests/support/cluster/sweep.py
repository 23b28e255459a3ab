"""What a cluster leaves on the machine when its processes have ended, taken away; and a look at whether that is all."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from cluster.network import Network
from cluster.node import CGROUPS
from cluster.processes import wait_until


def sweep(folder: Path, network: Network) -> None:
    """Nothing of the slot is left on return: also after a run that was killed, whose last processes may still end."""
    for group in _cgroups(network):
        for process in _processes_of(group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    wait_until(lambda: not any(_processes_of(group) for group in _cgroups(network)), "containers have ended")
    for group in sorted(_cgroups(network), reverse=True):  # the innermost first
        group.rmdir()
    network.remove()
    if folder.exists():
        shutil.rmtree(folder)


def leftovers(folder: Path, network: Network) -> list[str]:
    """What a test calls a leak: processes, mounts, links, cgroups and files of the slot that are there."""
    found = [f"cgroup {group}" for group in _cgroups(network)]
    found += [f"link {link}" for link in os.listdir("/sys/class/net") if link.startswith(network.bridge)]
    found += [
        f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line
    ]
    found += [f"process {told}" for told in _processes_that_name(folder)]
    return found + ([f"folder {folder}"] if folder.exists() else [])


def _cgroups(network: Network) -> list[Path]:
    tops = [*CGROUPS.glob(f"*/{network.bridge}-node*"), *CGROUPS.glob(f"{network.bridge}-node*")]
    return [
        path for top in tops for path in [top, *top.rglob("*")] if path.is_dir() and not path.is_symlink()
    ]


def _processes_of(group: Path) -> list[int]:
    with contextlib.suppress(OSError):  # it went away meanwhile
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    return []


def _processes_that_name(folder: Path) -> Iterator[str]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in words:
                    yield f"{process.name} {words}"
