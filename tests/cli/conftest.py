"""A real broker as its own process, and ``firn`` as people call it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from firn_node.demo.process import BrokerProcess
from support.firn_cli.calls import Run


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data")
    process.start()
    yield process
    assert process.stop() == 0


def call(*arguments: str, input: bytes = b"", address: str = "", code: int | None = 0, **environment: str):  # type: ignore[no-untyped-def]
    """One run of ``firn``; its exit code is checked unless ``code`` is None."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FIRN_")} | environment
    if address:
        env["FIRN_BROKER"] = address
    found = subprocess.run(
        [sys.executable, "-m", "firn_node", *arguments], input=input, capture_output=True, env=env, timeout=60
    )
    if code is not None:
        assert found.returncode == code, (found.returncode, found.stdout, found.stderr)
    return found


@pytest.fixture
def firn(broker: BrokerProcess) -> Run:
    """``firn`` against the broker of the session."""

    def run(*arguments: str, **options):  # type: ignore[no-untyped-def]
        return call(*arguments, address=broker.address, **options)

    return run


@pytest.fixture
def bare() -> Run:
    """``firn`` without any broker."""
    return call


@pytest.fixture
def topic(request: pytest.FixtureRequest, firn: Run) -> str:
    """A topic of this test alone, of one partition."""
    name = request.node.name[:200].replace("[", ".").replace("]", "").replace(" ", "_")
    firn("topics", "create", name)
    return name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"
