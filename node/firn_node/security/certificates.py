"""What a client's certificate says, and whether it is still worth anything.

TLS has proven that the peer has the key, and that some CA of ours signed. This module decides the rest from the
certificate alone, so that it can be asked again whenever CAs or revocations have changed, connections being open:

- it was signed *directly* by a CA of a file (which may hold intermediate ones), that CA is valid and may sign, and
  neither is revoked by a CRL of the file;
- a node's certificate has the SAN URI ``firn://node/NAME``; one with the organisation ``firn:admin`` has the role
  ``admin``. Both count from the cluster's own CA alone: another one, whoever signs with it, cannot make nodes;
- else the principal is the first SAN (URI, e-mail, DNS name), else the CN. Names that begin with ``system:`` or
  ``firn:`` are not taken from certificates: they belong to service accounts, and to firn.

A CRL is an ``X509 CRL`` block in the same PEM file as its CA. One past its next update still revokes what it names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

from firn.access import check_principal
from firn.errors import Invalid, Unauthorized
from firn_node.security.decision import Principal

NODE_URI = "firn://node/"
ADMIN_ORGANISATION = "firn:admin"
RESERVED = ("system:", "firn:")
_PEM_BEGIN, _PEM_END = b"-----BEGIN ", b"-----END "
_Key = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey


@dataclass(frozen=True, slots=True)
class Authorities:
    """The CAs of one file, and what they have revoked."""

    certificates: tuple[x509.Certificate, ...] = ()
    revocations: tuple[x509.CertificateRevocationList, ...] = ()

    def issuer_of(self, certificate: x509.Certificate) -> x509.Certificate | None:
        return next((ca for ca in self.certificates if _has_signed(ca, certificate)), None)

    def has_revoked(self, certificate: x509.Certificate) -> bool:
        return any(
            crl.issuer == certificate.issuer
            and crl.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None
            for crl in self.revocations
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Who credentials speak for, and until when."""

    principal: Principal
    expires_ms: int | None

    def has_expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and now_ms >= self.expires_ms


def parse_authorities(pem: bytes, *, source: str) -> Authorities:
    """The CAs and CRLs of a PEM file.

    Errors: Invalid, naming the file: no CA in it, or a CRL that none of its CAs signed.
    """
    try:
        certificates = tuple(x509.load_pem_x509_certificate(block) for block in _blocks(pem, b"CERTIFICATE"))
        revocations = tuple(x509.load_pem_x509_crl(block) for block in _blocks(pem, b"X509 CRL"))
    except ValueError as error:
        raise Invalid(f"{source}: {error}; expected PEM") from error
    if not certificates:
        raise Invalid(f"{source}: holds no certificate; expected PEM")
    for crl in revocations:
        if not any(_signed_crl(ca, crl) for ca in certificates):
            raise Invalid(f"{source}: holds a CRL of {crl.issuer.rfc4514_string()} that no CA in it signed")
    return Authorities(certificates, revocations)


def identify(der: bytes, cluster: Authorities, clients: Authorities, *, now_ms: int) -> Identity:
    """Who a certificate speaks for now. ``cluster``: the cluster's own CAs; ``clients``: further ones for clients.

    Errors: Unauthorized, saying what is wrong with it.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError as error:
        raise Unauthorized(f"the certificate cannot be read: {error}") from None
    in_cluster = cluster.issuer_of(certificate)
    issuer = in_cluster or clients.issuer_of(certificate)
    if issuer is None:
        raise Unauthorized("the certificate was not signed by a CA that is trusted here")
    for what, checked in (("certificate", certificate), ("certificate's CA", issuer)):
        _check_validity(what, checked, now_ms)
        if cluster.has_revoked(checked) or clients.has_revoked(checked):
            raise Unauthorized(f"the {what} is revoked")
    principal = _principal_of(certificate, is_of_cluster=in_cluster is not None)
    ends = min(certificate.not_valid_after_utc, issuer.not_valid_after_utc)
    return Identity(principal, int(ends.timestamp() * 1000))


def _principal_of(certificate: x509.Certificate, *, is_of_cluster: bool) -> Principal:
    names = list(_names(certificate))
    node = next((name.removeprefix(NODE_URI) for name in names if name.startswith(NODE_URI)), None)
    organisations = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    is_admin = any(attribute.value == ADMIN_ORGANISATION for attribute in organisations)
    if (node is not None or is_admin) and not is_of_cluster:
        raise Unauthorized(
            "the certificate is a node's or an administrator's, and not of the cluster's own CA"
        )
    if node is not None:
        return Principal(_checked(node), node=node)
    name = next((name for name in names if name), "")
    if name.startswith(RESERVED):
        raise Unauthorized(f"the certificate's name begins with {' or '.join(RESERVED)}, which none may have")
    return Principal(_checked(name), is_admin=is_admin)


def _checked(name: str) -> str:
    try:
        return check_principal(name, "the certificate's name")
    except Invalid as error:
        raise Unauthorized(error.message) from None


def _names(certificate: x509.Certificate) -> Iterator[str]:
    """SAN URIs, e-mails and DNS names, then the CN."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = None
    except ValueError as error:
        raise Unauthorized(f"the certificate's names cannot be read: {error}") from None
    if names is not None:
        for kind in (x509.UniformResourceIdentifier, x509.RFC822Name, x509.DNSName):
            yield from names.get_values_for_type(kind)
    for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME):
        yield attribute.value if isinstance(attribute.value, str) else ""


def _has_signed(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    try:
        return ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _signed_crl(ca: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    key = ca.public_key()
    return crl.issuer == ca.subject and isinstance(key, _Key) and crl.is_signature_valid(key)


def _check_validity(what: str, certificate: x509.Certificate, now_ms: int) -> None:
    if now_ms >= certificate.not_valid_after_utc.timestamp() * 1000:
        raise Unauthorized(f"the {what} has expired")
    if now_ms < certificate.not_valid_before_utc.timestamp() * 1000:
        raise Unauthorized(f"the {what} is not valid yet")


def _blocks(pem: bytes, label: bytes) -> Sequence[bytes]:
    """The PEM blocks of one kind; text between blocks is passed over."""
    begin, end = _PEM_BEGIN + label + b"-----", _PEM_END + label + b"-----"
    found = []
    at = 0
    while (start := pem.find(begin, at)) >= 0:
        stop = pem.find(end, start)
        if stop < 0:
            raise ValueError(f"a {label.decode()} block has no end")
        at = stop + len(end)
        found.append(pem[start:at] + b"\n")
    return found
