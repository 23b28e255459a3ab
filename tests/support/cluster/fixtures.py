"""Fixtures of tests that need a real Kubernetes; `tests/conftest.py` gives them to every test.

Where a machine lacks what such a test needs (`CannotRun`), in a fixture or in the test, the test is skipped, and the
reason says what is missing. What fails where all is there is a failure.
"""

from collections.abc import Generator, Iterator

import pytest
from cluster.apiserver import ApiServer
from cluster.bare import BareCluster
from cluster.client import WholeCluster
from cluster.errors import CannotRun
from cluster.providers import whole_cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    except CannotRun as error:
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except CannotRun as error:
        pytest.skip(str(error))


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
