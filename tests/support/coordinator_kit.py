"""What the contract of coordinators runs on: records to store, and a site for each implementation.

A *site* makes handles of one store, as several processes would have them, and can disturb one of them.
"""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from kube_kit import FakeKubernetes, configuration_of

from firn.crc import crc32c
from firn.types import Epoch
from firn_node.coordinator import (
    Coordinator,
    MemoryCoordinator,
    Reading,
    Records,
    SqliteCoordinator,
    Unknown,
    Unreachable,
)
from firn_node.coordinator.kubernetes import RECORD, KubernetesCoordinator
from firn_node.kubernetes.api import Api, Denied, KubernetesApi, NoAnswer, Object
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member

T = TypeVar("T")

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
    """Made within the event loop; ``begin`` and ``end`` are the first and last things called."""

    async def begin(self) -> None: ...

    async def end(self) -> None: ...

    def handle(self) -> Coordinator: ...

    async def put_back(self, record: GroupRecord) -> None:
        """Store a record behind the coordinator's back, as a restored backup does."""
        ...

    def disturbed(self, handle: Coordinator) -> contextlib.AbstractAsyncContextManager[None]:
        """Meanwhile no swap of ``handle`` can be carried out."""
        ...

    def losing_an_answer(self) -> contextlib.AbstractAsyncContextManager[Coordinator]:
        """A handle whose one swap meanwhile is carried out, at the end at the latest, without its hearing of it."""
        ...


class _Ready:
    """A site that needs nothing around it."""

    async def begin(self) -> None:
        pass

    async def end(self) -> None:
        pass


class MemorySite(_Ready):
    def __init__(self, folder: Path) -> None:
        self.records = Records()

    def handle(self) -> MemoryCoordinator:
        return MemoryCoordinator(self.records)

    async def put_back(self, record: GroupRecord) -> None:
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


class SqliteSite(_Ready):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "coordinator.sqlite"
        SqliteCoordinator.create(self.path)

    def handle(self) -> SqliteCoordinator:
        return SqliteCoordinator(self.path, busy_s=0.3, answer_s=20.0, poll_s=0.01)

    async def put_back(self, record: GroupRecord) -> None:
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
        await known(lambda: handle.read(GROUP))
        with locked(self.path):
            yield handle
        patient = self.handle()
        await handle.close()  # after what its thread had begun
        await patient.close()


NAMESPACE = "shop"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
LEASE_TTL_S = 60.0  # long: an answer counts for nothing after a quarter of it
_GROUPS = ("0", "1", "2", "ä/1")


def lease_of(group_id: GroupId) -> str:
    return f"main-{group_id.encode().hex()}"


def lease(name: str) -> Object:
    """An empty one, as the operator makes it."""
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}


class FaultyApi:
    """A connection whose changes can be kept from the server, or their answers from who asked."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.is_cut = False
        self.loses_answers = False

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Object | None = None,
        content: str = "application/json", within_s: float = 10.0,
    ) -> Object:  # fmt: skip
        if self.is_cut and method != "GET":
            raise NoAnswer("cut off")
        found = await self._api.request(
            method, path, query=query, body=body, content=content, within_s=within_s
        )
        if self.loses_answers and method != "GET":
            raise NoAnswer("the answer was lost")
        return found

    def watch(
        self, path: str, query: Mapping[str, str], *, within_s: float = 10.0
    ) -> AsyncGenerator[Object, None]:
        return self._api.watch(path, query, within_s=within_s)

    async def close(self) -> None:
        await self._api.close()


class KubernetesSite:
    """The Leases of a few groups on an API server; ``connect`` makes a connection to it."""

    def __init__(self) -> None:
        self.handles: list[KubernetesCoordinator] = []
        self.connections: dict[Coordinator, FaultyApi] = {}

    def connect(self) -> Api:
        raise NotImplementedError

    async def begin(self) -> None:
        self.admin = self.connect()
        for group in _GROUPS:
            await self.admin.request("POST", LEASES, body=lease(lease_of(GroupId(group))))

    async def end(self) -> None:
        for handle in self.handles:
            await handle.close()
        await self.admin.close()

    def handle(self) -> KubernetesCoordinator:
        connection = FaultyApi(self.connect())
        made = KubernetesCoordinator(connection, NAMESPACE, lease_of, lease_ttl_s=LEASE_TTL_S)
        self.connections[made] = connection
        self.handles.append(made)
        return made

    async def put_back(self, record: GroupRecord) -> None:
        annotations = {RECORD: json.dumps(record.to_document())}
        await self.admin.request(
            "PATCH", f"{LEASES}/{lease_of(record.group_id)}", body={"metadata": {"annotations": annotations}},
            content="application/merge-patch+json",
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def disturbed(self, handle: Coordinator) -> AsyncIterator[None]:
        self.connections[handle].is_cut = True
        yield
        self.connections[handle].is_cut = False

    @contextlib.asynccontextmanager
    async def losing_an_answer(self) -> AsyncIterator[Coordinator]:
        handle = self.handle()
        self.connections[handle].loses_answers = True
        yield handle


class FakeKubernetesSite(KubernetesSite):
    def __init__(self, folder: Path) -> None:
        super().__init__()

    async def begin(self) -> None:
        self.server = FakeKubernetes()
        await self.server.start()
        await super().begin()

    async def end(self) -> None:
        await super().end()
        await self.server.stop()

    def connect(self) -> Api:
        return self.server.api()


class ApiServerSite(KubernetesSite):
    """On a real API server, which stays as it is: what a test left there is taken away by the next."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__()
        self._kubeconfig = kubeconfig

    async def begin(self) -> None:
        self._configuration = await configuration_of(self._kubeconfig)
        admin = self.connect()
        with contextlib.suppress(Denied):
            await admin.request("POST", "/api/v1/namespaces", body={"metadata": {"name": NAMESPACE}})
        for group in _GROUPS:
            with contextlib.suppress(Denied):
                await admin.request("DELETE", f"{LEASES}/{lease_of(GroupId(group))}")
        await admin.close()
        await super().begin()

    def connect(self) -> Api:
        return KubernetesApi(self._configuration)


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


async def known(ask: Callable[[], Awaitable[T]]) -> T:
    """What a handle of little patience is answered in the end, where its store is well and just slow. Nothing of its own is
    under way then.
    """
    async with asyncio.timeout(60):
        while isinstance(found := await ask(), Unreachable | Unknown):
            pass
    return found
