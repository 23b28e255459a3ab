"""Fixtures of tests that need a real Kubernetes; `tests/conftest.py` gives them to every test."""

from collections.abc import Iterator

import pytest
from cluster.apiserver import ApiServer
from cluster.bare import BareCluster


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server for the whole run: tests keep to namespaces of their own (`apiserver.namespace()`)."""
    with ApiServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def nodes() -> Iterator[BareCluster]:
    """One cluster of three nodes for the whole run, whose nodes may be cut off and stopped: heal what you break."""
    with BareCluster.start(nodes=3) as cluster:
        yield cluster
