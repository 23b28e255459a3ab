"""Programs of a cluster as child processes: started with a log, waited for, stopped for certain.

Each ends with the process that started it, even if that is killed: the kernel signals it (`PR_SET_PDEATHSIG`, by
util-linux's ``setpriv``), so that a test run cut short by a signal leaves no server behind. What the kernel watches
is the thread that started it: start from one that lasts. Nothing forks Python: RocksDB's threads in a test process
would not survive that.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import DidNotStart

READY_SECONDS = 120.0  # what takes 2 s here may take a minute on a busy machine
STOP_SECONDS = 10.0  # then it is killed
_STEP_SECONDS = 0.02


@dataclass(slots=True)
class Process:
    name: str
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def signal(self, number: signal.Signals) -> None:
        """To it and what it runs: a program inside a node is the child of the one that went in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def stop(self, *, seconds: float = STOP_SECONDS) -> None:
        """Ended on return: asked first, killed when it does not."""
        self.signal(signal.SIGTERM)
        if not self._ends(seconds):
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._ends(READY_SECONDS)

    def _ends(self, seconds: float) -> bool:
        """Whether it, and what it ran, has ended in that time."""
        end = time.monotonic() + seconds
        while self._exists():
            if time.monotonic() > end:
                return False
            time.sleep(_STEP_SECONDS)
        return True

    def _exists(self) -> bool:
        self.popen.poll()
        try:
            os.killpg(self.popen.pid, 0)
        except ProcessLookupError:
            return False
        return True


@dataclass(slots=True)
class Processes:
    """Those of one cluster, in the order of their start."""

    logs: Path
    running: list[Process] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str | Path]) -> Process:
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with log.open("ab") as file:
            popen = subprocess.Popen(
                [*_WITH_PARENT, *(str(part) for part in command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a Ctrl-C at the terminal is for the test run, which then stops these
            )
        process = Process(name, log, popen)
        self.running.append(process)
        return process

    def named(self, name: str) -> Process:
        return next(process for process in reversed(self.running) if process.name == name)

    def stop(self, name: str) -> None:
        for process in [process for process in self.running if process.name == name]:
            process.stop()
            self.running.remove(process)

    def kill(self) -> None:
        """All of them, at once: what they keep is thrown away with them."""
        for process in self.running:
            process.signal(signal.SIGKILL)
        while self.running:
            self.running.pop().kill()


def wait_until(holds: Callable[[], bool], what: str, *, by: Sequence[Process] = ()) -> None:
    """Returns once it holds.

    *Errors*: `DidNotStart` after `READY_SECONDS`, and at once when a process it depends on has ended.
    """
    end = time.monotonic() + READY_SECONDS
    while not holds():
        for process in by:
            if not process.is_running:
                raise DidNotStart(f"{process.name} has ended: {process.last_words()}")
        if time.monotonic() > end:
            words = "\n".join(f"{process.name}: {process.last_words()}" for process in by)
            raise DidNotStart(f"not in {READY_SECONDS:.0f} s: {what}\n{words}")
        time.sleep(_STEP_SECONDS)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on. Between this and their use another process may take one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_listening(port: int, *, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _with_parent() -> list[str]:
    setpriv = shutil.which("setpriv", path=f"{os.environ.get('PATH', '')}:/usr/bin")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


_WITH_PARENT = _with_parent()
