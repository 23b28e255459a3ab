"""A whole cluster on this machine without Docker: the control plane as plain processes, nodes as sets of namespaces.

Needs root, Go and Debian's containerd. Several live side by side, one per slot; a slot whose cluster was killed is
swept before it is used again.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster import dns, host
from cluster.archive import write_image
from cluster.audit import AuditLog
from cluster.client import WholeCluster
from cluster.control import ControlPlane
from cluster.errors import DidNotStart
from cluster.network import Network
from cluster.node import PAUSE_IMAGE, Node, load
from cluster.processes import Processes, wait_until
from cluster.storage import Volumes
from cluster.sweep import sweep
from cluster.tools import cache_folder, locked, tool

SLOTS = 8
_PARTS = (
    "etcd",
    "kube-apiserver",
    "kubectl",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "pause",
    "coredns",
)


class BareCluster(WholeCluster):
    """Up, its nodes ready and names resolved, when `start` returns; gone without a trace after `stop`."""

    def __init__(self, ground: "_Ground", count: int) -> None:
        self._ground = ground
        self.network = ground.network
        processes = ground.processes
        self.control = ControlPlane(ground.folder, processes, self.network.addresses)
        super().__init__(self.control.start())
        self.audit = AuditLog(self.control.audit_log)
        self.control.start_controllers()
        self.control.start_scheduler()
        self._loaded: set[Path] = set()
        numbers = range(1, count + 1)
        self.nodes = [Node(number, ground.folder, self.network, processes) for number in numbers]
        proxies = self.control.kubeconfig("system:kube-proxy")
        for node in self.nodes:
            node.start([other for other in numbers if other != node.number])
            node.start_containerd()
        self.load(_system_image(PAUSE_IMAGE, "pause"), _system_image(dns.IMAGE, "coredns"))
        for node in self.nodes:
            node.start_kubelet(self.control)
            node.start_proxy(proxies)
        ground.volumes = Volumes(self.api, self.nodes)
        ground.volumes.start()
        self.apply(dns.manifests(self.network.dns_address))
        wait_until(self._is_ready, "nodes and names are ready", by=processes.running)

    @classmethod
    def start(cls, nodes: int = 2) -> Self:
        """*Errors*: `CannotRun` when this machine lacks something that cannot be installed from here."""
        host.require_root()
        host.install_for_nodes()
        host.require_namespaces()
        for name in _PARTS:
            tool(name)
        ground = _Ground.take()
        try:
            return cls(ground, nodes)
        except BaseException:
            ground.clear()
            raise

    def stop(self) -> None:
        self._ground.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        return self._ground.folder

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def load(self, *archives: Path) -> None:
        """Images, onto every node that does not have them yet."""
        for archive in archives:
            if archive not in self._loaded:
                load([node.socket for node in self.nodes], archive)
                self._loaded.add(archive)

    def _is_ready(self) -> bool:
        told = self.api.get("/apis/apps/v1/namespaces/kube-system/daemonsets/coredns")["status"]
        return bool(told.get("numberReady", 0) == len(self.nodes))


class _Ground:
    """A slot of this machine, held by this process: its folder, its network and what runs there."""

    def __init__(self, slot: int, lock: int) -> None:
        self._lock = lock
        self.folder = cache_folder() / f"slot{slot}"
        self.network = Network(slot)
        self.processes = Processes(self.folder / "log")
        self.volumes: Volumes | None = None

    @classmethod
    def take(cls) -> Self:
        """The first slot that no process holds, swept and with its bridge made."""
        for slot in range(SLOTS):
            lock = os.open(cache_folder() / f"slot{slot}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            ground = cls(slot, lock)
            sweep(ground.folder, ground.network)
            ground.folder.mkdir()
            ground.network.make()
            return ground
        raise DidNotStart(f"{SLOTS} clusters run on this machine already")

    def clear(self) -> None:
        """Everything ended and removed, the slot free."""
        if self.volumes:
            self.volumes.stop()
        self.processes.kill()
        sweep(self.folder, self.network)
        os.close(self._lock)


def _system_image(name: str, program: str) -> Path:
    built = tool(program)
    file = built.parent / f"{program}.tar"
    with locked("images"):
        if not file.exists():
            write_image(file, name, built)
    return file
