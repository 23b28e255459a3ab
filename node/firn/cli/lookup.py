"""``firn get`` and ``firn query``: the newest record of a key, and its raw history."""

import sys
from typing import Annotated

import typer

from firn.cli.printing import json_bytes, json_bytes_with_id, print_document, tsv_bytes
from firn.cli.running import (
    BrokerOption,
    OutputOption,
    ReadFromOption,
    TimeoutOption,
    checked,
    connect,
    fail,
    run,
)
from firn.cli.times import parse_time
from firn.record import Record

TimeOption = Annotated[int | None, typer.Option(parser=checked(parse_time))]


def register(app: typer.Typer) -> None:
    app.command("get", help="The newest value of a key; exit 1 when there is none.")(get)
    app.command("query", help="The raw records of a key, oldest first; or the one with a message id.")(query)


def get(
    topic: str,
    key: str,
    read_from: ReadFromOption = None,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    raw = key.encode(errors="surrogateescape")

    async def work() -> Record | None:
        async with connect(broker, timeout, read_from=read_from) as client:
            return await client.get(topic, raw)

    found = run(work())
    if found is None or found.value is None:
        fail(f"no such key: {key!r} has no value in topic {topic}")
    if print_document(found.document(), output):
        return
    sys.stdout.buffer.write(found.value)
    if sys.stdout.isatty() and not found.value.endswith(b"\n"):
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def query(
    topic: str,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY")] = None,
    id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The one record with this message id.")
    ] = None,
    since: Annotated[
        int | None,
        typer.Option("--since", parser=checked(parse_time), metavar="TIME", help="Not before this time."),
    ] = None,
    until: Annotated[
        int | None,
        typer.Option("--until", parser=checked(parse_time), metavar="TIME", help="Before this time."),
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="jsonl|tsv")] = "jsonl",
    ids: Annotated[bool, typer.Option("--ids", help="Print message ids too.")] = False,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
) -> None:
    if format not in ("jsonl", "tsv"):
        raise typer.BadParameter(f"--format: {format!r} is unknown; expected jsonl or tsv")
    if (key is None) == (id is None):
        raise typer.BadParameter("give either --key or --id")
    write = tsv_bytes if format == "tsv" else json_bytes_with_id if ids else json_bytes

    async def work() -> None:
        async with connect(broker, timeout) as client:
            if id is not None:
                named = await client.find(topic, id)
                found = [] if named is None else [named]
            else:
                raw = (key or "").encode(errors="surrogateescape")
                found = await client.query(topic, raw, since=since, until=until)
            for record in found:
                sys.stdout.buffer.write(write(record))

    run(work())
    sys.stdout.buffer.flush()
