"""Brokers of one group in one process: real folders, real connections on loopback, one coordinator in memory.

``broker_group`` checks at its end that all brokers that are up hold the same map of keys to values.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_kit import Kit, settings

from firn.errors import FirnError
from firn.topicspec import parse_spec
from firn_node.coordinator import MemoryCoordinator, Records
from firn_node.engine.broker import Broker
from firn_node.ports import free_ports
from firn_node.replication.record import GroupId
from firn_node.replication.state import Role
from firn_node.server import Server, serve
from firn_node.settings import GroupSettings

LEASE_TTL_MS = 1500
PATIENT_MS = 6000  # where nobody is to be elected, or called silent, because a busy machine stood still


_given: set[int] = set()


def free_port() -> int:
    """One that stays free while its replica is down, and before it is up: nobody else is given it."""
    while (port := free_ports("127.0.0.1", 1)[0]) in _given:
        pass
    _given.add(port)
    return port


@dataclass
class Replica:
    """One broker over many lives."""

    ordinal: int
    folder: Path
    records: Records
    changes: dict[str, Any] = field(default_factory=dict)  # of its settings
    group: int = 0
    groups: int = 1  # of the cluster
    lease_ttl_ms: int = LEASE_TTL_MS
    port: int = field(default_factory=free_port)
    broker: Broker = field(init=False)
    is_up: bool = False

    async def start(self) -> None:
        self.coordinator = MemoryCoordinator(self.records)
        place = GroupSettings(
            "", group=self.group, groups=self.groups, ordinal=self.ordinal, lease_ttl_ms=self.lease_ttl_ms
        )
        node = f"node-{self.ordinal}" if not self.group else f"node-{self.group}-{self.ordinal}"
        self.broker = Broker(
            settings(self.folder, port=self.port, node=node, group=place, **self.changes),
            coordinator=self.coordinator,
        )
        await self.broker.start()
        assert self.broker.group is not None
        self.server: Server = await serve(
            self.broker, host="127.0.0.1", port=self.port, peers=self.broker.group.peers
        )
        self.is_up = True

    async def stop(self) -> None:
        self.is_up = False
        await self.server.stop()
        await self.broker.stop()
        await self.coordinator.close()

    async def fail(self) -> None:
        """It takes no part in its group from one moment to the next, without a word to anyone."""
        assert self.broker.group is not None
        self.broker.group.fail("failed by the test")
        await self.stop()

    @property
    def role(self) -> Role:
        assert self.broker.group is not None
        return self.broker.group.role

    @property
    def kit(self) -> Kit:
        return Kit(self.broker)


class BrokerGroup:
    def __init__(
        self, folder: Path, replicas: int, changes: dict[str, Any], *, records: Records | None = None,
        group: int = 0, groups: int = 1, lease_ttl_ms: int = LEASE_TTL_MS,
    ) -> None:  # fmt: skip
        self.records = records or Records()
        self.group = group
        self.replicas = [
            Replica(n, folder / str(n), self.records, changes, group, groups, lease_ttl_ms)
            for n in range(replicas)
        ]

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_up]

    async def until(self, holds: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not holds():
            rows = [r.broker.group.status() for r in self.up if r.broker.group is not None]
            assert asyncio.get_running_loop().time() < end, f"never happened: {what}: {rows}"
            await asyncio.sleep(0.01)

    def master(self) -> Replica | None:
        """The one that takes writes now."""
        for replica in self.up:
            if replica.role is Role.MASTER and replica.broker.is_ready():
                return replica
        return None

    async def until_master(self, *, other_than: Replica | None = None) -> Replica:
        await self.until(lambda: self.master() not in (None, other_than), "a master takes writes")
        found = self.master()
        assert found is not None
        return found

    async def until_in_sync(self) -> None:
        def holds() -> bool:
            record = self.records.by_group.get(GroupId(str(self.group)))
            ids = {r.broker.core.identity.log_id for r in self.up}
            return record is not None and ids <= record.in_sync

        await self.until(holds, "all are in sync")

    async def until_equal(self) -> None:
        """All have dispatched all that the master has."""
        master = await self.until_master()
        end = master.broker.core.log.written_end
        await self.until(
            lambda: all(r.broker.core.dispatched_position >= end for r in self.up), "all have it"
        )

    async def maps(self, topic: str, keys: list[bytes]) -> list[list[bytes | None]]:
        """What each broker holds of these keys, whoever may serve them."""
        await self.until_equal()
        found = []
        for replica in self.up:
            broker = replica.broker
            partition = broker.partitions.get(broker.topic(topic), 0)
            rows = broker.parts.lookup.get(partition, keys)
            found.append([None if row is None else row.value for row in rows])
        return found


@contextlib.asynccontextmanager
async def broker_group(
    folder: Path, replicas: int = 3, *, lease_ttl_ms: int = LEASE_TTL_MS, **changes: Any
) -> AsyncIterator[BrokerGroup]:
    """``changes``: of all brokers' settings."""
    found = BrokerGroup(folder, replicas, changes, lease_ttl_ms=lease_ttl_ms)
    try:
        for replica in found.replicas:
            await replica.start()
        await found.until_in_sync()
        yield found
    finally:
        for replica in found.up:
            with contextlib.suppress(FirnError):
                await replica.stop()


class BrokerCluster:
    """Several groups that share a coordinator."""

    def __init__(self, folder: Path, groups: int, replicas: int) -> None:
        self.records = Records()
        self.groups = [
            BrokerGroup(folder / str(n), replicas, {}, records=self.records, group=n, groups=groups)
            for n in range(groups)
        ]

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{replica.port}" for group in self.groups for replica in group.replicas)

    async def until(self, holds: Callable[[], object], what: str) -> None:
        await self.groups[0].until(holds, what, seconds=40)


@contextlib.asynccontextmanager
async def broker_cluster(folder: Path, groups: int = 2, replicas: int = 2) -> AsyncIterator[BrokerCluster]:
    found = BrokerCluster(folder, groups, replicas)
    try:
        for group in found.groups:
            for replica in group.replicas:
                await replica.start()
        for group in found.groups:
            await group.until_in_sync()
            await group.until_master()
        yield found
    finally:
        for group in found.groups:
            for replica in group.up:
                with contextlib.suppress(FirnError):
                    await replica.stop()


async def filled(group: BrokerGroup) -> Replica:
    """The master, after 30 records of 5 keys went into a topic ``t``, which all replicas have."""
    master = await group.until_master()
    await master.broker.create_topic("t", parse_spec({"durability": {"minInSync": 1}}))
    for number in range(30):
        await master.kit.put("t", [(b"k%d" % (number % 5), b"%d" % number)])
    await group.until_equal()
    return master


def address(replica: Replica) -> str:
    return f"127.0.0.1:{replica.port}"


def asked_at(replica: Replica) -> int:
    """Requests for records that a replica has answered well."""
    counts = replica.server.context.counts
    pages = sum(
        number for (_, route, status), number in counts.requests.items()
        if route == "/v1/topics/{topic}/partitions/{partition}" and status == 200
    )  # fmt: skip
    return pages + counts.stream_messages["GET"] + counts.stream_messages["FETCH"]


def clean(replica: Replica) -> tuple[int, int]:
    """The clean rows and the horizon of the one partition of ``t``."""
    state = replica.broker.partitions.get(replica.broker.topic("t"), 0).state
    return state.clean_rows, state.horizon
