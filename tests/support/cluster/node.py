"""A node: containerd, kubelet and kube-proxy, within namespaces of their own for network, processes and mounts.

The first process of those namespaces is `pause`. When it ends the kernel ends everything that runs in the node, shims
and containers included, and drops its mounts and links; and it ends with the process that started the cluster, however
that ends. What is left then are a cgroup and a folder, which `sweep` removes.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from cluster import host
from cluster.control import SERVICE_DOMAIN, ControlPlane
from cluster.network import Network
from cluster.processes import Process, Processes, wait_until
from cluster.tools import tool

CGROUPS = Path("/sys/fs/cgroup")
PAUSE_IMAGE = "localhost/pause:1"
_IMAGES_BYTES = (
    6 << 30
)  # of a node, at most; this project's images and what they are unpacked to are half of that
_MEMORY_NEEDED = 12 << 30  # of the machine, so that images of three nodes are kept there beside what runs
_PERIOD_US = 100_000
_HOG = 'taken = []\nwhile True: taken.append(b"." * (16 << 20))'
# Folders that programs of a node write to whatever they are told; an empty one each.
_OWN_FOLDERS = ("/run", "/var/log", "/var/lib/cni", "/var/lib/kubelet/device-plugins")


def _has_memory() -> bool:
    """Whether images may be kept in memory: there in a third of the time, and gone with the node in none."""
    available = next(
        line.split()[1]
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return int(available) * 1024 > _MEMORY_NEEDED


def load(sockets: Sequence[Path], archive: Path) -> None:
    """An image from a docker-archive, into the containerd behind each socket; there for pods on return."""
    with ThreadPoolExecutor(len(sockets)) as pool:
        command = ("-n", "k8s.io", "images", "import", archive)
        list(pool.map(lambda socket: host.run("ctr", "-a", socket, *command), sockets))


def _processes_of(group: Path) -> list[int]:
    """Those of a container's cgroup; none of the sandbox, which only waits."""
    with contextlib.suppress(OSError):  # it went away meanwhile
        processes = [int(line) for line in (group / "cgroup.procs").read_text().split()]
        return [each for each in processes if _name_of(each) != "pause"]
    return []


def _name_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return "pause"


class Node:
    def __init__(self, number: int, folder: Path, network: Network, processes: Processes) -> None:
        self.number, self.name = number, f"node{number}"
        self.folder, self.network, self._processes = folder / self.name, network, processes
        self.address = network.node_address(number)
        self.socket = self.folder / "containerd.sock"
        self.volumes = self.folder / "volumes"
        self.cgroup = f"{network.bridge}-{self.name}"
        self._init = 0
        self._kubelet_command: list[str | Path] = []

    def start(self, others: Sequence[int]) -> None:
        """The namespaces and the network; nothing runs in them but `pause`."""
        for name in ("cni", "containerd", "kubelet", "volumes"):
            (self.folder / name).mkdir(parents=True)
        for name in _OWN_FOLDERS:
            Path(name).mkdir(parents=True, exist_ok=True)
        begin = ["mount -t proc proc /proc", *(f"mount -t tmpfs tmpfs {name}" for name in _OWN_FOLDERS)]
        if _has_memory():
            begin.append(f"mount -t tmpfs -o size={_IMAGES_BYTES} tmpfs {self.folder}/containerd")
        begin += ["mount --make-rshared /", f"touch {self.folder}/begun", f"exec {tool('pause')}"]
        command = [host.program("unshare"), "--net", "--pid", "--mount", "--fork", "--kill-child"]
        outer = self._processes.start(f"{self.name}-init", [*command, "sh", "-ec", "\n".join(begin)])
        wait_until((self.folder / "begun").exists, f"{self.name} begins", by=[outer])
        children = Path(f"/proc/{outer.popen.pid}/task/{outer.popen.pid}/children")
        self._init = int(children.read_text())
        self.network.attach(self.number, self._init, others)

    def start_containerd(self) -> None:
        (self.folder / "cni" / "10-firn.conflist").write_text(json.dumps(self._cni()))
        config = self.folder / "containerd.toml"
        config.write_text(self._containerd())
        self._start("containerd", [host.program("containerd"), "-c", config])
        wait_until(self.socket.exists, "containerd's socket", by=[self._process("containerd")])

    def start_kubelet(self, control: ControlPlane) -> None:
        self._make_cgroup()
        user = f"system:node:{self.name}"
        hosts = [self.name, self.address]
        serving = control.authority.sign(f"kubelet-{self.name}", organization="system:nodes", hosts=hosts)
        resolv = self.folder / "resolv.conf"
        resolv.write_text("")  # pods with dnsPolicy Default: nothing of this machine's own
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(control.authority.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "clusterDNS": [self.network.dns_address],
            "clusterDomain": SERVICE_DOMAIN,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "4s",
            "podLogsDir": str(self.folder / "podlogs"),
            "resolvConf": str(resolv),
            "serializeImagePulls": False,
            "shutdownGracePeriod": "0s",
            "syncFrequency": "10s",
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "volumePluginDir": str(self.folder / "volumeplugins"),
        }
        self._kubelet_command = [
            tool("kubelet"),
            f"--config={self._write('kubelet', config)}",
            f"--kubeconfig={control.kubeconfig(user, organization='system:nodes')}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--cert-dir={self.folder / 'certificates'}",
            "--v=1",
        ]
        self._start("kubelet", self._kubelet_command)

    def start_proxy(self, kubeconfig: Path) -> None:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "clusterCIDR": self.network.pods,
            "conntrack": {"maxPerCore": 0, "min": 0},
            "hostnameOverride": self.name,
            "iptables": {"minSyncPeriod": "0s"},
        }
        self._start("proxy", [tool("kube-proxy"), f"--config={self._write('proxy', config)}"])

    def stop_kubelet(self) -> None:
        """Its containers run on; the cluster thinks the node lost after the grace period."""
        self._processes.stop(f"{self.name}-kubelet")

    def restart_kubelet(self) -> None:
        self._start("kubelet", self._kubelet_command)

    def tag(self, image: str, other: str) -> None:
        """Gives an image that is on the node another name."""
        host.run("ctr", "-a", self.socket, "-n", "k8s.io", "images", "tag", "--force", image, other)

    def kill_pod(self, uid: str) -> int:
        """SIGKILL to every process of a pod's containers, as when memory is short: how many there were."""
        killed = 0
        for group in self._containers(uid):
            for process in _processes_of(group):
                with contextlib.suppress(
                    OSError
                ):  # it has ended by itself, or was found in another controller
                    os.kill(process, signal.SIGKILL)
                    killed += 1
        return killed

    def processes_of(self, uid: str) -> set[int]:
        """What runs in a pod's containers, by this machine's numbers."""
        return {process for group in self._containers(uid) for process in _processes_of(group)}

    def limit_cpu(self, uid: str, *, milli: int) -> None:
        """A pod gets so many thousandths of a core, as by a limit of its containers, without being made anew."""
        quota = _PERIOD_US * milli // 1000
        for group in self._pods(uid):
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            elif (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")

    def exhaust_memory(self, uid: str) -> None:
        """Something in each container of the pod takes memory until the kernel kills for it: what was there first."""
        for group in self._containers(uid):
            if not any((group / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
                continue
            if not (found := _processes_of(group)):
                continue
            for process in found:
                Path(f"/proc/{process}/oom_score_adj").write_text("1000")
            within = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c '{_HOG}'"
            host.run("sh", "-c", within, check=False)  # killed itself, in the end

    def _pods(self, uid: str) -> set[Path]:
        """The cgroups of a pod, in each controller."""
        return {
            *CGROUPS.glob(f"*/{self.cgroup}/**/pod{uid}"),
            *CGROUPS.glob(f"{self.cgroup}/**/pod{uid}"),
        }

    def _containers(self, uid: str) -> set[Path]:
        return {listed.parent for group in self._pods(uid) for listed in group.glob("*/cgroup.procs")}

    def cut(self) -> None:
        """The node hears nobody and nobody hears it."""
        self.network.cut(self.number)

    def heal(self) -> None:
        self.network.heal(self.number)

    def run(self, *command: str, input: str = "", check: bool = True) -> str:
        """What a command printed that ran within the node."""
        return host.run(*self._inside(), *command, input=input, check=check)

    def _inside(self) -> list[str]:
        return [host.program("nsenter"), f"--target={self._init}", "--net", "--pid", "--mount"]

    def _start(self, name: str, command: Sequence[str | Path]) -> None:
        self._processes.start(f"{self.name}-{name}", [*self._inside(), *command])

    def _process(self, name: str) -> Process:
        return self._processes.named(f"{self.name}-{name}")

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    def _cni(self) -> dict[str, Any]:
        """Each pod on a link of its own to the node: all that goes to or from a pod is forwarded by the node, and
        so passes the rules for Services and for policies, between pods of one node too."""
        addresses = {
            "type": "host-local",
            "dataDir": str(self.folder / "addresses"),
            "ranges": [[{"subnet": self.network.node_pods(self.number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        return {
            "cniVersion": "0.4.0",
            "name": "firn",
            "plugins": [
                {"type": "ptp", "ipMasq": False, "ipam": addresses},
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }

    def _containerd(self) -> str:
        return f"""version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/containerd-state"
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # A host that may not lower oom_score_adj fails every sandbox without this.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{host.CNI_FOLDER}"
  conf_dir = "{self.folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
"""

    def _make_cgroup(self) -> None:
        """cgroup v1 wants the root of the pods made by hand in every controller, cpuset filled in."""
        if (CGROUPS / "cgroup.controllers").exists():
            (CGROUPS / self.cgroup).mkdir()
            return
        for controller in CGROUPS.iterdir():
            if controller.is_symlink() or not (controller / "cgroup.procs").exists():
                continue
            made = controller / self.cgroup
            made.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (made / name).exists():
                    (made / name).write_text((controller / name).read_text())
