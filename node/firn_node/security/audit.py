"""The audit log: one JSON line for each administrative action and each denial.

``{"time":"2027-01-01T00:00:00.000Z","address":"10.0.0.7","principal":"alice","action":"DELETE /v1/topics/{topic}",
"object":"flights","outcome":"done"}``; ``outcome`` is ``done`` or the code of the error; ``principal`` is null where
nobody had proven to be anybody.

Invariants: no secret and no record is ever in it; a line is one write to a file opened for appending; a flood of
denials costs a bounded number of lines a second, and the next line says how many were left out; at ``bytes_max`` the
file becomes ``<name>.1``, in place of the one before. A log that cannot be written is reported and does not stop the
broker: what it denies stays denied.
"""

import json
import logging
import os
from datetime import UTC, datetime

from firn_node.clock import Clock

log = logging.getLogger("firn.security")

BYTES_MAX = 64 << 20
LINES_PER_SECOND = 100
_TEXT_MAX = 256


class AuditLog:
    def __init__(self, path: str, clock: Clock, *, bytes_max: int = BYTES_MAX) -> None:
        """Errors: OSError when the file cannot be opened."""
        self._path = path
        self._clock = clock
        self._bytes_max = bytes_max
        self._file = self._open()
        self._size = os.fstat(self._file).st_size
        self._second = 0
        self._lines = 0
        self._left_out = 0
        self.failures = 0

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(
        self, *, principal: str | None, address: str, action: str, target: str | None, outcome: str
    ) -> None:
        now_ms = self._clock.wall_ms()
        if outcome != "done" and not self._has_room(now_ms // 1000):
            self._left_out += 1
            return
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(now_ms / 1000, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "address": address,
            "principal": _short(principal),
            "action": _short(action),
            "object": _short(target),
            "outcome": outcome,
        }
        if self._left_out:
            line["left_out_before"] = self._left_out
            self._left_out = 0
        self._write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _has_room(self, second: int) -> bool:
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        return self._lines <= LINES_PER_SECOND

    def _write(self, line: bytes) -> None:
        try:
            if self._size + len(line) > self._bytes_max:
                self._turn_over()
            os.write(self._file, line)
            self._size += len(line)
        except OSError as error:
            self.failures += 1
            log.error("the audit log %s cannot be written: %s", self._path, error)

    def _turn_over(self) -> None:
        os.replace(self._path, f"{self._path}.1")
        fresh = self._open()
        os.close(self._file)
        self._file, self._size = fresh, 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "..."
