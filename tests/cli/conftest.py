"""A real broker as its own process, and ``firn`` as people call it."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from firn_node.demo.process import BrokerProcess
from support.firn_cli.calls import Run, call


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker") / "data")
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def firn(broker: BrokerProcess) -> Run:
    """``firn`` against the broker of the session."""
    return functools.partial(call, address=broker.address)


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
