"""Tokens, certificates, CAs and their files: what is taken, and why the rest is not."""

import asyncio
import os
from datetime import timedelta
from pathlib import Path

import pytest
from security_kit import SetClock, Site, now, revocation_list

from firn.errors import Invalid, Unauthorized
from firn.tls import Credentials, find_credentials
from firn_node.clock import RealRandomness
from firn_node.disk import RealDisk
from firn_node.security import localca
from firn_node.security.certificates import Authorities, identify, parse_authorities
from firn_node.security.decision import Principal
from firn_node.security.localca import Pair, make_ca, make_client, make_node
from firn_node.security.tokens import digest_of, new_token, parse_tokens
from firn_node.security.trust import Caller, TrustFiles, load_trust
from firn_node.settings import SecuritySettings

CLUSTER = make_ca("cluster", now())
OTHERS = make_ca("corporate", now())


def authorities(*cas: Pair, crl: bytes = b"") -> Authorities:
    return parse_authorities(b"".join(ca.certificate_pem() for ca in cas) + crl, source="ca.crt")


def who(
    pair: Pair, cluster: Authorities | None = None, clients: Authorities | None = None, **at: float
) -> Principal:
    moment = now() + timedelta(**at)
    return identify(
        localca_der(pair),
        cluster or authorities(CLUSTER),
        clients or Authorities(),
        now_ms=int(moment.timestamp() * 1000),
    ).principal


def localca_der(pair: Pair) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return pair.certificate.public_bytes(Encoding.DER)


# Certificates


def test_a_client_is_named_by_its_certificate() -> None:
    assert who(make_client(CLUSTER, "alice", now())) == Principal("alice")
    assert who(make_client(CLUSTER, "root", now(), is_admin=True)) == Principal("root", is_admin=True)
    assert who(make_node(CLUSTER, "firn-1", now())) == Principal("firn-1", node="firn-1")


def test_an_expired_a_future_and_a_foreign_certificate_are_refused_each_with_its_reason() -> None:
    pair = make_client(CLUSTER, "alice", now(), days=2)
    with pytest.raises(Unauthorized, match="certificate has expired"):
        who(pair, days=3)
    with pytest.raises(Unauthorized, match="not valid yet"):
        who(pair, hours=-1)
    with pytest.raises(Unauthorized, match="not signed by a CA"):
        who(make_client(OTHERS, "alice", now()))


def test_a_ca_of_the_same_name_with_another_key_is_foreign() -> None:
    twin = Pair(CLUSTER.certificate, OTHERS.key)
    with pytest.raises(Unauthorized, match="not signed by a CA"):
        who(make_client(twin, "alice", now()))


def test_a_certificate_outlives_its_ca_by_nothing() -> None:
    short = make_ca("short", now(), days=1)
    pair = make_client(short, "alice", now(), days=90)
    with pytest.raises(Unauthorized, match="CA has expired"):
        who(pair, authorities(short), days=2)


def test_a_clients_certificate_signs_nobody() -> None:
    middle = make_client(CLUSTER, "alice", now(), is_admin=True)
    with pytest.raises(Unauthorized, match="not signed by a CA"):
        who(make_client(middle, "mallory", now()), authorities(CLUSTER, middle))


def test_a_revoked_certificate_is_refused_and_another_one_of_the_name_is_not() -> None:
    lost, fresh = make_client(CLUSTER, "alice", now()), make_client(CLUSTER, "alice", now())
    known = authorities(CLUSTER, crl=revocation_list(CLUSTER, lost))
    with pytest.raises(Unauthorized, match="certificate is revoked"):
        who(lost, known)
    assert who(fresh, known) == Principal("alice")


def test_a_revocation_list_of_a_stranger_is_refused() -> None:
    with pytest.raises(Invalid, match="no CA in it signed"):
        authorities(CLUSTER, crl=revocation_list(OTHERS))
    with pytest.raises(Invalid, match="no CA in it signed"):
        authorities(CLUSTER, crl=revocation_list(Pair(CLUSTER.certificate, OTHERS.key)))


def test_cas_of_clients_make_clients_and_neither_nodes_nor_administrators() -> None:
    clients = authorities(OTHERS)
    assert who(make_client(OTHERS, "bob", now()), clients=clients) == Principal("bob")
    with pytest.raises(Unauthorized, match="not of the cluster's own CA"):
        who(make_node(OTHERS, "firn-1", now()), clients=clients)
    with pytest.raises(Unauthorized, match="not of the cluster's own CA"):
        who(make_client(OTHERS, "bob", now(), is_admin=True), clients=clients)


@pytest.mark.parametrize("name", ["system:serviceaccount:shop:web", "firn:operator"])
def test_a_certificate_cannot_take_the_name_of_a_service_account_or_of_firn(name: str) -> None:
    with pytest.raises(Unauthorized, match="begins with"):
        who(make_client(CLUSTER, name, now()))


def test_bytes_that_are_no_certificate_are_refused() -> None:
    with pytest.raises(Unauthorized, match="cannot be read"):
        identify(b"\x30\x03abc", authorities(CLUSTER), Authorities(), now_ms=0)


@pytest.mark.parametrize("pem", [b"", b"-----BEGIN CERTIFICATE-----\nabc", b"text"])
def test_a_file_without_a_ca_is_refused_by_name(pem: bytes) -> None:
    with pytest.raises(Invalid, match=r"^ca\.crt: "):
        parse_authorities(pem, source="ca.crt")


# Tokens


def test_a_token_is_found_by_its_hash_alone() -> None:
    token = new_token(RealRandomness())
    table = parse_tokens(
        f"tokens: [{{principal: shop, sha256: {digest_of(token).hex()}}}]", source="tokens.yaml"
    )
    found = table.find(digest_of(token))
    assert found is not None
    assert found.principal == Principal("shop")
    assert table.find(digest_of(token + "x")) is None
    assert len({new_token(RealRandomness()) for _ in range(100)}) == 100
    assert len(token) == 69


HASH = "ab" * 32


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tokens: {", "not YAML"),
        ("[]", "expected a mapping"),
        ("tokens: []\nusers: []", "nothing else"),
        ("tokens: [secret]", r"tokens\[0\]"),
        (f"tokens: [{{principal: a, sha256: {HASH}, password: secret}}]", "unknown field"),
        (f"tokens: [{{sha256: {HASH}}}]", r"tokens\[0\].principal"),
        (f"tokens: [{{principal: 'a*', sha256: {HASH}}}]", "not a pattern"),
        ("tokens: [{principal: a, sha256: secret}]", r"tokens\[0\].sha256"),
        ("tokens: [{principal: a, sha256: abcd}]", r"tokens\[0\].sha256"),
        (f"tokens: [{{principal: a, sha256: {HASH}, roles: [root]}}]", "roles"),
        (f"tokens: [{{principal: a, sha256: {HASH}, expires: soon}}]", "expires"),
        (f"tokens: [{{principal: a, sha256: {HASH}}}, {{principal: b, sha256: {HASH}}}]", "given twice"),
    ],
)
def test_a_token_file_that_is_none_is_refused_without_repeating_a_secret(text: str, named: str) -> None:
    with pytest.raises(Invalid, match=named) as caught:
        parse_tokens(text, source="tokens.yaml")
    assert caught.value.message.startswith("tokens.yaml: ")
    assert "secret" not in caught.value.message


# Callers, and files that change


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_token_that_expires_or_is_taken_out_ends_what_it_had_opened(site: Site) -> None:
    clock = SetClock()
    ends = (clock.now + timedelta(hours=1)).isoformat()
    site.tokens = {"one": f"principal: shop, expires: '{ends}'", "two": "principal: store, roles: [admin]"}
    site.write_tokens()
    files = TrustFiles(site.settings)
    one, two = (Caller(files, clock, digest=digest_of(token)) for token in ("one", "two"))
    assert one.principal() == Principal("shop")
    assert two.principal() == Principal("store", is_admin=True)
    clock.advance(hours=2)
    with pytest.raises(Unauthorized, match="not known here, or has expired"):
        one.principal()
    assert two.principal() == Principal("store", is_admin=True)
    del site.tokens["two"]
    site.write_tokens()
    assert files.reload_if_changed()
    for _ in range(2):
        with pytest.raises(Unauthorized, match="not known here, or has expired"):
            two.principal()


def test_a_certificate_that_is_revoked_or_whose_ca_goes_ends_what_it_had_opened(site: Site) -> None:
    files, clock = TrustFiles(site.settings), SetClock()
    alice, bob = (make_client(site.ca, name, now()) for name in ("alice", "bob"))
    callers = [Caller(files, clock, certificate=localca_der(pair)) for pair in (alice, bob)]
    assert [caller.principal() for caller in callers] == [Principal("alice"), Principal("bob")]
    site.write("ca.crt", site.ca.certificate_pem() + revocation_list(site.ca, alice))
    assert files.reload_if_changed()
    with pytest.raises(Unauthorized, match="revoked"):
        callers[0].principal()
    assert callers[1].principal() == Principal("bob")
    site.write("ca.crt", OTHERS.certificate_pem())
    assert files.reload_if_changed()
    with pytest.raises(Unauthorized, match="not signed by a CA"):
        callers[1].principal()


def test_a_caller_without_credentials_is_nobody(site: Site) -> None:
    assert Caller(TrustFiles(site.settings), SetClock()).principal() is None


def test_a_token_counts_over_a_certificate(site: Site) -> None:
    files, clock = TrustFiles(site.settings), SetClock()
    certificate = localca_der(make_client(site.ca, "alice", now()))
    with pytest.raises(Unauthorized):
        Caller(files, clock, certificate=certificate, digest=digest_of("wrong")).principal()


def test_half_replaced_files_leave_the_old_trust_in_force_until_they_are_whole(site: Site) -> None:
    files = TrustFiles(site.settings)
    before = files.current
    fresh = make_node(site.ca, "firn-0", now())
    site.write("node.key", fresh.key_pem())
    assert not files.reload_if_changed()
    assert files.current is before
    assert files.problem is not None
    assert "node.crt" in files.problem
    site.write("node.crt", fresh.certificate_pem())
    assert files.reload_if_changed()
    assert files.current is not before
    assert files.problem is None
    assert not files.reload_if_changed()


def test_a_missing_file_is_named(site: Site) -> None:
    os.unlink(site.path("tokens.yaml"))
    with pytest.raises(Invalid, match=r"tokens\.yaml"):
        load_trust(site.settings)


@pytest.mark.parametrize(
    "settings",
    [
        SecuritySettings(tls_cert="a"),
        SecuritySettings(tls_key="a"),
        SecuritySettings(tls_ca="a"),
        SecuritySettings(tls_client_ca="a"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(settings: SecuritySettings) -> None:
    with pytest.raises(Invalid, match="tlsKey"):
        settings.check()


# The local CA


def test_the_files_of_a_local_cluster_are_made_once_and_belong_together(tmp_path: Path) -> None:
    clock, disk, folder = SetClock(), RealDisk(tmp_path), str(tmp_path / "tls")
    files = localca.ensure(disk, folder, ["n-0", "n-1"], clock)
    before = {name: (tmp_path / "tls" / name).read_bytes() for name in os.listdir(folder)}
    assert sorted(before) == sorted(
        f"{name}.{kind}" for name in ("ca", "n-0", "n-1", "admin") for kind in ("crt", "key")
    )
    assert {os.stat(f"{folder}/{name}").st_mode & 0o777 for name in before if name.endswith("key")} == {0o600}
    localca.ensure(disk, folder, ["n-0", "n-1"], clock)
    assert before == {name: (tmp_path / "tls" / name).read_bytes() for name in os.listdir(folder)}
    settings = SecuritySettings(files.certificate("n-0"), files.key("n-0"), files.ca)
    load_trust(settings)
    known = parse_authorities(before["ca.crt"], source="ca.crt")
    for name, principal in (
        ("n-1", Principal("n-1", node="n-1")),
        ("admin", Principal("admin", is_admin=True)),
    ):
        assert identity_of(before[f"{name}.crt"], known, clock) == principal


def identity_of(pem: bytes, known: Authorities, clock: SetClock) -> Principal:
    der = localca_der_of_pem(pem)
    return identify(der, known, Authorities(), now_ms=clock.wall_ms()).principal


def localca_der_of_pem(pem: bytes) -> bytes:
    from ssl import PEM_cert_to_DER_cert

    return PEM_cert_to_DER_cert(pem.decode())


def test_certificates_are_renewed_at_two_thirds_of_their_life_and_the_ca_beside_the_old_one(
    tmp_path: Path,
) -> None:
    clock, disk, folder = SetClock(), RealDisk(tmp_path), str(tmp_path / "tls")

    def ensured() -> dict[str, bytes]:
        localca.ensure(disk, folder, ["n-0"], clock)
        return {name: (tmp_path / "tls" / name).read_bytes() for name in os.listdir(folder)}

    first = ensured()
    clock.advance(days=59)
    assert ensured() == first
    clock.advance(days=2)
    second = ensured()
    assert second["ca.crt"] == first["ca.crt"]
    assert second["n-0.crt"] != first["n-0.crt"]
    clock.advance(days=200)
    third = ensured()
    assert len(parse_authorities(third["ca.crt"], source="ca.crt").certificates) == 2
    known = parse_authorities(third["ca.crt"], source="ca.crt")
    assert identity_of(third["n-0.crt"], known, clock).node == "n-0"
    clock.now = now() + timedelta(days=62)  # a node that has the old files meets one that has the new ones
    assert identity_of(second["n-0.crt"], known, clock).node == "n-0"
    clock.advance(days=365 * 2)
    assert len(parse_authorities(ensured()["ca.crt"], source="ca.crt").certificates) == 1


def test_a_running_cluster_renews_its_certificates_by_itself(tmp_path: Path) -> None:
    clock, disk, folder = SetClock(), RealDisk(tmp_path), str(tmp_path / "tls")
    files = localca.ensure(disk, folder, ["n-0"], clock)
    settings = localca.secured(SecuritySettings(), files, "n-0")
    trust = TrustFiles(settings, poll_seconds=0.01)

    async def main() -> None:
        changed = asyncio.Event()
        tasks = [
            asyncio.create_task(localca.keep(disk, folder, ["n-0"], clock, check_seconds=0.01)),
            asyncio.create_task(trust.watch(changed.set)),
        ]
        await asyncio.sleep(0.1)
        assert not changed.is_set()
        clock.advance(days=61)
        async with asyncio.timeout(60):
            await changed.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert trust.problem is None
    with pytest.raises(Invalid, match="its own certificates"):
        localca.secured(settings, files, "n-0")


def test_a_damaged_or_foreign_file_of_a_local_cluster_is_made_anew(tmp_path: Path) -> None:
    clock, disk, folder = SetClock(), RealDisk(tmp_path), str(tmp_path / "tls")
    files = localca.ensure(disk, folder, ["n-0"], clock)
    Path(files.key("n-0")).write_bytes(b"")
    other = make_client(OTHERS, "admin", now(), is_admin=True)
    Path(files.certificate("admin")).write_bytes(other.certificate_pem())
    Path(files.key("admin")).write_bytes(other.key_pem())
    localca.ensure(disk, folder, ["n-0"], clock)
    load_trust(SecuritySettings(files.certificate("n-0"), files.key("n-0"), files.ca))
    known = parse_authorities(Path(files.ca).read_bytes(), source="ca.crt")
    assert identity_of(Path(files.certificate("admin")).read_bytes(), known, clock).is_admin


# A client's own credentials


def test_credentials_come_from_arguments_then_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    environment = {
        "FIRN_TLS_CA": "env-ca",
        "FIRN_TOKEN": "env-token",
        "FIRN_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert find_credentials(environment={}) == Credentials()
    assert find_credentials(environment=environment) == Credentials("env-ca", token="env-token")
    assert find_credentials(tls_ca="arg", token="t", environment=environment) == Credentials("arg", token="t")
    assert find_credentials(token_file=str(tmp_path / "token"), environment=environment).token == "from-file"
    del environment["FIRN_TOKEN"]
    assert find_credentials(environment=environment).token == "from-file"
    environment["FIRN_TOKEN_FILE"] = ""
    assert find_credentials(environment=environment).token is None


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(Invalid, match="belong together"):
        find_credentials(tls_cert="a", environment={})


def test_a_token_does_not_show_and_does_not_leave_the_machine_in_the_open() -> None:
    credentials = Credentials(token="firn_secret")
    assert "firn_secret" not in repr(credentials)
    for address in ("127.0.0.1:7700", "localhost:7700", "[::1]:7700", "127.8.8.8:1"):
        credentials.check_address(address)
    with pytest.raises(Invalid, match="not sent without TLS"):
        credentials.check_address("10.0.0.7:7700")
    Credentials("ca.crt", token="firn_secret").check_address("10.0.0.7:7700")
