"""Single records over HTTP: put, get, delete by key, and a JSON array at once.

A put is one batch of one record, appended under the same rules as any other; ``If-Match: OFFSET`` and
``If-None-Match: *`` make it a compare-and-set that the engine decides.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from firn import limits
from firn.batch import Identity, columns_of, encode
from firn.errors import FirnError, Invalid, LimitExceeded, NotFound, UnknownPartition
from firn.partitioner import partition_of
from firn.record import NewRecord, Record, parse_document
from firn_node.engine.api import Appended, Outcome, TopicInfo
from firn_node.security.decision import Action
from firn_node.server.answers import JSON_TYPE, accepts, answer, header_text
from firn_node.server.budget import Charge
from firn_node.server.context import Context
from firn_node.server.params import Call, parse_int, read_body, read_document
from firn_node.server.reads import parse_floor
from firn_node.server.routes import Route

# Records of a JSON array are put together to batches of about this many bytes, at most this many records.
_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 4096
_TIMEOUT_MS_MAX = 600_000
INT_MIN = -(1 << 63)


def check_record(record: NewRecord, what: str) -> None:
    """The produce limits of one record, before anything is encoded.

    Errors: LimitExceeded, Invalid; both name ``what``.
    """
    sizes = [
        ("key", len(record.key), limits.KEY_BYTES_MAX),
        ("value", len(record.value or b""), limits.VALUE_BYTES_MAX),
    ]
    try:
        sizes.append(("tag", len((record.tag or "").encode()), limits.TAG_BYTES_MAX))
        sizes.append(("queues", len(record.queues), limits.QUEUES_PER_RECORD_MAX))
        sizes += [("queue name", len(name.encode()), limits.QUEUE_NAME_BYTES_MAX) for name in record.queues]
        # 12: more than msgpack's heads of a name and its value take.
        spent = sum(len(k.encode()) + len(v.encode()) + 12 for k, v in (record.headers or {}).items())
        sizes.append(("headers", spent, limits.HEADERS_BYTES_MAX))
    except UnicodeEncodeError as error:
        raise Invalid(f"{what}: not valid Unicode: {error}") from None
    for name, size, most in sizes:
        if size > most:
            raise LimitExceeded(f"{what}: {name} of {size}; at most {most}")


def encode_records(topic: TopicInfo, partition: int, records: Sequence[NewRecord], now_ms: int) -> bytes:
    """One batch of records of one partition."""
    columns = columns_of(
        [r.key for r in records],
        [r.value for r in records],
        [now_ms if r.timestamp is None else r.timestamp for r in records],
        tags=[r.tag for r in records],
        queues=[r.queues for r in records],
        headers=[r.headers for r in records],
    )
    return encode(columns, Identity(topic_id=topic.topic_id, partition=partition))


def place(topic: TopicInfo, record: NewRecord) -> int:
    """The partition of a record: the named one, else by its key.

    Errors: UnknownPartition.
    """
    count = topic.spec.partitions
    if record.partition is None:
        return partition_of(record.key, count)
    if not 0 <= record.partition < count:
        raise UnknownPartition(f"{topic.name}: no partition {record.partition}; it has {count}")
    return record.partition


def _condition(call: Call) -> int | None:
    """``if_offset`` of the request: None, or an offset, or -1 for "must not exist"."""
    match, none_match = call.http.headers.get("If-Match"), call.http.headers.get("If-None-Match")
    if match is not None and none_match is not None:
        raise Invalid("If-Match and If-None-Match: give one of them", parameter="If-Match")
    if none_match is not None:
        if none_match.strip() != "*":
            raise Invalid(f"If-None-Match: expected *, found {none_match[:64]!r}", parameter="If-None-Match")
        return -1
    return None if match is None else parse_int(match.strip().strip('"'), "If-Match", least=-1)


async def _put_one(context: Context, call: Call, record: NewRecord) -> web.Response:
    topic = context.broker.topic(call.name("topic"))
    check_record(record, "record")
    partition = place(topic, record)
    data = encode_records(topic, partition, [record], context.clock.wall_ms())
    timeout_ms = call.header_integer("Firn-Timeout-Ms", least=1, most=_TIMEOUT_MS_MAX)
    appending = asyncio.ensure_future(context.broker.produce(data, conditions=[_condition(call)]))
    outcome = (await context.outcome_within(appending, timeout_ms))[0]
    if isinstance(outcome, FirnError):
        raise outcome
    return answer(
        call.http,
        {"partition": outcome.partition, "offset": outcome.base_offset},
        headers={"ETag": f'"{outcome.base_offset}"'},
    )


def _described(call: Call, value: bytes | None) -> NewRecord:
    """The record that path and headers name."""
    call.query.finish()
    return NewRecord(
        call.path["rest"],
        value,
        partition=call.header_integer("Firn-Partition", most=(1 << 32) - 1),
        timestamp=call.header_integer("Firn-Timestamp", least=INT_MIN),
        tag=call.header("Firn-Tag"),
    )


async def put_record(context: Context, call: Call) -> web.StreamResponse:
    async with Charge(context.in_flight) as charge:
        value = await read_body(call, charge, limits.VALUE_BYTES_MAX)
        context.counts.bytes_in += len(value)
        return await _put_one(context, call, _described(call, value))


async def delete_record(context: Context, call: Call) -> web.StreamResponse:
    return await _put_one(context, call, _described(call, None))


async def get_record(context: Context, call: Call) -> web.StreamResponse:
    floor = parse_floor(context.broker, call.query)
    call.query.finish()
    topic, key = call.name("topic"), call.path["rest"]
    partition = call.header_integer("Firn-Partition", most=(1 << 32) - 1)
    found = (await context.broker.get(topic, [key], partition=partition, floor=floor))[0]
    if found is None:
        raise NotFound("no such key")
    context.counts.bytes_out += len(found.value)
    headers = {
        "Firn-Partition": str(found.partition),
        "Firn-Offset": str(found.offset),
        "Firn-Timestamp": str(found.timestamp),
        "ETag": f'"{found.offset}"',
    }
    if floor is not None:
        headers["Firn-Shown"] = context.broker.shown
    if accepts(call.http, JSON_TYPE):
        record = Record(
            topic, found.partition, found.offset, found.timestamp, key, found.value, found.tag, found.headers
        )
        return answer(call.http, record.document(), headers=headers)
    if found.tag is not None:
        headers["Firn-Tag"] = header_text(found.tag)
    return web.Response(body=found.value, content_type="application/octet-stream", headers=headers)


async def post_records(context: Context, call: Call) -> web.StreamResponse:
    """Offsets of all, in input order; else the first error, with what was acknowledged beside it."""
    call.query.finish()
    async with Charge(context.in_flight) as charge:
        document = await read_document(call, charge, limits.BATCH_BYTES_MAX)
        if not isinstance(document, list):
            raise Invalid("body: expected an array of records")
        topic = context.broker.topic(call.name("topic"))
        by_partition: dict[int, list[tuple[int, NewRecord]]] = {}
        for at, item in enumerate(document):
            record = _parse_item(item, at)
            by_partition.setdefault(place(topic, record), []).append((at, record))
        now_ms = context.clock.wall_ms()
        batches, rows = [], []
        for partition, records in by_partition.items():
            for chosen in _batches(records):
                batches.append(encode_records(topic, partition, [record for _, record in chosen], now_ms))
                rows.append([at for at, _ in chosen])
        if not batches:
            return answer(call.http, [])
        outcomes = await context.broker.produce(b"".join(batches))
        context.counts.bytes_in += sum(map(len, batches))
    return _offsets_answer(call.http, len(document), rows, outcomes)


def _parse_item(item: Any, at: int) -> NewRecord:
    try:
        record = parse_document(item)
    except Invalid as error:
        raise Invalid(f"record {at}: {error.message}", record=at) from None
    check_record(record, f"record {at}")
    return record


def _batches(records: list[tuple[int, NewRecord]]) -> Iterator[list[tuple[int, NewRecord]]]:
    """Runs of records, in order, each of a size for one batch."""
    run: list[tuple[int, NewRecord]] = []
    size = 0
    for at, record in records:
        spent = len(record.key) + len(record.value or b"") + 32
        if run and (size + spent > _BATCH_BYTES or len(run) >= _BATCH_RECORDS):
            yield run
            run, size = [], 0
        run.append((at, record))
        size += spent
    if run:
        yield run


def _offsets_answer(
    http: web.BaseRequest, count: int, rows: list[list[int]], outcomes: Sequence[Outcome]
) -> web.Response:
    found: list[dict[str, int] | None] = [None] * count
    failed: dict[int, FirnError] = {}
    for run, outcome in zip(rows, outcomes, strict=True):
        if isinstance(outcome, Appended):
            for row, at in enumerate(run):
                found[at] = {"partition": outcome.partition, "offset": outcome.base_offset + row}
        else:
            failed[run[0]] = outcome
    if not failed:
        return answer(http, found)
    first = failed[min(failed)]
    return answer(http, {**first.document(), "acknowledged": found}, status=first.status)


_KEY = "/v1/topics/{topic}/records/{rest}"
ROUTES = [
    Route("PUT", _KEY, put_record, Action.WRITE),
    Route("GET", _KEY, get_record, Action.READ),
    Route("DELETE", _KEY, delete_record, Action.WRITE),
    Route("POST", "/v1/topics/{topic}/records", post_records, Action.WRITE),
]
