"""Clients that ask in an election are told who won it, by the one answer that they wait for."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from engine_kit import run
from group_kit import BrokerGroup, Replica, broker_group

from firn.client import Client
from firn.topicspec import parse_spec
from firn_node.server import masters


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, an election is over by then."""
    monkeypatch.setattr(masters, "HELD_S", 120.0)


async def fallen(group: BrokerGroup) -> Replica:
    """A standby of a group whose master has gone, and that knows it; there is no election before ``elect``."""
    master = await group.until_master()
    await master.broker.create_topic("t", parse_spec({"durability": {"minInSync": 1}}))
    await group.until_equal()
    left = [replica for replica in group.replicas if replica is not master]
    for replica in left:
        replica.coordinator.cut()
    await master.fail()
    standby = left[0]
    assert standby.broker.group is not None
    told = standby.broker.group
    await group.until(lambda: told.not_master().details["address"] is None, "nobody is known to act")
    return standby


def elect(group: BrokerGroup) -> None:
    for replica in group.up:
        replica.coordinator.heal()


def waiting(standby: Replica, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once somebody who asked a standby waits there for the next master."""
    driver, begun = standby.broker.group, asyncio.Event()
    assert driver is not None
    wait = driver.until_master_named

    async def noted(within_s: float) -> None:
        begun.set()
        await wait(within_s)

    monkeypatch.setattr(driver, "until_master_named", noted)
    return begun


async def put(standby: Replica) -> tuple[int, str]:
    """Status, and the address that the answer names."""
    url = f"http://127.0.0.1:{standby.port}/v1/topics/t/records/k"
    async with aiohttp.ClientSession() as session, session.put(url, data=b"v") as answer:
        document = await answer.json()
        return answer.status, str(document.get("address"))


def test_a_request_over_http_is_answered_with_the_next_masters_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            standby = await fallen(group)
            begun = waiting(standby, monkeypatch)
            asked = asyncio.create_task(put(standby))
            await begun.wait()
            elect(group)
            master = await group.until_master()
            status, address = await asked
            assert status >= 400
            assert address.rpartition(":")[2] == str(master.port)

    run(story())


def test_a_produce_over_a_stream_goes_on_at_the_next_master_after_few_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path) as group:
            standby = await fallen(group)
            begun = waiting(standby, monkeypatch)
            async with Client(f"127.0.0.1:{standby.port}", timeout=120) as client:
                asked = asyncio.create_task(client.put("t", b"k", b"v"))
                await begun.wait()
                elect(group)
                await asked
                found = await client.get("t", b"k")
                assert found is not None

    run(story())


def test_who_waits_is_told_no_later_than_the_wait_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters, "HELD_S", 0.05)

    async def story() -> None:
        async with broker_group(tmp_path, replicas=2) as group:
            standby = await fallen(group)
            status, address = await put(standby)
            assert status >= 400
            assert address == "None"

    run(story())
