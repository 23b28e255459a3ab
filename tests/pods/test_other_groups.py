"""What a broker knows of the other groups of its cluster: told by the coordinator's watches, not read again and again."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from coordinator_kit import LEASES, NAMESPACE, first_record, lease, lease_of, renewed
from engine_kit import run
from kube_kit import FakeKubernetes, fake_kubernetes

from firn.types import Epoch
from firn_node.coordinator import Done, MemoryCoordinator, Records
from firn_node.coordinator.kubernetes import KubernetesCoordinator
from firn_node.engine.others import Others
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member

OWN, OTHER = 0, 1
SECOND = LogId("b")
TTL_S = 600.0  # nothing is silent for too long here


def handle(server: FakeKubernetes, token: str) -> KubernetesCoordinator:
    return KubernetesCoordinator(server.api(token), NAMESPACE, lease_of, lease_ttl_s=TTL_S)


def joined(record: GroupRecord) -> GroupRecord:
    """With a second replica that is in sync."""
    members = {**record.members, SECOND: Member("node-1", "127.0.0.1:7701", 1)}
    return replace(record, version=record.version + 1, members=members, in_sync=record.in_sync | {SECOND})


def moved(record: GroupRecord) -> GroupRecord:
    """The next epoch, of the second replica."""
    return replace(
        record,
        version=record.version + 1,
        epoch=Epoch(record.epoch + 1),
        master=Master(SECOND, Incarnation("2")),
        in_sync=frozenset({SECOND}),
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_other_groups_are_watched_and_neither_they_nor_the_own_one_are_read_again() -> None:
    async def story() -> None:
        async with fake_kubernetes() as server:
            for group in (OWN, OTHER):
                name = lease_of(GroupId(str(group)))
                server.put(f"{LEASES}/{name}", lease(name))
            writer, reader = handle(server, "writer"), handle(server, "reader")
            own = first_record(GroupId(str(OWN)))
            record = first_record(GroupId(str(OTHER)))
            assert await writer.compare_and_set(record, expected_version=0) == Done(record)
            others = Others(reader, [OWN, OTHER], OWN, lambda: own)
            task = asyncio.create_task(others.run())
            await until(lambda: others.master_of(OTHER) == "127.0.0.1:7700")
            for _ in range(20):
                record = renewed(record)
                await writer.compare_and_set(record, expected_version=record.version - 1)
            for change in (joined, moved):
                record = change(record)
                assert await writer.compare_and_set(record, expected_version=record.version - 1) == Done(
                    record
                )
            await until(lambda: others.master_of(OTHER) == "127.0.0.1:7701")
            await others.look()
            assert [place.master for place in others.places()] == ["127.0.0.1:7700", "127.0.0.1:7701"]
            asked = [each for each in server.asked if each.token == "reader"]
            assert [each.path.rpartition("/")[2] for each in asked if "watch" not in each.query] == [
                lease_of(GroupId(str(OTHER)))
            ]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await writer.close()
            await reader.close()

    run(story())


def test_who_asks_before_anything_was_told_is_answered_by_a_read() -> None:
    async def story() -> None:
        records = Records()
        coordinator = MemoryCoordinator(records)
        others = Others(coordinator, [OWN, OTHER], OWN, lambda: None)
        record = first_record(GroupId(str(OTHER)))
        await coordinator.compare_and_set(record, expected_version=0)
        assert others.master_of(OTHER) is None
        await others.look()
        assert others.master_of(OTHER) == "127.0.0.1:7700"
        await coordinator.close()

    run(story())
