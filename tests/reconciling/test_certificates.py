"""The cluster's CA and its certificates over years, with an operator that may end after any write."""

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.verification import PolicyBuilder, Store
from operator_kit import World

from firn_node.security.certificates import identify, parse_authorities
from firn_node.security.decision import Principal
from firn_operator.certificates import CA_LIFE, LIFE, SPREAD, SecretWrite, make_ca, plan_certificates
from firn_operator.kube import Obj
from firn_operator.spec import parse_cluster

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PODS = {0: 3, 1: 1}
HOLDERS = ("main-admin", "main-0-tls", "main-1-tls")


class Holding:
    """The Secrets as they are written, and each ``ca.crt`` as it has been read ``SPREAD`` later."""

    def __init__(self) -> None:
        self.cluster = parse_cluster(World().cluster(groups=2))
        self.secrets: dict[str, Obj] = {}
        self.trust: str | None = None
        self.now = NOW
        self.bundles: list[tuple[datetime, dict[str, str]]] = []
        self.wrote: list[tuple[str, str]] = []

    def write(self, write: SecretWrite) -> None:
        old = self.secrets.get(write.name)
        assert write.version == (old["metadata"]["resourceVersion"] if old else None)
        data = {
            **(old["data"] if old else {}),
            **{k: base64.b64encode(v).decode() for k, v in write.data.items()},
        }
        meta = {"resourceVersion": str(len(self.wrote)), "annotations": {"firn.dev/ca-stage": write.stage}}
        self.secrets[write.name] = {"metadata": meta, "data": data}
        self.wrote.append((write.name, write.why))

    def step(self, *, ends_after: int | None = None) -> int:
        """One pass, which may end after so many writes; how many it made."""
        plan = plan_certificates(self.cluster, PODS, self.secrets, self.trust, self.now)
        for number, write in enumerate(plan.writes):
            if number == ends_after:
                break
            self.write(write)
            self.bundles.append(
                (self.now, {name: self.text(name, "ca.crt") for name in HOLDERS if name in self.secrets})
            )
            self.check()
        else:
            self.trust = plan.trust
        return len(plan.writes)

    def text(self, name: str, key: str) -> str:
        return base64.b64decode(self.secrets[name]["data"].get(key, "")).decode()

    def leaves(self) -> list[x509.Certificate]:
        return [
            x509.load_pem_x509_certificate(base64.b64decode(value))
            for name in HOLDERS if name in self.secrets
            for key, value in self.secrets[name]["data"].items() if key.endswith(".crt") and key != "ca.crt"
        ]  # fmt: skip

    def check(self) -> None:
        """Every certificate is one that everybody believes who read his bundle up to ``SPREAD`` ago."""
        read = [self.bundles[-1][1]]
        before = [bundles for at, bundles in self.bundles if at <= self.now - SPREAD]
        read += before[-1:]
        if len(self.secrets) <= len(HOLDERS):
            return  # the first certificates of all: nobody talks yet
        for bundles in read:
            for pem in bundles.values():
                trusted = {each.subject for each in x509.load_pem_x509_certificates(pem.encode())}
                assert {leaf.issuer for leaf in self.leaves()} <= trusted


def run(holding: Holding, until: datetime, *, every: timedelta, ends_after: int | None = None) -> None:
    while holding.now < until:
        holding.now += every
        holding.step(ends_after=ends_after)
        while holding.step():
            pass


def begun() -> Holding:
    holding = Holding()
    while holding.step():
        pass
    return holding


def test_the_first_pass_makes_all_and_the_next_one_nothing() -> None:
    holding = Holding()
    assert holding.step() == 4
    assert holding.step() == 0
    names = [name for name, _ in holding.wrote]
    assert names == ["main-ca", "main-admin", "main-0-tls", "main-1-tls"]


def test_brokers_take_a_pods_certificate_for_the_node_and_the_administrators_for_one() -> None:
    holding = begun()
    authorities = parse_authorities(holding.text("main-0-tls", "ca.crt").encode(), source="ca.crt")
    now_ms = int(NOW.timestamp() * 1000)
    none = parse_authorities(make_ca("other", NOW).certificate_pem, source="other")

    def principal(name: str, key: str) -> Principal:
        der = x509.load_pem_x509_certificate(holding.text(name, key).encode())
        return identify(der.public_bytes(Encoding.DER), authorities, none, now_ms=now_ms).principal

    assert principal("main-0-tls", "main-0-2.crt").node == "main-0-2"
    assert principal("main-admin", "tls.crt").is_admin


def test_a_client_believes_a_pod_by_each_name_that_it_is_dialled_by() -> None:
    holding = begun()
    store = Store(x509.load_pem_x509_certificates(str(holding.trust).encode()))
    leaf = x509.load_pem_x509_certificate(holding.text("main-0-tls", "main-0-1.crt").encode())
    for host in ("main-0-1.main-0.shop.svc", "main-bootstrap.shop.svc", "main-bootstrap", "localhost"):
        verifier = PolicyBuilder().store(store).time(NOW).build_server_verifier(x509.DNSName(host))
        verifier.verify(leaf, [])


def test_certificates_are_renewed_at_two_thirds_of_their_life_and_not_before() -> None:
    holding = begun()
    before = len(holding.wrote)
    run(holding, NOW + LIFE * 2 / 3 - timedelta(days=2), every=timedelta(days=1))
    assert len(holding.wrote) == before
    run(holding, NOW + LIFE * 2 / 3 + timedelta(days=2), every=timedelta(days=1))
    assert sorted(name for name, _ in holding.wrote[before:]) == ["main-0-tls", "main-1-tls", "main-admin"]


@pytest.mark.parametrize("ends_after", [None, 0, 1, 2])
def test_a_new_ca_is_trusted_everywhere_before_it_signs_anything(ends_after: int | None) -> None:
    holding = begun()
    old = holding.leaves()[0].issuer
    run(holding, NOW + CA_LIFE * 2 / 3 - timedelta(days=2), every=timedelta(days=1))
    assert len({leaf.issuer for leaf in holding.leaves()}) == 1
    run(
        holding, NOW + CA_LIFE * 2 / 3 + timedelta(days=1), every=timedelta(minutes=15), ends_after=ends_after
    )
    assert old not in {leaf.issuer for leaf in holding.leaves()}
    trusted = {each.subject for each in x509.load_pem_x509_certificates(str(holding.trust).encode())}
    assert old in trusted
    run(holding, NOW + CA_LIFE + timedelta(days=2), every=timedelta(days=5))
    assert old not in {each.subject for each in x509.load_pem_x509_certificates(str(holding.trust).encode())}


def test_a_ca_that_is_lost_is_followed_by_one_that_all_know_before_it_signs() -> None:
    holding = begun()
    issuer = holding.leaves()[0].issuer
    holding.now += timedelta(days=3)
    del holding.secrets["main-ca"]
    while holding.step():
        pass
    assert {leaf.issuer for leaf in holding.leaves()} == {issuer}
    run(holding, holding.now + timedelta(hours=1), every=timedelta(minutes=5))
    assert issuer not in {leaf.issuer for leaf in holding.leaves()}


def test_a_damaged_certificate_is_made_anew_and_the_others_stay() -> None:
    holding = begun()
    before = holding.text("main-0-tls", "main-0-1.crt")
    holding.secrets["main-0-tls"]["data"]["main-0-0.key"] = base64.b64encode(b"nonsense").decode()
    assert holding.step() == 1
    assert holding.text("main-0-tls", "main-0-1.crt") == before
    assert "main-0-0" in holding.wrote[-1][1]


def test_keys_show_in_no_repr() -> None:
    assert "PRIVATE" not in repr(plan_certificates(begun().cluster, PODS, {}, None, NOW))
