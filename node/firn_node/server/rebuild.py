"""What a standby that is being rebuilt asks its master: the list, pins, and the bytes under a pin; for nodes alone."""

import asyncio
from itertools import islice

import msgpack
from aiohttp import web

from firn.errors import FirnError
from firn.wire import MSGPACK_TYPE
from firn_node.replication import PATH
from firn_node.security.decision import Action
from firn_node.server.answers import answer
from firn_node.server.context import Context
from firn_node.server.params import INT_MAX, Call
from firn_node.server.replicate import peers_of
from firn_node.server.routes import Route
from firn_node.server.sendfile import guarded, send_range

_ROWS_AT_ONCE = 2048
_RANGE_BYTES_MAX = 64 << 20


def _number(call: Call, name: str, *, most: int = INT_MAX) -> int:
    return call.query.integer(name, most=most) or 0


def _check_asker(context: Context, call: Call) -> None:
    """*Errors*: as of a dial: this is not meant for this folder, or is of another node."""
    principal = None if call.access is None else call.access.principal()
    peers_of(context).check_dial(call.http.query, node=None if principal is None else principal.node)


async def get_list(context: Context, call: Call) -> web.StreamResponse:
    """``Source.rows``, as msgpack arrays one after another; it is whole if the last one says so."""
    _check_asker(context, call)
    start, stall = _number(call, "start"), context.settings.stall_seconds
    source = await context.broker.rebuild_source(start)
    response = web.StreamResponse(headers={"Content-Type": MSGPACK_TYPE})
    response.enable_chunked_encoding()
    with source.rows(start) as rows:
        await response.prepare(call.http)
        try:
            while found := await asyncio.to_thread(lambda: list(islice(rows, _ROWS_AT_ONCE))):
                data = b"".join([msgpack.packb(row) for row in found])
                await guarded(response.write(data), stall)
        except (FirnError, OSError) as error:
            # The head is out: only a cut connection can say that the rest will not come.
            if call.http.transport is not None:
                call.http.transport.abort()
            raise ConnectionResetError(f"a list for a rebuild ended early: {error}") from error
    await response.write_eof()
    return response


async def post_pins(context: Context, call: Call) -> web.StreamResponse:
    _check_asker(context, call)
    start = _number(call, "start")
    source = await context.broker.rebuild_source(start)
    given = source.give(_number(call, "topic_id"), _number(call, "partition", most=(1 << 32) - 1), start)
    document = {"id": given.id, "manifest": given.manifest.encode(), "position": given.position}
    return web.Response(status=201, body=msgpack.packb(document), content_type=MSGPACK_TYPE)


async def get_pin(context: Context, call: Call) -> web.StreamResponse:
    """Bytes of a segment's batches, ``[position, position + size)``; without ``size`` its mask."""
    _check_asker(context, call)
    source, id, segment = context.broker.pinned_source(), call.name("id"), _number(call, "segment")
    size = call.query.integer("size", least=1, most=_RANGE_BYTES_MAX)
    if size is None:
        body = await asyncio.to_thread(source.mask, id, segment)
        return web.Response(body=body, content_type="application/octet-stream")
    part = source.batches(id, segment, _number(call, "position"), size)
    try:
        response = web.StreamResponse(
            headers={"Content-Type": "application/octet-stream", "Content-Length": str(part.size)}
        )
        writer = await response.prepare(call.http)
        if writer is not None:
            try:
                context.counts.sendfile_bytes += await send_range(
                    call.http, writer, part, stall_seconds=context.settings.stall_seconds
                )
            except (FirnError, OSError) as error:
                if call.http.transport is not None:
                    call.http.transport.abort()
                raise ConnectionResetError(f"a pull ended early: {error}") from error
        await response.write_eof()
    finally:
        part.lease.release()
    context.counts.bytes_out += part.size
    return response


async def delete_pin(context: Context, call: Call) -> web.StreamResponse:
    _check_asker(context, call)
    id = call.name("id")
    context.broker.pinned_source().take_back(id)
    return answer(call.http, {"id": id, "deleted": True})


ROUTES = [
    Route("GET", f"{PATH}/rebuild", get_list, Action.REPLICATE),
    Route("POST", f"{PATH}/pins", post_pins, Action.REPLICATE),
    Route("GET", f"{PATH}/pins/{{id}}", get_pin, Action.REPLICATE),
    Route("DELETE", f"{PATH}/pins/{{id}}", delete_pin, Action.REPLICATE),
]
