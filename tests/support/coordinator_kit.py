"""What the contract of coordinators runs on: records to store, and a site for each implementation.

A *site* makes handles of one store, as several processes would have them, and can disturb one of them.
"""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from firn.crc import crc32c
from firn.types import Epoch
from firn_node.coordinator import Coordinator, MemoryCoordinator, Reading, Records, SqliteCoordinator
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member

GROUP = GroupId("0")


def first_record(group_id: GroupId = GROUP, *, log_id: str = "a") -> GroupRecord:
    """Version 1 of a group of one node."""
    name = LogId(log_id)
    return GroupRecord(
        group_id=group_id,
        version=1,
        epoch=Epoch(1),
        renewals=0,
        master=Master(name, Incarnation("1")),
        in_sync=frozenset([name]),
        members={name: Member("node-0", "127.0.0.1:7700")},
    )


def renewed(record: GroupRecord) -> GroupRecord:
    return replace(record, version=record.version + 1, renewals=record.renewals + 1)


class Site(Protocol):
    def handle(self) -> Coordinator: ...

    def put_back(self, record: GroupRecord) -> None:
        """Store a record behind the coordinator's back, as a restored backup does."""
        ...

    def disturbed(self, handle: Coordinator) -> contextlib.AbstractAsyncContextManager[None]:
        """Meanwhile no swap of ``handle`` can be carried out."""
        ...

    def losing_an_answer(self) -> contextlib.AbstractAsyncContextManager[Coordinator]:
        """A handle whose one swap meanwhile is carried out, at the end at the latest, without its hearing of it."""
        ...


class MemorySite:
    def __init__(self, folder: Path) -> None:
        self.records = Records()

    def handle(self) -> MemoryCoordinator:
        return MemoryCoordinator(self.records)

    def put_back(self, record: GroupRecord) -> None:
        self.records.by_group[record.group_id] = record
        self.records.wake()

    @contextlib.asynccontextmanager
    async def disturbed(self, handle: Coordinator) -> AsyncIterator[None]:
        assert isinstance(handle, MemoryCoordinator)
        handle.cut()
        yield
        handle.heal()

    @contextlib.asynccontextmanager
    async def losing_an_answer(self) -> AsyncIterator[Coordinator]:
        handle = self.handle()
        handle.lose_next_answer()
        yield handle


class SqliteSite:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "coordinator.sqlite"
        SqliteCoordinator.create(self.path)

    def handle(self) -> SqliteCoordinator:
        return SqliteCoordinator(self.path, busy_s=0.3, answer_s=20.0, poll_s=0.01)

    def put_back(self, record: GroupRecord) -> None:
        document = json.dumps(record.to_document()).encode()
        row = (record.group_id, record.version, document, crc32c(document))
        with contextlib.closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)", row)

    @contextlib.asynccontextmanager
    async def disturbed(self, handle: Coordinator) -> AsyncIterator[None]:
        """The file is locked for longer than the busy time-out."""
        with locked(self.path):
            yield

    @contextlib.asynccontextmanager
    async def losing_an_answer(self) -> AsyncIterator[Coordinator]:
        """The handle gives up hope while its thread still waits for the file, which it gets in the end."""
        handle = SqliteCoordinator(self.path, busy_s=20.0, answer_s=0.2)
        await handle.read(GROUP)
        with locked(self.path):
            yield handle
        patient = self.handle()
        await handle.close()  # after what its thread had begun
        await patient.close()


@contextlib.contextmanager
def locked(path: Path):
    """Another process's write transaction on the file, for as long as the block."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def next_of(watch, seconds: float = 20.0) -> Reading:
    async with asyncio.timeout(seconds):
        return await anext(watch)
