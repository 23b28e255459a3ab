"""Fixtures of tests that need a real Kubernetes; `tests/conftest.py` gives them to every test."""

from collections.abc import Iterator

import pytest

from cluster.apiserver import ApiServer


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """One API server for the whole run: tests keep to namespaces of their own (`apiserver.namespace()`)."""
    with ApiServer.start() as server:
        yield server
