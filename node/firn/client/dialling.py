"""Where a broker's address is really reached: at itself, or, from outside of its network, somewhere else.

Brokers name one another by the addresses that they have among themselves, such as a pod's name in the cluster's DNS. A
``Dial`` turns each into the one to connect to: a forwarded port, say. The broker still has to prove by its certificate
that it is the one of the first address, and requests name that one as their host.
"""

import errno
import socket
from collections.abc import Awaitable, Callable

from aiohttp.abc import AbstractResolver, ResolveResult

Dial = Callable[[str], Awaitable[str]]
"""``HOST:PORT`` for ``HOST:PORT``, the host a number, at every new connection. Errors: OSError when there is no way."""


async def direct(address: str) -> str:
    """The address itself."""
    return address


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of ``HOST:PORT``, without the brackets of an IPv6 address. Errors: ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class DialResolver(AbstractResolver):
    """A ``Dial`` as aiohttp takes it: in place of the question to the DNS."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            reached, at = host_and_port(await self._dial(f"{host}:{port}"))
        except OSError as error:  # aiohttp shows the text of the operating system alone
            raise OSError(error.errno or errno.EHOSTUNREACH, error.strerror or str(error)) from error
        family = socket.AF_INET6 if ":" in reached else socket.AF_INET
        return [
            ResolveResult(
                hostname=host, host=reached, port=at, family=family, proto=0, flags=socket.AI_NUMERICHOST
            )
        ]

    async def close(self) -> None:
        """Nothing is held here."""
