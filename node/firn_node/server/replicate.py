"""``/v1/replicate``: the WebSocket that one replica of a group dials to another (``replication.doors.peers``)."""

from collections.abc import Coroutine
from typing import Any, cast

from aiohttp import web

from firn.errors import Invalid, Unavailable
from firn.websocket import accept_key
from firn_node.replication.doors.peers import PATH, Peers
from firn_node.security.decision import Action
from firn_node.server.context import Context
from firn_node.server.params import Call
from firn_node.server.routes import Route


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
    peers: Peers, request: web.BaseRequest, *, node: str | None = None
) -> web.StreamResponse:
    """Answer a dial, and stay until its connection ends. ``node``: whose certificate was shown, if any was.

    *Errors*: NotMaster, Invalid: not meant for this folder; Forbidden: another node's log_id.
    """
    source = peers.check_dial(request.query, node=node)
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
        await connection.gone.wait()
    finally:
        connection.cut("the connection is over")
    return response


async def get_replicate(context: Context, call: Call) -> web.StreamResponse:
    if context.peers is None:
        raise Unavailable("this broker is not part of a group")
    principal = None if call.access is None else call.access.principal()
    node = None if principal is None else principal.node
    return await serve_peer(context.peers, call.http, node=node)


ROUTES = [Route("GET", PATH, get_replicate, Action.REPLICATE)]
