"""``firn status``: all brokers of the cluster and their topics."""

from typing import Any

import typer

from firn.cli.printing import compact_json
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, connect, run
from firn.cli.tables import print_status


def register(app: typer.Typer) -> None:
    app.command("status", help="Brokers, topics and partitions as they are now.")(status)


def status(broker: BrokerOption = None, timeout: TimeoutOption = None, output: OutputOption = None) -> None:
    async def work() -> dict[str, Any]:
        async with connect(broker, timeout) as client:
            return await client.cluster_status()

    found = run(work())
    if output == "json":
        print(compact_json(found))
    else:
        print_status(found)
