"""The cluster's own CA and what it signs: decided from the Secrets that are there and the time, written by the caller.

::

    Secret CLUSTER-ca       tls.crt tls.key   the CA that signs, a year
                            next.crt next.key the CA that will sign next; it is trusted already
                            old.crt           CAs that signed before, until they expire
    Secret CLUSTER-admin    tls.crt tls.key ca.crt     organisation firn:admin, 90 days
    Secret GROUP-tls        ca.crt, and of each pod POD.crt POD.key, 90 days

Everything is renewed at two thirds of its life. A change of CA has three steps, each seen in the Secrets alone, so
that an operator that ends between any two goes on where it was:

1. ``next`` is made; every ``ca.crt`` gets it beside the CA that signs;
2. when all have it, the time is noted (annotation ``firn.dev/ca-stage``); after ``SPREAD`` every kubelet and every broker
   has read it;
3. ``next`` signs from now on: certificates of the CA before are made anew, and that one is trusted until it expires.

A CA whose Secret is lost is followed by a new one in the same way: what it signed is kept until all trust the new one.

Invariant: whatever was written so far, a certificate in any Secret is signed by a CA that every ``ca.crt`` has had for
``SPREAD`` or from its beginning. So no handshake fails on the way.
"""

import base64
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from firn_operator.kube import Obj
from firn_operator.names import (
    STAGE,
    GroupName,
    admin_name,
    bootstrap_name,
    ca_name,
    group_name,
    host_of,
    pod_name,
    tls_name,
)  # fmt: skip
from firn_operator.spec import ClusterSpec

CA_LIFE = timedelta(days=365)
LIFE = timedelta(days=90)
SPREAD = timedelta(
    minutes=10
)  # a kubelet looks every 1 to 2 minutes, a broker every 2 s, both with room to spare
BACKDATED = timedelta(minutes=5)  # for clocks that lag behind
LOOK_AGAIN = timedelta(hours=12)
ADMIN_ORGANISATION, NODE_URI = "firn:admin", "firn://node/"
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        return pem_of(self.certificate)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class SecretWrite:
    """A Secret as it is to be; ``version``: of the one that it takes the place of, None when there is none."""

    name: str
    data: Mapping[str, bytes] = field(repr=False, hash=False)
    version: str | None
    why: str
    group: int | None = None
    stage: str = ""  # when the next CA was known to be trusted everywhere


@dataclass(frozen=True, slots=True)
class CertificatePlan:
    writes: tuple[SecretWrite, ...]
    trust: str  # PEM of what clients are to trust, once the writes are done
    look_again: timedelta


def plan_certificates(
    cluster: ClusterSpec,
    pods: Mapping[int, int],
    secrets: Mapping[str, Obj],
    trust_map: str | None,
    now: datetime,
) -> CertificatePlan:
    """What to write so that every pod has what it needs. ``pods``: how many, by group; ``trust_map``: as published."""
    ca_secret = secrets.get(ca_name(cluster.name))
    writes: list[SecretWrite] = []
    signs, coming = _pair(ca_secret, "tls"), _pair(ca_secret, "next")
    old, stage = _old(ca_secret, now), _stage(ca_secret)
    why = ""
    if signs is None or signs.certificate.not_valid_after_utc <= now:
        signs, coming, old = make_ca(cluster.name, now), None, _known(secrets, now)
        # Where nobody trusts anything yet, nobody has to learn of the new one first.
        stage, why = "" if old else (now - SPREAD).isoformat(), "the cluster has no CA that is valid"
    elif coming is None and is_due(signs.certificate, now):
        coming, stage, why = make_ca(cluster.name, now), "", "the CA is two thirds through its life"
    elif not stage and _is_spread(cluster, pods, secrets, trust_map, bundle_of(signs, coming, old)):
        stage, why = now.isoformat(), "the newest CA is in every bundle"
    elif coming is not None and _is_trusted(stage, now):
        old, signs, coming, why = (*old, signs.certificate), coming, None, "the next CA signs from now on"
    bundle = bundle_of(signs, coming, old)
    good = {signs.certificate.subject}
    if coming is None and not _is_trusted(stage, now):
        good |= {
            each.subject for each in old
        }  # a CA that was lost: what it signed is good until all know the new one
    authority = _Authority(signs, bundle, frozenset(good))
    if why:
        data = _ca_data(signs, coming, old)
        writes.append(SecretWrite(ca_name(cluster.name), data, _version(ca_secret), why, stage=stage))
    if admin := _plan_admin(cluster, secrets, authority, now):
        writes.append(admin)
    for group, count in sorted(pods.items()):
        if write := _plan_group(cluster, group, count, secrets, authority, now):
            writes.append(write)
    waits = not _is_trusted(stage, now)
    return CertificatePlan(tuple(writes), bundle, timedelta(minutes=1) if waits else LOOK_AGAIN)


@dataclass(frozen=True, slots=True)
class _Authority:
    """Who signs, what is trusted, and the names of the CAs whose certificates are still good."""

    signs: Pair
    bundle: str
    good: frozenset[x509.Name]


def _is_trusted(stage: str, now: datetime) -> bool:
    """Whether the newest CA has been in every bundle for long enough."""
    return bool(stage) and now >= datetime.fromisoformat(stage) + SPREAD


def _plan_admin(
    cluster: ClusterSpec, secrets: Mapping[str, Obj], authority: _Authority, now: datetime
) -> SecretWrite | None:
    name = admin_name(cluster.name)
    secret = secrets.get(name)
    kept, bundle = _kept(_pair(secret, "tls"), authority, now), authority.bundle
    if kept is not None and _text(secret, "ca.crt") == bundle:
        return None
    pair = kept or make_admin(authority.signs, now)
    data = {"tls.crt": pair.certificate_pem, "tls.key": pair.key_pem, "ca.crt": bundle.encode()}
    return SecretWrite(
        name,
        data,
        _version(secret),
        "what is trusted changed" if kept else "an administrator's certificate is due",
    )


def _plan_group(
    cluster: ClusterSpec,
    group: int,
    count: int,
    secrets: Mapping[str, Obj],
    authority: _Authority,
    now: datetime,
) -> SecretWrite | None:
    name = group_name(cluster.name, group)
    secret = secrets.get(tls_name(name))
    bundle = authority.bundle
    data: dict[str, bytes] = {"ca.crt": bundle.encode()}
    made = []
    for ordinal in range(count):
        pod = pod_name(name, ordinal)
        pair = _kept(_pair(secret, pod), authority, now)
        if pair is None:
            pair = make_node(authority.signs, pod, hosts_of(cluster, name, pod), now)
            made.append(pod)
        data[f"{pod}.crt"], data[f"{pod}.key"] = pair.certificate_pem, pair.key_pem
    if not made and secret is not None and _text(secret, "ca.crt") == bundle and _keys(secret) >= data.keys():
        return None
    why = f"certificates of {', '.join(made)} are due" if made else "what is trusted changed"
    return SecretWrite(tls_name(name), data, _version(secret), why, group)


def hosts_of(cluster: ClusterSpec, group: GroupName, pod: str) -> list[str]:
    """The names by which a pod is dialled."""
    bootstrap = bootstrap_name(cluster.name)
    host, service = host_of(pod, group, cluster.namespace), f"{bootstrap}.{cluster.namespace}"
    return [
        host, f"{host}.cluster.local", bootstrap, service, f"{service}.svc", f"{service}.svc.cluster.local", "localhost",
    ]  # fmt: skip


def is_due(certificate: x509.Certificate, now: datetime) -> bool:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= start + (end - start) * 2 / 3


def bundle_of(signs: Pair, coming: Pair | None, old: Sequence[x509.Certificate]) -> str:
    """PEM of the CAs to trust, the one that signs first."""
    all_of = [signs.certificate, *([coming.certificate] if coming else []), *old]
    return b"".join(pem_of(each) for each in all_of).decode()


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _is_spread(
    cluster: ClusterSpec,
    pods: Mapping[int, int],
    secrets: Mapping[str, Obj],
    trust_map: str | None,
    bundle: str,
) -> bool:
    """Whether everything that is trusted from has this bundle."""
    names = [admin_name(cluster.name), *(tls_name(group_name(cluster.name, group)) for group in pods)]
    return trust_map == bundle and all(_text(secrets.get(name), "ca.crt") == bundle for name in names)


def _ca_data(signs: Pair, coming: Pair | None, old: Sequence[x509.Certificate]) -> dict[str, bytes]:
    """With empty values where there is nothing, so that what was there before goes."""
    return {
        "tls.crt": signs.certificate_pem, "tls.key": signs.key_pem,
        "next.crt": coming.certificate_pem if coming else b"", "next.key": coming.key_pem if coming else b"",
        "old.crt": b"".join(pem_of(each) for each in old),
    }  # fmt: skip


def _kept(pair: Pair | None, authority: _Authority, now: datetime) -> Pair | None:
    """The pair, unless it is due or not of a CA that is good."""
    if pair is None or is_due(pair.certificate, now):
        return None
    return pair if pair.certificate.issuer in authority.good else None


def _known(secrets: Mapping[str, Obj], now: datetime) -> tuple[x509.Certificate, ...]:
    """CAs that some Secret still trusts: what is left of a CA whose key is lost."""
    found: dict[bytes, x509.Certificate] = {}
    for secret in secrets.values():
        for certificate in _certificates(_text(secret, "ca.crt")):
            if certificate.not_valid_after_utc > now:
                found[pem_of(certificate)] = certificate
    return tuple(found.values())


def _old(secret: Obj | None, now: datetime) -> tuple[x509.Certificate, ...]:
    return tuple(each for each in _certificates(_text(secret, "old.crt")) if each.not_valid_after_utc > now)


def _certificates(pem: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode()) if pem else []
    except ValueError:
        return []


def _pair(secret: Obj | None, name: str) -> Pair | None:
    """A certificate and its key in a Secret; None when they are missing, damaged, or do not belong together."""
    try:
        certificate = x509.load_pem_x509_certificate(_text(secret, f"{name}.crt").encode())
        key = serialization.load_pem_private_key(_text(secret, f"{name}.key").encode(), None)
    except (ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        return None
    return Pair(certificate, key)


def _text(secret: Obj | None, name: str) -> str:
    try:
        return base64.b64decode(((secret or {}).get("data") or {}).get(name) or "").decode()
    except ValueError:
        return ""


def _keys(secret: Obj) -> set[str]:
    return set(secret.get("data") or {})


def _stage(secret: Obj | None) -> str:
    text = str((((secret or {}).get("metadata") or {}).get("annotations") or {}).get(STAGE, ""))
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return ""
    return text


def _version(secret: Obj | None) -> str | None:
    return None if secret is None else str(secret["metadata"].get("resourceVersion", ""))


# Making certificates.


def make_ca(name: str, now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # A number in the name keeps two CAs of one cluster apart.
    common = f"firn {name} {x509.random_serial_number():x}"[:64]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    builder = _builder(subject, key, now, CA_LIFE).issuer_name(subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_ca=True), critical=True)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def make_node(ca: Pair, node: str, hosts: Sequence[str], now: datetime) -> Pair:
    """A broker's: a server for clients, a server and a client for other brokers."""
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(f"{NODE_URI}{node}"), *(x509.DNSName(host) for host in hosts),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]  # fmt: skip
    return _issued(
        ca, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)]), names, [_SERVER, _CLIENT], now
    )


def make_admin(ca: Pair, now: datetime) -> Pair:
    subject = x509.Name([
        x509.NameAttribute(NameOID.COMMON_NAME, "firn-operator"),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, ADMIN_ORGANISATION),
    ])  # fmt: skip
    return _issued(ca, subject, [], [_CLIENT], now)


def _issued(
    ca: Pair,
    subject: x509.Name,
    names: list[x509.GeneralName],
    purposes: list[x509.ObjectIdentifier],
    now: datetime,
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(subject, key, now, LIFE).issuer_name(ca.certificate.subject)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_ca=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = builder.add_extension(authority, critical=False)
    return Pair(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def parse_time(text: str) -> datetime:
    """A time of the API (RFC 3339)."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)
