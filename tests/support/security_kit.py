"""Certificates, tokens and clocks for tests of security."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from firn.tls import Credentials
from firn_node.clock import RealClock
from firn_node.security.localca import Pair, make_ca, make_client, make_node
from firn_node.security.tokens import digest_of
from firn_node.security.trust import SecuritySettings


class SetClock:
    """Wall time as a test sets it."""

    def __init__(self, now: datetime | None = None) -> None:
        self.now = now or datetime.now(UTC)

    def wall_ms(self) -> int:
        return int(self.now.timestamp() * 1000)

    def monotonic(self) -> float:
        return RealClock().monotonic()

    def advance(self, **by: float) -> None:
        self.now += timedelta(**by)


def now() -> datetime:
    return datetime.now(UTC)


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
