"""Certificates, tokens and clocks for tests of security."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from yarl import URL

from firn.tls import ClientProof, Credentials, client_context
from firn_node.clock import RealClock
from firn_node.security.audit import AuditLog
from firn_node.security.guard import Guard
from firn_node.security.localca import Pair, make_ca, make_client, make_node
from firn_node.security.tokens import digest_of
from firn_node.security.trust import Reviews, TrustFiles
from firn_node.server import ServerSettings, serve
from firn_node.settings import SecuritySettings
from server.serving import Peer


class SetClock:
    """Wall time as a test sets it."""

    def __init__(self, now: datetime | None = None) -> None:
        self.now = now or datetime.now(UTC)
        self._advanced = 0.0

    def wall_ms(self) -> int:
        return int(self.now.timestamp() * 1000)

    def monotonic(self) -> float:
        return RealClock().monotonic() + self._advanced

    def advance(self, **by: float) -> None:
        self.now += timedelta(**by)
        self._advanced += timedelta(**by).total_seconds()

    def set_back(self, **by: float) -> None:
        """As a person does: the time that has passed is another clock's."""
        self.now -= timedelta(**by)


def now() -> datetime:
    return datetime.now(UTC)


AUDIENCE = "firn.dev"


def account_token(name: str, *, audience: Any = AUDIENCE, seconds: float = 3600.0) -> str:
    """A token as the API server makes them, but for its signature; ``seconds``: until it expires."""
    claims = {"aud": [audience], "exp": int(now().timestamp() + seconds), "sub": name}
    parts = ({"alg": "RS256"}, claims, "signature")
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
    )


def account(namespace: str, name: str, *, audience: str = AUDIENCE) -> dict[str, Any]:
    """The status of a TokenReview that knows a service account's token."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    return {
        "authenticated": True, "audiences": [audience],
        "user": {"username": f"system:serviceaccount:{namespace}:{name}", "groups": groups},
    }  # fmt: skip


def revocation_list(ca: Pair, *revoked: Pair) -> bytes:
    """A CRL in PEM."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.certificate.subject)
        .last_update(now())
        .next_update(now() + timedelta(days=1))
    )
    for pair in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(pair.certificate.serial_number)
        builder = builder.add_revoked_certificate(entry.revocation_date(now()).build())
    return builder.sign(ca.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@dataclass
class Site:
    """The files of a broker, and those of whoever connects, in one folder."""

    folder: Path
    ca: Pair = field(default_factory=lambda: make_ca("cluster", now()))
    tokens: dict[str, str] = field(default_factory=dict)  # token -> the rest of its entry, as YAML

    def __post_init__(self) -> None:
        self.write("ca.crt", self.ca.certificate_pem())
        self.save("node", make_node(self.ca, "firn-0", now()))
        self.write_tokens()

    @property
    def settings(self) -> SecuritySettings:
        return SecuritySettings(
            tls_cert=self.path("node.crt"),
            tls_key=self.path("node.key"),
            tls_ca=self.path("ca.crt"),
            tokens=self.path("tokens.yaml"),
        )

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, name: str, data: bytes) -> str:
        """Replaces a file as a rotation does: another one under the same name."""
        fresh = self.folder / f"{name}.new"
        fresh.write_bytes(data)
        fresh.rename(self.folder / name)
        return self.path(name)

    def save(self, name: str, pair: Pair) -> None:
        self.write(f"{name}.key", pair.key_pem())
        self.write(f"{name}.crt", pair.certificate_pem())

    def write_tokens(self) -> None:
        lines = "".join(
            f"  - {{sha256: {digest_of(token).hex()}, {rest}}}\n" for token, rest in self.tokens.items()
        )
        self.write("tokens.yaml", b"tokens:\n" + lines.encode() if lines else b"tokens: []\n")

    def client(self, name: str, *, is_admin: bool = False, pair: Pair | None = None) -> Credentials:
        """Credentials with a client certificate of the cluster's CA, or with another pair."""
        self.save(name, pair or make_client(self.ca, name, now(), is_admin=is_admin))
        return Credentials(self.path("ca.crt"), self.path(f"{name}.crt"), self.path(f"{name}.key"))

    def with_token(self, token: str) -> Credentials:
        return Credentials(self.path("ca.crt"), token=token)


@contextlib.asynccontextmanager
async def guarded(
    site: Site,
    broker: Any,
    *,
    clock: SetClock | None = None,
    settings: ServerSettings | None = None,
    security: SecuritySettings | None = None,
    reviews: Reviews | None = None,
) -> AsyncIterator[Any]:
    """A server with TLS and authentication before ``broker``; its address has a name that certificates hold."""
    clock = clock or SetClock()
    trust = TrustFiles(security or site.settings)
    audit = AuditLog(site.path("audit.log"), clock)
    guard = Guard(trust, clock, broker, audit, reviews)
    server = await serve(broker, host="127.0.0.1", port=0, trust=trust, guard=guard, settings=settings)
    try:
        yield server
    finally:
        await server.stop()
        audit.close()


class Asking:
    """Requests of one holder of credentials, each over the one connection of its session."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._base = f"{'https' if credentials.uses_tls else 'http'}://{address}"
        self._tls = client_context(credentials) if credentials.uses_tls else True
        self.session = aiohttp.ClientSession(
            headers=ClientProof(credentials).headers(), auto_decompress=False
        )

    async def __call__(self, method: str, target: str, **options: Any) -> tuple[int, Any]:
        """Status and body, decoded where it is JSON."""
        url = URL(self._base + target, encoded=True)
        async with self.session.request(method, url, ssl=self._tls, **options) as response:
            body: Any = await response.read()
            if response.content_type == "application/json":
                body = json.loads(body)
            return response.status, body

    @contextlib.asynccontextmanager
    async def stream(self, path: str = "/v1/stream") -> AsyncIterator[Peer]:
        url = f"{self._base}{path}"
        async with self.session.ws_connect(url, max_msg_size=0, ssl=self._tls) as socket:
            yield Peer(socket)

    async def __aenter__(self) -> "Asking":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
