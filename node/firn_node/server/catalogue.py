"""``/v1/catalogue``: the topics of group 0, for the masters of the cluster's other groups (``engine.following``).

They come as nodes, by the certificate that they replicate with; no client is told anything here.
"""

from aiohttp import web

from firn_node.security.decision import Action
from firn_node.server.answers import answer
from firn_node.server.context import Context
from firn_node.server.params import Call
from firn_node.server.routes import Route

_WAIT_MS_MAX = 60_000
_GROUPS_MAX = 1 << 16


async def get_catalogue(context: Context, call: Call) -> web.StreamResponse:
    group = call.query.integer("group", least=0, most=_GROUPS_MAX) or 0
    epoch = call.query.integer("epoch", least=0) or 0
    position = call.query.integer("position", least=0) or 0
    wait_ms = call.query.integer("wait_ms", least=0, most=_WAIT_MS_MAX) or 0
    call.query.finish()
    telling = context.broker.tell_topics(group, (epoch, position), wait_ms / 1000)
    return answer(call.http, await context.until_stopped(telling))


ROUTES = [Route("GET", "/v1/catalogue", get_catalogue, Action.REPLICATE)]
