"""``Snapshot``: one exact state of a topic, pinned at the broker under a lease that is renewed while it is open."""

import asyncio
import logging
from types import TracebackType
from typing import Any, Self

from firn.client.transport import Transport, path_of
from firn.errors import FirnError, SnapshotExpired

log = logging.getLogger(__name__)

RENEW_S = 120.0  # a fifth of the lease of 10 min: four may be missed


class Snapshot:
    """``async with await client.snapshot(topic) as snapshot``; read it by ``client.reader(topic, snapshot=snapshot)``."""

    def __init__(self, transport: Transport, topic: str, document: dict[str, Any]) -> None:
        self.topic = topic
        self.id = str(document["id"])
        self.ends = {int(p): int(found["end"]) for p, found in document["partitions"].items()}
        self._transport = transport
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, transport: Transport, topic: str) -> Self:
        answer = await transport.request("POST", path_of("topics", topic, "snapshots"))
        return cls(transport, topic, answer.document())

    async def renew(self) -> None:
        """Take the lease anew. Errors: SnapshotExpired or NotFound when it is gone."""
        await self._transport.request("PUT", path_of("topics", self.topic, "snapshots", self.id))

    async def close(self) -> None:
        """Let the broker drop what the snapshot pins."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            await self._transport.request("DELETE", path_of("topics", self.topic, "snapshots", self.id))
        except FirnError as error:
            if not isinstance(error, SnapshotExpired) and error.status != 404:
                raise

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
