"""``read_from="any"``: standbys answer what they have dispatched, and what was once shown never goes missing again."""

import asyncio
from pathlib import Path

import pytest
from engine_kit import run
from group_kit import PATIENT_MS, BrokerGroup, Replica, address, asked_at, broker_group

from firn.client import Client
from firn.errors import Invalid, NotMaster, UnknownTopic
from firn.shown import parse_shown, shown_text
from firn.topicspec import parse_spec
from firn_node.engine.api import ReadRequest
from support.firn_cli.calls import call

KEYS = [b"k%d" % number for number in range(20)]


async def filled(group: BrokerGroup) -> tuple[Replica, Replica]:
    """The master and a standby that has everything: a topic of two partitions with 20 keys."""
    master = await group.until_master()
    await master.broker.create_topic("t", parse_spec({"partitions": 2}))
    async with Client(address(master), timeout=60) as client, client.producer("t") as producer:
        await producer.send_many(KEYS, KEYS)
    await group.until_equal()
    return master, next(replica for replica in group.up if replica is not master)


def test_a_client_that_reads_from_any_is_answered_by_the_standby_alone_and_its_writes_go_to_the_master(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2, lease_ttl_ms=PATIENT_MS) as group:
            master, standby = await filled(group)
            before = asked_at(master)
            async with Client(address(standby), timeout=60, read_from="any") as client:
                assert {r.key async for r in client.reader("t", until_end=True)} == set(KEYS)
                found = await client.get_many("t", KEYS)
                assert [record.value for record in found if record is not None] == KEYS
                one = await client.get("t", b"k3")
                assert one is not None
                assert await client.get("t", b"none") is None
                assert (asked_at(master), asked_at(standby) >= 5) == (before, True)
                await client.put("t", b"k3", b"new")
                async with await client.table("t") as table:
                    await table.caught_up()
                    assert table[b"k3"] == b"new"
                    assert len(table) == len(KEYS)
            async with Client(address(master), timeout=60) as client:
                reader = client.reader("t", until_end=True, read_from=address(standby))
                assert len([record async for record in reader]) >= len(KEYS)

    run(story())


def test_the_command_line_reads_from_a_standby_when_asked_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2, lease_ttl_ms=PATIENT_MS) as group:
            master, standby = await filled(group)
            before = asked_at(master)
            for words in (["consume", "t", "--format", "tsv"], ["get", "t", "k3"]):
                ended = await asyncio.to_thread(call, *words, "--read-from", "any", address=address(standby))
                assert b"k3" in ended.stdout
            assert (asked_at(master), asked_at(standby) >= 3) == (before, True)

    run(story())


def test_without_being_asked_for_a_standby_answers_no_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master, standby = await filled(group)
            with pytest.raises(NotMaster) as refused:
                await standby.broker.read(ReadRequest(topic="t", partition=0))
            assert refused.value.details["address"] == address(master)

    run(story())


def test_a_standby_that_is_not_as_far_as_the_reader_was_shown_sends_it_to_the_master(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2, lease_ttl_ms=PATIENT_MS) as group:
            master, standby = await filled(group)
            end = standby.broker.core.dispatched_position
            assert (await standby.broker.get("t", [b"k1"], floor=end))[0] is not None
            for floor in (end + 1, 1 << 40):
                with pytest.raises(NotMaster):
                    await standby.broker.get("t", [b"k1"], floor=floor)
                with pytest.raises(NotMaster):
                    await standby.broker.read(ReadRequest(topic="t", partition=0, floor=floor))
            async with Client(address(standby), timeout=60, read_from="any") as client:
                await client.get("t", b"k1")
                client._routes.reading(client._transport, True).note_shown(shown_text({0: end + 1, 7: 99}))
                before = asked_at(master)
                asked = asyncio.create_task(client.get("t", b"k1"))
                await group.until(lambda: asked_at(master) > before, "the master is asked")
                assert not asked.done()  # it is not as far either
                await master.kit.put("t", [(b"other", b"v")])
                assert await asked is not None

    run(story())


def test_what_only_the_master_can_judge_is_left_to_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            _, standby = await filled(group)
            past = ReadRequest(topic="t", partition=0, view="raw", offset=1 << 30, floor=0)
            for request in (past, ReadRequest(topic="unknown", partition=0, floor=0)):
                with pytest.raises(NotMaster):
                    await standby.broker.read(request)
            async with Client(address(standby), timeout=60, read_from="any") as client:
                with pytest.raises(UnknownTopic):
                    await client.get("unknown", b"k")

    run(story())


def test_a_standby_that_follows_nobody_answers_no_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master, standby = await filled(group)
            driver = standby.broker.group
            assert driver is not None
            standby.coordinator.cut()  # it cannot become master itself
            await master.fail()
            await group.until(lambda: not driver.is_following, "it has noticed")
            with pytest.raises(NotMaster):
                await standby.broker.get("t", [b"k1"], floor=0)

    run(story())


def test_what_was_shown_travels_as_text_and_anything_else_is_refused() -> None:
    assert parse_shown(shown_text({3: 7, 0: 4711})) == {0: 4711, 3: 7}
    assert parse_shown("") == {}
    for text in ("0", "0:", ":1", "0:-1", "a:1", "0:1,", f"0:{1 << 63}", "0:1," * 2000):
        with pytest.raises(Invalid, match="shown"):
            parse_shown(text)
