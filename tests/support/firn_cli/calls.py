"""Runs of the command line in processes of their own.

``call`` forks a process that has the modules loaded already: the pipes, the exit code and the signals are those of
a real process, and a run takes a tenth of the time that loading takes. ``Running`` starts a fresh interpreter.
"""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    stdout: bytes
    stderr: bytes


Run = Callable[..., Ended]


def call(
    *arguments: str, input: bytes = b"", address: str = "", code: int | None = 0, **environment: str
) -> Ended:
    """One run of ``firn``; its exit code is checked unless ``code`` is None."""
    if arguments[:1] == ("up",):  # RocksDB's threads do not survive a fork, if this process has opened one
        with Running(*arguments, address=address, **environment) as running:
            ended = running.end()
        assert code is None or ended.returncode == code, ended
        return ended
    import firn_node.commands  # noqa: F401

    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        _child(arguments, pipes, environment | ({"FIRN_BROKER": address} if address else {}))
    for theirs in (pipes[0][0], pipes[1][1], pipes[2][1]):
        os.close(theirs)
    found = _talk(pid, pipes[0][1], pipes[1][0], pipes[2][0], input)
    if code is not None:
        assert found.returncode == code, found
    return found


def _child(arguments: tuple[str, ...], pipes: list[tuple[int, int]], environment: dict[str, str]) -> NoReturn:
    code = 120
    try:
        for number, (read, write) in enumerate(pipes):
            os.dup2(read if number == 0 else write, number)
        os.closerange(
            3, os.sysconf("SC_OPEN_MAX")
        )  # a pipe's other end among them: its reader would never see the end
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w", closefd=False)), encoding="utf-8")
        for name in [name for name in os.environ if name.startswith("FIRN_")]:
            del os.environ[name]
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["firn", *arguments]
        from firn.cli.main import main

        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _talk(pid: int, stdin: int, stdout: int, stderr: int, input: bytes) -> Ended:
    outputs: dict[int, bytes] = {}

    def feed() -> None:
        with open(stdin, "wb") as pipe:
            try:
                pipe.write(input)
            except BrokenPipeError:
                return

    def drain(descriptor: int) -> None:
        with open(descriptor, "rb") as pipe:
            outputs[descriptor] = pipe.read()

    threads = [threading.Thread(target=feed)] + [
        threading.Thread(target=drain, args=(d,)) for d in (stdout, stderr)
    ]
    killer = threading.Timer(SECONDS_MAX, os.kill, (pid, signal.SIGKILL))
    for thread in (*threads, killer):
        thread.start()
    _, status = os.waitpid(pid, 0)
    killer.cancel()
    for thread in threads:
        thread.join(5)
    return Ended(os.waitstatus_to_exitcode(status), outputs[stdout], outputs[stderr])


class Running:
    """``firn`` in a fresh interpreter, its pipes open. Leaving it kills what still runs."""

    def __init__(self, *arguments: str, address: str = "", **environment: str) -> None:
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("FIRN_")
        } | environment
        if address:
            env["FIRN_BROKER"] = address
        self.process = subprocess.Popen(
            [sys.executable, "-m", "firn_node", *arguments], env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def line(self) -> bytes:
        """The next line of stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self, number: int = signal.SIGTERM) -> Ended:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> Ended:
        """Close stdin and wait for the end."""
        stdout, stderr = self.process.communicate(timeout=SECONDS_MAX)
        return Ended(self.process.returncode, stdout, stderr)

    def close_stdout(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self.process.wait(SECONDS_MAX)
