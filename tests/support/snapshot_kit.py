"""Broker groups that hold snapshots and nothing else, to see which of them are held and which are given back."""

import asyncio
from typing import Any

from firn.errors import Unavailable


class Answer:
    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def document(self) -> dict[str, Any]:
        return self._found


class Group:
    """A broker group of one partition, the end of which is at ``end``."""

    def __init__(self, partition: int, *, end: int = 5, is_away: bool = False) -> None:
        self.partition = partition
        self.end = end
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
        return Answer({"id": id, "partitions": {str(self.partition): {"end": self.end}}})


class Brokers:
    """A link, and the topic that it finds."""

    topic_id = 7

    def __init__(self, *transports: Group) -> None:
        self.transports = transports
        self.partitions = len(transports)

    async def target(self, topic: str) -> "Brokers":
        return self
