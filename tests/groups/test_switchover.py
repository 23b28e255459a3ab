"""Planned changes of master, asked for as people ask: the client, its command, and what each refuses."""

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from cluster_kit import local_cluster
from engine_kit import run
from group_kit import PATIENT_MS, BrokerGroup, Replica, broker_group

from firn.client import Client
from firn.errors import FirnError, Invalid, Unavailable, UnknownTopic
from firn.topicspec import parse_spec
from firn.types import Epoch
from firn_node.engine import operating
from firn_node.engine.operating import choose_successor
from firn_node.engine.topicids import position_of
from firn_node.replication.epochstart import epoch_start_batch
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member
from firn_node.replication.state import Role

PATIENT = ("--lease-ttl", "6s")  # where nobody is to be elected because a busy machine stood still


def client_of(group: BrokerGroup) -> Client:
    return Client(",".join(f"127.0.0.1:{replica.port}" for replica in group.replicas), timeout=60)


async def with_topic(group: BrokerGroup, min_in_sync: int = 1) -> Replica:
    """The master, with the topic t."""
    master = await group.until_master()
    await master.broker.create_topic("t", parse_spec({"durability": {"minInSync": min_in_sync}}))
    return master


async def load(client: Client, acknowledged: list[bytes], is_over: asyncio.Event) -> None:
    """One record after another, each awaited, until it is over."""
    async with client.producer("t", linger_ms=0) as producer:
        while not is_over.is_set():
            key = b"%d" % len(acknowledged)
            await producer.send(key, b"v")
            acknowledged.append(key)


def test_switchovers_under_load_fail_no_request_and_double_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        acknowledged: list[bytes] = []
        is_over = asyncio.Event()
        async with (
            local_cluster(tmp_path, *PATIENT, replicas=2) as cluster, cluster.client() as client, cluster.client() as admin,
        ):  # fmt: skip
            await client.create_topic("t", durability={"minInSync": 2})
            loading = asyncio.create_task(load(client, acknowledged, is_over))
            for _ in range(4):
                await cluster.until_in_sync()
                before = len(acknowledged)
                outcome = await admin.switchover(0)
                assert outcome["from"] != outcome["to"]
                while len(acknowledged) < before + 20:
                    await asyncio.sleep(0.01)
                    assert not loading.done(), loading.result()
            is_over.set()
            await loading
            found = [record.key async for record in client.reader("t", view="raw", until_end=True)]
            assert found == acknowledged

    run(story())


def test_the_command_hands_over_to_the_node_that_was_named_and_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with local_cluster(tmp_path, *PATIENT) as cluster, cluster.client() as client:
            first = await cluster.master()
            to = next(row["node"] for row in await cluster.rows() if row["role"] == "standby")
            said = (await cluster.firn("switchover", "0", "--to", to)).stdout.decode()
            assert said.startswith(f"group 0: {to} (127.0.0.1:")
            epoch = first["epoch"] + 1
            assert f") is master in epoch {epoch}, after {first['node']}; it took " in said
            assert (await cluster.master())["node"] == to
            await cluster.until_in_sync()
            found = json.loads((await cluster.firn("switchover", "0", "-o", "json")).stdout)
            assert (found["group"], found["from"], found["epoch"], found["forced"]) == (
                0,
                to,
                epoch + 1,
                False,
            )
            assert (await cluster.master())["node"] == found["to"]
            ended = await cluster.firn("switchover", "7", code=1)
            assert ended.stderr == b"firn: no broker here knows of a group 7\n"
            await cluster.firn("switchover", "0", "--accept-data-loss", code=2)
            for node, accept_data_loss, reason in (
                ("nobody", False, "nobody is no member of group 0; its members are firn-0-0, firn-0-1, firn-0-2"),
                (found["to"], False, f"{found['to']} is the master already"),
                (to, True, f"{found['to']} is master and serves"),
            ):  # fmt: skip
                with pytest.raises(FirnError, match=reason):
                    await client.switchover(0, to=node, accept_data_loss=accept_data_loss)

    run(story())


def test_a_broker_of_its_own_has_nobody_to_hand_over_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 1) as group:
            master = await with_topic(group)
            async with client_of(group) as client:
                with pytest.raises(Unavailable, match="no standby is in sync"):
                    await client.switchover(0)
            assert master.role is Role.MASTER

    run(story())


async def lose_the_master(group: BrokerGroup) -> tuple[Replica, Replica]:
    """The master, gone with a record that only it has, and the standby, which was not in sync."""
    master = await with_topic(group)
    [standby] = [replica for replica in group.up if replica is not master]
    await master.kit.put("t", [(b"a", b"both")])
    await group.until_equal()
    await standby.stop()
    await group.until(
        lambda: len(next(iter(group.records.by_group.values())).in_sync) == 1, "the standby is out"
    )
    await master.kit.put("t", [(b"a", b"lost")])
    await master.fail()
    await standby.start()
    return master, standby


def test_accepted_data_loss_makes_a_standby_master_that_lacks_records_and_the_record_tells(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            _, standby = await lose_the_master(group)
            async with client_of(group) as client:
                with pytest.raises(Unavailable, match="has no master that could hand over"):
                    await client.switchover(0)
                found = await forced(client, f"node-{standby.ordinal}")
                assert (found["to"], found["forced"]) == (f"node-{standby.ordinal}", True)
                assert await standby.kit.get("t", b"a") == b"both"
                [shown] = (await client.cluster_status())["groups"]
                assert shown["forced_epoch"] == shown["epoch"] == found["epoch"]
            await standby.kit.put("t", [(b"a", b"new")])

    run(story())


async def forced(client: Client, node: str) -> dict[str, object]:
    """Once the record is silent: right after its master's end it still may be alive."""
    while True:
        try:
            return await client.switchover(0, to=node, accept_data_loss=True)
        except Unavailable as error:
            if "until a moment ago" not in error.message:
                raise
            await asyncio.sleep(0.1)


def test_a_topic_created_after_accepted_data_loss_has_not_the_id_of_a_lost_one(tmp_path: Path) -> None:
    """Both are created at one position; who knows the lost one by its id must not write into the other."""

    async def story() -> None:
        async with broker_group(tmp_path, 2) as group:
            master = await with_topic(group)
            [standby] = [replica for replica in group.up if replica is not master]
            await group.until_equal()
            await standby.stop()
            [record] = group.records.by_group.values()
            await group.until(lambda: len(in_sync(group)) == 1, "the standby is out")
            start = epoch_start_batch(
                record.epoch,
                group_id=record.group_id,
                log_id=LogId(standby.broker.core.identity.log_id),
                now_ms=0,
            )
            filling = (master.kit.batch("t", [(b"a", b"v" * n)]) for n in range(len(start)))
            await master.broker.produce(next(batch for batch in filling if len(batch) == len(start)))
            await master.broker.create_topic("lost", parse_spec({}))
            late = master.kit.batch("lost", [(b"a", b"late")])
            lost = master.broker.topic("lost").topic_id
            await master.fail()
            await standby.start()
            async with client_of(group) as client:
                await forced(client, f"node-{standby.ordinal}")
            await group.until_master()
            made = await standby.broker.create_topic("made", parse_spec({}))
            assert position_of(made.topic_id) == position_of(lost)
            assert made.topic_id > lost
            [refused] = await standby.broker.produce(late)
            assert isinstance(refused, UnknownTopic)
            assert await standby.kit.map("made") == {}

    run(story())


def test_data_loss_is_not_accepted_while_a_master_acts_and_nobody_is_deposed(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 2, lease_ttl_ms=PATIENT_MS) as group:
            master = await with_topic(group)
            [standby] = [replica for replica in group.up if replica is not master]
            assert master.broker.group is not None
            epoch = master.broker.group.epoch
            name = f"node-{standby.ordinal}"
            async with client_of(group) as client:
                with pytest.raises(Unavailable, match="no data need be lost"):
                    await client.switchover(0, to=name, accept_data_loss=True)
            with pytest.raises(Unavailable, match="a master that acts"):
                await standby.broker.accept_data_loss(0, name, "test")
            with pytest.raises(Invalid, match=f"only node-{master.ordinal} itself"):
                await standby.broker.accept_data_loss(0, f"node-{master.ordinal}", "test")
            await master.kit.put("t", [(b"a", b"b")])
            assert (master.role, master.broker.group.epoch) == (Role.MASTER, epoch)

    run(story())


def test_a_switchover_to_a_node_that_dies_is_given_up_and_the_group_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3) as group:
            master = await with_topic(group)
            first = next(replica for replica in group.up if replica is not master)
            asked = asyncio.create_task(master.broker.switch_over(0, f"node-{first.ordinal}"))
            await asyncio.sleep(0)
            await first.fail()
            with pytest.raises(Unavailable):
                await asked
            await group.until(lambda: group.master() is not None, "somebody is master")

    run(story())


def in_sync(group: BrokerGroup) -> set[int]:
    [record] = group.records.by_group.values()
    return {record.members[log_id].ordinal for log_id in record.in_sync}


@pytest.fixture
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, who steps aside has been heard by then."""
    monkeypatch.setattr(operating, "STEP_ASIDE_S", 60.0)


@pytest.mark.usefixtures("_unhurried")
def test_a_master_that_steps_aside_hands_over_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3, lease_ttl_ms=PATIENT_MS) as group:
            master = await with_topic(group, min_in_sync=2)
            await master.kit.put("t", [(b"a", b"before")])
            await group.until_equal()
            await master.broker.step_aside()
            assert master.role is Role.STANDBY
            assert in_sync(group) == {0, 1, 2} - {master.ordinal}
            second = await group.until_master(other_than=master)
            await second.kit.put("t", [(b"a", b"after")])
            await master.stop()
            await master.start()
            await group.until_in_sync()
            assert await group.maps("t", [b"a"]) == [[b"after"]] * 3

    run(story())


@pytest.mark.usefixtures("_unhurried")
def test_a_master_that_is_told_to_stop_while_it_hands_over_is_out_of_in_sync_too(tmp_path: Path) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3, lease_ttl_ms=PATIENT_MS) as group:
            master = await with_topic(group)
            await group.until_equal()
            to = next(replica for replica in group.up if replica is not master)
            asked = asyncio.create_task(master.broker.switch_over(0, f"node-{to.ordinal}"))
            while master.role is Role.MASTER:
                await asyncio.sleep(0)
            await master.broker.step_aside()
            await asked
            assert in_sync(group) == {0, 1, 2} - {master.ordinal}

    run(story())


@pytest.mark.usefixtures("_unhurried")
def test_a_standby_that_steps_aside_is_out_of_in_sync_where_the_group_can_spare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with broker_group(tmp_path, 3, lease_ttl_ms=PATIENT_MS) as group:
            master = await with_topic(group, min_in_sync=2)
            await group.until_equal()
            first, second = (replica for replica in group.up if replica is not master)
            await first.broker.step_aside()
            assert in_sync(group) == {master.ordinal, second.ordinal}
            monkeypatch.setattr(operating, "STEP_ASIDE_S", 2.0)  # nobody lets it go
            await second.broker.step_aside()  # 2 are asked for: it stays, and is followed by nobody's absence
            assert in_sync(group) == {master.ordinal, second.ordinal}
            assert await group.until_master() is master
            await master.kit.put("t", [(b"a", b"b")])

    run(story())


def test_a_rolling_restart_under_load_loses_and_doubles_nothing_and_fails_no_request(tmp_path: Path) -> None:
    async def story() -> None:
        acknowledged: list[bytes] = []
        is_over = asyncio.Event()
        async with (
            local_cluster(tmp_path, "--restart-after", "200ms") as cluster, cluster.client() as client,
        ):  # fmt: skip
            await client.create_topic("t", durability={"minInSync": 2})
            loading = asyncio.create_task(load(client, acknowledged, is_over))
            for node in ("firn-0-0", "firn-0-1", "firn-0-2"):
                [row] = [row for row in await cluster.until_in_sync() if row["node"] == node]
                os.kill(row["pid"], signal.SIGTERM)
                await cluster.until_restarted(row)
                assert not loading.done(), loading.result()
            await cluster.until_in_sync()
            is_over.set()
            await loading
            found = [record.key async for record in client.reader("t", view="raw", until_end=True)]
            assert found == acknowledged

    run(story())


def test_without_a_name_the_standby_with_the_longest_durable_log_is_chosen_then_the_lower_ordinal() -> None:
    a, b, c, d = (LogId(name) for name in "abcd")
    members = {
        log_id: Member(f"node-{log_id}", "h:1", ordinal) for ordinal, log_id in enumerate((a, b, c, d))
    }
    record = GroupRecord(
        GroupId("0"), 9, Epoch(4), 0, Master(a, Incarnation("i")), frozenset({a, b, c, d}), members
    )

    def chosen(**durable: tuple[int, int]) -> str:
        heard = {
            LogId(name): SimpleNamespace(epoch=epoch, durable=end) for name, (epoch, end) in durable.items()
        }
        mastery, me = SimpleNamespace(epoch=4), SimpleNamespace(log_id=a)
        return choose_successor(SimpleNamespace(record=record, me=me, mastery=mastery, heard=heard), None)

    assert chosen(b=(4, 10), c=(4, 20), d=(4, 15)) == c
    assert chosen(b=(4, 10), c=(4, 20), d=(4, 20)) == c
    assert chosen(b=(4, 10), c=(3, 99)) == b, "what was said in an older epoch counts for nothing"
