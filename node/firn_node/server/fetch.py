"""One FETCH of a stream: pages of a partition for as long as the peer gives credit and has not cancelled.

Invariants: DATA is sent for the first page, empty or not, and then whenever bytes or the numbers beside them are
new; a page takes its length of the credit, at least 1, and none is read without credit; a page that was begun is
sent to its end, so a CANCEL leaves no half message at the peer. ``since`` follows the reader: the least horizon
that it was told.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack

from firn import limits
from firn.errors import Invalid
from firn.shown import ANY, MASTER
from firn.wire import Op, frames
from firn_node.engine.api import ReadRequest, ReadResult
from firn_node.security.decision import Action
from firn_node.server.budget import Charge
from firn_node.server.context import Context, ServedBroker
from firn_node.server.outbox import Outbox
from firn_node.server.reads import READ_BYTES_MAX, picked_rows, view_of
from firn_node.server.sendfile import CHUNK_BYTES, read_whole

if TYPE_CHECKING:
    from firn_node.security.guard import Access

_WAIT_MS = 10_000  # one long poll; the next follows
_PAUSE_SECONDS = 0.05  # after a read that came back at once with nothing new
_INT_MAX = (1 << 63) - 1
_FRAME_DATA_BYTES = limits.FRAME_BYTES_MAX - 64


class Fetch:
    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        id: int,
        meta: dict[str, Any],
        access: "Access | None" = None,
    ) -> None:
        """Errors: Invalid, naming the field of ``meta``."""
        self._access = access
        self.task: asyncio.Task[None] | None = None
        self._context = context
        self._outbox = outbox
        self._id = id
        self._request = replace(parse_fetch(meta), floor=floor_of(context.broker, meta))
        self._credit = _integer(meta, "credit", 0, default=1 << 20) or 0
        self._credited = asyncio.Event()
        self._is_sending = False
        self._is_cancelled = False

    def add_credit(self, meta: dict[str, Any]) -> None:
        """Errors: Invalid."""
        self._credit = min(_INT_MAX, self._credit + (_integer(meta, "bytes", 0, default=0) or 0))
        self._credited.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self.task is not None and not self._is_sending:
            self.task.cancel()

    async def run(self) -> None:
        told: tuple[int, ...] | None = None
        wait_ms = 0
        loop = asyncio.get_running_loop()
        while not self._is_cancelled:
            while self._credit <= 0:
                self._credited.clear()
                await self._credited.wait()
            self._check_access()
            asked = loop.time()
            result = await self._context.wait_for_bytes(
                replace(self._request, max_bytes=min(self._request.max_bytes, self._credit), wait_ms=wait_ms)
            )
            try:
                numbers = _numbers(result)
                if result.parts or numbers != told:
                    told = numbers
                    await self._send(result)
                elif loop.time() - asked < _PAUSE_SECONDS:
                    await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                result.release()
            since = self._request.since
            self._request = replace(
                self._request,
                offset=result.next_offset,
                since=result.horizon if since is None else min(since, result.horizon),
            )
            wait_ms = _WAIT_MS

    def _check_access(self) -> None:
        """Before each page: rights and credentials may end while a FETCH goes on. *Errors*: Unauthorized, Forbidden."""
        if self._access is not None:
            self._access.check(Action.READ, self._request.topic, what="FETCH")

    async def _send(self, result: ReadResult) -> None:
        self._is_sending = True
        async with Charge(self._context.reads) as charge:
            await charge.add(sum(len(part) for part in result.parts if isinstance(part, bytes)))
            if result.queue_rows is not None:
                data = b"".join([block async for block in _blocks(result)])
                result = picked_rows(result, data, keys_only=self._request.keys_only)
            size = result.size
            await self._send_page(result, size)
        self._credit -= max(1, size)
        self._is_sending = False

    async def _send_page(self, result: ReadResult, size: int) -> None:
        meta: dict[str, Any] = {
            "topic_id": result.topic_id,
            "next_offset": result.next_offset,
            "end": result.end,
            "horizon": result.horizon,
            "tombstone_floor": result.tombstone_floor,
            "generation": result.generation,
        }
        if self._request.floor is not None:
            meta["shown"] = self._context.broker.shown
        if size <= CHUNK_BYTES:
            data = b"".join([block async for block in _blocks(result)])
            for frame in frames(Op.DATA, self._id, meta, data):
                await self._outbox.put(frame)
            return
        # A large page is read and sent piece by piece: only a block of it is in memory.
        await self._outbox.put(msgpack.packb([Op.DATA, self._id, {**meta, "size": size}, b""]))
        async for block in _blocks(result):
            view = memoryview(block)
            for at in range(0, len(view), _FRAME_DATA_BYTES):
                more = [Op.MORE, self._id, {}, view[at : at + _FRAME_DATA_BYTES]]
                await self._outbox.put(msgpack.packb(more))


async def _blocks(result: ReadResult) -> AsyncIterator[bytes]:
    """The bytes of a read in blocks; files are read off the event loop. *Errors*: Corrupt."""
    loop = asyncio.get_running_loop()
    for part in result.parts:
        if isinstance(part, bytes):
            yield part
            continue
        for at in range(0, part.size, CHUNK_BYTES):
            yield await loop.run_in_executor(None, read_whole, part, at, min(CHUNK_BYTES, part.size - at))


def _numbers(result: ReadResult) -> tuple[int, ...]:
    return (result.topic_id, result.next_offset, result.end, result.horizon, result.tombstone_floor)


def parse_fetch(meta: dict[str, Any]) -> ReadRequest:
    """Errors: Invalid, naming the field."""
    topic, queue = meta.get("topic"), _text(meta, "queue")
    if not isinstance(topic, str):
        raise Invalid(f"FETCH: topic: expected a name, found {topic!r}")
    view = meta.get("view", "compacted" if queue is None else "raw")
    if view not in ("compacted", "raw"):
        raise Invalid(f"FETCH: view: expected compacted or raw, found {view!r}")
    projection = meta.get("projection")
    if projection not in (None, "all", "keys"):
        raise Invalid(f"FETCH: projection: expected all or keys, found {projection!r}")
    return ReadRequest(
        topic=topic,
        partition=_integer(meta, "partition", 0, default=0, most=(1 << 32) - 1) or 0,
        view=view_of(view),
        offset=_integer(meta, "offset", 0, default=0) or 0,
        since=_integer(meta, "since", 0),
        snapshot=_text(meta, "snapshot"),
        queue=queue,
        tag=_text(meta, "tag"),
        keys_only=projection == "keys",
        positions=meta.get("positions") is True,
        max_bytes=min(READ_BYTES_MAX, _integer(meta, "max_bytes", 1, default=1 << 20) or 1),
    )


def floor_of(broker: ServedBroker, meta: dict[str, Any]) -> int | None:
    """How far the reader was shown the log, of a read that any replica may answer. *Errors*: Invalid."""
    read_from, shown = meta.get("read_from", MASTER), _text(meta, "shown") or ""
    if read_from not in (MASTER, ANY):
        raise Invalid(f"read_from: expected master or any, found {read_from!r}")
    return broker.floor_in(shown) if read_from == ANY else None


def _integer(
    meta: dict[str, Any], name: str, least: int, *, default: int | None = None, most: int = _INT_MAX
) -> int | None:
    found = meta.get(name)
    if found is None:
        return default
    if isinstance(found, int) and not isinstance(found, bool) and least <= found <= most:
        return found
    raise Invalid(f"{name}: expected a whole number from {least} to {most}, found {found!r}")


def _text(meta: dict[str, Any], name: str) -> str | None:
    found = meta.get(name)
    if found is None or isinstance(found, str):
        return found
    raise Invalid(f"{name}: expected text, found {found!r}")
