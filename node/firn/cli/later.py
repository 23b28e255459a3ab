"""Commands for many brokers. This build has a single one: each says so in one sentence and exits with 1."""

from typing import Annotated

import typer

from firn.cli.running import fail

SINGLE = "this build runs a single broker without replicas"


def register(app: typer.Typer) -> None:
    app.command("switchover", help="Hand a group's mastership to another node.")(switchover)
    app.command("rebuild", help="Rebuild a node's data from its peers.")(rebuild)


def switchover(group: str, to: Annotated[str | None, typer.Option("--to", metavar="NODE")] = None) -> None:
    fail(f"cannot switch group {group} over: {SINGLE}; stop and start the broker instead")


def rebuild(node: str) -> None:
    fail(
        f"cannot rebuild {node}: {SINGLE}, so there is no peer to copy from; restore its data folder from a backup"
    )
