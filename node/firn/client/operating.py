"""What administrators ask of broker groups: to whom each request goes, and when it has come about."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from firn.client.transport import Transport, path_of
from firn.errors import FirnError, Invalid, Timeout, Unavailable

POLL_S = 0.05
ASK_S = 5.0  # for one look at a broker's status
Document = dict[str, Any]


async def switch_over(
    transport: Transport, status: Callable[[], Awaitable[Document]], group: int, *, to: str | None, accept_data_loss: bool
) -> Document:  # fmt: skip
    """Change a group's master, and wait until the new one takes writes.

    Shape: ``group, from, to, address, epoch, forced`` as the broker answers. Errors: Invalid for what does not exist;
    Unavailable why it was not done, or did not last; Timeout when the new master does not act in time.
    """
    if accept_data_loss and to is None:
        raise Invalid("accepting data loss: name the node whose data shall count")
    rows = [row for row in (await status())["brokers"] if row["group"] == group]
    if not rows:
        raise Invalid(f"no broker here knows of a group {group}")
    if to is not None and all(row["node"] != to for row in rows):
        raise Invalid(f"{to} is no member of group {group}; its members are {_names(rows)}")
    if accept_data_loss:
        address = _address_of_node(rows, to)
        path, body = path_of("cluster", "data-loss"), {"group": group, "node": to}
    else:
        address = _address_of_master(rows, group)
        path, body = path_of("cluster", "switchover"), {"group": group, "to": to}
    deadline = asyncio.get_running_loop().time() + transport.timeout
    answer = await transport.ask_once(address, path, method="POST", body=body, seconds=transport.timeout)
    found: Document = answer.document()
    await _until_master(transport, found, deadline)
    return found


async def rebuild(
    transport: Transport, status: Callable[[], Awaitable[Document]], node: str, *, reason: str
) -> Document:
    """Order a standby to start anew from its master; its row of the status as it was.

    Errors: Invalid for no node, and for a master; Unavailable when it does not answer, or nobody could give its
    records back.
    """
    brokers = (await status())["brokers"]
    row = next((row for row in brokers if row["node"] == node), None)
    if row is None:
        raise Invalid(f"no broker here is named {node}; there are {_names(brokers)}")
    if row["state"] == "unreachable":
        raise Unavailable(f"{node} does not answer: {row['reason']}")
    await transport.ask_once(
        row["address"], path_of("rebuild"), method="POST", body={"reason": reason}, seconds=transport.timeout
    )
    found: Document = row
    return found


def _names(rows: list[Document]) -> str:
    return ", ".join(sorted(row["node"] for row in rows if row["node"]))


def _address_of_master(rows: list[Document], group: int) -> str:
    for row in rows:
        if row["role"] == "master":
            return str(row["address"])
    reasons = "; ".join(f"{row['node']} is {row['state']}" for row in rows)
    raise Unavailable(
        f"group {group} has no master that could hand over ({reasons}); an in-sync standby becomes one by itself"
    )


def _address_of_node(rows: list[Document], to: str | None) -> str:
    [row] = [row for row in rows if row["node"] == to]
    master = next(
        (row["node"] for row in rows if row["role"] == "master" and row["state"] == "serving"), None
    )
    if master is not None:
        raise Unavailable(
            f"{master} is master and serves: no data need be lost; hand over without accepting any loss"
        )
    if row["state"] == "unreachable":
        raise Unavailable(f"{to} does not answer: {row['reason']}")
    return str(row["address"])


async def _until_master(transport: Transport, found: Document, deadline: float) -> None:
    """Return when the new master takes writes. *Errors*: Unavailable when it is none any more; Timeout."""
    why = "it has not answered"
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            answer = await transport.ask_once(
                found["address"], f"{path_of('status')}?limit=1", seconds=min(left, ASK_S)
            )
        except FirnError as error:
            why = error.message
        else:
            [row] = answer.document()["brokers"]
            if row["role"] == "master" and row["state"] == "serving":
                return
            if row["role"] == "standby" and row["epoch"] > found["epoch"]:
                raise Unavailable(
                    f"{found['to']} was made master in epoch {found['epoch']}, and somebody else has been elected since; "
                    "`firn status` shows who, and it can be asked again"
                )
            why = f"its role is {row['role']}; {row['reason']}"
        await asyncio.sleep(POLL_S)
    raise Timeout(f"{found['to']} was made master and does not take writes yet: {why}")
