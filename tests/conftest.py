"""What every test may ask for. A fixture costs nothing until a test names it."""

from cluster.fixtures import apiserver, bare, nodes

__all__ = ["apiserver", "bare", "nodes"]
