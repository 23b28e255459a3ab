"""Whole brokers as replicas of one group: what is acknowledged by one is served by the next."""

import asyncio
from pathlib import Path

import pytest
from engine_kit import run
from group_kit import broker_group

from firn.errors import FirnError, NotMaster, UnknownTopic
from firn.topicspec import parse_spec
from firn_node.replication.record import LogId
from firn_node.replication.state import Role


def test_a_record_acknowledged_by_the_master_is_on_every_replica(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            master = await group.until_master()
            await master.broker.create_topic("t", parse_spec({"durability": {"minInSync": 3}}))
            for number in range(50):
                await master.kit.put("t", [(b"key-%d" % (number % 7), b"%d" % number)])
            keys = [b"key-%d" % number for number in range(7)]
            first, second, third = await group.maps("t", keys)
            assert first == second == third
            assert await master.kit.get("t", b"key-0") == b"49"

    run(story())


def test_a_standby_sends_writers_and_readers_to_the_master(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            master = await group.until_master()
            await master.kit.create()
            await group.until_equal()
            standby = next(r for r in group.up if r.role is Role.STANDBY)
            with pytest.raises(NotMaster) as refused:
                await standby.kit.put("t", [(b"k", b"v")])
            assert refused.value.details["address"] == f"127.0.0.1:{master.port}"
            with pytest.raises(NotMaster):
                await standby.kit.get("t", b"k")

    run(story())


def test_a_replica_that_may_answer_no_reads_does_not_say_that_a_topic_is_unknown(tmp_path: Path) -> None:
    """A replica that had just started once did, and clients gave up a topic that its log held."""

    async def story() -> None:
        async with broker_group(tmp_path) as group:
            master = await group.until_master()
            standby = next(r for r in group.up if r is not master)
            with pytest.raises(NotMaster):
                standby.broker.topic("not-dispatched-here-yet")
            with pytest.raises(UnknownTopic):
                master.broker.topic("not-dispatched-here-yet")

    run(story())


def test_after_a_failover_the_new_master_serves_everything_and_takes_writes(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            first = await group.until_master()
            await first.broker.create_topic("t", parse_spec({"durability": {"minInSync": 2}}))
            for number in range(20):
                await first.kit.put("t", [(b"a", b"%d" % number)], producer=(7, 0, number))
            await first.fail()
            second = await group.until_master(other_than=first)
            assert await second.kit.get("t", b"a") == b"19"
            known = await second.kit.put("t", [(b"a", b"19")], producer=(7, 0, 19))
            assert known.base_offset == 19  # the retry of a batch gets its first outcome
            added = await second.kit.put("t", [(b"a", b"20")], producer=(7, 0, 20))
            assert added.base_offset == 20
            await first.start()
            await group.until_in_sync()
            assert (await group.maps("t", [b"a"])) == [[b"20"]] * 3

    run(story())


def test_what_a_master_appended_while_it_was_replaced_is_kept_by_all_or_by_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            first = await group.until_master()
            await first.broker.create_topic("t", parse_spec({"durability": {"minInSync": 2}}))
            first.coordinator.cut()  # it cannot renew its lease: it stops by itself
            acknowledged, number = [], 0
            while first.role is Role.MASTER:
                try:
                    await first.kit.put("t", [(b"%d" % number, b"v")], producer=(7, 0, number))
                    acknowledged.append(b"%d" % number)
                except FirnError:
                    pass  # refused, or nobody can say
                number += 1
                await asyncio.sleep(0.01)
            second = await group.until_master(other_than=first)
            first.coordinator.heal()
            await group.until_in_sync()
            keys = [b"%d" % n for n in range(number)]
            ones, twos, threes = await group.maps("t", keys)
            assert ones == twos == threes
            assert {key for key, value in zip(keys, ones, strict=True) if value} >= set(acknowledged)
            assert acknowledged
            assert second is not first

    run(story())


def test_a_master_whose_disk_is_full_hands_over_and_stays_a_standby(tmp_path: Path) -> None:
    """It stayed master, and nobody could write until there was room."""

    async def story() -> None:
        async with broker_group(tmp_path) as group:
            first = await group.until_master()
            await first.broker.create_topic("t", parse_spec({}))
            await first.kit.put("t", [(b"a", b"0")])
            await first.stop()
            await group.until_master(other_than=first)
            first.changes = {**first.changes, "disk_reserve": 1.0}  # every disk is too full for that
            await first.start()
            await group.until_in_sync()
            second = await group.until_master()
            assert second.broker.group is not None
            await second.broker.group.switchover(LogId(first.broker.core.identity.log_id))
            third = await group.until_master(other_than=first)
            await third.kit.put("t", [(b"a", b"1")])
            await group.until_in_sync()
            assert first.role is Role.STANDBY
            assert (await group.maps("t", [b"a"])) == [[b"1"]] * 3

    run(story())
