"""A lone Kubernetes API: etcd and kube-apiserver on loopback, and the few controllers that tidy up.

No nodes, no pods: objects are stored, defaulted, validated, watched and authorized as in any cluster, by the same
program. Of the controllers run those for namespaces (a deleted one goes away), owners (what is owned goes with its
owner) and ServiceAccounts; none makes pods.
"""

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.audit import AuditLog
from cluster.client import Client
from cluster.control import Addresses, ControlPlane
from cluster.processes import Processes

_CONTROLLERS = (
    "namespace-controller",
    "garbage-collector-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
)


class ApiServer(Client):
    """Up when constructed by `start`, gone with all of its files after `stop`, or at the end of a ``with``."""

    def __init__(self, folder: Path, processes: Processes, control: ControlPlane) -> None:
        super().__init__(control.start())
        control.start_controllers(_CONTROLLERS)
        self.folder, self.control, self.audit = folder, control, AuditLog(control.audit_log)
        self._processes = processes

    @classmethod
    def start(cls) -> Self:
        folder = Path(tempfile.mkdtemp(prefix="firn-apiserver-"))
        processes = Processes(folder / "log")
        try:
            return cls(folder, processes, ControlPlane(folder, processes, Addresses()))
        except BaseException:
            _remove(folder, processes)
            raise

    def stop(self) -> None:
        _remove(self.folder, self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _remove(folder: Path, processes: Processes) -> None:
    processes.kill()
    shutil.rmtree(folder)
