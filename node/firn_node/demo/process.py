"""A broker as its own process: ``firn up --print-ready``, started, killed and started again."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

READY_SECONDS = 60.0


class BrokerProcess:
    """One broker on a fixed data folder; each start takes a free port."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> float:
        """Seconds from the start of the process until it takes writes.

        Errors: RuntimeError with the broker's own words when it does not get ready.
        """
        began = time.perf_counter()
        command = [sys.executable, "-m", "firn_node", "up", "--data", str(self.data)]
        command += ["--listen", "127.0.0.1:0", "--print-ready", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        line = self._first_line(began + READY_SECONDS)
        if not line.startswith("READY "):
            self.kill()
            raise RuntimeError(f"the broker did not get ready; it said {line!r}")
        self.address = line.split()[1]
        return time.perf_counter() - began

    def _first_line(self, until: float) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        stdout, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n") and (left := until - time.perf_counter()) > 0:
            if select.select([stdout], [], [], left)[0]:
                byte = os.read(stdout, 1)
                if not byte:
                    break
                line += byte
        return line.decode(errors="replace").strip()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(timeout=READY_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
        return code
