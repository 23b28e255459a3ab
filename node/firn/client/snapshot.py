"""``Snapshot``: one exact state of a topic, pinned at the broker under a lease that is renewed while it is open."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from firn.client.routes import Target
from firn.client.transport import Transport, path_of
from firn.errors import FirnError, SnapshotExpired

log = logging.getLogger(__name__)

RENEW_S = 120.0  # a fifth of the lease of 10 min: four may be missed


class Snapshot:
    """``async with await client.snapshot(topic) as snapshot``; read it by ``client.reader(topic, snapshot=snapshot)``."""

    def __init__(self, topic: str, parts: Sequence[tuple[Transport, dict[str, Any]]]) -> None:
        """``parts``: what each of the topic's broker groups holds of it, in their order."""
        self.topic = topic
        self.ids = tuple(str(document["id"]) for _, document in parts)
        self.ends = {
            int(p): int(found["end"]) for _, document in parts for p, found in document["partitions"].items()
        }
        self._transports = [transport for transport, _ in parts]
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def id(self) -> str:
        """Its name at the broker; of several broker groups their names, parted by commas."""
        return ",".join(self.ids)

    @classmethod
    async def open(cls, topic: str, target: Target) -> Self:
        """Of several broker groups each part is exact; between them there is no order anyway.

        *Effects*: where a group refuses its part, the parts of the others are given back.
        """
        path = path_of("topics", topic, "snapshots")
        asked = (transport.request("POST", path) for transport in target.transports)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        parts = [
            (transport, answer.document())
            for transport, answer in zip(target.transports, answers, strict=True)
            if not isinstance(answer, BaseException)
        ]
        opened = cls(topic, parts)
        for answer in answers:
            if isinstance(answer, BaseException):
                with suppress(FirnError):  # what cannot be given back ends with its lease
                    await opened.close()
                raise answer
        return opened

    async def renew(self) -> None:
        """Take the lease anew. Errors: SnapshotExpired or NotFound when it is gone."""
        for transport, id in zip(self._transports, self.ids, strict=True):
            await transport.request("PUT", path_of("topics", self.topic, "snapshots", id))

    async def close(self) -> None:
        """Let the brokers drop what the snapshot pins; one that does not answer keeps no other from it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        ways = zip(self._transports, self.ids, strict=True)
        asked = (way.request("DELETE", path_of("topics", self.topic, "snapshots", id)) for way, id in ways)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not _is_gone(answer):
                raise answer

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self.renew()
            except FirnError as error:  # reads will say so when it is gone
                log.warning("snapshot %s of %s was not renewed: %s", self.id, self.topic, error.message)

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew_for_ever(), name=f"firn snapshot {self.id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, SnapshotExpired) or (isinstance(error, FirnError) and error.status == 404)
