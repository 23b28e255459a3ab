"""Drill 37 on real nodes: a cluster's CA and every certificate are made anew under load, while operators die.

A year passes in a minute: the CA is put in its place again as it would be at two thirds of its life, and the time in
which its successor was trusted everywhere is dated back, once it truly is.
"""

import base64
import http.client
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cluster.bare import BareCluster
from cluster.fixtures import breakable
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from shop_kit import UNREACHABLE_PEERS, Shop
from shop_operators import kill_operators, until_led

from firn_operator.certificates import CA_LIFE, SPREAD, Pair, make_admin
from firn_operator.names import CLIENT_PORT, STAGE

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,  # a kubelet looks for changed Secrets now and then
    pytest.mark.usefixtures("whole"),
    pytest.mark.filterwarnings(UNREACHABLE_PEERS),
]
SECONDS = 300.0


@pytest.fixture
def bare(shop: Shop) -> BareCluster:
    return breakable(shop.cluster)


def test_a_new_ca_and_new_certificates_come_without_an_error_of_a_client(
    shop: Shop, bare: BareCluster, tmp_path: Path
) -> None:
    pods = [f"{shop.group}-{ordinal}" for ordinal in range(3)]
    with shop.load() as load:
        _change_ca(shop, {"tls.crt": _aged(_pair(shop, "tls"))})
        until_led(bare, not_by=kill_operators(bare))
        bare.until(lambda: _stage(shop), "every Secret has the next CA", seconds=SECONDS)
        coming = _pair(shop, "next")
        shown = tmp_path / "signed-by-the-next.pem"
        admin = make_admin(coming, datetime.now(UTC))
        shown.write_bytes(admin.certificate_pem + admin.key_pem)
        for pod in pods:
            bare.until(lambda p=pod: _lets_in(shop, p, shown), f"{pod} trusts the next CA", seconds=SECONDS)
        shop.write_credentials()
        load.until_more()
        _date_back(shop)
        until_led(bare, not_by=kill_operators(bare))
        for pod in pods:
            bare.until(
                lambda p=pod: _issuer_of(shop, p) == coming.certificate.subject,
                f"{pod} shows a certificate of the new CA",
                seconds=SECONDS,
            )
            load.until_more()
        shop.write_credentials()
        successor = next(name for name in shop.in_sync() if name != shop.master())
        shop.switch_over(successor)
        load.until_more()
    assert load.refused == []
    assert _pair(shop, "tls").certificate == coming.certificate
    shop.until_in_sync(3)
    print(f"gap {load.gap_seconds:.1f} s, {load.total():,} records")


def _pair(shop: Shop, name: str) -> Pair:
    data = shop.secret(f"{shop.name}-ca")["data"]
    key = serialization.load_pem_private_key(base64.b64decode(data[f"{name}.key"]), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Pair(x509.load_pem_x509_certificate(base64.b64decode(data[f"{name}.crt"])), key)


def _aged(ca: Pair) -> bytes:
    """The same CA, made four fifths of its life ago."""
    old, begun = ca.certificate, datetime.now(UTC) - CA_LIFE * 0.8
    builder = x509.CertificateBuilder().subject_name(old.subject).issuer_name(old.issuer)
    builder = builder.public_key(old.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(begun).not_valid_after(begun + CA_LIFE)
    for each in old.extensions:
        builder = builder.add_extension(each.value, each.critical)
    return builder.sign(ca.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _change_ca(shop: Shop, data: dict[str, bytes]) -> None:
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    shop.cluster.api.patch(_path(shop), {"data": encoded})


def _date_back(shop: Shop) -> None:
    since = datetime.now(UTC) - SPREAD - timedelta(minutes=1)
    shop.cluster.api.patch(_path(shop), {"metadata": {"annotations": {STAGE: since.isoformat()}}})


def _stage(shop: Shop) -> str:
    """Since when the next CA is trusted; empty while there is none, or some Secret lacks it."""
    secret = shop.secret(f"{shop.name}-ca")
    return str(secret["metadata"]["annotations"].get(STAGE, "")) if secret["data"].get("next.crt") else ""


def _path(shop: Shop) -> str:
    return f"/api/v1/namespaces/{shop.space}/secrets/{shop.name}-ca"


def _lets_in(shop: Shop, pod: str, shown: Path) -> bool:
    """Whether a broker answers a client whose certificate is in this file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only what the broker trusts is asked
    context.load_cert_chain(shown)
    address = shop.pod(pod)["status"]["podIP"]
    connection = http.client.HTTPSConnection(address, CLIENT_PORT, context=context, timeout=60)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _issuer_of(shop: Shop, pod: str) -> x509.Name:
    return x509.load_pem_x509_certificate(shop.certificate_of(pod).encode()).issuer
