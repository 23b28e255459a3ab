"""The port of a broker: who comes in, before anything is known about them.

Invariants:

- a turn of the event loop takes ``BITE`` connections, the others wait in the kernel: a crowd that comes at once holds
  up who is inside, and the lease of a master, by no more than a few handshakes a turn;
- where something is to be proven, a connection counts against the bound of its address from its acceptance until it
  has proven who it is; past the bound it is cut before its handshake has cost anything;
- a TLS handshake, and then the proof, get ``proof_seconds`` each;
- each connection gets the certificate and the CAs that are trusted when it is accepted: files may change at any time;
- what was accepted is a transport in the end, or closed: when the port closes in the same turn, too.

asyncio's own servers tell nothing of a connection before its handshake is over, take up to a thousand a turn, and lose
one that they accept in the turn in which they are closed (CPython issue 109564): so this one accepts by itself.
"""

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from firn_node.security.admission import Admission, Place
from firn_node.security.alerts import told_over

if TYPE_CHECKING:
    from firn_node.security.trust import TrustFiles

log = logging.getLogger("firn.server")

BITE = 8  # connections a turn: a handshake with TLS takes about a millisecond
_BACKLOG = 1024
_PAUSE_SECONDS = 0.2  # after an acceptance that failed: most likely there are no descriptors left

Refused = Callable[[str, str], None]  # a handshake that came to nothing: address and reason
Factory = Callable[
    [Place], asyncio.Protocol
]  # of a connection that leaves its place when it has proven itself


class Door:
    """``files``: None for a port without TLS."""

    def __init__(
        self,
        files: "TrustFiles | None",
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
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._coming: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the first address. Errors: OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
            self._listen(listening)
        name = self._sockets[0].getsockname()
        return name[0], name[1]

    async def close(self) -> None:
        """Take no more connections, and end the handshakes that are under way."""
        self._shut()
        coming = list(self._coming)
        if self.files is not None:  # a plain one is there a turn later, whatever its peer does
            for task in coming:
                task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

    def _shut(self) -> None:
        for listening in self._sockets:
            if (resting := self._resting.pop(listening, None)) is not None:
                resting.cancel()
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()

    def _listen(self, listening: socket.socket) -> None:
        self._resting.pop(listening, None)
        self._loop.add_reader(listening, self._take, listening)

    def _take(self, listening: socket.socket) -> None:
        """Let in who waits, so many that the turn stays short."""
        for _ in range(BITE):
            try:
                connection, peer = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it has gone again
            except OSError as error:
                log.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(listening)
                self._resting[listening] = self._loop.call_later(_PAUSE_SECONDS, self._listen, listening)
                return
            connection.setblocking(False)
            place = self.admission.enter(peer[0])
            if place is None:
                connection.close()
                continue
            task = self._loop.create_task(self._let_in(connection, place))
            self._coming.add(task)
            task.add_done_callback(functools.partial(self._came, connection, place))

    def _came(self, connection: socket.socket, place: Place, task: asyncio.Task[None]) -> None:
        self._coming.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a connection could not be let in", exc_info=error)
        if (
            task.cancelled() or error is not None
        ):  # before its first step, maybe: then nobody else knows of it
            place.leave()
            connection.close()

    async def _let_in(self, connection: socket.socket, place: Place) -> None:
        context = None if self.files is None else self.files.current.context
        protocol = self._factory(place)
        try:
            with told_over(connection):
                await self._loop.connect_accepted_socket(
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


def _reason(error: ssl.SSLError) -> str:
    """Why a handshake failed, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    return error.reason or type(error).__name__
