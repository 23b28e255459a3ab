"""``firn switchover``: another master for a broker group; ``firn rebuild``: a standby that starts anew."""

import time
from typing import Annotated, Any

import typer

from firn.cli.printing import print_document
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, connect, run


def register(app: typer.Typer) -> None:
    app.command("switchover", help="Hand a group's mastership to another node.")(switchover)
    app.command("rebuild", help="Rebuild a standby's data from its master.")(rebuild)


def switchover(
    group: Annotated[int, typer.Argument(metavar="GROUP", min=0, help="Its number, from 0.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="NODE", help="Else the best of the in-sync standbys.", show_default=False
        ),
    ] = None,
    accept_data_loss: Annotated[
        bool,
        typer.Option(
            "--accept-data-loss",
            help="Make NODE master though it may lack acknowledged records, which are then lost for good.",
        ),
    ] = False,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    if accept_data_loss and to is None:
        raise typer.BadParameter("--accept-data-loss: say with --to whose data shall count")

    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            return await client.switchover(group, to=to, accept_data_loss=accept_data_loss)

    started = time.monotonic()
    found = run(work())
    seconds = time.monotonic() - started
    if not print_document({**found, "seconds": round(seconds, 3)}, output):
        print(
            f"group {group}: {found['to']} ({found['address']}) is master in epoch {found['epoch']}, "
            f"after {found['from'] or 'nobody'}; it took {seconds:.1f} s"
        )


def rebuild(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name in `firn status`.")],
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="For its log.")
    ] = "somebody asked for it",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
) -> None:
    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            return await client.rebuild(node, reason=reason)

    row = run(work())
    print(f"{node} ({row['address']}) starts anew; `firn status` shows how far it is")
