"""What several broker groups say of one topic, put together: its description, its compaction."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from firn.client.transport import Transport, path_of
from firn.errors import FirnError, Unavailable, UnknownTopic

_STATES = ("running", "waiting", "failed", "cancelled", "done")  # of the whole: the first that a part has
_PLAN_STATES = ("open", "expired", "cancelled")  # likewise; else it is done

FIRST_GROUP = 0  # it decides on topics
_SHARE = 3  # a group that does not answer may take this part of the time
_PARTITIONS_PAGE = 1000  # of a topic, in one answer of a broker


def joined_runs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One compaction's document of those of the groups."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in part["partitions"]]
    states = {part["state"] for part in parts}
    return {
        **parts[0],
        "state": next(state for state in _STATES if state in states),
        "partitions": sorted(rows, key=lambda row: int(row["partition"])),
    }


async def with_further_partitions(
    name: str, way: Transport, document: dict[str, Any], *, timeout: float | None = None
) -> dict[str, Any]:
    """A topic as one broker shows it, ``document``, with the partitions that its answer had no room for.

    Errors: those of the requests; Unavailable where the topic was made anew between two of them.
    """
    rows = page = document["partitions"]
    while len(page) == _PARTITIONS_PAGE:
        query = {"after": int(page[-1]["partition"]), "limit": _PARTITIONS_PAGE}
        found = (await way.request("GET", path_of("topics", name), query=query, timeout=timeout)).document()
        if found["topic_id"] != document["topic_id"]:
            raise Unavailable(f"topic {name!r} was deleted and made anew just now; ask again")
        page = found["partitions"]
        rows = rows + page
    return {**document, "partitions": rows}


async def whole_description(
    name: str, groups: Sequence[int], ways: Mapping[int, Transport]
) -> dict[str, Any]:
    """A topic as all groups of a cluster show it; ``ways``: to those that are known to have a broker.

    Shape: as a broker's, with the partitions of all; ``lacking``: the groups that have yet to take the topic over;
    ``silent``: group -> why it was not asked for its partitions, which are left out.
    Errors: those of group 0, which knows whether there is such a topic.
    """

    async def ask(group: int) -> dict[str, Any] | FirnError:
        try:
            if group not in ways:
                raise Unavailable(f"broker group {group} has no broker yet")
            way = ways[group]
            timeout = way.timeout / _SHARE
            answer = await way.request("GET", path_of("topics", name), timeout=timeout)
            found: dict[str, Any] = answer.document()
            return await with_further_partitions(name, way, found, timeout=timeout)
        except FirnError as error:
            if group == FIRST_GROUP:
                raise
            return error

    found = dict(zip(groups, await asyncio.gather(*map(ask, groups)), strict=True))
    documents = [answer for answer in found.values() if isinstance(answer, dict)]
    errors = {group: answer for group, answer in found.items() if isinstance(answer, FirnError)}
    first = documents[0]
    lacking = {group for group, error in errors.items() if isinstance(error, UnknownTopic)}
    rows = [row for document in documents for row in document["partitions"]]
    return {
        **first,
        "partitions": sorted(rows, key=lambda row: int(row["partition"])),
        "lacking": sorted(lacking | set(first.get("lacking", ()))),
        "silent": {str(group): error.message for group, error in errors.items() if group not in lacking},
    }
