"""``/v1/replicate``: the WebSocket that one replica of a group dials to another (``replication.doors.peers``)."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from firn.errors import FirnError, Invalid, Unavailable
from firn.websocket import accept_key
from firn_node.replication import PATH
from firn_node.security.decision import Action
from firn_node.server.context import Context
from firn_node.server.params import Call
from firn_node.server.routes import Route

if TYPE_CHECKING:
    from firn_node.replication.doors.connection import Connection
    from firn_node.replication.doors.peers import Peers
    from firn_node.security.guard import Access

CHECK_SECONDS = 5.0  # how often the credentials of an open connection are looked at


class _Flow:
    """The connection's room, as aiohttp tells it."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._protocol = request.protocol
        self._writer = request.writer

    @property
    def is_full(self) -> bool:
        return self._protocol.writing_paused

    def room(self) -> Coroutine[Any, Any, None]:
        return self._writer.drain()


async def serve_peer(
    peers: "Peers", request: web.BaseRequest, *, access: "Access | None" = None
) -> web.StreamResponse:
    """Answer a dial, and stay until its connection ends, or the credentials of the ``access`` that it came with.

    *Errors*: NotMaster, Invalid: not meant for this folder; Forbidden: another node's log_id.
    """
    principal = None if access is None else access.principal()
    source = peers.check_dial(request.query, node=None if principal is None else principal.node)
    if not web.WebSocketResponse().can_prepare(request).ok:
        raise Invalid(f"{PATH} is a WebSocket: connect with Upgrade: websocket")
    key = request.headers["Sec-WebSocket-Key"]
    response = web.StreamResponse(
        status=101,
        headers={"Upgrade": "websocket", "Connection": "upgrade", "Sec-WebSocket-Accept": accept_key(key)},
    )
    await response.prepare(request)
    response.force_close()
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the connection is lost")
    connection = peers.accept(source, transport, _Flow(request))
    try:
        # What aiohttp's own WebSocket does: from here on it hands on what arrives, as it arrives.
        request.protocol.set_parser(cast(Any, connection.socket))
        await _until_over(connection, access)
    finally:
        connection.cut("the connection is over")
    return response


async def _until_over(connection: "Connection", access: "Access | None") -> None:
    while access is not None and not connection.gone.is_set():
        try:
            access.check(Action.REPLICATE, what=f"GET {PATH}")
        except FirnError as error:
            connection.cut(error.message)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS):
                await connection.gone.wait()
    await connection.gone.wait()


def peers_of(context: Context) -> "Peers":
    """*Errors*: Unavailable on a broker of its own."""
    if context.peers is None:
        raise Unavailable("this broker is not part of a group")
    return context.peers


async def get_replicate(context: Context, call: Call) -> web.StreamResponse:
    return await serve_peer(peers_of(context), call.http, access=call.access)


ROUTES = [Route("GET", PATH, get_replicate, Action.REPLICATE)]
