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
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NoResult
from http.server import BaseHTTPRequestHandler
from typing import Any

HANGS_S = 20.0
BEAT_S = 1.0
_PEER_S = 5.0  # a request takes so long at most
_METRICS_S = 4.0
_THREADS_MAX = 32
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


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], port: HealthPort) -> None:
        self.port = port
        self._places = threading.BoundedSemaphore(_THREADS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that has gone: nobody is told."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PEER_S
    server_version, sys_version = "firn", ""

    def do_GET(self) -> None:
        status, kind, body = self.server.port.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Probes come every few seconds."""
