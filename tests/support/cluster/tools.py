"""The programs of a Kubernetes cluster, built once per version from the Go module proxy.

A program lies in ``<cache>/<name>-<version>/<name>``; a second run finds it there. Most are built through a small
module of ours, `go/*`, whose `go.sum` pins every source by hash: Kubernetes and etcd because ``go install`` refuses
modules with ``replace`` lines, CoreDNS because it takes minutes with plugins that nobody here asks for. For another
version: change it here and in `go.mod`, of Kubernetes also in its ``replace`` lines (1.x.y is v0.x.y there), then run
``go mod tidy`` in that folder.

Versions: Kubernetes 1.34 is the newest that runs on hosts of cgroup v1 and with the containerd of Debian 12. etcd
is of 3.6, because Debian's 3.4 lacks RequestWatchProgress and clients that stream their lists fail on it.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import CannotRun, DidNotBuild

KUBERNETES = "1.34.2"
ETCD = "3.6.16"
GO_MIN = (1, 24)
GO_MODULES = Path(__file__).parent / "go"
_VERSION_PACKAGE = "k8s.io/component-base/version"


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    version: str
    package: str
    module: str = ""  # folder of `go/` that it is built through; without one by `go install`

    @property
    def path(self) -> Path:
        return cache_folder() / f"{self.name}-{self.version}" / self.name


def _kubernetes(name: str) -> Tool:
    return Tool(name, KUBERNETES, f"k8s.io/kubernetes/cmd/{name}", "kubernetes")


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("etcd", ETCD, "go.etcd.io/etcd/server/v3", "etcd"),
        _kubernetes("kube-apiserver"),
        _kubernetes("kubectl"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        Tool("pause", "1", ".", "pause"),
        Tool("helm", "3.22.0", "helm.sh/helm/v3/cmd/helm"),
        Tool("coredns", "1.14.7", ".", "coredns"),
    )
}


def cache_folder() -> Path:
    """Where built programs and images are kept: outside of every checkout, shared by all of them."""
    return Path(os.environ.get("FIRN_CLUSTER_CACHE") or "~/.cache/firn-cluster").expanduser()


def tool(name: str) -> Path:
    """The path of a program, built if it is not there yet.

    *Effects*: the first call for a version downloads and compiles: a minute or two for each part of Kubernetes.
    *Errors*: `CannotRun` when there is no Go; `DidNotBuild` when it fails.
    """
    wanted = TOOLS[name]
    if not wanted.path.exists():
        with locked("build"):
            if not wanted.path.exists():
                _build(wanted)
    return wanted.path


def build_all(names: Sequence[str] = ()) -> None:
    """Every program that is missing, those that a lone API server needs first."""
    for name in names or TOOLS:
        tool(name)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process of this machine at a time."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def go_program() -> str:
    """The Go command of this machine; one that is too old for the module in hand fetches a newer one by itself."""
    for found in (shutil.which("go"), "/usr/local/go/bin/go"):
        if found and Path(found).exists():
            version = subprocess.run([found, "env", "GOVERSION"], capture_output=True, text=True, check=True)
            if _numbers(version.stdout) >= (1, 21):  # the first that can switch toolchains
                return found
    raise CannotRun(
        f"Kubernetes is built from source, which needs Go {GO_MIN[0]}.{GO_MIN[1]} or newer (1.21 or newer fetches "
        "that by itself): unpack https://go.dev/dl into /usr/local/go, or on Debian 13 `apt-get install golang-go`"
    )


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.strip().removeprefix("go").split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def _build(wanted: Tool) -> None:
    go = go_program()
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "auto", "GOWORK": "off", "GOFLAGS": ""}
    with tempfile.TemporaryDirectory(prefix="firn-go-") as scratch:
        if wanted.module:
            shutil.copytree(GO_MODULES / wanted.module, scratch, dirs_exist_ok=True)
            built = Path(scratch) / wanted.name
            command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", _link_flags(wanted)]
            _go([*command, "-o", str(built), wanted.package], scratch, environment)
        else:
            environment["GOBIN"] = scratch
            built = Path(scratch) / wanted.name
            command = [go, "install", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w"]
            _go([*command, f"{wanted.package}@v{wanted.version}"], scratch, environment)
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        arriving = wanted.path.with_suffix(".arriving")
        shutil.copy(built, arriving)
        arriving.rename(wanted.path)


def _link_flags(wanted: Tool) -> str:
    """Without symbols; Kubernetes also wants to be told its version, which clients read and compare."""
    flags = "-s -w"
    if wanted.module == "kubernetes":
        major, minor, _ = wanted.version.split(".")
        told = {
            "gitVersion": f"v{wanted.version}",
            "gitMajor": major,
            "gitMinor": minor,
            "gitCommit": "unknown",
            "buildDate": "1970-01-01T00:00:00Z",
        }
        flags += "".join(f" -X {_VERSION_PACKAGE}.{name}={value}" for name, value in told.items())
    return flags


def _go(command: list[str], folder: str, environment: dict[str, str]) -> None:
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise DidNotBuild(f"{' '.join(command)} failed:\n{ended.stderr[-4000:]}")
