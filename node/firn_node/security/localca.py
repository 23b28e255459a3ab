"""Certificates of a local cluster: a throw-away CA, one certificate a node, and one for the person at the keyboard.

::

    FOLDER/ca.crt ca.key          the CA, valid for a year
    FOLDER/<node>.crt .key        a node's: SAN ``firn://node/<node>``, localhost, 127.0.0.1, ::1; 90 days
    FOLDER/admin.crt admin.key    a client's, with the role admin; 90 days

Keys are readable by their owner alone. ``ensure`` renews what has lived two thirds of its life; when it renews the
CA, ``ca.crt`` keeps the old one beside the new one until that has expired, so that certificates of both are taken.
"""

import asyncio
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from firn.errors import Invalid
from firn_node.clock import Clock
from firn_node.disk import Disk, read_file, replace_file
from firn_node.security.certificates import ADMIN_ORGANISATION, NODE_URI, parse_authorities
from firn_node.settings import SecuritySettings

CA_DAYS = 365
CERTIFICATE_DAYS = 90
CHECK_SECONDS = 3600.0  # how often a running cluster looks whether a renewal is due
ADMIN = "admin"
_BACKDATED = timedelta(minutes=5)  # for clocks that lag behind
_CLIENT, _SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Paths of what ``ensure`` made."""

    folder: str

    @property
    def ca(self) -> str:
        return f"{self.folder}/ca.crt"

    def certificate(self, name: str) -> str:
        return f"{self.folder}/{name}.crt"

    def key(self, name: str) -> str:
        return f"{self.folder}/{name}.key"


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def ensure(disk: Disk, folder: str, nodes: Sequence[str], clock: Clock) -> LocalFiles:
    """The files for these nodes, made or renewed where that is due.

    Effects: durable on return; a key is written before the certificate that needs it.
    """
    disk.make_folder(folder)
    files = LocalFiles(folder)
    now = datetime.fromtimestamp(clock.wall_ms() / 1000, UTC)
    ca = _kept(disk, files, "ca", now, None)
    if ca is None:
        ca = make_ca("firn local cluster", now)
        replace_private(disk, files.key("ca"), ca.key_pem())
        replace_file(disk, files.ca, ca.certificate_pem() + _still_trusted(disk, files.ca, now))
    for name in nodes:
        if _kept(disk, files, name, now, ca) is None:
            _write(disk, files, name, make_node(ca, name, now))
    if _kept(disk, files, ADMIN, now, ca) is None:
        _write(disk, files, ADMIN, make_client(ca, ADMIN, now, is_admin=True))
    return files


async def keep(
    disk: Disk, folder: str, nodes: Sequence[str], clock: Clock, *, check_seconds: float = CHECK_SECONDS
) -> None:
    """Renew what is due for as long as a cluster runs, until cancelled; its processes watch their files."""
    while True:
        await asyncio.sleep(check_seconds)
        await asyncio.to_thread(ensure, disk, folder, nodes, clock)


def secured(security: SecuritySettings, files: LocalFiles, node: str) -> SecuritySettings:
    """The settings of a node of the local cluster.

    Errors: Invalid when they name certificates already.
    """
    if security.has_tls or security.tls_ca:
        raise Invalid("a local cluster makes its own certificates: leave out tlsCert, tlsKey and tlsCa")
    return replace(
        security,
        tls_cert=files.certificate(node),
        tls_key=files.key(node),
        tls_ca=files.ca,
        local_ca=files.folder,
    )


def make_ca(name: str, now: datetime, *, days: int = CA_DAYS) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # A number in the name keeps two CAs of one cluster apart.
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {x509.random_serial_number():x}"[:64])]
    )
    builder = _builder(subject, key, now, days).issuer_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_ca=True), critical=True)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def make_node(ca: Pair, node: str, now: datetime, *, days: int = CERTIFICATE_DAYS) -> Pair:
    """A node's certificate: a server for clients, a server and a client for other nodes."""
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(f"{NODE_URI}{node}"),
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
    ]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    return _issued(ca, subject, names, [_SERVER, _CLIENT], now, days)


def make_client(
    ca: Pair, name: str, now: datetime, *, is_admin: bool = False, days: int = CERTIFICATE_DAYS
) -> Pair:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if is_admin:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, ADMIN_ORGANISATION))
    return _issued(ca, x509.Name(attributes), [], [_CLIENT], now, days)


def replace_private(disk: Disk, path: str, data: bytes) -> None:
    """As ``replace_file``, readable by the owner alone from its first byte on."""
    before = os.umask(0o077)
    try:
        replace_file(disk, path, data)
    finally:
        os.umask(before)


def _issued(
    ca: Pair,
    subject: x509.Name,
    names: Sequence[x509.GeneralName],
    purposes: list[x509.ObjectIdentifier],
    now: datetime,
    days: int,
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(subject, key, now, days).issuer_name(ca.certificate.subject)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_ca=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = builder.add_extension(authority, critical=False)
    return Pair(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _kept(disk: Disk, files: LocalFiles, name: str, now: datetime, ca: Pair | None) -> Pair | None:
    """The pair that is there, unless it is damaged, due for renewal, or not of this CA."""
    try:
        certificate = x509.load_pem_x509_certificate(read_file(disk, files.certificate(name)))
        key = serialization.load_pem_private_key(read_file(disk, files.key(name)), None)
    except (OSError, ValueError):
        return None
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    is_due = now >= start + (end - start) * 2 / 3
    if (
        is_due
        or not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != certificate.public_key()
    ):
        return None
    if ca is not None and certificate.issuer != ca.certificate.subject:
        return None
    return Pair(certificate, key)


def _still_trusted(disk: Disk, path: str, now: datetime) -> bytes:
    """The CAs of the file as it was that have not expired."""
    try:
        known = parse_authorities(read_file(disk, path), source=path).certificates
    except (OSError, Invalid):
        return b""
    return b"".join(
        ca.public_bytes(serialization.Encoding.PEM) for ca in known if ca.not_valid_after_utc > now
    )


def _write(disk: Disk, files: LocalFiles, name: str, pair: Pair) -> None:
    replace_private(disk, files.key(name), pair.key_pem())
    replace_file(disk, files.certificate(name), pair.certificate_pem())
