"""Bulk reads of one partition over HTTP.

Whole batches, as they are stored, unless ``Accept`` names JSON or msgpack: ranges of files go by sendfile, and
what is in memory is bounded by the budget of reads. What a reader needs to go on is in headers, of empty answers
too. A light queue's rows are picked by mask blocks in front of their batches: the rows to leave out are masked.
"""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web

from firn.batch import HEADER_BYTES, Batch
from firn.errors import Corrupt, FirnError
from firn.record import records_of
from firn.shown import ANY, MASTER
from firn.wire import BATCHES_TYPE, MSGPACK_TYPE, Item, items, mask_block
from firn_node.engine.api import ReadRequest, ReadResult, View
from firn_node.filecache import FileRange
from firn_node.security.decision import Action
from firn_node.server.answers import JSON_TYPE, accepts, answer
from firn_node.server.budget import Charge
from firn_node.server.context import Context, ServedBroker
from firn_node.server.params import Call, Query
from firn_node.server.routes import Route
from firn_node.server.sendfile import guarded, send_range

READ_BYTES_MAX = 16 << 20
WAIT_MS_MAX = 60_000


def view_of(text: str) -> View:
    return "raw" if text == "raw" else "compacted"


def parse_floor(broker: ServedBroker, query: Query) -> int | None:
    """How far the reader was shown the log, of a read that any replica may answer. *Errors*: Invalid."""
    is_any = query.choice("read_from", (MASTER, ANY)) == ANY
    shown = query.text("shown") or ""
    return broker.floor_in(shown) if is_any else None


def parse_request(topic: str, partition: int, query: Query, broker: ServedBroker) -> ReadRequest:
    """Errors: Invalid, naming the parameter."""
    queue = query.text("queue") or None
    # A light queue has a raw view alone, so that is what it is read by when nothing else is said.
    view = view_of(query.choice("view", ("compacted", "raw") if queue is None else ("raw", "compacted")))
    offset = query.integer("offset")
    max_bytes = query.integer("max_bytes", least=1)
    wait_ms = query.integer("wait_ms", most=WAIT_MS_MAX)
    request = ReadRequest(
        topic=topic,
        partition=partition,
        view=view,
        offset=offset or 0,
        since=query.integer("since"),
        snapshot=query.text("snapshot") or None,
        queue=queue,
        tag=query.text("tag"),
        keys_only=query.choice("projection", ("all", "keys")) == "keys",
        positions=query.choice("positions", ("false", "true")) == "true",
        max_bytes=min(max_bytes or 1 << 20, READ_BYTES_MAX),
        wait_ms=wait_ms or 0,
        floor=parse_floor(broker, query),
    )
    query.finish()
    return request


def read_headers(result: ReadResult, request: ReadRequest, broker: ServedBroker) -> dict[str, str]:
    shown = {} if request.floor is None else {"Firn-Shown": broker.shown}
    return {
        **shown,
        "Firn-Next-Offset": str(result.next_offset),
        "Firn-End": str(result.end),
        "Firn-Horizon": str(result.horizon),
        "Firn-Tombstone-Floor": str(result.tombstone_floor),
        "Firn-Topic-Id": str(result.topic_id),
        "Firn-Generation": str(result.generation),
    }


async def get_partition(context: Context, call: Call) -> web.StreamResponse:
    request = parse_request(call.name("topic"), call.integer("partition"), call.query, context.broker)
    result = await context.wait_for_bytes(request)
    try:
        if accepts(call.http, JSON_TYPE) or accepts(call.http, MSGPACK_TYPE):
            return await _send_documents(context, call, request, result)
        if result.queue_rows is not None:
            result = picked_rows(result, await _taken(result), keys_only=request.keys_only)
        return await _send_batches(context, call, result, read_headers(result, request, context.broker))
    finally:
        result.release()


async def _taken(result: ReadResult) -> bytes:
    """All bytes of a read, fetched off the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, result.take)


async def _send_batches(
    context: Context, call: Call, result: ReadResult, headers: dict[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    response.content_type = BATCHES_TYPE
    response.content_length = result.size
    stall = context.settings.stall_seconds
    async with Charge(context.reads) as charge:
        await charge.add(sum(len(part) for part in result.parts if isinstance(part, bytes)))
        writer = await response.prepare(call.http)
        if writer is None or call.http.method == "HEAD":
            return response
        try:
            for part in result.parts:
                if isinstance(part, bytes):
                    await guarded(writer.write(part), stall)
                else:
                    context.counts.sendfile_bytes += await send_range(
                        call.http, writer, part, stall_seconds=stall
                    )
        except (FirnError, OSError) as error:
            # The head is out: only a cut connection can say that the rest will not come.
            if call.http.transport is not None:
                call.http.transport.abort()
            raise ConnectionResetError(f"a bulk read ended early: {error}") from error
        await response.write_eof()
    context.counts.bytes_out += result.size
    return response


async def _send_documents(
    context: Context, call: Call, request: ReadRequest, result: ReadResult
) -> web.StreamResponse:
    async with Charge(context.reads) as charge:
        await charge.add(result.size)
        rows = result.queue_rows
        data = await _taken(result)
        documents: list[dict[str, Any]] = []
        for at, item in enumerate(items(data, keys_only=request.keys_only and rows is None)):
            documents += _documents(item, request, None if rows is None else rows[at])
            await asyncio.sleep(0)  # others go on between batches
        context.counts.bytes_out += len(data)
        return answer(call.http, documents, headers=read_headers(result, request, context.broker))


def _documents(item: Item, request: ReadRequest, rows: list[tuple[int, int]] | None) -> list[dict[str, Any]]:
    """The records of one batch that the reader asked for, as objects."""
    masked = None if item.masked is None else item.masked.tolist()
    records = list(records_of(item.batch, request.topic))
    chosen: list[tuple[int | None, int]]
    if rows is None:
        chosen = [(None, row) for row in range(len(records)) if records[row].offset >= request.offset]
    else:
        chosen = [(queue_offset, row) for queue_offset, row in rows]
    tombstones = item.batch.columns.tombstones
    found = []
    for queue_offset, row in chosen:
        record = records[row]
        if (masked and masked[row]) or (request.tag is not None and record.tag != request.tag):
            continue
        document = record.document()
        if request.keys_only:
            document.pop("value_base64", None)
            document.pop("value", None)
            document["tombstone"] = bool(tombstones[row])
        if queue_offset is not None:
            document["queue_offset"] = queue_offset
        found.append(document)
    return found


def picked_rows(result: ReadResult, data: bytes, *, keys_only: bool) -> ReadResult:
    """The read of a light queue with a mask block before each batch that hides the rows of other queues.

    Errors: Corrupt when rows and batches do not belong together.
    """
    rows = result.queue_rows or []
    batches = [item.batch for item in items(data)]  # a light queue is read whole, whatever the projection
    if len(batches) != len(rows):
        raise Corrupt(f"light queue: {len(rows)} lists of rows for {len(batches)} batches")
    parts: list[bytes | FileRange] = []
    for batch, pairs in zip(batches, rows, strict=True):
        end = HEADER_BYTES + batch.header.keys_bytes if keys_only else batch.header.size
        parts += [_mask_others(batch, [row for _, row in pairs]), bytes(batch.data[:end])]
    return replace(result, parts=parts)


def _mask_others(batch: Batch, rows: list[int]) -> bytes:
    masked = np.ones(batch.header.records, np.bool_)
    masked[rows] = False
    return mask_block(masked)


ROUTES = [Route("GET", "/v1/topics/{topic}/partitions/{partition}", get_partition, Action.READ)]
