"""Plans of forced compactions that somebody else decides (``POST .../compaction/plan``), of all groups of a topic.

Each group's master has a plan of its own, for its partitions; here they are one document: ``ids`` is of each group its
plan's, in the topic's order, and each row of ``partitions`` has the ``plan`` that it is of.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from firn.client.routes import Target
from firn.client.transport import Answer, Transport, path_of
from firn.errors import NotFound, UnknownPlan

Document = dict[str, Any]
_STATES = ("open", "cancelled", "expired", "done")  # of the whole: the first that a part has


async def open_plan(
    target: Target, topic: str, *, run: str = "", slice_records: int | None = None
) -> Document:
    """The open plan of a topic, or a new one; the one of this ``run`` if that is done."""
    body: Document = {"run": run}
    if slice_records is not None:
        body["slice_records"] = slice_records
    return await _of_each(target, lambda way, _: way.request("POST", _path(topic), body=body))


async def newest_plan(target: Target, topic: str) -> Document | None:
    """The newest plan of a topic; None when no group has one."""
    return joined_newest(await asyncio.gather(*(_newest(way, topic) for way in target.transports)))


async def _newest(way: Transport, topic: str) -> Document | None:
    try:
        found: Document = (await way.request("GET", _path(topic))).document()
    except NotFound:
        return None
    return found


async def touch_plan(
    target: Target, topic: str, ids: Sequence[str], progress: Document | None = None
) -> Document:
    """Say that the driver is there. Errors: UnknownPlan: plan again."""
    body = {} if progress is None else {"progress": progress}
    return await _of_each(target, lambda way, n: way.request("PUT", _path(topic, ids[n]), body=body))


async def cancel_plan(target: Target, topic: str) -> None:
    """Let nothing more be compacted for a topic's open plan; what was by then stays. There may be none."""

    async def cancel(way: Transport) -> None:
        plan = await _newest(way, topic)
        if plan is not None and plan["state"] == "open":
            with contextlib.suppress(UnknownPlan):  # it has ended meanwhile
                await way.request("DELETE", _path(topic, str(plan["id"])))

    await asyncio.gather(*(cancel(way) for way in target.transports))


async def planned_partition(target: Target, topic: str, id: str, partition: int) -> Document:
    """One row of a plan. Errors: UnknownPlan: plan again."""
    way = target.transport_of(partition)
    found: Document = (await way.request("GET", _path(topic, id, "partitions", partition))).document()
    return found


async def upload_statement(
    target: Target,
    topic: str,
    id: str,
    *,
    partition: int,
    slice: int,
    data: bytes,
    timeout: float | None = None,
) -> Document:
    """Send a statement (``firn.statement``); what is missing still of its partition comes back.

    Errors: AlreadyUploaded: another one is there, and counts; UnknownPlan: plan again; Invalid for a damaged one.
    """
    way = target.transport_of(partition)
    path = _path(topic, id, "partitions", partition, "slices", slice)
    found: Document = (await way.request("PUT", path, data=data, timeout=timeout)).document()
    return found


def joined_newest(parts: Sequence[Document | None]) -> Document | None:
    """One document of those that the groups have; None when no group has one.

    It is ``open`` as long as a group has none yet, or none any more: its driver makes one there. What a group keeps of
    another run than the first one's is left out.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    found = joined([part for part in known if part["run"] == known[0]["run"]])
    states = {part["state"] for part in known}
    if len(known) < len(parts):
        states.add("open")
    return {**found, "state": _state(states)}


def joined(parts: Sequence[Document]) -> Document:
    """One document of those of the groups."""
    rows = [{**row, "plan": part["id"]} for part in parts for row in part["partitions"]]
    first = parts[0]
    return {
        "ids": [part["id"] for part in parts], "run": first["run"], "topic": first["topic"],
        "topic_id": first["topic_id"], "engine": first["engine"], "state": _state({part["state"] for part in parts}),
        "progress": first["progress"], "partitions": sorted(rows, key=lambda row: int(row["partition"])),
    }  # fmt: skip


def _state(states: set[str]) -> str:
    return next(state for state in _STATES if state in states)


async def _of_each(target: Target, ask: Callable[[Transport, int], Coroutine[Any, Any, Answer]]) -> Document:
    answers = await asyncio.gather(*(ask(way, number) for number, way in enumerate(target.transports)))
    return joined([answer.document() for answer in answers])


def _path(topic: str, *more: str | int) -> str:
    return path_of("topics", topic, "compaction", "plan", *more)
