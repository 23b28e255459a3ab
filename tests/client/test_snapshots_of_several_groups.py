"""A snapshot of a topic in several broker groups: all of its parts, or none."""

import asyncio
from typing import Any

import pytest

from firn.client.snapshot import Snapshot
from firn.errors import Unavailable


class Answer:
    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def document(self) -> dict[str, Any]:
        return self._found


class Group:
    """A broker group of one partition that holds snapshots."""

    def __init__(self, partition: int, *, is_away: bool = False) -> None:
        self.partition = partition
        self.is_away = is_away
        self.held: set[str] = set()

    async def request(self, method: str, path: str) -> Answer:
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("nobody answers")
        if method == "DELETE":
            self.held.remove(path.rpartition("/")[2])
            return Answer({})
        id = f"s{self.partition}"
        self.held.add(id)
        return Answer({"id": id, "partitions": {str(self.partition): {"end": self.partition + 5}}})


class Brokers:
    def __init__(self, *transports: Group) -> None:
        self.transports = transports


def opened(brokers: Any) -> Snapshot:
    return asyncio.run(Snapshot.open("t", brokers))


def test_a_snapshot_has_the_parts_of_all_groups_in_their_order() -> None:
    brokers = Brokers(Group(0), Group(1))
    found = opened(brokers)
    assert (found.id, found.ends) == ("s0,s1", {0: 5, 1: 6})
    assert [group.held for group in brokers.transports] == [{"s0"}, {"s1"}]


def test_the_parts_of_the_others_are_given_back_when_a_group_is_away() -> None:
    brokers = Brokers(Group(0), Group(1, is_away=True), Group(2))
    with pytest.raises(Unavailable, match="nobody answers"):
        opened(brokers)
    assert [group.held for group in brokers.transports] == [set(), set(), set()]
