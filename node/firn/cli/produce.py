"""``firn produce``: records from standard input, streamed in bounded memory.

Two tasks share the work: one reads lines and hands records to the producer, the other awaits their
acknowledgements in input order. Invariants: at most ``BLOCKS_AHEAD`` blocks of input are on their way; an
acknowledgement is printed after all of those before it; what was read before a bad line is flushed and counted.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firn.cli.lines import BadLine, LineCutter, parse_jsonl, parse_tsv
from firn.cli.running import BrokerOption, Failure, TimeoutOption, connect, run, sentence_of
from firn.cli.stdin import stdin_blocks
from firn.errors import FirnError, LimitExceeded

if TYPE_CHECKING:
    from firn.client.chunks import Sent
    from firn.client.producer import Producer

_RECORD = re.compile(r"^record \d+: ")  # the producer counts records; people count lines
BLOCKS_AHEAD = 16  # of at most 1 MiB, one long line excepted


def register(app: typer.Typer) -> None:
    app.command("produce", help="Write records from standard input.")(produce)


@dataclass(frozen=True, slots=True)
class Input:
    """How lines become records."""

    format: str
    separator: bytes
    empty_is_tombstone: bool


def produce(
    topic: str,
    format: Annotated[str, typer.Option("--format", metavar="tsv|jsonl")] = "tsv",
    key_separator: Annotated[
        str, typer.Option("--key-separator", metavar="TEXT", help="Of tsv; \\t for TAB.", show_default=False)
    ] = "\t",
    tombstone_on_empty: Annotated[
        bool, typer.Option("--tombstone-on-empty", help="An empty value is a tombstone.")
    ] = False,
    acks: Annotated[bool, typer.Option("--acks", help="One JSON line per acknowledged record.")] = False,
    broker: BrokerOption = None,
    timeout: TimeoutOption = None,
) -> None:
    if format not in ("tsv", "jsonl"):
        raise typer.BadParameter(f"--format: {format!r} is unknown; expected tsv or jsonl")
    separator = key_separator.replace("\\t", "\t").encode(errors="surrogateescape")
    if not separator or b"\n" in separator:
        raise typer.BadParameter("--key-separator: expected text without a line end")
    given = Input(format, separator, tombstone_on_empty)

    async def work() -> None:
        async with connect(broker, timeout) as client:
            await client.describe(topic)  # an absent topic or broker is told before any input is taken
            sending = Sending(client.producer(topic), given, print_acks=acks)
            try:
                await sending.run(stdin_blocks())
            finally:
                if not acks:
                    print(f"{sending.acknowledged} records acknowledged", flush=True)

    run(work())


class Sending:
    """One run of ``produce``."""

    def __init__(self, producer: "Producer", given: Input, *, print_acks: bool) -> None:
        self._producer = producer
        self._given = given
        self._print_acks = print_acks
        self._blocks: asyncio.Queue[list[tuple[int, Sent]] | None] = asyncio.Queue(BLOCKS_AHEAD)
        self.acknowledged = 0

    async def run(self, blocks: AsyncIterator[bytes]) -> None:
        """Send all lines and await every acknowledgement.

        Errors: Failure for the first record that failed or the first line that is none, whichever comes first.
        """
        reading = asyncio.ensure_future(self._read(blocks))
        settling = asyncio.ensure_future(self._settle())
        try:
            await asyncio.wait({reading, settling}, return_when=asyncio.FIRST_COMPLETED)
            if settling.done():
                settling.result()
            await settling  # reading has ended: all that is on its way comes to an end
            reading.result()
        finally:
            for task in (reading, settling):
                task.cancel()
            await asyncio.gather(reading, settling, return_exceptions=True)

    async def _read(self, blocks: AsyncIterator[bytes]) -> None:
        cutter = LineCutter()
        try:
            async for block in blocks:
                await self._send(*cutter.feed(block))
            await self._send(*cutter.finish())
        except BadLine as error:
            raise Failure(f"{error.message}; the records before it are written") from error
        finally:
            await self._blocks.put(None)

    async def _send(self, first: int, lines: list[bytes]) -> None:
        """Hand the lines over. Errors: BadLine, after those before it were handed over."""
        sent: list[tuple[int, Sent]] = []
        try:
            for number, record in enumerate(self._parse(first, lines), first):
                try:
                    sent.append((number, self._producer.send(*record)))
                except LimitExceeded:  # its buffer is full: as much as that is on its way
                    await self._producer.wait_for_room()
                    sent.append((number, self._producer.send(*record)))
        finally:
            if sent:
                await self._blocks.put(sent)

    def _parse(self, first: int, lines: list[bytes]) -> Iterator[tuple[Any, ...]]:
        """The arguments of ``Producer.send``, a line each. Errors: BadLine."""
        given = self._given
        if given.format == "tsv":
            return parse_tsv(
                first, lines, separator=given.separator, empty_is_tombstone=given.empty_is_tombstone
            )
        return (
            (r.key, r.value, r.tag, r.timestamp, r.headers, r.queues or None, r.partition)
            for r in parse_jsonl(first, lines, empty_is_tombstone=given.empty_is_tombstone)
        )

    async def _settle(self) -> None:
        """Await acknowledgements in input order. Errors: Failure at the first record that failed."""
        while (sent := await self._blocks.get()) is not None:
            for number, outcome in sent:
                try:
                    partition, offset = await outcome
                except FirnError as error:
                    raise Failure(f"line {number}: {_RECORD.sub('', sentence_of(error))}") from error
                self.acknowledged += 1
                if self._print_acks:
                    _write(b'{"partition":%d,"offset":%d}\n' % (partition, offset))


def _write(line: bytes) -> None:
    """One whole line, at once, past Python's buffers."""
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]
