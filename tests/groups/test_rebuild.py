"""A replica that starts anew, or has fallen behind the start of its master's log, is rebuilt by messages."""

from pathlib import Path

import pytest
from engine_kit import run
from group_kit import BrokerGroup, Replica, broker_group

from firn.errors import Invalid, Unavailable
from firn.topicspec import parse_spec
from firn_node.replication.state import Role


def a_standby(group: BrokerGroup) -> Replica:
    return next(replica for replica in group.up if replica.role is Role.STANDBY)


async def restart(replica: Replica) -> None:
    await replica.stop()
    await replica.start()


def test_a_standby_that_is_told_to_start_anew_joins_under_another_log_id(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec({"durability": {"minInSync": 2}}))
            await master.kit.put("t", [(b"k", b"v")])
            standby = a_standby(group)
            before = standby.broker.core.identity.log_id
            await standby.broker.rebuild("a test")
            assert "a test" in await standby.broker.failed()
            await restart(standby)
            assert standby.broker.core.identity.log_id != before
            await group.until_in_sync()
            assert await group.maps("t", [b"k"]) == [[b"v"]] * 3

    run(story())


def test_a_master_and_the_last_in_sync_replica_are_not_rebuilt(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, replicas=2) as group:
            master = await group.until_master()
            with pytest.raises(Invalid, match="hand over first"):
                await master.broker.rebuild("a test")
            await a_standby(group).stop()
            record = next(iter(group.records.by_group))
            own = master.broker.core.identity.log_id
            await group.until(lambda: group.records.by_group[record].in_sync == {own}, "it is alone")
            assert master.broker.group is not None
            master.broker.group.damaged("a test")
            assert not master.broker.starts_anew
            with pytest.raises(Unavailable):
                await master.broker.rebuild("a test")

    run(story())
