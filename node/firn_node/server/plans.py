"""Plans of forced compactions by Spark: made, followed, cancelled; statements about their slices taken.

A statement is written to a file as it arrives: it may be larger than the memory of requests.
"""

import json
from typing import Any

from aiohttp import web

from firn.errors import Invalid, LimitExceeded, Unavailable
from firn.statement import BYTES_MAX
from firn_node.plans.plans import SLICE_RECORDS
from firn_node.security.decision import Action
from firn_node.server.answers import answer
from firn_node.server.budget import Charge
from firn_node.server.context import Context
from firn_node.server.params import Call, mapping, next_chunk, read_document, welcome_body
from firn_node.server.routes import Route

_DOCUMENT_BYTES_MAX = 64 << 10
_PROGRESS_BYTES_MAX = 4 << 10
_RUN_CHARACTERS_MAX = 253
_RUN_BYTES = 1 << 20  # written to the file at once
_SLICE_MAX = 1 << 20


async def _body(context: Context, call: Call, *known: str) -> dict[str, Any]:
    async with Charge(context.in_flight) as charge:
        return mapping(await read_document(call, charge, _DOCUMENT_BYTES_MAX), "body", known)


async def post_plan(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    body = await _body(context, call, "run", "slice_records")
    run = body.get("run", "")
    if not isinstance(run, str) or len(run) > _RUN_CHARACTERS_MAX:
        raise Invalid(f"body: run: expected a name of up to {_RUN_CHARACTERS_MAX} characters, found {run!r}")
    records = body.get("slice_records", SLICE_RECORDS)
    if not isinstance(records, int) or isinstance(records, bool) or not 1 <= records <= 1 << 31:
        raise Invalid(f"body: slice_records: expected 1 to {1 << 31}, found {records!r}")
    found, is_new = await context.broker.open_plan(call.name("topic"), run=run, slice_records=records)
    return answer(call.http, found, status=201 if is_new else 200)


async def get_plan(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    return answer(call.http, context.broker.plan(call.name("topic")))


async def put_plan(context: Context, call: Call) -> web.StreamResponse:
    """The driver is there, and so far."""
    call.query.finish()
    progress = (await _body(context, call, "progress")).get("progress")
    if progress is not None and not isinstance(progress, dict):
        raise Invalid(f"body: progress: expected an object, found {type(progress).__name__}")
    if len(json.dumps(progress)) > _PROGRESS_BYTES_MAX:
        raise LimitExceeded(f"body: progress: at most {_PROGRESS_BYTES_MAX} bytes")
    return answer(call.http, context.broker.touch_plan(call.name("topic"), call.name("id"), progress))


async def get_planned_partition(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    partition = call.integer("partition")
    return answer(call.http, context.broker.planned_partition(call.name("topic"), call.name("id"), partition))


async def delete_plan(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    return answer(call.http, await context.broker.cancel_plan(call.name("topic"), call.name("id")))


async def put_statement(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    partition, slice = call.integer("partition"), call.integer("slice", most=_SLICE_MAX)
    announced = call.http.content_length
    if announced is not None and announced > BYTES_MAX:
        raise LimitExceeded(f"body: {announced} bytes; a statement has at most {BYTES_MAX}")
    upload = context.broker.upload_to_plan(call.name("topic"), call.name("id"), partition, slice)
    try:
        welcome_body(call.http)
        async with Charge(context.in_flight) as charge:
            await charge.add(_RUN_BYTES)
            run = bytearray()
            while chunk := await next_chunk(call.http):
                context.counts.bytes_in += len(chunk)
                run += chunk
                if len(run) >= _RUN_BYTES:
                    await upload.write(bytes(run))
                    run.clear()
            if run:
                await upload.write(bytes(run))
        return answer(call.http, await upload.finish())
    except OSError as error:
        raise Unavailable(f"the statement cannot be kept: {error}; make room, then send it again") from error
    finally:
        await upload.close()


_PLAN = "/v1/topics/{topic}/compaction/plan"
ROUTES = [
    Route("POST", _PLAN, post_plan, Action.COMPACT),
    Route("GET", _PLAN, get_plan, Action.SEE),
    Route("PUT", f"{_PLAN}/{{id}}", put_plan, Action.COMPACT),
    Route("DELETE", f"{_PLAN}/{{id}}", delete_plan, Action.COMPACT),
    Route("GET", f"{_PLAN}/{{id}}/partitions/{{partition}}", get_planned_partition, Action.COMPACT),
    Route("PUT", f"{_PLAN}/{{id}}/partitions/{{partition}}/slices/{{slice}}", put_statement, Action.COMPACT),
]
