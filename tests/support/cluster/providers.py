"""Which cluster the tests of whole clusters get, in this order:

1. the one of ``FIRN_TEST_KUBECONFIG``, as ``make test-cluster KUBECONFIG=...`` sets it: not simply of ``KUBECONFIG``, which
   may name somebody's production;
2. one of kind, where Docker answers and kind is installed;
3. one of this machine's own.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.bare import BareCluster
from cluster.client import WholeCluster
from cluster.errors import DidNotStart

NODES = 3
_KIND_CONFIG = Path(__file__).parents[2] / "kind.yaml"


@contextlib.contextmanager
def whole_cluster() -> Iterator[WholeCluster]:
    """A cluster of three nodes or more, for the time of the ``with``."""
    if given := os.environ.get("FIRN_TEST_KUBECONFIG"):
        yield GivenCluster(Path(given))
    elif _has_kind():
        with _kind() as cluster:
            yield cluster
    else:
        with BareCluster.start(NODES) as bare:
            yield bare


class GivenCluster(WholeCluster):
    """A cluster that is there already: images are in it, and its nodes are not broken from here."""

    def load(self, *archives: Path) -> None:
        """Nothing: whoever gives the cluster has loaded what ``python -m cluster images`` names."""


class KindCluster(WholeCluster):
    def __init__(self, name: str, config: Path) -> None:
        super().__init__(config)
        self._name = name

    def load(self, *archives: Path) -> None:
        for archive in archives:
            _run("kind", "load", "image-archive", str(archive), "--name", self._name)


def _has_kind() -> bool:
    if not shutil.which("kind") or not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _kind() -> Iterator[KindCluster]:
    name = f"firn-test-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="firn-kind-") as folder:
        config = Path(folder) / "admin.kubeconfig"
        try:
            made = ["--config", str(_KIND_CONFIG), "--kubeconfig", str(config), "--wait", "180s"]
            _run("kind", "create", "cluster", "--name", name, *made)
            yield KindCluster(name, config)
        finally:
            _run("kind", "delete", "cluster", "--name", name, "--kubeconfig", str(config))


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise DidNotStart(f"{' '.join(command)}: exit {ended.returncode}\n{ended.stderr[-2000:]}")
