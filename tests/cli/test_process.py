"""What a broker's process does to itself when it starts."""

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from firn_node.main import no_certificates
from firn_node.security.localca import make_ca


def certificates() -> int:
    return ssl.create_default_context().cert_store_stats()["x509_ca"]


def test_the_certificates_of_the_system_are_found_again_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_bytes(make_ca("one", datetime.now(UTC)).certificate_pem())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    before = dict(os.environ)
    with no_certificates():
        assert certificates() == 0
    assert dict(os.environ) == before
    assert certificates() >= 1
