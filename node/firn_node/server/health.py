"""The port for probes and metrics alone: plain HTTP, nothing secret, and answered by threads of its own.

======== =====================================================================================================
/livez   200, whatever the broker is doing: recovering, waiting for its group, being rebuilt. 503 only when the
         event loop of a broker that has started has not turned for ``HANGS_S``: nothing but a new process helps
/healthz as /livez
/readyz  200 when ``why_unready`` says None; else 503 with the reason
/metrics what Prometheus reads; 503 until the broker serves
======== =====================================================================================================

Recovery holds up the event loop for longer than a probe waits, and a probe that gets no answer ends the pod: so this
port is not the loop's.
"""

import asyncio
import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NoResult
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

HANGS_S = 20.0
BEAT_S = 1.0
REQUEST_S = 3.0  # for a whole request, however its bytes trickle in
HEAD_BYTES_MAX = 4 << 10
PEER_MAX = 4  # connections of one address at a time; further ones are cut
TOTAL_MAX = 64  # ... and of all: past it the oldest one is cut
_METRICS_S = 4.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthPort:
    """Made and closed on the event loop; answers in threads."""

    def __init__(self, host: str, port: int) -> None:
        """Errors: OSError when the port is taken."""
        self.why_unready: Callable[[], str | None] = _starting
        self.metrics: Callable[[], bytes] | None = None  # called on the event loop
        self.has_started = False  # the event loop is to turn from now on
        self._loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()
        self._beat()
        self._server = _Server((host, port), self)
        self.address = "{}:{}".format(*self._server.server_address[:2])
        self._thread = threading.Thread(target=self._server.serve_forever, name="firn health", daemon=True)
        self._thread.start()

    def starting(self) -> None:
        """A broker is about to start, in this process: the loop may stand still meanwhile."""
        self.has_started = False
        self.why_unready, self.metrics = _starting, None

    def serving(self, why_unready: Callable[[], str | None], metrics: Callable[[], bytes]) -> None:
        self._beat_at = time.monotonic()
        self.why_unready, self.metrics = why_unready, metrics
        self.has_started = True

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body. Called by threads."""
        if path in ("/livez", "/healthz"):
            silent = time.monotonic() - self._beat_at
            if self.has_started and silent > HANGS_S:
                return _text(503, f"the event loop has not turned for {silent:.0f} s")
            return _text(200, "alive")
        if path == "/readyz":
            why = self.why_unready()
            return _text(200, "ready") if why is None else _text(503, why)
        if path == "/metrics":
            return self._metrics_of_now()
        return _text(404, "no such path; there are /livez, /readyz, /healthz, /metrics")

    def _metrics_of_now(self) -> tuple[int, str, bytes]:
        if self.metrics is None:
            return _text(503, "this broker does not serve yet")
        found = asyncio.run_coroutine_threadsafe(_call(self.metrics), self._loop)
        try:
            return 200, METRICS_TYPE, found.result(_METRICS_S)
        except NoResult:
            found.cancel()
            return _text(503, f"the event loop was busy for {_METRICS_S:g} s")

    async def close(self) -> None:
        self._timer.cancel()
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def _starting() -> str:
    return "this broker is starting: it recovers its folder"


async def _call(metrics: Callable[[], bytes]) -> bytes:
    return metrics()


def _text(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection that is being answered."""

    address: str
    socket: socket.socket


class _Server(socketserver.ThreadingTCPServer):
    """One thread a connection. A peer that says little, or nothing, holds up nobody but itself, and not for long."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], port: HealthPort) -> None:
        self.port = port
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, _Peer] = {}  # the oldest first
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            host = client_address[0]
            is_refused = sum(peer.address == host for peer in self._peers.values()) >= PEER_MAX
            if not is_refused:
                if len(self._peers) >= TOTAL_MAX:
                    _cut(next(iter(self._peers)))
                self._peers[request] = _Peer(host, request)
        if is_refused:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._peers.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that has gone: nobody is told."""


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(socketserver.BaseRequestHandler):
    """One request, of which the first line counts, and its answer."""

    request: socket.socket
    server: _Server

    def handle(self) -> None:
        method, path = self._asked()
        if method in ("GET", "HEAD"):
            status, kind, body = self.server.port.answer(path.partition("?")[0])
        else:
            status, kind, body = _text(405, "only GET")
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.request.settimeout(REQUEST_S)
        self.request.sendall(head.encode() + (b"" if method == "HEAD" else body))

    def _asked(self) -> tuple[str, str]:
        """Method and target. *Errors*: OSError when the head is not whole in time, or too long."""
        ends, data = time.monotonic() + REQUEST_S, b""
        while b"\r\n\r\n" not in data:
            left = ends - time.monotonic()
            if left <= 0 or len(data) > HEAD_BYTES_MAX:
                raise OSError("no whole request")
            self.request.settimeout(left)
            more = self.request.recv(HEAD_BYTES_MAX)
            if not more:
                raise OSError("the peer has gone")
            data += more
        method, _, rest = data.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        return method, rest.partition(" ")[0]
