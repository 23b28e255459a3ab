"""Ranges of files to a socket without a copy through this process.

``os.sendfile`` on a duplicate of the socket's descriptor: asyncio's own ``loop.sendfile`` is missing from
uvloop, and both loops refuse to watch a descriptor that a transport owns, but not its duplicate. Invariants:
nothing goes past the transport while it still buffers bytes of the same answer; the transport's water marks and
the duplicate are put back whatever happens.
"""

import asyncio
import errno
import os
from collections.abc import Coroutine
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from firn.errors import Corrupt
from firn_node.filecache import FileRange

# Below this a copy costs less than the two loop turns of waiting for an empty buffer.
SENDFILE_BYTES_MIN = 64 << 10
CHUNK_BYTES = 256 << 10


def read_whole(part: FileRange, at: int, size: int) -> bytes:
    """``size`` bytes from ``at`` of a range. *Errors*: Corrupt when the file ends before."""
    found = part.lease.file.pread(size, part.start + at)
    if len(found) != size:
        path = part.lease.path
        raise Corrupt(
            f"{path} at byte {part.start + at}: expected {size} bytes, found {len(found)}",
            file=path, position=part.start + at,
        )  # fmt: skip
    return found


async def send_range(
    request: web.BaseRequest, writer: AbstractStreamWriter, part: FileRange, *, stall_seconds: float
) -> int:
    """Send the whole range; how many of its bytes went by sendfile.

    Errors: ConnectionResetError when the peer has gone or takes nothing for ``stall_seconds``; Corrupt.
    """
    descriptor = part.lease.file.fileno()
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the connection is lost")
    socket = transport.get_extra_info("socket")
    encrypted = transport.get_extra_info("sslcontext") is not None
    if descriptor is None or socket is None or encrypted or part.size < SENDFILE_BYTES_MIN:
        await _send_copied(writer, part, stall_seconds)
        return 0
    await _empty_buffer(transport, writer, stall_seconds)
    duplicate = os.dup(socket.fileno())
    try:
        await _send_direct(transport, duplicate, descriptor, part, stall_seconds)
    finally:
        os.close(duplicate)
    return part.size


async def _send_copied(writer: AbstractStreamWriter, part: FileRange, stall_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    for at in range(0, part.size, CHUNK_BYTES):
        size = min(CHUNK_BYTES, part.size - at)
        await guarded(
            writer.write(await loop.run_in_executor(None, read_whole, part, at, size)), stall_seconds
        )


async def _empty_buffer(
    transport: asyncio.Transport, writer: AbstractStreamWriter, stall_seconds: float
) -> None:
    """Wait until everything written before is in the kernel."""
    transport.set_write_buffer_limits(high=0)
    try:
        while transport.get_write_buffer_size():
            await asyncio.sleep(0)  # uvloop writes at the end of the turn
            await guarded(writer.drain(), stall_seconds)
    finally:
        transport.set_write_buffer_limits()


async def _send_direct(
    transport: asyncio.Transport, socket: int, file: int, part: FileRange, stall_seconds: float
) -> None:
    sent = 0
    while sent < part.size:
        if transport.is_closing():
            raise ConnectionResetError("the connection is lost")
        try:
            count = os.sendfile(socket, file, part.start + sent, min(part.size - sent, 1 << 20))
        except (BlockingIOError, InterruptedError):
            await _writable(socket, stall_seconds)
            continue
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNABORTED):
                raise ConnectionResetError("the connection is lost") from error
            raise
        if count == 0:
            read_whole(part, sent, part.size - sent)  # the file ends early: this says where
        sent += count


async def _writable(socket: int, stall_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(socket, _set, ready)
    try:
        await guarded(ready, stall_seconds)
    finally:
        loop.remove_writer(socket)


def _set(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


async def guarded(writing: "asyncio.Future[None] | Coroutine[Any, Any, None]", stall_seconds: float) -> None:
    """Wait for a write; a peer that takes nothing for so long is as good as gone."""
    try:
        async with asyncio.timeout(stall_seconds):
            await writing
    except TimeoutError:
        raise ConnectionResetError(f"the peer took no byte for {stall_seconds:g} s") from None
