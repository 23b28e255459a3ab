"""``POST /v1/batches``: batches of any topics, one after another, in one body of any length up to the bound.

The body may be chunked: each run of whole batches goes to the engine as soon as it has arrived, in order, and
its memory is free again once it is acknowledged. The answer is a list with an item a batch, in order:
``[partition, base_offset]`` or an error's document. What is wrong with the body itself is the last item, or the
answer's error when no batch came before it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from firn import limits
from firn.batch import HEADER_BYTES, parse_header
from firn.errors import FirnError, Invalid, LimitExceeded, MalformedBatch
from firn_node.engine.api import Outcome
from firn_node.security.decision import Action
from firn_node.server.answers import answer
from firn_node.server.budget import Charge
from firn_node.server.context import Context
from firn_node.server.params import Call, next_chunk, welcome_body
from firn_node.server.produce import result_item, trusted_size
from firn_node.server.routes import Route

_RUNS_MAX = 8  # runs of one request under way at the engine


def whole_batches(buffer: bytearray) -> int:
    """The length of the whole batches that the buffer begins with.

    Errors: MalformedBatch, LimitExceeded: nothing behind these can be found.
    """
    at = 0
    while len(buffer) - at >= HEADER_BYTES:
        size = trusted_size(buffer, at)
        if size is None or size > limits.BATCH_BYTES_MAX:
            if at:
                return at  # first those before it; it is met again at the head of the buffer
            if size is None:
                parse_header(buffer)  # says what is wrong
                raise MalformedBatch("batch header: not valid")
            raise LimitExceeded(f"batch of {size} bytes; at most {limits.BATCH_BYTES_MAX}")
        if at + size > len(buffer):
            break
        at += size
    return at


class _Upload:
    """The runs of one request, in order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.runs: list[asyncio.Task[Sequence[Outcome]]] = []
        self._open: set[asyncio.Task[Sequence[Outcome]]] = set()

    async def append(self, data: bytes) -> None:
        """Hand a run to the engine as soon as there is room. *Errors*: Busy."""
        if len(self._open) >= _RUNS_MAX:
            await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
        held = await self._context.in_flight.take(len(data))
        task = asyncio.ensure_future(self._produce(data, held))
        self.runs.append(task)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        await asyncio.sleep(0)  # the engine sees this run before the next one is read

    async def _produce(self, data: bytes, held: int) -> Sequence[Outcome]:
        try:
            return await self._context.broker.produce(data)
        except FirnError as error:
            return [error]
        finally:
            self._context.in_flight.give(held)

    async def results(self) -> list[Any]:
        return [result_item(outcome) for run in self.runs for outcome in await run]


async def post_batches(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    announced = call.http.content_length
    if announced is not None and announced > limits.PRODUCE_REQUEST_BYTES_MAX:
        raise LimitExceeded(f"body: {announced} bytes; at most {limits.PRODUCE_REQUEST_BYTES_MAX} a request")
    welcome_body(call.http)
    upload, fault = _Upload(context), None
    try:
        async with Charge(context.in_flight) as charge:
            await _receive(context, call, upload, charge)
    except FirnError as error:
        fault = error
    results = await upload.results()
    if fault is not None:
        if not results:
            raise fault
        results.append(fault.document())
    return answer(call.http, results)


async def _receive(context: Context, call: Call, upload: _Upload, charge: Charge) -> None:
    buffer, received, held = bytearray(), 0, 0
    while chunk := await next_chunk(call.http):
        received += len(chunk)
        context.counts.bytes_in += len(chunk)
        if received > limits.PRODUCE_REQUEST_BYTES_MAX:
            raise LimitExceeded(f"body: more than {limits.PRODUCE_REQUEST_BYTES_MAX} bytes a request")
        buffer += chunk
        while length := whole_batches(buffer):
            if call.access is not None:
                call.access.check_batches(memoryview(buffer)[:length], what="POST /v1/batches")
            charge.release()  # the run takes its own; holding both, a large batch would wait for itself
            held = 0
            await upload.append(bytes(buffer[:length]))
            del buffer[:length]
        if len(buffer) > held:
            await charge.add(len(buffer) - held)  # a batch in the making
            held = len(buffer)
    if buffer:
        raise Invalid(f"body: ends within a batch, {len(buffer)} bytes after the last whole one")
    if not received:
        raise Invalid("body: no batch")


ROUTES = [Route("POST", "/v1/batches", post_batches, Action.KNOWN)]
