"""What a client makes of a switchover that brokers have agreed to: it waits for the new master, and no longer."""

import asyncio
import json
from typing import Any

import pytest

from firn.client.operating import switch_over
from firn.client.transport import Answer
from firn.errors import Unavailable

Row = dict[str, Any]


def row(role: str, epoch: int, state: str = "serving") -> Row:
    return {
        "node": "b", "group": 0, "address": "b:1", "role": role, "epoch": epoch, "state": state, "reason": None,
    }  # fmt: skip


class Brokers:
    """``b`` is made master in epoch 5; then its status shows one row after another, the last one for ever."""

    timeout = 60.0

    def __init__(self, *rows: Row) -> None:
        self._rows = list(rows)
        self.asked = 0

    async def ask_once(self, address: str, path: str, *, method: str = "GET", **_: Any) -> Answer:
        if method == "POST":
            return _answer(
                {"group": 0, "from": "a", "to": "b", "address": "b:1", "epoch": 5, "forced": False}
            )
        self.asked += 1
        return _answer({"brokers": [self._rows.pop(0) if len(self._rows) > 1 else self._rows[0]]})

    async def status(self) -> Row:
        return {"brokers": [row("master", 4) | {"node": "a", "address": "a:1"}, row("standby", 4)]}

    async def switched(self) -> Row:
        transport: Any = self
        return await switch_over(transport, self.status, 0, to="b", accept_data_loss=False)


def _answer(document: Any) -> Answer:
    return Answer(200, {}, json.dumps(document).encode())


def test_a_switchover_ends_when_the_new_master_takes_writes() -> None:
    brokers = Brokers(row("standby", 4), row("standby", 5), row("master", 5, "starting"), row("master", 5))
    assert asyncio.run(brokers.switched())["to"] == "b"
    assert brokers.asked == 4


def test_a_switchover_to_a_node_that_is_replaced_at_once_is_not_waited_for() -> None:
    """A busy machine may hold the new master up until its lease is over; it need never be master again."""
    brokers = Brokers(row("standby", 4), row("standby", 6))
    with pytest.raises(Unavailable, match="b was made master in epoch 5, and somebody else has been elected"):
        asyncio.run(asyncio.wait_for(brokers.switched(), 30))
