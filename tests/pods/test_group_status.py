"""The BrokerGroup of brokers in pods: what their master says of the group, and how many replicas it obeys."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_kit import LEASE_TTL_MS, PATIENT_MS, BrokerGroup, Replica, broker_group
from kube_kit import FakeKubernetes, fake_kubernetes
from pods_kit import CLUSTER, FIRN, NAMESPACE, put_group, until

from firn.topicspec import parse_spec
from firn_node.clock import Clock, RealClock, RealRandomness
from firn_node.kubernetes import groupstatus
from firn_node.kubernetes.api import APPLY_PATCH, Object
from firn_node.kubernetes.groupstatus import GroupKeeper, is_news
from firn_node.replication.record import LogId
from firn_node.settings import GroupSettings

PATH = f"{FIRN}/brokergroups/{CLUSTER}-0"


class Ticking(RealClock):
    """A second passes each time that somebody asks for the time of day."""

    def __init__(self) -> None:
        self._wall_ms = 1_800_000_000_000

    def wall_ms(self) -> int:
        self._wall_ms += 1000
        return self._wall_ms


class Kept:
    """A broker group whose brokers look after one BrokerGroup."""

    def __init__(self, server: FakeKubernetes, group: BrokerGroup) -> None:
        self.server = server
        self.group = group
        self.clock: Clock = RealClock()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def keep(self, replica: Replica) -> None:
        place = replica.broker.settings.group
        assert isinstance(place, GroupSettings)
        in_pod = replace(place, coordinator="kubernetes", cluster=CLUSTER, namespace=NAMESPACE)
        self.leave_alone(replica)
        self._tasks[replica.ordinal] = asyncio.create_task(self._run(replica, in_pod))

    async def _run(self, replica: Replica, place: GroupSettings) -> None:
        async with contextlib.AsyncExitStack() as stack:
            api = self.server.api()
            stack.push_async_callback(api.close)
            await GroupKeeper(replica.broker, api, place, self.clock, RealRandomness()).run()

    def leave_alone(self, replica: Replica) -> None:
        if (task := self._tasks.pop(replica.ordinal, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wish(self, replicas: int) -> None:
        found = self.server.get(PATH)
        assert found is not None
        self.server.put(PATH, {**found, "spec": {**found["spec"], "replicas": replicas}})

    @property
    def status(self) -> Object:
        found = self.server.get(PATH)
        assert found is not None
        return found["status"]

    def states(self) -> dict[str, str]:
        return {member["node"]: member.get("state", "") for member in self.status.get("members", ())}

    @property
    def is_told(self) -> bool:
        return set(self.states().values()) == {"serving", "following"} and len(self.states()) == 3

    def phases(self) -> list[str]:
        """Of all rebuilds, as they were told one after the other."""
        members = [
            member for asked in self.server.writes() for member in (asked.body or {}).get("status", {}).get("members", ())
        ]  # fmt: skip
        return [member["rebuild"]["phase"] for member in members if "rebuild" in member]

    @property
    def record(self) -> Any:
        [record] = self.group.records.by_group.values()
        return record


def run(folder: Path, test: Callable[[Kept], Awaitable[None]], *, lease_ttl_ms: int = LEASE_TTL_MS) -> None:
    @contextlib.asynccontextmanager
    async def kept() -> AsyncIterator[Kept]:
        async with (
            fake_kubernetes() as server, broker_group(folder, lease_ttl_ms=lease_ttl_ms) as group,
        ):  # fmt: skip
            put_group(server, replicas=3)
            found = Kept(server, group)
            for replica in group.replicas:
                found.keep(replica)
            try:
                yield found
            finally:
                await found.close()

    async def scene() -> None:
        async with kept() as found:
            await until(lambda: found.is_told, "the group is told of")
            await test(found)

    asyncio.run(scene())


def test_the_status_is_the_record_told_once_and_renewals_are_no_news(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        status, record = kept.status, kept.record
        assert (status["epoch"], status["currentMaster"]) == (1, "node-0")
        assert status["inSync"] == ["node-0", "node-1", "node-2"]
        assert [member["ordinal"] for member in status["members"]] == [0, 1, 2]
        assert {member["logId"] for member in status["members"]} == record.members.keys()
        assert [(c["type"], c["status"]) for c in status["conditions"]] == [("Serving", "True")]
        writes = len(list(kept.server.writes()))
        await until(lambda: kept.record.renewals > record.renewals + 2, "the lease is renewed")
        assert len(list(kept.server.writes())) == writes

    run(tmp_path, test, lease_ttl_ms=PATIENT_MS)


def test_a_new_master_takes_the_status_over_and_a_silent_member_is_called_so(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        master = await kept.group.until_master()
        epoch = kept.record.epoch
        kept.leave_alone(master)
        await master.fail()
        await until(
            lambda: kept.status["epoch"] > epoch and kept.states()[f"node-{master.ordinal}"] == "silent",
            "the new master says that the old one is silent",
        )
        assert kept.status["currentMaster"] != f"node-{master.ordinal}"
        await master.start()
        kept.keep(master)
        await until(lambda: kept.is_told and len(kept.status["inSync"]) == 3, "all are in sync again")

    run(tmp_path, test)


def test_a_replica_that_is_not_wished_leaves_and_comes_back_with_the_same_log_when_it_is(
    tmp_path: Path,
) -> None:
    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        log_id = LogId(last.broker.core.identity.log_id)
        kept.wish(2)
        await until(lambda: log_id not in kept.record.members, "it is out of the members")
        await until(lambda: kept.states().keys() == {"node-0", "node-1"}, "the status says so")
        version = kept.record.version
        await until(lambda: kept.record.version > version + 8, "the lease is renewed")
        assert log_id not in kept.record.members
        kept.leave_alone(last)
        await last.stop()
        kept.wish(3)
        await last.start()
        kept.keep(last)
        await kept.group.until_in_sync()
        assert log_id in kept.record.in_sync

    run(tmp_path, test)


def test_one_that_has_left_and_is_wished_again_ends_so_that_a_new_process_joins(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        kept.wish(2)
        await until(lambda: len(kept.record.members) == 2, "it is out of the members")
        kept.wish(3)
        reason = await asyncio.wait_for(last.broker.failed(), 60)
        assert "is wanted again" in reason
        kept.leave_alone(last)
        await last.stop()
        await last.start()
        kept.keep(last)
        await kept.group.until_in_sync()

    run(tmp_path, test)


def test_a_master_that_is_not_wished_stays_until_it_has_handed_over(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        assert last.broker.group is not None
        await (await kept.group.until_master()).broker.switch_over(0, "node-2")
        assert await kept.group.until_master() is last
        kept.wish(2)
        renewals = kept.record.renewals
        await until(lambda: kept.record.renewals > renewals + 8, "the lease is renewed")
        assert kept.group.master() is last
        await last.broker.switch_over(0, "node-1")
        await until(lambda: len(kept.record.members) == 2, "it is out of the members")

    run(tmp_path, test)


def test_a_replica_that_is_not_wished_stands_where_the_group_has_nobody_else(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        first, second, last = kept.group.replicas
        for replica in (first, second):
            kept.leave_alone(replica)
            await replica.stop()
        await until(lambda: len(kept.record.in_sync) == 1 or kept.group.master() is last, "it is alone")
        kept.leave_alone(last)
        await last.stop()
        kept.wish(1)
        await last.start()
        kept.keep(last)
        assert await kept.group.until_master() is last

    run(tmp_path, test)


def test_what_an_earlier_process_told_of_its_rebuild_is_taken_back(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        kept.leave_alone(last)
        api = kept.server.api()
        body = {
            "apiVersion": "firn.dev/v1alpha1", "kind": "BrokerGroup", "metadata": {"name": f"{CLUSTER}-0"},
            "status": {"members": [{"node": "node-2", "rebuild": {"phase": "pulling"}}]},
        }  # fmt: skip
        query = {"fieldManager": "firn-broker-node-2", "force": "true"}
        await api.request("PATCH", f"{PATH}/status", query=query, body=body, content=APPLY_PATCH)
        await api.close()

        def told() -> bool:
            return any("rebuild" in member for member in kept.status["members"])

        assert told()
        kept.keep(last)
        await until(lambda: not told(), "it is taken back")
        assert kept.states().keys() == {"node-0", "node-1", "node-2"}

    run(tmp_path, test)


def test_the_default_of_min_in_sync_follows_the_wished_number(tmp_path: Path) -> None:
    async def test(kept: Kept) -> None:
        master = await kept.group.until_master()
        assert master.broker.default_min_in_sync == 2
        kept.wish(1)
        await until(lambda: len(kept.record.members) == 1, "the others are out")
        assert master.broker.default_min_in_sync == 1
        await master.broker.create_topic("t", parse_spec({}))

    run(tmp_path, test)


def test_progress_of_a_rebuild_is_told_by_who_is_rebuilt_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groupstatus, "PROGRESS_S", 0.1)

    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        progress: list[dict[str, Any] | None] = [
            {"phase": "pulling", "partitions": 8, "partitions_done": 3, "bytes": 10, "bytes_expected": 90, "reason": None}
        ]  # fmt: skip
        monkeypatch.setattr(last.broker, "rebuild_status", lambda: progress[0])

        def told() -> Any:
            [member] = [each for each in kept.status["members"] if each["node"] == "node-2"]
            return member.get("rebuild")

        await until(told, "the progress is told")
        assert (told()["phase"], told()["partitionsDone"], told()["bytesExpected"]) == ("pulling", 3, 90)
        assert kept.states()["node-2"] == "following"
        progress[0] = None
        await until(lambda: told() is None, "the progress is taken back")
        assert kept.states()["node-2"] == "following"
        assert kept.phases() == ["pulling", "joined"]

    run(tmp_path, test)


def test_a_rebuild_that_has_ended_is_told_until_its_replica_is_in_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groupstatus, "PROGRESS_S", 0.1)

    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        progress: list[dict[str, Any] | None] = [{"phase": "compacting", "partitions_done": 8, "bytes": 90}]
        monkeypatch.setattr(last.broker, "rebuild_status", lambda: progress[0])
        await until(lambda: kept.phases() == ["compacting"], "the progress is told")
        kept.wish(2)
        await until(lambda: len(kept.record.members) == 2, "it is out of the members")
        progress[0] = None
        await until(lambda: kept.phases() == ["compacting", "catching-up"], "it is told to catch up")

    run(tmp_path, test)


def test_a_rebuild_tells_when_it_last_got_further_and_a_reason_alone_is_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groupstatus, "PROGRESS_S", 0.1)

    async def test(kept: Kept) -> None:
        last = kept.group.replicas[2]
        progress: dict[str, Any] = {
            "phase": "pulling", "partitions": 8, "partitions_done": 3, "bytes": 10, "bytes_expected": 90, "reason": None,
        }  # fmt: skip
        monkeypatch.setattr(last.broker, "rebuild_status", lambda: dict(progress))
        kept.clock = Ticking()
        kept.keep(last)

        def told(field: str) -> Any:
            [member] = [each for each in kept.status["members"] if each["node"] == "node-2"]
            return member.get("rebuild", {}).get(field)

        await until(lambda: told("bytes") == 10, "the progress is told")
        begun = told("lastProgressTime")
        progress["reason"] = "the master is away"
        await until(lambda: told("reason") == "the master is away", "the reason is told")
        assert told("lastProgressTime") == begun
        progress["bytes"] = 20
        await until(lambda: told("bytes") == 20, "further progress is told")
        assert told("lastProgressTime") > begun

    run(tmp_path, test)


def test_what_makes_a_status_worth_writing() -> None:
    members = [{"node": "a", "address": "a:1", "state": "serving"}, {"node": "b", "address": "b:1"}]
    wanted = {"epoch": 1, "version": 5, "currentMaster": "a", "members": members, "conditions": []}
    assert is_news(None, wanted)
    assert not is_news({**wanted, "version": 4, "targetMaster": "b"}, wanted)
    assert is_news({**wanted, "epoch": 2}, wanted)
    assert not is_news({**wanted, "members": [{**members[0], "rebuild": {}}, members[1]]}, wanted)
    assert is_news({**wanted, "members": [*members, {"node": "c", "address": "c:1"}]}, wanted)
    assert not is_news({**wanted, "members": [*members, {"node": "c", "rebuild": {}}]}, wanted)
    assert is_news(wanted, {name: value for name, value in wanted.items() if name != "currentMaster"})
