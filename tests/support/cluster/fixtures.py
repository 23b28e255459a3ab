"""Fixtures of tests that need a real Kubernetes; `tests/conftest.py` gives them to every test."""

from collections.abc import Iterator

import pytest
from cluster.apiserver import ApiServer
from cluster.bare import BareCluster
from cluster.client import WholeCluster
from cluster.providers import whole_cluster


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server for the whole run: tests keep to namespaces of their own (`apiserver.namespace()`)."""
    with ApiServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def nodes() -> Iterator[WholeCluster]:
    """One cluster of three nodes for the whole run: heal what you break."""
    with whole_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def bare(nodes: WholeCluster) -> BareCluster:
    """The same, where its nodes may be cut off and looked into; else the test is skipped."""
    return breakable(nodes)


def breakable(cluster: WholeCluster) -> BareCluster:
    if not isinstance(cluster, BareCluster):
        pytest.skip("needs a cluster whose nodes are this machine's own")
    return cluster
