"""The broker's port: connections, requests, their errors, and the stop.

Invariants: every request is answered in one shape, an error too, and one without a class of ours is logged,
counted and answered 500 at this one boundary; connections past ``connections_max`` are told so (503) on their
first request and closed; a connection that says nothing is closed in time. aiohttp's low-level server is used:
its router would decode keys.
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from firn.errors import FirnError, Invalid, LimitExceeded, Unauthorized, Unavailable
from firn_node.clock import Clock, RealClock
from firn_node.security.admission import Admission, Place
from firn_node.security.decision import Action
from firn_node.server import (
    admin,
    bulk,
    catalogue,
    metrics,
    operating,
    plans,
    reads,
    rebuild,
    records,
    replicate,
    stream,
)
from firn_node.server.answers import answer, error_answer
from firn_node.server.budget import Budget
from firn_node.server.context import Context, ServedBroker, ServerSettings
from firn_node.server.door import Door
from firn_node.server.guarded import Proof, admit, note_admin, proof_of, too_long
from firn_node.server.masters import named
from firn_node.server.params import Call, Query
from firn_node.server.routes import Router

if TYPE_CHECKING:
    from firn_node.replication.doors.peers import Peers
    from firn_node.security.guard import Guard
    from firn_node.security.trust import TrustFiles

log = logging.getLogger("firn.server")

# A key of 64 KiB may take three characters a byte in the request line.
_LINE_BYTES_MAX = 256 << 10
_REFUSED_KEPT = 64  # connections past the bound that are told so; those past these are cut at once
_REFUSED_SECONDS = 5.0

ROUTER = Router(
    [
        *records.ROUTES,
        *bulk.ROUTES,
        *reads.ROUTES,
        *admin.ROUTES,
        *plans.ROUTES,
        *metrics.ROUTES,
        *stream.ROUTES,
        *replicate.ROUTES,
        *operating.ROUTES,
        *rebuild.ROUTES,
        *catalogue.ROUTES,
    ]
)


class _Connection(RequestHandler):
    """One connection; what is not HTTP is answered in the shape of every error."""

    __slots__ = ("proof",)

    def __init__(self, manager: web.Server, *, proof: Proof | None = None, **options: Any) -> None:
        super().__init__(manager, **options)
        self.proof = proof

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun")
        error = Invalid(f"not a valid HTTP request: {(message or str(exc) or 'malformed')[:500]}")
        found = answer(request, error.document(), status=status if status < 500 else 400)
        found.force_close()
        return found


class _ProvenConnection(_Connection):
    """One that has to prove who is at its other end."""

    __slots__ = ()
    proof: Proof

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.proof.begin(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.proof.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.proof.takes(data):
            super().data_received(data)
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.write(too_long())
            self.transport.close()


class _Listener(web.Server):
    """Counts connections and closes those that say nothing."""

    def __init__(self, context: Context, connections_max: int, **options: Any) -> None:
        super().__init__(self._handle, **options)
        self._context = context
        self._connections_max = connections_max
        self._timers: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._refused: set[RequestHandler] = set()
        self._is_shut = False

    async def shutdown(self, timeout: float | None = None) -> None:
        self._is_shut = True
        await super().shutdown(timeout)

    def plain(self, place: Place) -> RequestHandler:
        """A connection of a port where nobody proves anything."""
        place.leave()
        return _Connection(self, loop=self._loop, **self._kwargs)

    def guarded(self, place: Place) -> RequestHandler:
        """A connection that has to prove who is at its other end."""
        proof = Proof(self._context.guard, place)
        return _ProvenConnection(self, proof=proof, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        counts = self._context.counts
        counts.connections += 1
        if self._is_shut:  # accepted just before the port was closed: nobody else would close it
            transport.abort()
            return
        seconds = self._context.settings.first_request_seconds
        proof = proof_of(handler)
        if proof is not None and not proof.is_given:
            seconds = self._context.settings.proof_seconds
        if counts.connections > self._connections_max:
            counts.connections_refused += 1
            if len(self._refused) >= _REFUSED_KEPT:
                transport.abort()
                return
            self._refused.add(handler)
            seconds = min(seconds, _REFUSED_SECONDS)
        self._timers[handler] = self._loop.call_later(seconds, transport.abort)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._context.counts.connections -= 1
        self._refused.discard(handler)
        self._heard(handler)

    def _heard(self, handler: RequestHandler) -> None:
        timer = self._timers.pop(handler, None)
        if timer is not None:
            timer.cancel()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._heard(request.protocol)
        if request.protocol in self._refused:
            refusal = LimitExceeded(
                f"{self._connections_max} connections are open; try again later", retry=True
            )
            found = answer(request, refusal.document(), status=503, headers={"Retry-After": "1"})
            found.force_close()
            return found
        response = await handle(self._context, request)
        proof = proof_of(request.protocol)
        if proof is not None and not proof.is_given and (transport := request.transport) is not None:
            proof.next_request()
            seconds = self._context.settings.proof_seconds
            self._timers[request.protocol] = self._loop.call_later(seconds, transport.abort)
        return response


async def handle(context: Context, request: web.BaseRequest) -> web.StreamResponse:
    """The answer to one request, whatever happens; only a lost connection raises."""
    loop = asyncio.get_running_loop()
    started, pattern = loop.time(), "none"
    response: web.StreamResponse
    failure: FirnError | None = None
    route, call = None, None
    try:
        if context.is_stopping:
            raise Unavailable("this broker is stopping; ask again, or another one")
        path, _, query = _target(request).partition(b"?")
        route, values = ROUTER.find(request.method, path)
        pattern = route.pattern
        call = Call(request, values, Query(query))
        if context.guard is not None:
            if route.action is not Action.OPEN:
                await context.guard.prepare(request.headers.get("Authorization"))
            admit(request, route, call)
        response = await route.handler(context, call)
    except FirnError as error:
        failure = await named(context, error)
        response = error_answer(request, failure)
    except ConnectionError:
        raise  # the peer has gone: there is nobody to answer
    except Exception:
        log.exception("request failed: %s %s", request.method, pattern)
        context.counts.failures += 1
        failure = FirnError("an unforeseen error; the broker's log has it")
        response = error_answer(request, failure)
    if call is not None and call.access is not None and route is not None:
        note_admin(request, route, call, failure)
    if isinstance(failure, Unauthorized):
        response.force_close()
    if not response.prepared and not request.content.is_eof():
        response.force_close()  # the rest of a refused body is not read
    context.counts.requests[request.method[:16], pattern, response.status] += 1
    context.counts.request_seconds[request.method[:16], pattern] += loop.time() - started
    return response


def _target(request: web.BaseRequest) -> bytes:
    """The request target as it came, without scheme and host."""
    target = request.raw_path
    if not target.startswith("/") and "://" in target:
        target = "/" + target.split("://", 1)[1].partition("/")[2]
    return target.partition("#")[0].encode("utf-8", "surrogateescape")


class Server:
    """A broker's open port."""

    def __init__(self, context: Context, runner: web.ServerRunner, address: str) -> None:
        self.context = context
        self.address = address  # HOST:PORT
        self._runner = runner

    async def stop(self) -> None:
        """Refuse new requests, let running ones end (bounded), close every connection."""
        context = self.context
        context.is_stopping = True
        if context.door is not None:
            await context.door.close()
        for task in list(context.waiting):
            task.cancel()
        await stream.close_all(context)
        if context.peers is not None:
            await context.peers.close()
        await self._runner.cleanup()
        if context.kept:
            await asyncio.wait(list(context.kept), timeout=context.settings.stop_seconds)


async def serve(
    broker: ServedBroker,
    *,
    host: str,
    port: int,
    clock: Clock | None = None,
    settings: ServerSettings | None = None,
    trust: "TrustFiles | None" = None,
    guard: "Guard | None" = None,
    peers: "Peers | None" = None,
) -> Server:
    """An open port that answers for ``broker``; port 0 takes a free one (see ``address``).

    *Shape*: with ``trust`` by TLS, where it has a certificate; with ``guard`` only for who may; ``peers``: of a replica.
    Errors: OSError when the port is taken.
    """
    settings = settings or ServerSettings()
    memory = broker.settings.memory
    wait = settings.budget_wait_seconds
    context = Context(
        broker=broker,
        clock=clock or RealClock(),
        settings=settings,
        in_flight=Budget(memory.in_flight_bytes, name="requests in flight", wait_seconds=wait),
        reads=Budget(memory.reads_bytes, name="reads", wait_seconds=wait),
        guard=guard,
        peers=peers,
    )
    listener = _Listener(
        context,
        broker.settings.connections_max,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=75.0,
        lingering_time=2.0,  # a peer that still sends a refused body gets so long to read why
        max_line_size=_LINE_BYTES_MAX,
    )
    runner = web.ServerRunner(listener, shutdown_timeout=settings.stop_seconds)
    await runner.setup()
    context.door = _door(context, trust, listener)
    try:
        found_host, found_port = await context.door.open(host, port)
    except OSError:
        await runner.cleanup()
        raise
    shown = f"[{found_host}]" if ":" in found_host else found_host
    return Server(context, runner, f"{shown}:{found_port}")


def _door(context: Context, trust: "TrustFiles | None", listener: _Listener) -> Door:
    settings = context.settings
    admission = Admission(settings.unproven_per_address_max, settings.unproven_max)

    def refused(address: str, reason: str) -> None:
        if context.guard is not None:
            context.guard.denials["handshake"] += 1
            context.guard.note(None, address, "TLS handshake", None, reason)

    factory = listener.plain if trust is None else listener.guarded
    return Door(trust, admission, factory, refused=refused, proof_seconds=settings.proof_seconds)


def install_uvloop() -> bool:
    """Use uvloop for loops made from now on, where it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        return True
    return False
