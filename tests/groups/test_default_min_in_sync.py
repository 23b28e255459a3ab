"""What ``minInSync`` a topic gets that does not say it, that it keeps it, and which one a write needs."""

import asyncio
from pathlib import Path

import pytest
from cluster_kit import local_cluster
from engine_kit import run
from group_kit import BrokerGroup, Replica, broker_group

from firn.client import Client
from firn.errors import NotEnoughInSync
from firn.topicspec import parse_documents, parse_spec
from firn_node.config_topics import apply_topics

DOCUMENT = """
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: t}
spec: {partitions: %d, durability: {flush: %s}}
"""


def test_a_topic_that_does_not_say_it_asks_for_two_in_a_group_of_three_and_keeps_that(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3) as group:
            master = await group.until_master()
            async with Client(f"127.0.0.1:{master.port}", timeout=60) as client:

                async def least(topic: str) -> int:
                    return int((await client.describe(topic))["spec"]["durability"]["minInSync"])

                await client.create_topic("left-out")
                await client.create_topic("one", durability={"minInSync": 1})
                assert (await least("left-out"), await least("one")) == (2, 1)
                await apply_topics(master.broker, parse_documents(DOCUMENT % (1, "sync")))
                assert await least("t") == 2
                await client.update_topic("t", durability={"minInSync": 3})
                await apply_topics(master.broker, parse_documents(DOCUMENT % (1, "interval")))
                found = (await client.describe("t"))["spec"]["durability"]
                assert found == {"minInSync": 3, "flush": "interval"}

    run(story())


def test_a_topic_that_does_not_say_it_asks_for_one_in_a_group_of_two(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await group.until_master()
            async with Client(f"127.0.0.1:{master.port}", timeout=60) as client:
                await client.create_topic("left-out")
                assert (await client.describe("left-out"))["spec"]["durability"]["minInSync"] == 1

    run(story())


async def alone_with_a_topic(group: BrokerGroup) -> Replica:
    """The master of two replicas, the other one gone, with the topic t that asks for one."""
    master = await group.until_master()
    await master.kit.create("t", durability={"minInSync": 1})
    [standby] = [replica for replica in group.up if replica is not master]
    await standby.stop()
    log_id = standby.broker.core.identity.log_id
    await group.until(
        lambda: all(log_id not in r.in_sync for r in group.records.by_group.values()), "it is out"
    )
    await master.kit.put("t", [(b"a", b"by one")])
    return master


def test_what_is_sent_after_it_was_raised_needs_as_many_at_the_next_master_too(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await alone_with_a_topic(group)
            await master.broker.update_topic("t", parse_spec({"durability": {"minInSync": 2}}))
            with pytest.raises(NotEnoughInSync):
                await master.kit.put("t", [(b"a", b"by two")])
            await master.stop()
            await master.start()
            await group.until_master()
            with pytest.raises(NotEnoughInSync):
                await master.kit.put("t", [(b"a", b"by two")])
            assert await master.kit.get("t", b"a") == b"by one"

    run(story())


def test_what_is_sent_beside_a_raise_needs_what_was_in_force_when_it_was_appended(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await alone_with_a_topic(group)
            spec = parse_spec({"durability": {"minInSync": 2}})
            raising = asyncio.create_task(master.broker.update_topic("t", spec))
            await asyncio.sleep(0)
            assert master.broker.core.catalogue.changing == {"t"}
            await master.kit.put("t", [(b"a", b"beside")])
            await raising
            assert await master.kit.get("t", b"a") == b"beside"

    run(story())


def test_topics_of_a_file_ask_for_two_in_a_cluster_of_three_that_is_just_starting(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(DOCUMENT % (2, "sync"))

    async def story() -> None:
        async with (
            local_cluster(tmp_path, "-f", str(tmp_path / "t.yaml")) as cluster,
            Client(cluster.all_addresses, timeout=60) as client,
        ):
            assert (await client.describe("t"))["spec"]["durability"]["minInSync"] == 2

    run(story())
