"""What every test may ask for. A fixture costs nothing until a test names it."""

from cluster.fixtures import apiserver, bare, nodes, pytest_runtest_call, pytest_runtest_setup

__all__ = ["apiserver", "bare", "nodes", "pytest_runtest_call", "pytest_runtest_setup"]
