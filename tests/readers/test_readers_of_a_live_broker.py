"""Readers and tables of the real client against a real server, while tombstones, offsets and files go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from engine_kit import Kit, run, running

from firn.client import Client
from firn.errors import OffsetExpired, SnapshotExpired
from firn.record import Record
from firn_node.compaction import CompactedLog
from firn_node.engine.api import ReadRequest
from firn_node.server import Server, serve

AT_ONCE = {"deleteRetention": "0s"}


@dataclass
class Live:
    """A broker whose port can be closed while the broker works on."""

    kit: Kit
    server: Server

    @property
    def address(self) -> str:
        return self.server.address

    async def away(self) -> None:
        # asyncio's server (not uvloop's) loses a connection that it accepts in the very turn in which it is closed
        # (CPython issue 109564): let the client's come in.
        await asyncio.sleep(0.05)
        await self.server.stop()

    async def back(self) -> None:
        host, _, port = self.address.rpartition(":")
        self.server = await serve(self.kit.broker, host=host, port=int(port))


@asynccontextmanager
async def live(folder: Any, **settings: Any) -> AsyncIterator[tuple[Live, Client]]:
    async with running(folder, index="files", **settings) as kit:
        found = Live(kit, await serve(kit.broker, host="127.0.0.1", port=0))
        try:
            async with asyncio.timeout(30), Client(found.address) as client:
                yield found, client
        finally:
            await found.server.stop()


@pytest.mark.parametrize("floor_passes_the_reader", [True, False])
def test_a_table_that_missed_a_tombstone_starts_anew_and_reports_the_differences(
    tmp_path, caplog, floor_passes_the_reader
):
    """And one that missed none goes on where it was."""

    async def main() -> None:
        async with live(tmp_path) as (broker, client):
            await broker.kit.create("t", compaction=AT_ONCE)
            await broker.kit.put("t", [(b"stays", b"1"), (b"goes", b"1"), (b"changes", b"1")])
            table = await client.table("t")
            await table.caught_up()
            changes: list[tuple[bytes, bytes | None, bytes | None]] = []
            table.on_change(lambda *change: changes.append(change))
            await broker.away()
            await broker.kit.put("t", [(b"goes", None), (b"changes", b"2"), (b"comes", b"1")])
            if floor_passes_the_reader:
                await broker.kit.compact("t")
                assert [r.key for r in await broker.kit.read("t")] == [b"stays", b"changes", b"comes"]
            await broker.back()
            await table.caught_up()
            assert dict(table) == {b"stays": b"1", b"changes": b"2", b"comes": b"1"}
            assert sorted(changes) == [
                (b"changes", b"1", b"2"), (b"comes", None, b"1"), (b"goes", b"1", None),
            ]  # fmt: skip
            await client.put("t", b"after", b"1")
            await table.caught_up()
            assert table[b"after"] == b"1"

    with caplog.at_level("INFO", logger="firn.client.table"):
        run(main())
    assert ("reads partition 0 anew" in caplog.text) == floor_passes_the_reader


def test_a_slow_reader_is_interrupted_and_never_silently_wrong(tmp_path):
    async def main() -> None:
        async with live(tmp_path) as (broker, client):
            await broker.kit.create("t", compaction=AT_ONCE)
            for number in range(4):
                await broker.kit.put("t", [(b"%d" % number, b"1")])
            async with client.reader("t", until_end=True, page_bytes=1, prefetch_bytes=1) as reader:
                records = aiter(reader)
                assert (await anext(records)).key == b"0"
                await broker.kit.put("t", [(b"0", None)])
                await broker.kit.compact("t")
                with pytest.raises(SnapshotExpired):
                    await drain(records)

    run(main())


async def drain(records: AsyncIterator[Record]) -> list[Record]:
    return [record async for record in records]


def test_a_raw_reader_of_expired_offsets_is_told_the_earliest_and_a_compacted_one_gets_the_next_live_record(
    tmp_path,
):
    async def main() -> None:
        quick = {"log_segment_bytes": 16 << 10, "compaction_check_ms": 20, "checkpoint_ms": 20}
        async with live(tmp_path, **quick) as (broker, client):
            await broker.kit.create("t", compaction=AT_ONCE, retention={"time": "0s"})
            for number in range(40):
                await broker.kit.put("t", [(b"%d" % (number % 8), b"%d " % number * 500)])
            await broker.kit.compact("t")
            earliest = await expired_to(broker, client)
            assert 0 < earliest <= 40
            with pytest.raises(OffsetExpired) as expired:
                await anext(aiter(client.reader("t", view="raw", start=0)))
            assert expired.value.details["earliest"] == earliest
            raw = [r.offset async for r in client.reader("t", view="raw", until_end=True)]
            assert raw == list(range(earliest, 40)), "from the earliest on"
            # Offsets 0 to 31 were overwritten: they are in neither log now.
            for start in (0, 5, 31):
                async with client.reader("t", start=start, until_end=True) as reader:
                    assert [r.offset async for r in reader] == list(range(32, 40))

    run(main())


async def expired_to(broker: Live, client: Client) -> int:
    """The first raw offset, once the broker has let go of all that it ever will: the log's last segment stays."""
    while len(broker.kit.broker.core.log.extents()) > 1:
        await asyncio.sleep(0.05)
    return int((await client.describe("t"))["partitions"][0]["earliest"])


class SwappedMeanwhile:
    """A compacted log that gets a new generation in the middle of every read, as another thread may do."""

    def __init__(self, log: CompactedLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def read(self, *arguments: Any, **options: Any) -> Any:
        found = self._log.read(*arguments, **options)
        self._log.swap(lambda manifest: manifest)
        return found


def test_the_horizon_and_floor_of_an_answer_are_those_of_the_generation_its_bytes_come_from(tmp_path):
    """A newer horizon would claim that the reader has met the tombstones below it, and it would keep deleted keys."""

    async def main() -> None:
        async with running(tmp_path, index="files") as kit:
            await kit.create("t", compaction=AT_ONCE)
            await kit.put("t", [(b"a", b"1"), (b"b", b"1")])
            await kit.compact("t")
            partition = kit.broker.partitions.get(kit.broker.topic("t"), 0)
            log = partition.log
            before = log.manifest.generation
            partition.log = SwappedMeanwhile(log)  # type: ignore[assignment]
            found = await kit.broker.read(ReadRequest(topic="t", partition=0))
            partition.log = log
            assert found.take()
            assert log.manifest.generation == before + 1
            assert found.generation == before

    run(main())
