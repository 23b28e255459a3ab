"""This machine: what it must have for a whole cluster, and commands run on it."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import CannotRun

# program -> the Debian package that brings it
NODE_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "sysctl": "procps",
}
IMAGE_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}
CNI_FOLDER = Path("/usr/lib/cni")  # of Debian's containernetworking-plugins
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandFailed(Exception):
    def __init__(self, command: Sequence[object], code: int, said: str) -> None:
        self.code, self.said = code, said
        super().__init__(f"{' '.join(map(str, command))}: exit {code}\n{said}")


def run(*command: object, input: str = "", check: bool = True) -> str:
    """What it printed.

    *Errors*: `CommandFailed`, with what it said; with `check` false the exit status is ignored.
    """
    words = [str(word) for word in command]
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"}
    ended = subprocess.run(words, input=input, env=environment, capture_output=True, text=True, check=False)
    if check and ended.returncode:
        raise CommandFailed(words, ended.returncode, ended.stdout + ended.stderr)
    return ended.stdout


def program(name: str) -> str:
    """Its path; root's folders count even if they are not on the ``PATH``.

    *Errors*: `CannotRun`.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")
    if found is None:
        raise CannotRun(f"{name} is missing")
    return found


# What nodes are made of, tried where it leaves nothing behind: within namespaces of its own.
_TRIAL = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/lower /mnt/upper /mnt/work /mnt/merged
mount -t overlay overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work /mnt/merged
ip link add trial type bridge
ip link add trial0 type veth peer name trial1
iptables -w -t nat -S
"""


def require_namespaces() -> None:
    """*Errors*: `CannotRun` where root may not do what nodes are made of, as in most containers."""
    require_root()
    try:
        trial = ("--net", "--pid", "--mount", "--fork", "--kill-child", "sh", "-euc", _TRIAL)
        run(program("unshare"), *trial)
    except CommandFailed as error:
        raise CannotRun(
            "nodes are namespaces with a network and mounts of their own, which root may not make here; point "
            f"KUBECONFIG at a cluster, or install Docker and kind ({error.said.strip()})"
        ) from error


def require_root() -> None:
    if os.geteuid() != 0:
        raise CannotRun(
            "a cluster of plain processes makes network namespaces and containers, which takes root; run this as "
            "root, or point KUBECONFIG at a cluster, or install Docker and kind"
        )


def install(programs: dict[str, str], *, packages: Sequence[str] = ()) -> None:
    """Debian's packages for the programs that are missing.

    *Errors*: `CannotRun` with the command to type, when this is no Debian or the installation fails.
    """
    wanted = {package for name, package in programs.items() if _is_missing(name)} | set(packages)
    if not wanted:
        return
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends"]
    command += sorted(wanted)
    told = f"this machine lacks {', '.join(sorted(wanted))}; run: apt-get update && {' '.join(command)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotRun(told)
    try:
        run("apt-get", "-o", "DPkg::Lock::Timeout=300", "update", "-qq")
        run("env", "DEBIAN_FRONTEND=noninteractive", *command)
    except CommandFailed as error:
        raise CannotRun(f"{told}\n{error}") from error


def install_for_nodes() -> None:
    missing = () if (CNI_FOLDER / "ptp").exists() else ("containernetworking-plugins",)
    install(NODE_PROGRAMS, packages=missing)


def _is_missing(name: str) -> bool:
    try:
        program(name)
    except CannotRun:
        return True
    return False
