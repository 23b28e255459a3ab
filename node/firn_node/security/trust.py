"""What a broker trusts now: its own certificate, CAs, tokens; read from files, and read again when they change.

Invariants:

- a ``Trust`` is whole and never changes: what is half replaced on disk is not taken, the last good one stays in
  force and ``TrustFiles.problem`` says why;
- a new one concerns new connections at once, and every open one at its next request (``Caller.principal``);
  no connection is dropped because a file changed.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from firn.errors import FirnError, Invalid, Unauthorized
from firn.tls import file_stamp
from firn_node.clock import Clock
from firn_node.security.alerts import TellingContext
from firn_node.security.certificates import Authorities, Identity, identify, parse_authorities
from firn_node.security.decision import Principal
from firn_node.security.tokens import TokenTable, parse_tokens
from firn_node.settings import SecuritySettings

log = logging.getLogger("firn.security")

POLL_SECONDS = 2.0
# RFC 8446 and the library agree on these; what a session ticket would save is checked anew instead.
_NO_TICKETS = 0


@dataclass(frozen=True, slots=True)
class Trust:
    context: ssl.SSLContext | None = None
    cluster: Authorities = field(default_factory=Authorities)
    clients: Authorities = field(default_factory=Authorities)
    tokens: TokenTable = field(default_factory=TokenTable)

    def of_certificate(self, der: bytes, now_ms: int) -> Identity:
        """Errors: Unauthorized."""
        return identify(der, self.cluster, self.clients, now_ms=now_ms)

    def of_token(self, digest: bytes, now_ms: int) -> Identity:
        """Errors: Unauthorized; the same for a token that never was and for one that has expired."""
        found = self.tokens.find(digest)
        if found is None or (found.expires_ms is not None and now_ms >= found.expires_ms):
            raise Unauthorized("the token is not known here, or has expired")
        return Identity(found.principal, found.expires_ms)


def load_trust(settings: SecuritySettings) -> Trust:
    """What the files say now. Errors: Invalid, naming the file."""
    settings.check()
    cluster = _authorities(settings.tls_ca)
    clients = _authorities(settings.tls_client_ca)
    tokens = (
        parse_tokens(_read(settings.tokens).decode("utf-8", "replace"), source=settings.tokens)
        if settings.tokens
        else TokenTable()
    )
    return Trust(_server_context(settings), cluster, clients, tokens)


def _authorities(path: str) -> Authorities:
    return parse_authorities(_read(path), source=path) if path else Authorities()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Invalid(f"{path}: {error.strerror or error}") from error


def _server_context(settings: SecuritySettings) -> ssl.SSLContext | None:
    """TLS 1.3. A certificate of the client is asked for where a CA is given, and then checked if it comes."""
    if not settings.has_tls:
        return None
    context = TellingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = _NO_TICKETS
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise Invalid(
            f"tlsCert {settings.tls_cert}, tlsKey {settings.tls_key}: {_why(error)}; expected PEM, of one another"
        ) from error
    for path in filter(None, (settings.tls_ca, settings.tls_client_ca)):
        context.load_verify_locations(path)
        context.verify_mode = ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a file may hold an intermediate CA alone
    return context


def _why(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


class TrustFiles:
    """The trust of a running broker. ``current`` is replaced as a whole."""

    def __init__(self, settings: SecuritySettings, *, poll_seconds: float = POLL_SECONDS) -> None:
        """Errors: Invalid, naming the file."""
        self.settings = settings
        self.problem: str | None = None
        self.reloads = 0
        self._poll_seconds = poll_seconds
        self._stamps = self._look()
        self.current = load_trust(settings)

    def _look(self) -> tuple[object, ...]:
        s = self.settings
        return tuple(file_stamp(p) for p in (s.tls_cert, s.tls_key, s.tls_ca, s.tls_client_ca, s.tokens) if p)

    def reload_if_changed(self) -> bool:
        """Whether there is a new trust. A bad file leaves the old one in force, and is tried again when it changes."""
        stamps = self._look()
        if stamps == self._stamps and self.problem is None:
            return False
        try:
            found = load_trust(self.settings)
        except (FirnError, OSError, ValueError) as error:
            if self.problem != str(error):
                log.warning("what was trusted before stays in force: %s", error)
            self.problem = str(error)
            return False
        self.current, self._stamps, self.problem = found, stamps, None
        self.reloads += 1
        log.info("certificates and tokens were read again")
        return True

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Read again whenever a file changes, until cancelled. Files are read in a thread."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            if await asyncio.to_thread(self.reload_if_changed):
                changed()


class Reviews(Protocol):
    """Tokens that somebody else knows the holders of (``tokenreview``)."""

    async def prepare(self, digest: bytes, token: str) -> None: ...
    def find(self, digest: bytes) -> Principal: ...


@dataclass(slots=True)
class Caller:
    """Who is at the other end, re-proven whenever what is trusted has changed, and when the proof expires.

    ``certificate``: the DER that TLS has checked; ``digest``: of the bearer token. A token counts over a certificate,
    one of the file over one that ``reviews`` knows of.
    """

    files: TrustFiles
    clock: Clock
    certificate: bytes | None = None
    digest: bytes | None = None
    reviews: "Reviews | None" = None
    _trust: Trust | None = None
    _identity: Identity | None = None

    def identity(self) -> Identity | None:
        """None when no credentials were shown. Errors: Unauthorized when those that were are no good (any more)."""
        now_ms = self.clock.wall_ms()
        trust = self.files.current
        known = self._identity
        if trust is not self._trust or (known is not None and known.has_expired(now_ms)):
            self._trust, self._identity = None, None
            known = self._prove(trust, now_ms)
            self._trust, self._identity = trust, known
        return known

    @property
    def _is_reviewed(self) -> bool:
        """Whether its token is not of the file; what reviews know counts for a moment, and is asked for each time."""
        if self.reviews is None or self.digest is None:
            return False
        return self.files.current.tokens.find(self.digest) is None

    def _prove(self, trust: Trust, now_ms: int) -> Identity | None:
        if self.digest is not None:
            return trust.of_token(self.digest, now_ms)
        if self.certificate is not None:
            return trust.of_certificate(self.certificate, now_ms)
        return None

    def principal(self) -> Principal | None:
        """Who it is now; None when no credentials were shown. Errors: as ``identity``; Unavailable when those who could
        say have not said.
        """
        if self._is_reviewed:
            assert self.reviews is not None
            assert self.digest is not None
            return self.reviews.find(self.digest)
        found = self.identity()
        return None if found is None else found.principal
