"""The port of a broker with TLS or authentication: who comes in, before anything is known about them.

Invariants:

- from its acceptance until it has proven who it is, a connection counts against the bound of its address; past it, a
  connection is cut before its handshake has cost anything;
- a TLS handshake, and then the proof, get ``proof_seconds`` each;
- each connection gets the certificate and the CAs that are trusted when it is accepted: files may change at any time.

asyncio's own servers tell nothing of a connection before its handshake is over: so this one accepts by itself.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from firn_node.security.admission import Admission, Place
from firn_node.security.alerts import told_over
from firn_node.security.trust import TrustFiles

log = logging.getLogger("firn.server")

_BACKLOG = 1024
_PAUSE_SECONDS = 0.2  # after an acceptance that failed: most likely there are no descriptors left

Refused = Callable[[str, str], None]  # a handshake that came to nothing: address and reason
Factory = Callable[
    [Place], asyncio.Protocol
]  # of a connection that leaves its place when it has proven itself


class Door:
    def __init__(
        self,
        files: TrustFiles,
        admission: Admission,
        factory: Factory,
        *,
        refused: Refused,
        proof_seconds: float,
    ) -> None:
        self.files = files
        self.admission = admission
        self.handshakes_failed = 0
        self._factory = factory
        self._refused = refused
        self._proof_seconds = proof_seconds
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the first address. Errors: OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            if self._sockets:
                port = self._sockets[0].getsockname()[1]  # port 0 is the same for all
            try:
                listening = socket.create_server((address[0], port), family=family, backlog=_BACKLOG)
            except OSError:
                self._shut()
                raise
            listening.setblocking(False)
            self._sockets.append(listening)
        for listening in self._sockets:
            self._spawn(self._accept(listening))
        name = self._sockets[0].getsockname()
        return name[0], name[1]

    def close(self) -> None:
        """Take no more connections; handshakes that are under way end."""
        for task in self._tasks:
            task.cancel()
        self._shut()

    def _shut(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # it has gone again
            except OSError as error:
                log.error("no connection can be accepted: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            place = self.admission.enter(peer[0])
            if place is None:
                connection.close()
                continue
            self._spawn(self._let_in(connection, place))

    async def _let_in(self, connection: socket.socket, place: Place) -> None:
        context = self.files.current.context
        protocol = self._factory(place)
        try:
            with told_over(connection):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=context,
                    ssl_handshake_timeout=None if context is None else self._proof_seconds,
                )
        except (OSError, ssl.SSLError) as error:
            self.handshakes_failed += 1
            place.leave()
            if isinstance(error, ssl.SSLError):  # not a probe that only opened the port
                self._refused(place.address, _reason(error))
        except BaseException:
            place.leave()
            raise


def _reason(error: ssl.SSLError) -> str:
    """Why a handshake failed, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    return error.reason or type(error).__name__
