"""What a broker's process does to itself when it starts."""

import asyncio
import gc
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from firn_node import main
from firn_node.kernels import jit
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


class SlowKernel:
    """One that takes so long to compile that somebody stops the broker meanwhile."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self.stopping = stopping
        self.loads = 0

    def load(self) -> None:
        self.loads += 1
        self.stopping.set()


def test_a_broker_that_is_told_to_stop_compiles_no_further_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = asyncio.Event()
    first, second = SlowKernel(stopping), SlowKernel(stopping)
    monkeypatch.setattr(jit, "kernels", [first, second])
    main._load_kernels(stopping)
    assert (first.loads, second.loads) == (1, 0)
    assert gc.isenabled()
