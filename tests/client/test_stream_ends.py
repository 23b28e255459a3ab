"""A connection that breaks at the worst moment: while a message is leaving."""

import asyncio
from typing import Any, Self, cast

import aiohttp
import pytest

from firn.client.stream import Stream
from firn.errors import Unavailable
from firn.wire import Op


class ResetSocket:
    """A socket whose peer has gone: every send fails, and what is read has not ended yet."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def send_bytes(self, data: Any) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await self.closed.wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        self.closed.set()


def test_a_connection_that_is_reset_while_sending_ends_the_request_as_unavailable() -> None:
    """It once ended as a NameError, which broke the producer for good."""

    async def main() -> None:
        stream = Stream(cast(aiohttp.ClientWebSocketResponse, ResetSocket()), "a:1")
        with pytest.raises(Unavailable, match="while sending"):
            await stream.post(Op.PRODUCE, {}, b"batch")
        assert not stream.is_open
        with pytest.raises(Unavailable):
            await stream.post(Op.PRODUCE, {}, b"batch")
        await stream.close()

    asyncio.run(main())
