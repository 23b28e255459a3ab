"""The status of a whole cluster: every broker that is given, and every one that those know of, asked at once.

Shape: ``brokers``, a row a replica by group and name; one that does not answer has the state ``unreachable`` and the
reason, with what the others know of it. ``groups``: the newest record of each. ``topics``: as their masters show them;
of a group without a master nothing is shown. ``security``: of a broker that has a problem with it, if one has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from firn.errors import FirnError, InvariantBroken

Document = dict[str, Any]
_UNKNOWN = (
    "pid", "epoch", "committed_position", "log_start", "log_end", "lag_bytes", "lag_seconds",
)  # fmt: skip


async def cluster_status(addresses: Iterable[str], ask: Callable[[str], Awaitable[Any]]) -> Document:
    """``ask`` gives one broker's own status. Errors: that of the first address, when no broker answers."""
    answers: dict[str, Document | FirnError] = {}
    wanted = list(dict.fromkeys(addresses))
    while wanted:
        found = await asyncio.gather(*(_asked(address, ask) for address in wanted))
        answers.update(zip(wanted, found, strict=True))
        known = [member["address"] for group in _groups(answers.values()) for member in group["members"]]
        wanted = [address for address in dict.fromkeys(known) if address not in answers]
    if not any(isinstance(answer, dict) for answer in answers.values()):
        raise next(answer for answer in answers.values() if isinstance(answer, FirnError))
    return merged(answers)


async def _asked(address: str, ask: Callable[[str], Awaitable[Any]]) -> Document | FirnError:
    try:
        answer = await ask(address)
    except FirnError as error:
        return error
    if isinstance(answer, dict) and isinstance(answer.get("brokers"), list):
        return answer
    return InvariantBroken(f"{address} answered with {str(answer)[:200]!r} where a status belongs")


def merged(answers: dict[str, Document | FirnError]) -> Document:
    """One document of all answers, by address."""
    documents = [answer for answer in answers.values() if isinstance(answer, dict)]
    groups = sorted(_groups(documents), key=lambda group: group["group"])
    rows = {(row["group"], row["node"], row["address"]): row for d in documents for row in d["brokers"]}
    shown = {address for _, _, address in rows}
    members = {member["address"]: (group, member) for group in groups for member in group["members"]}
    silent = [
        _unreachable(address, answer, *members.get(address, (None, None)))
        for address, answer in answers.items()
        if isinstance(answer, FirnError) and address not in shown
    ]
    brokers = sorted([*rows.values(), *silent], key=lambda row: (row["group"] or 0, row["node"] or "~"))
    securities = [document["security"] for document in documents if "security" in document]
    security = next((found for found in securities if found.get("problem")), next(iter(securities), None))
    return {"brokers": brokers, "groups": groups, "topics": _topics(documents), "security": security}


def _groups(answers: Iterable[Document | FirnError]) -> list[Document]:
    """The newest record of each group; what its master says of it first."""
    newest: dict[int, Document] = {}
    for answer in answers:
        for group in answer.get("groups", ()) if isinstance(answer, dict) else ():
            known = newest.get(group["group"])
            if known is None or _newness(known) < _newness(group):
                newest[group["group"]] = group
    return list(newest.values())


def _newness(group: Document) -> tuple[int, bool, int]:
    """By epoch, then those that know how far the members are, then by version."""
    return group["epoch"], any(m["lag_bytes"] is not None for m in group["members"]), group["version"]


def _unreachable(address: str, error: FirnError, group: Document | None, member: Document | None) -> Document:
    row = {
        "node": member and member["node"], "pid": None, "group": group and group["group"], "role": "none", "epoch": None,
        "address": address, "in_sync": bool(member and member["in_sync"]), **dict.fromkeys(_UNKNOWN),
        "state": "unreachable", "read_only": False, "reason": error.message,
    }  # fmt: skip
    if member is not None:
        row |= {"lag_bytes": member["lag_bytes"], "lag_seconds": member["lag_seconds"]}
    return row


def _topics(documents: list[Document]) -> list[Document]:
    """The topics of all masters, by name; each partition as the first of them shows it."""
    topics: dict[str, Document] = {}
    for document in documents:
        if not any(row["role"] == "master" for row in document["brokers"]):
            continue
        for topic in document["topics"]:
            known = topics.setdefault(topic["name"], {**topic, "partitions": []})
            numbers = {row["partition"] for row in known["partitions"]}
            known["partitions"] += [row for row in topic["partitions"] if row["partition"] not in numbers]
    for topic in topics.values():
        topic["partitions"].sort(key=lambda row: row["partition"])
    return [topics[name] for name in sorted(topics)]
