"""Requests of a broker with authentication: asked for before any handler runs, and bounded until they are.

Until a connection has proven who it is (by its certificate, or by a request with a good token):

- it has ``proof_seconds``, again after each request that proved nothing, and counts against its address
  (``Door``);
- the head of a request may have ``HEAD_BYTES_MAX`` bytes. Keys of more belong into later requests;
- an answer of 401 ends the connection, and the body of such a request is not read.
"""

import asyncio
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from firn.errors import FirnError, LimitExceeded, Unauthorized
from firn_node.security.admission import Place
from firn_node.security.decision import Action
from firn_node.server.answers import to_json
from firn_node.server.params import Call
from firn_node.server.routes import Route

if TYPE_CHECKING:
    from firn_node.security.guard import Access, Guard

HEAD_BYTES_MAX = 4 << 10
_HEAD_END = b"\r\n\r\n"


class Proof:
    """What one connection has proven so far. ``access`` is None where the broker asks nobody."""

    __slots__ = ("_guard", "_head", "_place", "access")

    def __init__(self, guard: "Guard | None", place: Place) -> None:
        self.access: Access | None = None
        self._guard = guard
        self._place = place
        self._head: bytearray | None = bytearray()  # of the request that is coming; None: bounded no more

    @property
    def is_given(self) -> bool:
        return self._place.is_left

    def begin(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there, its handshake over."""
        if self._guard is None:
            self.give()
            return
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(True)
        self.access = self._guard.access(self._place.address, certificate)
        try:
            if self.access.principal() is not None:
                self.give()
        except Unauthorized:
            pass  # told at the first request

    def give(self) -> None:
        self._head = None
        self._place.leave()

    def end(self) -> None:
        self._place.leave()

    def takes(self, data: bytes) -> bool:
        """Whether these bytes may be parsed: False when a head grows past what nobody in particular may send."""
        if self._head is not None:
            self._head += data[: HEAD_BYTES_MAX + 1]
            if 0 <= self._head.find(_HEAD_END) <= HEAD_BYTES_MAX - len(_HEAD_END):
                self._head = None
            elif len(self._head) > HEAD_BYTES_MAX:
                return False
        return True

    def next_request(self) -> None:
        if not self.is_given:
            self._head = bytearray()


def too_long() -> bytes:
    """The answer to a head that was not taken."""
    error = LimitExceeded(
        f"the head of a request from nobody in particular may have {HEAD_BYTES_MAX} bytes; authenticate first, "
        "by a shorter request or a certificate"
    )
    body = to_json(error.document()) + b"\n"
    return (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


def proof_of(handler: RequestHandler) -> Proof | None:
    return getattr(handler, "proof", None)


def admit(request: web.BaseRequest, route: Route, call: Call) -> None:
    """Let the request go on, or not; ``call.access`` is then what its sender may do.

    Errors: Unauthorized, Forbidden.
    """
    proof = proof_of(cast(Any, request.protocol))
    if proof is None or (access := proof.access) is None or route.action is Action.OPEN:
        return
    access.present(request.headers.get("Authorization"))
    access.check(route.action, call.topic(), what=_name_of(request, route))
    proof.give()
    call.access = access


def note_admin(request: web.BaseRequest, route: Route, call: Call, error: FirnError | None) -> None:
    """Put an administrative action into the audit log, however it ended."""
    if call.access is not None and route.action is Action.ADMIN and request.method != "GET":
        outcome = "done" if error is None else error.code
        call.access.done(_name_of(request, route), call.target or call.topic(), outcome)


def _name_of(request: web.BaseRequest, route: Route) -> str:
    return f"{request.method[:16]} {route.pattern}"
