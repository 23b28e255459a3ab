"""Blocks of standard input for an event loop, as they arrive, in bounded memory."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator

BLOCK_BYTES = 1 << 20
AHEAD = 2  # blocks read before they are asked for


async def stdin_blocks(fd: int = 0) -> AsyncIterator[bytes]:
    """The blocks of ``fd`` until its end: what a read gives at once, so that a slow writer's line is not held back.

    The reading thread is a daemon: one that waits for input does not keep the process from ending.

    Errors: OSError of the read.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)

    def read() -> None:
        block: bytes | OSError = b"-"
        while block and not isinstance(block, OSError):
            room.acquire()
            try:
                block = os.read(fd, BLOCK_BYTES)
            except OSError as error:
                block = error
            try:
                loop.call_soon_threadsafe(queue.put_nowait, block)
            except RuntimeError:  # the loop is closed: nobody reads on
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        block = await queue.get()
        room.release()
        if isinstance(block, OSError):
            raise block
        if not block:
            return
        yield block
