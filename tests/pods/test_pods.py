"""Broker processes as pods start them: they find their place, wait for their group, hand over, and report."""

import asyncio
import signal
from pathlib import Path

import pytest
from kube_kit import FakeKubernetes, fake_kubernetes
from pods_kit import FIRN, LEASES, pods, put_group, put_lease, until

from firn.errors import Invalid
from firn_node.config import configure
from firn_node.kubernetes.api import Object
from firn_node.kubernetes.conditions import condition
from firn_node.kubernetes.pod import budgets, memory_limit, placed
from firn_node.settings import BrokerSettings, MemorySettings

MIB = 1 << 20
GIVEN = {"data": "d", "coordinator": "kubernetes", "cluster": "main", "listen": "0.0.0.0:7700"}
PATIENT = "4s"  # nobody is elected, or called silent, because a busy machine stood still
POD = {"POD_NAME": "main-0-12", "POD_NAMESPACE": "shop"}


def place(given: dict[str, str], environment: dict[str, str]) -> BrokerSettings:
    return placed(configure(given, environment=environment), environment)


def test_a_pod_knows_its_ordinal_its_name_and_its_objects() -> None:
    found = place(GIVEN, POD)
    assert found.group is not None
    assert (found.node, found.group.ordinal, found.group.namespace) == ("main-0-12", 12, "shop")
    assert (found.group.object_of(3), found.address) == ("main-3", "0.0.0.0:7700")
    advertised = place({**GIVEN, "advertise": "main-0-12.main-0.shop.svc:7700", "ordinal": "4"}, POD)
    assert advertised.address == "main-0-12.main-0.shop.svc:7700"
    assert advertised.group is not None
    assert advertised.group.ordinal == 4


@pytest.mark.parametrize(
    ("missing", "why"),
    [("cluster", "FIRN_CLUSTER"), ("POD_NAME", r"\$POD_NAME"), ("POD_NAMESPACE", r"\$POD_NAMESPACE")],
)
def test_what_a_pod_does_not_tell_is_asked_for_by_name(missing: str, why: str) -> None:
    given = {name: value for name, value in GIVEN.items() if name != missing}
    environment = {name: value for name, value in POD.items() if name != missing}
    with pytest.raises(Invalid, match=why):
        place(given, environment)


def test_an_address_to_advertise_has_a_port() -> None:
    with pytest.raises(Invalid, match="--advertise"):
        configure({**GIVEN, "advertise": "main-0-0:0"}, environment={})
    assert configure({**GIVEN, "advertise": "[::1]:7"}, environment={}).settings.advertise == "[::1]:7"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "536870912\n"}, 512 * MIB),
        ({"memory.max": "max\n"}, None),
        ({"memory/memory.limit_in_bytes": "268435456\n"}, 256 * MIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_container_is_read_from_either_version_of_cgroups(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def total(found: MemorySettings) -> int:
    return found.index_bytes + found.active_keys_bytes + found.in_flight_bytes + found.reads_bytes


def test_budgets_leave_room_for_the_process_below_any_limit() -> None:
    defaults = total(MemorySettings())
    assert abs(total(budgets(512 * MIB)) - defaults) < 3 * MIB
    assert total(budgets(2048 * MIB)) > 5 * defaults
    for limit in (320, 512, 1024, 65536):
        assert total(budgets(limit * MIB)) + 220 * MIB <= limit * MIB
    assert total(budgets(0)) > 20 * MIB


def test_a_group_of_pods_elects_serves_and_hands_over_within_its_stop(tmp_path: Path) -> None:
    async def scene() -> None:
        async with fake_kubernetes() as server:
            put_group(server, replicas=3)
            async with pods(tmp_path, server, lease_ttl=PATIENT) as group:
                await group.until_ready()
                master = group.master
                assert {m["node"] for m in group.record()["members"].values()} == {
                    "main-0-0",
                    "main-0-1",
                    "main-0-2",
                }
                async with group.client() as client:
                    await client.create_topic("t", durability={"minInSync": 2})
                    await client.put("t", b"k", b"v")
                    ended = await master.stop()
                    assert ended.returncode == 0, ended
                    assert group.lease()["spec"]["holderIdentity"] != master.name
                    assert group.record()["epoch"] == 2
                    found = await client.get("t", b"k")
                    assert found is not None
                    assert found.value == b"v"
                    master.start()
                    await master.until_ready()
                    assert len(group.record()["in_sync"]) == 3

    asyncio.run(scene())


def test_resources_become_topics_without_an_operator_and_a_steady_cluster_writes_leases_alone(
    tmp_path: Path,
) -> None:
    quotes = {
        "apiVersion": "firn.dev/v1alpha1", "kind": "CompactedTopic", "status": {},
        "spec": {"clusterRef": {"name": "main"}, "partitions": 2, "compaction": {"minDirtyRatio": 0.2}},
    }  # fmt: skip

    async def scene() -> None:
        async with fake_kubernetes() as server:
            put_group(server, replicas=3)
            server.put(f"{FIRN}/compactedtopics/quotes", quotes)
            async with pods(tmp_path, server, lease_ttl=PATIENT) as group:
                await group.until_ready()
                await until(lambda: condition_of(server, "quotes") == "Created", "the topic is made")
                async with group.client() as client:
                    await client.put("quotes", b"k", b"v")
                    found = await client.describe("quotes")
                    assert (len(found["partitions"]), found["spec"]["compaction"]["minDirtyRatio"]) == (
                        2,
                        0.2,
                    )
                    assert found["spec"]["durability"]["minInSync"] == 2
                    await until(
                        lambda: states(server) == ["following", "following", "serving"], "status is told"
                    )
                    await until(lambda: compaction_of(server, "quotes"), "how dirty it is is told")
                    before = group.record()["version"]
                    counted = len(server.asked)
                    await until(lambda: group.record()["version"] >= before + 8, "the lease is renewed")
                    written = {asked.path for asked in server.asked[counted:] if asked.method != "GET"}
                    assert written == {f"{LEASES}/main-0"}

                    killed = group.master
                    await killed.stop(signal.SIGKILL)
                    changed = server.get(f"{FIRN}/compactedtopics/quotes")
                    spec = {**quotes["spec"], "retention": {"time": "1h"}}
                    server.put(f"{FIRN}/compactedtopics/quotes", {**changed, "spec": spec})
                    await until(
                        lambda: condition_of(server, "quotes") == "Updated", "the next master changes it"
                    )
                    assert group.master is not killed
                    record = await client.get("quotes", b"k")
                    assert record is not None
                    assert record.value == b"v"

                    going = server.get(f"{FIRN}/compactedtopics/quotes")
                    metadata = {**going["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
                    server.put(f"{FIRN}/compactedtopics/quotes", {**going, "metadata": metadata})
                    await until(lambda: condition_of(server, "quotes") == "Deleted", "the topic goes with it")

    asyncio.run(scene())


def compaction_of(server: FakeKubernetes, name: str) -> list[Object]:
    found = server.get(f"{FIRN}/compactedtopics/{name}") or {}
    rows: list[Object] = found.get("status", {}).get("compaction", [])
    return rows


def condition_of(server: FakeKubernetes, name: str) -> str | None:
    found = server.get(f"{FIRN}/compactedtopics/{name}")
    assert found is not None
    said = condition(found, "Applied")
    return None if said is None else said["reason"]


def states(server: FakeKubernetes) -> list[str]:
    found = server.get(f"{FIRN}/brokergroups/main-0")
    assert found is not None
    return sorted(member.get("state", "") for member in found["status"].get("members", ()))


def test_a_pod_that_waits_for_its_group_lives_and_says_what_it_waits_for(tmp_path: Path) -> None:
    async def scene() -> None:
        async with fake_kubernetes() as server, pods(tmp_path, server, replicas=1) as group:
            [pod] = group.pods

            async def says_why() -> bool:
                status, body = await pod.probe("/readyz")
                return status == 503 and "Lease shop/main-0: there is no such Lease yet" in body

            await until(says_why, "it says that the Lease is missing")
            assert await pod.probe("/livez") == (200, "alive\n")
            assert (await pod.probe("/v1/status"))[0] == 404
            await server.stop()

            async def says_away() -> bool:
                status, body = await pod.probe("/readyz")
                return status == 503 and "Lease shop/main-0: " in body and "no such Lease" not in body

            await until(says_away, "it says that the API is away")
            assert await pod.probe("/livez") == (200, "alive\n")
            await server.start()
            put_lease(server)
            await pod.until_ready()
            status, body = await pod.probe("/metrics")
            assert status == 200
            assert "firn_ready 1.0" in body
            assert (await pod.stop()).returncode == 0

    asyncio.run(scene())
