"""``/v1/cluster/...``: what administrators ask of the broker groups. A broker answers for its own group alone."""

from typing import Any

from aiohttp import web

from firn.errors import Invalid
from firn_node.security.decision import Action
from firn_node.server.answers import answer
from firn_node.server.budget import Charge
from firn_node.server.context import Context
from firn_node.server.params import Call, mapping, read_document
from firn_node.server.routes import Route

_BODY_BYTES_MAX = 4 << 10


async def post_switchover(context: Context, call: Call) -> web.StreamResponse:
    """Of the master: hand over to a standby."""
    body = await _body(context, call, "group", "to")
    group, to = _group(body), _node(body, "to") if body.get("to") is not None else None
    call.target = f"group {group}" + (f" to {to}" if to is not None else "")
    return answer(call.http, await context.broker.switch_over(group, to))


async def post_data_loss(context: Context, call: Call) -> web.StreamResponse:
    """Of the node itself that is to become master whatever others hold."""
    body = await _body(context, call, "group", "node")
    group, node = _group(body), _node(body, "node")
    call.target = f"group {group} to {node}"
    return answer(call.http, await context.broker.accept_data_loss(group, node, _who(call)))


async def _body(context: Context, call: Call, *known: str) -> dict[str, Any]:
    call.query.finish()
    async with Charge(context.in_flight) as charge:
        return mapping(await read_document(call, charge, _BODY_BYTES_MAX), "body", known)


def _group(body: dict[str, Any]) -> int:
    group = body.get("group")
    if not isinstance(group, int) or isinstance(group, bool) or group < 0:
        raise Invalid(f"body: group: expected the number of a broker group, found {group!r}")
    return group


def _node(body: dict[str, Any], field: str) -> str:
    node = body.get(field)
    if not isinstance(node, str) or not node:
        raise Invalid(f"body: {field}: expected the name of a node, found {node!r}")
    return node


def _who(call: Call) -> str:
    """Who answers for it."""
    principal = call.access.principal() if call.access is not None else None
    return principal.name if principal is not None else f"somebody at {call.http.remote}"


ROUTES = [
    Route("POST", "/v1/cluster/switchover", post_switchover, Action.ADMIN),
    Route("POST", "/v1/cluster/data-loss", post_data_loss, Action.ADMIN),
]
