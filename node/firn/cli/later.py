"""Commands for many brokers. This build has a single one: each says so in one sentence and exits with 1."""

from typing import Annotated

import typer

from firn.cli.running import OutputOption, fail

SINGLE = "this build runs a single broker without replicas"


def register(app: typer.Typer) -> None:
    app.command("switchover", help="Hand a group's mastership to another node.")(switchover)
    app.command("rebuild", help="Rebuild a node's data from its peers.")(rebuild)
    drills = typer.Typer(help="Failure drills.", no_args_is_help=True, rich_markup_mode=None)
    drills.command("list", help="List the drills.")(drill_list)
    drills.command("run", help="Run one drill, or all.")(drill_run)
    app.add_typer(drills, name="drill")


def switchover(group: str, to: Annotated[str | None, typer.Option("--to", metavar="NODE")] = None) -> None:
    fail(f"cannot switch group {group} over: {SINGLE}; stop and start the broker instead")


def rebuild(node: str) -> None:
    fail(
        f"cannot rebuild {node}: {SINGLE}, so there is no peer to copy from; restore its data folder from a backup"
    )


def drill_list(output: OutputOption = None) -> None:
    fail(f"there are no drills: {SINGLE}; `make test` runs its crash tests")


def drill_run(name: str, output: OutputOption = None) -> None:
    fail(f"cannot run drill {name}: {SINGLE}; `make test` runs its crash tests")
