"""Ways to broker pods from outside of their network: a ``kubectl port-forward`` for each that is asked for.

A forward starts at the first connection to its address and lasts until it ends by itself, as it does when its pod is gone;
the next connection starts another one. ``Forwards`` is a ``firn.client.dialling.Dial``.
"""

import asyncio
import contextlib
import re
from dataclasses import dataclass

from firn.cli.kube.finding import pod_of
from firn.cli.kube.kubectl import Kubectl

START_S = 20.0  # until kubectl listens
_LISTENS = re.compile(r"Forwarding from (127\.0\.0\.1:\d+) -> \d+")


@dataclass(slots=True)
class _Forward:
    """A child that listens at ``address``. ``reading``: takes what it prints, or it would stand still."""

    process: asyncio.subprocess.Process
    address: str
    reading: list["asyncio.Task[None]"]

    @property
    def is_open(self) -> bool:
        return self.process.returncode is None


class Forwards:
    """The forwards of one command. To be closed in the event loop that used it."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._ways: dict[str, asyncio.Task[_Forward]] = {}

    async def __call__(self, address: str) -> str:
        """Where the broker of this address is reached. *Errors*: ConnectionError, with what kubectl says."""
        way = self._ways.get(address)
        if way is None or (way.done() and not _is_good(way)):
            way = self._ways[address] = asyncio.create_task(self._opened(address), name=f"forward {address}")
        # Who asked may give up earlier: the next who asks finds it open.
        return (await asyncio.shield(way)).address

    async def _opened(self, address: str) -> _Forward:
        pod, port = pod_of(address), address.rpartition(":")[2]
        process = await self._kubectl.start(
            "port-forward", "--address", "127.0.0.1", f"pod/{pod}", f":{port}"
        )
        assert process.stdout is not None
        assert process.stderr is not None
        said: list[str] = []
        reading = [asyncio.create_task(_drain(process.stderr, said))]
        try:
            async with asyncio.timeout(START_S):
                line = (await process.stdout.readline()).decode(errors="replace")
                while line and not (found := _LISTENS.match(line)):
                    line = (await process.stdout.readline()).decode(errors="replace")
        except TimeoutError:
            await _end(process, reading)
            raise ConnectionError(f"kubectl port-forward {pod}: not ready within {START_S:g} s") from None
        except asyncio.CancelledError:
            await _end(process, reading)
            raise
        if not line or found is None:
            await process.wait()
            await asyncio.gather(*reading)
            why = said[-1] if said else f"it ended with exit code {process.returncode}"
            raise ConnectionError(f"kubectl port-forward {pod}: {why}")
        reading.append(asyncio.create_task(_drain(process.stdout, [])))
        return _Forward(process, found[1], reading)

    async def close(self) -> None:
        """End all of them."""
        ways, self._ways = list(self._ways.values()), {}
        for way in ways:
            way.cancel()
        for found in await asyncio.gather(*ways, return_exceptions=True):
            if isinstance(found, _Forward):
                await _end(found.process, found.reading)


def _is_good(way: "asyncio.Task[_Forward]") -> bool:
    return not way.cancelled() and way.exception() is None and way.result().is_open


async def _drain(pipe: asyncio.StreamReader, last: list[str]) -> None:
    """Read to the end; ``last`` holds the last line that said something."""
    while line := await pipe.readline():
        if text := line.decode(errors="replace").strip():
            last[:] = [text]


async def _end(process: asyncio.subprocess.Process, reading: list["asyncio.Task[None]"]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
