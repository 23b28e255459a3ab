"""``firn consume``: records to standard output, a page at a time.

With ``--group``: reading goes on at the group's offsets unless ``--from`` is given, and what was printed is
committed: every second, at the end, and when it is stopped. A page whose printing failed is not committed.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firn.cli.printing import json_bytes_with_id, json_line, tsv_bytes
from firn.cli.running import BrokerOption, ReadFromOption, TimeoutOption, checked, connect, quiet_stdout, run
from firn.cli.times import Start, parse_start
from firn.record import Record

if TYPE_CHECKING:
    from firn.client import Client
    from firn.client.reader import Reader

COMMIT_SECONDS = 1.0


def register(app: typer.Typer) -> None:
    app.command("consume", help="Print the records of a topic.")(consume)


def consume(
    topic: str,
    view: Annotated[
        str | None, typer.Option("--view", metavar="compacted|raw", help="compacted; raw with --queue.", show_default=False)
    ] = None,
    start: Annotated[
        Any,
        typer.Option(
            "--from", parser=checked(parse_start), metavar="earliest|latest|OFFSET|TIME", show_default=False,
            help="earliest when not given; with --group its offsets.",
        ),
    ] = None,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop at the end. The default.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on as records arrive.")] = False,
    partition: Annotated[int | None, typer.Option("--partition", metavar="P", show_default=False)] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", show_default=False)] = None,
    group: Annotated[str | None, typer.Option("--group", metavar="G", show_default=False)] = None,
    count_max: Annotated[int | None, typer.Option("--max", metavar="N", show_default=False)] = None,
    format: Annotated[str, typer.Option("--format", metavar="jsonl|tsv")] = "jsonl",
    ids: Annotated[bool, typer.Option("--ids", help="With --view raw: print message ids too.")] = False,
    read_from: ReadFromOption = None,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
) -> None:  # fmt: skip
    for name, value, known in (
        ("--view", view or "compacted", ("compacted", "raw")),
        ("--format", format, ("jsonl", "tsv")),
    ):
        if value not in known:
            raise typer.BadParameter(f"{name}: {value!r} is unknown; expected {known[0]} or {known[1]}")
    if until_end and follow:
        raise typer.BadParameter("--until-end and --follow: give one of them")
    if count_max is not None and count_max < 0:
        raise typer.BadParameter("--max: expected 0 or more")
    if partition is not None and partition < 0:
        raise typer.BadParameter("--partition: expected 0 or more")
    if count_max == 0:
        return

    async def work() -> None:
        async with connect(broker, timeout, read_from=read_from) as client:
            reader = client.reader(
                topic, view=view, start=_start(start, group), until_end=not follow, queue=queue, group=group,
                ids=ids,
                partitions=None if partition is None else [partition],
            )  # fmt: skip
            printing = Printing(client, reader, topic, group, _printer(format, ids), count_max)
            await printing.run()

    try:
        run(work())
    except KeyboardInterrupt:
        if not follow:
            raise
    except BrokenPipeError:
        quiet_stdout()


def _start(given: Start | None, group: str | None) -> Any:
    """What the client library takes as a start."""
    if given is None:
        return "earliest" if group is None else "committed"
    kind, number = given
    if kind == "offset":
        return number
    return f"@{number}" if kind == "time" else kind


def _printer(format: str, ids: bool) -> Callable[[list[Record]], bytes]:
    if format == "tsv":
        return _tsv
    return _jsonl_with_ids if ids else _jsonl


def _jsonl_with_ids(records: list[Record]) -> bytes:
    return b"".join(map(json_bytes_with_id, records))


def _jsonl(records: list[Record]) -> bytes:
    return "".join(map(json_line, records)).encode()


def _tsv(records: list[Record]) -> bytes:
    return b"".join(map(tsv_bytes, records))


class Printing:
    """One run of ``consume``."""

    def __init__(
        self, client: "Client", reader: "Reader", topic: str, group: str | None,
        encode: Callable[[list[Record]], bytes], count_max: int | None,
    ) -> None:  # fmt: skip
        self._client = client
        self._reader = reader
        self._topic = topic
        self._group = group
        self._encode = encode
        self._left = count_max
        self._printed: dict[int, Any] = {}  # partition -> where the group goes on
        self._committed_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Print until the end, the count, a signal or a closed pipe; commit what was printed, whichever it was.

        Errors: BrokenPipeError; those of the reader.
        """
        try:
            async for records in self._reader.pages():
                if self._left is not None and len(records) >= self._left:
                    self._print(records[: self._left], is_cut=len(records) > self._left)
                    break
                self._print(records, is_cut=False)
                if self._group and asyncio.get_running_loop().time() - self._committed_at > COMMIT_SECONDS:
                    await self._commit()
            else:
                self._printed = self._reader.positions()
        finally:
            await self._commit()
            await self._reader.close()

    def _print(self, records: list[Record], *, is_cut: bool) -> None:
        output = sys.stdout.buffer
        output.write(self._encode(records))
        output.flush()
        if self._left is not None:
            self._left -= len(records)
        positions = dict(self._reader.positions())
        if is_cut:
            last = records[-1]
            positions[last.partition] = positions[last.partition]._replace(offset=last.offset + 1)
        self._printed = positions

    async def _commit(self) -> None:
        if self._group and self._printed:
            await self._client.commit_offsets(self._group, self._topic, self._printed)
        self._committed_at = asyncio.get_running_loop().time()
