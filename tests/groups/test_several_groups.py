"""A cluster of several groups in one process: topics through each group's log, partitions dealt to the groups."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_kit import run
from group_kit import BrokerCluster, broker_cluster

from firn.client import Client
from firn.errors import FirnError, NotMaster, TopicExists, Unavailable, UnknownTopic
from firn_node.engine.broker import Broker
from firn_node.engine.following import Followers
from firn_node.engine.topicids import topic_id_at

KEYS = [b"key-%d" % number for number in range(40)]


def brokers(cluster: BrokerCluster) -> list[Broker]:
    return [replica.broker for group in cluster.groups for replica in group.up]


def knows(broker: Broker, name: str) -> int | None:
    """The id that a broker has for a topic."""
    found = broker.core.catalogue.by_name.get(name)
    return None if found is None else found.topic_id


async def filled(client: Client, topic: str = "t", values: bytes = b"v") -> None:
    async with client.producer(topic) as producer:
        await producer.send_many(KEYS, [values + key for key in KEYS])


def test_a_topic_of_four_partitions_lives_in_two_groups_and_every_way_of_reading_finds_all(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path) as cluster, Client(cluster.addresses) as client:
            await client.create_topic("t", partitions=4)
            await filled(client)
            masters = [await group.until_master() for group in cluster.groups]
            ends = [
                [m.broker.partitions.opened(knows(m.broker, "t") or 0, p) for p in range(4)] for m in masters
            ]
            assert [[end is not None for end in ends_of] for ends_of in ends] == [
                [True, False, True, False],
                [False, True, False, True],
            ]
            expected = {key: b"v" + key for key in KEYS}
            records = await client.get_many("t", KEYS)
            assert {r.key: r.value for r in records if r is not None} == expected
            assert [r.key for r in await asyncio.gather(*(client.get("t", k) for k in KEYS)) if r] == KEYS
            read = [record async for record in client.reader("t", until_end=True)]
            assert {r.key: r.value for r in read} == expected
            assert {r.partition for r in read} == {0, 1, 2, 3}
            for group in cluster.groups:
                await group.until_equal()
            async with Client(cluster.addresses, read_from="any") as anybody:
                records = await anybody.get_many("t", KEYS)
                assert {r.key: r.value for r in records if r is not None} == expected
                read = [record async for record in anybody.reader("t", until_end=True)]
                assert {r.key: r.value for r in read} == expected
            table = await client.table("t")
            await table.caught_up()
            assert dict(table) == expected
            async with await client.snapshot("t") as snapshot:
                await client.put("t", KEYS[0], b"later")
                pinned = [r async for r in client.reader("t", snapshot=snapshot)]
                assert {r.key: r.value for r in pinned} == expected
            for key in KEYS[:4]:
                partition, offset = await client.put("t", key, b"w")
                again = await client.get("t", key)
                assert again is not None
                assert (again.partition, again.offset, again.value) == (partition, offset, b"w")
                history = await client.query("t", key)
                assert [r.value for r in history][-1] == b"w"
                raw = client.reader("t", view="raw", until_end=True, ids=True, partitions=[partition])
                [last] = [r async for r in raw if r.offset == offset]
                assert last.id is not None
                found = await client.find("t", last.id)
                assert found is not None
                assert found.value == b"w"
            done = await client.compact("t", force=True, wait=True, timeout=60)
            assert [(p["partition"], p["state"]) for p in done["partitions"]] == [
                (p, "done") for p in range(4)
            ]
            described = await client.describe("t")
            assert [row["partition"] for row in described["partitions"]] == [0, 1, 2, 3]
            assert described["groups"] == [0, 1]
            assert described["lacking"] == []
            assert described["silent"] == {}

    run(story())


def test_a_consumer_group_goes_on_where_it_committed_in_every_group(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster, Client(cluster.addresses) as client:
            await client.create_topic("t", partitions=4)
            await filled(client)
            async with client.reader("t", group="g", until_end=True) as reader:
                first = [record async for record in reader]
                await reader.commit()
            await filled(client, values=b"second")
            async with client.reader("t", group="g", until_end=True) as reader:
                second = [record async for record in reader]
            assert len(first) == len(second) == len(KEYS)
            assert {r.value for r in second} == {b"second" + key for key in KEYS}
            assert set(await client.fetch_offsets("g", "t")) == {0, 1, 2, 3}

    run(story())


def test_whoever_is_asked_leads_to_the_group_that_decides_or_holds_the_partition(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster:
            zero, one = [(await group.until_master()) for group in cluster.groups]
            async with Client(f"127.0.0.1:{one.port}") as client:  # knows a broker of group 1 alone
                await client.create_topic("t", partitions=2)
                await filled(client)
                assert len([r async for r in client.reader("t", until_end=True)]) == len(KEYS)
            with pytest.raises(NotMaster) as refused:
                await zero.kit.put("t", [(b"k", b"v")], partition=1)
            assert refused.value.details == {"address": f"127.0.0.1:{one.port}", "group": 1}
            with pytest.raises(NotMaster) as refused:
                await one.broker.delete_topic("t")
            assert refused.value.details == {"address": f"127.0.0.1:{zero.port}", "group": 0}

    run(story())


def test_a_topic_created_again_under_its_name_is_the_new_one_in_every_group(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path) as cluster, Client(cluster.addresses) as client:
            for round_number in range(3):
                made = await client.create_topic("t", partitions=4)
                await filled(client, values=b"%d" % round_number)
                for group in cluster.groups:
                    await group.until_equal()
                assert {knows(broker, "t") for broker in brokers(cluster)} == {made["topic_id"]}
                found = await client.get_many("t", KEYS)
                assert [r.value for r in found if r] == [b"%d" % round_number + key for key in KEYS]
                with pytest.raises(TopicExists):
                    await client.create_topic("t")
                await client.delete_topic("t")
                with pytest.raises(UnknownTopic):
                    await client.describe("t")

    run(story())


def test_a_spec_that_changes_changes_in_every_group(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster, Client(cluster.addresses) as client:
            await client.create_topic("t", partitions=2)
            await client.update_topic("t", compaction={"minDirtyRatio": 0.125})
            ratios = [b.topic("t").spec.compaction.min_dirty_ratio for b in brokers(cluster)]
            assert ratios == [0.125, 0.125]

    run(story())


def test_a_group_that_is_down_while_a_topic_is_created_follows_once_it_is_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster:
            zero, one = [(await group.until_master()) for group in cluster.groups]
            await zero.broker.create_topic("gone", zero.kit.spec({"partitions": 2}))
            await one.stop()
            with pytest.raises(Unavailable, match="group 1 could not take that over") as refused:
                await zero.broker.create_topic("t", zero.kit.spec({"partitions": 2}), wait_s=0.2)
            assert refused.value.details["lacking"] == [1]
            assert not refused.value.retry
            with pytest.raises(Unavailable):
                await zero.broker.delete_topic("gone", wait_s=0.2)
            assert (await zero.broker.describe("t"))["lacking"] == [1]
            await one.start()
            assert await zero.broker.followed(40) == []
            assert (await zero.broker.describe("t"))["lacking"] == []
            assert knows(one.broker, "t") == knows(zero.broker, "t") is not None
            assert knows(one.broker, "gone") is None
            async with Client(cluster.addresses) as client:
                await filled(client)

    run(story())


def test_topics_of_a_master_that_fails_before_it_told_of_them_are_told_by_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path) as cluster:
            zero = await cluster.groups[0].until_master()
            for replica in cluster.groups[1].up:
                await replica.stop()
            await zero.broker.create_topic("t", zero.kit.spec({"partitions": 2}), wait_s=None)
            topic_id = knows(zero.broker, "t")
            await cluster.groups[0].until_equal()
            await zero.fail()
            for replica in cluster.groups[1].replicas:
                await replica.start()
            second = await cluster.groups[0].until_master(other_than=zero)
            assert await second.broker.followed(40) == []
            assert knows((await cluster.groups[1].until_master()).broker, "t") == topic_id

    run(story())


def test_a_late_word_of_an_older_master_deletes_no_newer_topic(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster:
            zero, one = [(await group.until_master()) for group in cluster.groups]
            followers = zero.broker.member.followers
            assert followers is not None
            late = await followers.tell(1, (0, 0), 0)
            await zero.broker.create_topic("t", zero.kit.spec({"partitions": 2}))
            following = one.broker.member.following
            assert following is not None
            assert late["whole"]
            with pytest.raises(Unavailable, match="older state"):
                await following._take_over(late)
            assert knows(one.broker, "t") is not None

    run(story())


def test_a_group_of_many_changes_behind_is_told_everything(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster:
            zero, one = [(await group.until_master()) for group in cluster.groups]
            names = [f"t{number}" for number in range(600)]  # more than one batch of the group that follows
            await one.stop()
            for at in range(0, 600, 100):
                await asyncio.gather(
                    *(
                        zero.broker.create_topic(name, zero.kit.spec({}), wait_s=None)
                        for name in names[at : at + 100]
                    )
                )
            await one.start()
            assert await zero.broker.followed(60) == []
            assert [topic.name for topic in one.broker.topics()] == sorted(names)
            assert one.broker.topics() == zero.broker.topics()

    run(story())


def test_both_groups_masters_fail_under_load_and_nothing_acknowledged_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path) as cluster, Client(cluster.addresses) as client:
            await client.create_topic("t", partitions=4)
            acknowledged: list[int] = []
            stop = asyncio.Event()

            async def produce() -> None:
                producer = client.producer("t", linger_ms=0)
                number = 0
                while not stop.is_set():
                    await asyncio.gather(*(producer.send(b"%d" % n, b"v") for n in range(number, number + 8)))
                    acknowledged.extend(range(number, number + 8))
                    number += 8
                await producer.close()

            producing = asyncio.create_task(produce())

            async def until_more() -> None:
                before = len(acknowledged)
                await cluster.until(lambda: len(acknowledged) > before + 80, "writes flow")

            for group in cluster.groups:
                await until_more()
                master = await group.until_master()
                await master.fail()
                await group.until_master(other_than=master)
                await master.start()
                await group.until_in_sync()
            await until_more()
            stop.set()
            await producing
            read = [r async for r in client.reader("t", view="raw", until_end=True)]
            assert sorted(int(r.key) for r in read) == acknowledged
            for partition in range(4):
                mine = [int(r.key) for r in read if r.partition == partition]
                assert mine == sorted(mine)

    run(story(), 180)


def test_records_for_one_group_wait_for_it_while_those_of_the_other_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster, Client(cluster.addresses) as client:
            await client.create_topic("t", partitions=2)
            one = await cluster.groups[1].until_master()
            await one.stop()
            gave_up = asyncio.Event()

            async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read()
                gave_up.set()
                writer.close()

            async with await asyncio.start_server(say_nothing, "127.0.0.1", one.port) as silent:
                producer = client.producer("t", linger_ms=0)
                waiting = producer.send(b"k", b"v", partition=1)
                for number in range(4):
                    assert (await producer.send(b"k", b"%d" % number, partition=0)) == (0, number)
                assert not gave_up.is_set()  # all that while the first try for group 1 went on
                silent.close()
                await gave_up.wait()
            await one.start()
            assert await waiting == (1, 0)
            await producer.close()

    run(story())


def test_a_topic_that_its_group_has_yet_to_hear_of_is_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster:
            one = await cluster.groups[1].until_master()
            catalogue = one.broker.core.catalogue
            await cluster.until(lambda: bool(catalogue.whole_to()), "group 1 has been told")
            refused: list[FirnError] = [catalogue.unknown(8), catalogue.unknown(catalogue.whole_to() or 0)]
            assert [error.retry for error in refused] == [False, True]
            catalogue.whole_to = lambda: topic_id_at(4096, forced_epoch=3)
            lost, coming = (catalogue.unknown(topic_id_at(8192, forced)) for forced in (0, 3))
            assert (lost.retry, coming.retry) == (False, True)

    run(story())


def test_a_standby_leads_to_its_master_who_names_a_topic_that_it_does_not_know(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, groups=1, replicas=2) as cluster:
            [group] = cluster.groups
            master = await group.until_master()
            await group.until_in_sync()
            [standby] = [replica for replica in group.up if replica is not master]
            refused = standby.broker.unknown_id(1 << 40)
            assert isinstance(refused, NotMaster)
            assert refused.details["address"] == f"127.0.0.1:{master.port}"
            assert isinstance(master.broker.unknown_id(1 << 40), UnknownTopic)

    run(story())


def test_a_new_master_that_group_0_has_told_nothing_yet_denies_no_topic(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster:
            zero, one = [(await group.until_master()) for group in cluster.groups]
            catalogue = one.broker.core.catalogue
            await cluster.until(lambda: bool(catalogue.whole_to()), "group 1 has been told")
            with pytest.raises(UnknownTopic):
                one.broker.topic("t")
            await zero.stop()
            await one.stop()
            await one.start()
            await cluster.groups[1].until_master()
            with pytest.raises(Unavailable, match="not known yet") as refused:
                one.broker.topic("t")
            assert refused.value.retry

    run(story())


def test_a_group_0_that_says_no_end_of_ids_is_followed_as_an_older_firns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Followers.tell

    async def tell_as_before(self: Followers, group: int, has: tuple[int, int], wait_s: float) -> Any:
        answer = await tell(self, group, has, wait_s)
        del answer["ids_end"]
        return answer

    monkeypatch.setattr(Followers, "tell", tell_as_before)

    async def story() -> None:
        async with broker_cluster(tmp_path, replicas=1) as cluster, Client(cluster.addresses) as client:
            await client.create_topic("t", partitions=2)
            await filled(client)
            one = (await cluster.groups[1].until_master()).broker
            await cluster.until(lambda: bool(one.core.catalogue.whole_to()), "group 1 has been told")
            assert knows(one, "t") is not None
            with pytest.raises(UnknownTopic):
                one.topic("nobody-made-this")

    run(story())
