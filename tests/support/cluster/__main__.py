"""``python -m cluster``: a Kubernetes of one's own, from a shell.

Exit status: 0 done, 1 this machine lacks something, and the text says what.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from cluster import tools
from cluster.apiserver import ApiServer
from cluster.errors import CannotRun, DidNotStart


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("tools", help="build the programs that are missing, and say where they are")
    build.add_argument("names", nargs="*", choices=[[], *tools.TOOLS], help="all without a name")
    commands.add_parser("apiserver", help="run an API server until stopped; prints the line for your shell")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)  # by an exception, so that what was started is stopped
    try:
        match options.command:
            case "tools":
                _tools(options.names)
            case "apiserver":
                _run_api_server()
    except (CannotRun, DidNotStart) as error:
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


def _run_api_server() -> None:
    with ApiServer.start() as server:
        print(f"export KUBECONFIG={server.kubeconfig}", flush=True)
        _until_stopped()


def _until_stopped() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
