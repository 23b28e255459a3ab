"""TLS contexts of a broker that tell a peer why they refuse its handshake.

OpenSSL makes an alert of a handshake that fails, and asyncio closes the connection without sending it: who has shown a
certificate that has expired, or that another CA has signed, sees a connection that ended. Here the alert is sent, as
far as the socket takes it at once; nobody waits for a peer that is refused.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextvars import ContextVar

_accepted: ContextVar[socket.socket | None] = ContextVar("accepted", default=None)


@contextlib.contextmanager
def told_over(connection: socket.socket) -> Iterator[None]:
    """A handshake that begins within, on a transport made within, tells its refusal over this socket."""
    token = _accepted.set(connection)
    try:
        yield
    finally:
        _accepted.reset(token)


class _Telling(ssl.SSLObject):
    outgoing: ssl.MemoryBIO | None = None
    connection: socket.socket | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if self.outgoing is not None and self.connection is not None:
                with contextlib.suppress(OSError):
                    self.connection.send(self.outgoing.read())
            raise


class TellingContext(ssl.SSLContext):
    """As its parent, for ``asyncio``'s transports."""

    sslobject_class = _Telling

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        found = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(found, _Telling):
            found.outgoing, found.connection = outgoing, _accepted.get()
        return found
