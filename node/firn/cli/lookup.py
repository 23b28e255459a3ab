"""``firn get`` and ``firn query``: the newest record of a key, and its raw history."""

import sys
from typing import Annotated

import typer

from firn.cli.printing import json_bytes, json_line, tsv_bytes
from firn.cli.running import BrokerOption, OutputOption, TimeoutOption, checked, connect, fail, run
from firn.cli.times import parse_time
from firn.record import Record

TimeOption = Annotated[int | None, typer.Option(parser=checked(parse_time))]


def register(app: typer.Typer) -> None:
    app.command("get", help="The newest value of a key; exit 1 when there is none.")(get)
    app.command("query", help="The raw records of a key, oldest first.")(query)


def get(
    topic: str,
    key: str,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    raw = key.encode(errors="surrogateescape")

    async def work() -> Record | None:
        async with connect(broker, timeout) as client:
            return await client.get(topic, raw)

    found = run(work())
    if found is None or found.value is None:
        fail(f"no such key: {key!r} has no value in topic {topic}")
    if output == "json":
        sys.stdout.write(json_line(found))
        return
    sys.stdout.buffer.write(found.value)
    if sys.stdout.isatty() and not found.value.endswith(b"\n"):
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def query(
    topic: str,
    key: Annotated[str, typer.Option("--key", metavar="KEY")],
    since: Annotated[
        int | None,
        typer.Option("--since", parser=checked(parse_time), metavar="TIME", help="Not before this time."),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option("--until", parser=checked(parse_time), metavar="TIME", help="Before this time."),
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="jsonl|tsv")] = "jsonl",
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
) -> None:
    if format not in ("jsonl", "tsv"):
        raise typer.BadParameter(f"--format: {format!r} is unknown; expected jsonl or tsv")
    raw = key.encode(errors="surrogateescape")
    write = json_bytes if format == "jsonl" else tsv_bytes

    async def work() -> None:
        async with connect(broker, timeout) as client:
            for record in await client.query(topic, raw, since=since, until=until):
                sys.stdout.buffer.write(write(record))

    run(work())
    sys.stdout.buffer.flush()
