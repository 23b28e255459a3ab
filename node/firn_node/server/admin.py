"""Topics, compactions, snapshots, groups' offsets, look-ups by key, id and time, status and health."""

from typing import Any

from aiohttp import web

from firn import limits
from firn.errors import Invalid, NotFound, Unavailable
from firn.topicspec import check_topic_name, parse_spec
from firn_node.engine.api import SnapshotInfo, TopicInfo
from firn_node.security.decision import Action
from firn_node.server.answers import answer
from firn_node.server.budget import Charge
from firn_node.server.context import Context, Positions
from firn_node.server.params import INT_MAX, Call, mapping, parse_int, read_document
from firn_node.server.routes import Route

_DOCUMENT_BYTES_MAX = 1 << 20
_OFFSETS_BYTES_MAX = 16 << 20  # a commit of all partitions of a topic of 100,000
_LISTED_MAX = 10_000
_TIME_MIN = -(1 << 63)


def _topic_document(topic: TopicInfo) -> dict[str, Any]:
    return {"name": topic.name, "topic_id": topic.topic_id, "spec": topic.spec.document()}


async def _body(
    context: Context, call: Call, *known: str, limit: int = _DOCUMENT_BYTES_MAX
) -> dict[str, Any]:
    async with Charge(context.in_flight) as charge:
        return mapping(await read_document(call, charge, limit), "body", known)


async def get_topics(context: Context, call: Call) -> web.StreamResponse:
    after = call.query.text("after") or ""
    limit = call.query.integer("limit", least=1, most=_LISTED_MAX) or 1000
    call.query.finish()
    found = _visible_topics(context, call, after, limit + 1)
    page = found[:limit]
    following = page[-1].name if len(found) > limit else None
    return answer(call.http, {"topics": [_topic_document(topic) for topic in page], "after": following})


def _visible_topics(context: Context, call: Call, after: str, limit: int) -> list[TopicInfo]:
    """Up to ``limit`` topics after a name that the caller may see."""
    if call.access is None:
        return context.broker.topics(after=after, limit=limit)
    found: list[TopicInfo] = []
    while len(found) < limit and (page := context.broker.topics(after=after, limit=_LISTED_MAX)):
        found += [topic for topic in page if call.access.may_see(topic)]
        after = page[-1].name
    return found[:limit]


async def post_topics(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    body = await _body(context, call, "name", "spec")
    name = call.target = check_topic_name(body.get("name"))
    spec = parse_spec(body.get("spec"), min_in_sync=context.broker.default_min_in_sync)
    topic = await context.broker.create_topic(name, spec)
    return answer(call.http, _topic_document(topic), status=201)


async def get_topic(context: Context, call: Call) -> web.StreamResponse:
    after = call.query.integer("after", least=-1)
    limit = call.query.integer("limit", least=1, most=_LISTED_MAX) or 1000
    call.query.finish()
    name = call.name("topic")
    # First: a replica that may not answer must not say that there is no such topic.
    found = await context.broker.describe(name, after=-1 if after is None else after, limit=limit)
    return answer(call.http, {**_topic_document(context.broker.topic(name)), **found})


async def put_topic(context: Context, call: Call) -> web.StreamResponse:
    """The spec as given replaces the topic's; left out, ``partitions`` and ``minInSync`` stay, others get defaults."""
    call.query.finish()
    body = await _body(context, call, "spec")
    topic = context.broker.topic(call.name("topic"))
    spec = body.get("spec")
    if not isinstance(spec, dict):
        raise Invalid(f"body: spec: expected an object, found {type(spec).__name__}")
    spec = parse_spec(
        {"partitions": topic.spec.partitions, **spec}, min_in_sync=topic.spec.durability.min_in_sync
    )
    found = await context.broker.update_topic(topic.name, spec)
    return answer(call.http, _topic_document(found))


async def delete_topic(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    name = call.name("topic")
    await context.broker.delete_topic(name)
    return answer(call.http, {"name": name, "deleted": True})


async def post_compaction(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    body = await _body(context, call, "force")
    force = body.get("force", False)
    if not isinstance(force, bool):
        raise Invalid(f"body: force: expected true or false, found {force!r}")
    run = await context.broker.compact(call.name("topic"), force=force)
    return answer(call.http, run.document(), status=202)


async def get_compaction(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    name = call.name("topic")
    run = context.broker.compaction(name)
    if run is None:
        raise NotFound(f"{name}: no compaction was asked for")
    return answer(call.http, run.document())


async def delete_compaction(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    return answer(call.http, context.broker.cancel_compaction(call.name("topic")).document())


def _snapshot_document(snapshot: SnapshotInfo) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "topic": snapshot.topic,
        "partitions": {str(number): numbers for number, numbers in snapshot.partitions.items()},
        "expires_ms": snapshot.expires_ms,
        "renewals": snapshot.renewals,
    }


async def post_snapshots(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    return answer(
        call.http, _snapshot_document(await context.broker.snapshot(call.name("topic"))), status=201
    )


async def put_snapshot(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    return answer(call.http, _snapshot_document(context.broker.renew(call.name("id"))))


async def delete_snapshot(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    id = call.name("id")
    context.broker.close_snapshot(id)
    return answer(call.http, {"id": id, "deleted": True})


async def get_offsets(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    group, topic = call.name("group"), call.name("topic")
    found = await context.broker.fetch_offsets(group, topic)
    offsets = {str(p): {"offset": offset, "since": since} for p, (offset, since) in found.items()}
    return answer(call.http, {"group": group, "topic": topic, "offsets": offsets})


async def put_offsets(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    body = await _body(context, call, "offsets", limit=_OFFSETS_BYTES_MAX)
    offsets = body.get("offsets")
    if not isinstance(offsets, dict):
        raise Invalid("body: offsets: expected an object of partition numbers")
    await context.broker.commit_offsets(call.name("group"), call.name("topic"), _parse_offsets(offsets))
    return answer(call.http, {"committed": len(offsets)})


def _parse_offsets(offsets: dict[Any, Any]) -> Positions:
    """Errors: Invalid, naming the partition."""
    found: Positions = {}
    for name, value in offsets.items():
        partition = parse_int(str(name), "partition", most=(1 << 32) - 1)
        fields = mapping(value, f"offsets: partition {partition}", ("offset", "since"))
        offset, since = fields.get("offset"), fields.get("since")
        for field, number in (("offset", offset), ("since", since)):
            if number is None and field == "since":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= INT_MAX:
                raise Invalid(
                    f"offsets: partition {partition}: {field}: expected a whole number, found {number!r}"
                )
        found[partition] = (offset, since)  # type: ignore[assignment]  # both were checked just above
    return found


async def get_query(context: Context, call: Call) -> web.StreamResponse:
    key = call.query.raw("key")
    since = call.query.integer("since", least=_TIME_MIN)
    until = call.query.integer("until", least=_TIME_MIN)
    call.query.finish()
    if key is None:
        raise Invalid("key: required", parameter="key")
    if len(key) > limits.KEY_BYTES_MAX:
        raise Invalid(f"key: {len(key)} bytes; at most {limits.KEY_BYTES_MAX}", parameter="key")
    found = await context.broker.query(
        call.name("topic"), key, 0 if since is None else since, INT_MAX if until is None else until
    )
    return answer(call.http, [_with_id(record.document(), record.id) for record in found])


def _with_id(document: dict[str, Any], id: str | None) -> dict[str, Any]:
    return document if id is None else {**document, "id": id}


async def get_by_id(context: Context, call: Call) -> web.StreamResponse:
    call.query.finish()
    id = call.name("id")
    record = await context.broker.find_id(call.name("topic"), id)
    if record is None:
        raise NotFound(f"no record has the id {id[:200]!r}; it may have expired")
    return answer(call.http, _with_id(record.document(), record.id))


async def get_offset(context: Context, call: Call) -> web.StreamResponse:
    timestamp = call.query.integer("timestamp", least=_TIME_MIN)
    call.query.finish()
    if timestamp is None:
        raise Invalid("timestamp: required, in ms since 1970", parameter="timestamp")
    partition = call.integer("partition")
    offset = await context.broker.offset_of_time(call.name("topic"), partition, timestamp)
    return answer(call.http, {"partition": partition, "offset": offset})


async def get_status(context: Context, call: Call) -> web.StreamResponse:
    limit = call.query.integer("limit", least=1, most=_LISTED_MAX) or 1000
    call.query.finish()
    found = context.broker.status(limit=limit)
    if (access := call.access) is not None:
        topics = {name: context.broker.topic(name) for name in (row["name"] for row in found["topics"])}
        found["topics"] = [row for row in found["topics"] if access.may_see(topics[row["name"]])]
    return answer(call.http, {**found, "security": _security_document(context)})


def _security_document(context: Context) -> dict[str, Any]:
    """How this broker is closed; ``problem``: why changed files do not count."""
    files = None if context.door is None else context.door.files
    return {
        "tls": files is not None and files.settings.has_tls,
        "authentication": context.guard is not None,
        "problem": None if files is None else files.problem,
    }


async def post_rebuild(context: Context, call: Call) -> web.StreamResponse:
    """Let this replica start anew from its master."""
    call.query.finish()
    reason = (await _body(context, call, "reason")).get("reason", "")
    if not isinstance(reason, str) or not reason.strip():
        raise Invalid("body: reason: say in a few words why")
    await context.broker.rebuild(reason.strip()[:200])
    return answer(call.http, {"rebuild": "ordered"}, status=202)


async def get_health(context: Context, call: Call) -> web.StreamResponse:
    """The process answers: that is all it says."""
    return answer(call.http, {"status": "ok"})


async def get_ready(context: Context, call: Call) -> web.StreamResponse:
    if not context.broker.is_ready():
        raise Unavailable("this broker does not take writes yet; /v1/status says why")
    return answer(call.http, {"status": "ready"})


_TOPIC = "/v1/topics/{topic}"
ROUTES = [
    Route("GET", "/v1/topics", get_topics, Action.KNOWN),
    Route("POST", "/v1/topics", post_topics, Action.ADMIN),
    Route("GET", _TOPIC, get_topic, Action.SEE),
    Route("PUT", _TOPIC, put_topic, Action.ADMIN),
    Route("DELETE", _TOPIC, delete_topic, Action.ADMIN),
    Route("POST", f"{_TOPIC}/compaction", post_compaction, Action.COMPACT),
    Route("GET", f"{_TOPIC}/compaction", get_compaction, Action.SEE),
    Route("DELETE", f"{_TOPIC}/compaction", delete_compaction, Action.COMPACT),
    Route("POST", f"{_TOPIC}/snapshots", post_snapshots, Action.READ),
    Route("PUT", f"{_TOPIC}/snapshots/{{id}}", put_snapshot, Action.READ),
    Route("DELETE", f"{_TOPIC}/snapshots/{{id}}", delete_snapshot, Action.READ),
    Route("GET", f"{_TOPIC}/query", get_query, Action.READ),
    Route("GET", f"{_TOPIC}/ids/{{id}}", get_by_id, Action.READ),
    Route("GET", f"{_TOPIC}/partitions/{{partition}}/offset", get_offset, Action.READ),
    Route("GET", "/v1/groups/{group}/offsets/{topic}", get_offsets, Action.READ),
    Route("PUT", "/v1/groups/{group}/offsets/{topic}", put_offsets, Action.READ),
    Route("GET", "/v1/status", get_status, Action.KNOWN),
    Route("POST", "/v1/rebuild", post_rebuild, Action.ADMIN),
    Route("GET", "/healthz", get_health, Action.OPEN),
    Route("GET", "/readyz", get_ready, Action.OPEN),
]
