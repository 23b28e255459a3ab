"""``python -m cluster``: a real Kubernetes on this machine, from a shell; tests have the fixtures of `cluster.fixtures`.

* `apiserver`: etcd and kube-apiserver on loopback, up in seconds; needs Go, not root.
* `up`: a whole cluster, its nodes sets of namespaces of this machine; needs root.

Exit status: 0 done, 1 something failed, 3 this machine lacks something, and the text says what.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cluster import host, images, node, tools
from cluster.apiserver import ApiServer
from cluster.bare import BareCluster
from cluster.errors import CannotRun, DidNotBuild, DidNotStart


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("tools", help="build the programs that are missing, and say where they are")
    build.add_argument("names", nargs="*", choices=[[], *tools.TOOLS], help="all without a name")
    commands.add_parser("parts", help="install, build and make all that a whole cluster is started from")
    commands.add_parser("apiserver", help="run an API server until stopped; prints the line for your shell")
    up = commands.add_parser("up", help="run a whole cluster until stopped; prints the line for your shell")
    up.add_argument("--nodes", type=int, default=3)
    up.add_argument(
        "--images", nargs="*", choices=list(images.IMAGES), default=[], help="of this tree, to load"
    )
    load = commands.add_parser("load", help="bring images of this tree to the running cluster of $KUBECONFIG")
    load.add_argument("names", nargs="+", choices=list(images.IMAGES))
    build = commands.add_parser("images", help="build the images of this tree, and say where they are")
    build.add_argument("names", nargs="*", choices=[[], *images.IMAGES], help="all without a name")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)  # by an exception, so that what was started is stopped
    try:
        match options.command:
            case "tools":
                _tools(options.names)
            case "parts":
                _parts()
            case "apiserver":
                _run_api_server()
            case "up":
                _run_cluster(options.nodes, options.images)
            case "load":
                _load(options.names)
            case "images":
                _images(options.names)
    except CannotRun as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 3
    except (DidNotBuild, DidNotStart, host.CommandFailed) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tools(names: list[str]) -> None:
    for name in names or tools.TOOLS:
        begun = time.monotonic()
        path = tools.tool(name)
        print(
            f"{name:24} {tools.TOOLS[name].version:8} {time.monotonic() - begun:6.1f} s  {path}", flush=True
        )


def _parts() -> None:
    """What needs least comes first, so that it is there for the tests that need no more."""
    _tools([])
    host.require_root()
    host.install_for_nodes()
    host.require_namespaces()
    _images([])


def _run_api_server() -> None:
    with ApiServer.start() as server:
        print(f"export KUBECONFIG={server.kubeconfig}", flush=True)
        _until_stopped()


def _run_cluster(nodes: int, wanted: list[str]) -> None:
    with BareCluster.start(nodes) as cluster:
        for name in wanted:
            image = images.IMAGES[name]
            cluster.load(images.archive(image))
            print(f"# {name}: {image.reference()}", flush=True)
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        _until_stopped()


def _load(names: list[str]) -> None:
    sockets = sorted(Path(os.environ.get("KUBECONFIG", "")).parent.glob("node*/containerd.sock"))
    if not sockets:
        raise CannotRun("KUBECONFIG is not the file of a cluster that `python -m cluster up` runs")
    for name in names:
        node.load(sockets, images.archive(images.IMAGES[name]))
        print(images.IMAGES[name].reference(), flush=True)


def _images(names: list[str]) -> None:
    for name in names or images.IMAGES:
        begun = time.monotonic()
        file = images.archive(images.IMAGES[name])
        print(f"{images.IMAGES[name].reference()}  {time.monotonic() - begun:6.1f} s  {file}", flush=True)


def _until_stopped() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
