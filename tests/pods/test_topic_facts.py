"""How compaction of the topics stands, as masters write it into their status: what, and how seldom."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kube_kit import FakeKubernetes, fake_kubernetes
from pods_kit import CLUSTER, FIRN, NAMESPACE, until

from firn.topicspec import parse_spec
from firn_node.engine.api import TopicInfo
from firn_node.engine.partition import DirtyState
from firn_node.kubernetes.topicfacts import Pace, TopicFacts, row_of
from firn_node.kubernetes.topics import Ours

TOPICS = f"{FIRN}/compactedtopics"
DAY_MS = 86_400_000
LONG_S = 3600.0
AT_ONCE = Pace(tick_s=0.01, rest_s=0.0, pause_s=0.0, again_s=0.0)


class Host:
    def __init__(self) -> None:
        self.is_leading = True
        self.topics: dict[str, tuple[TopicInfo, dict[int, DirtyState]]] = {}
        self.looks = self.asks = 0
        self.restless = ""  # a topic that is another one with each look

    def leads(self) -> bool:
        self.asks += 1
        return self.is_leading

    def topics_here(self) -> list[TopicInfo]:
        self.looks += 1
        return [topic for topic, _ in self.topics.values()]

    def dirty_states(self, topic: TopicInfo) -> dict[int, DirtyState]:
        if topic.name == self.restless:
            percent = 10 * (self.looks % 10)
            return {0: DirtyState(dirty_bytes=percent, clean_bytes=100 - percent)}
        return self.topics[topic.name][1]

    def add(self, name: str, *states: DirtyState, topic_id: int = 8192) -> None:
        spec = parse_spec({"partitions": max(1, len(states))}, min_in_sync=1)
        self.topics[name] = TopicInfo(name, topic_id, spec), dict(enumerate(states))


def put(server: FakeKubernetes, name: str, cluster: str = CLUSTER, topic_id: str = "8192") -> None:
    head = {"apiVersion": "firn.dev/v1alpha1", "kind": "CompactedTopic", "metadata": {"name": name}}
    server.put(
        f"{TOPICS}/{name}",
        {**head, "spec": {"clusterRef": {"name": cluster}}, "status": {"topicId": topic_id}},
    )


def shown(server: FakeKubernetes, name: str = "quotes") -> list[dict[str, Any]]:
    return (server.get(f"{TOPICS}/{name}") or {}).get("status", {}).get("compaction", [])


def run(test: Callable[[FakeKubernetes, Host], Awaitable[None]], pace: Pace | None = None) -> None:
    async def scene() -> None:
        async with fake_kubernetes() as server:
            host, api = Host(), server.api()
            facts = TopicFacts(host, api, Ours(NAMESPACE, CLUSTER), 0, pace=pace or AT_ONCE)
            task = asyncio.create_task(facts.run())
            try:
                await test(server, host)
                assert not task.done(), task.exception()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await api.close()

    asyncio.run(scene())


async def looked(host: Host, times: int = 5) -> None:
    """Return when it has looked at the topics so many times more."""
    wanted = host.looks + times
    await until(lambda: host.looks >= wanted, "it looks again")


@pytest.mark.parametrize(("states", "row"), [
    ({}, None),
    ({0: DirtyState()}, None),
    ({0: DirtyState(dirty_bytes=10)},
     {"group": 0, "partitions": 1, "dirty": "100%", "dirtiest": 0, "dirtiestDirty": "100%"}),
    ({0: DirtyState(dirty_bytes=1, clean_bytes=99), 2: DirtyState(dirty_bytes=31, clean_bytes=69)},
     {"group": 0, "partitions": 2, "dirty": "15%", "dirtiest": 2, "dirtiestDirty": "30%"}),
    ({0: DirtyState(clean_bytes=9, last_started_ms=DAY_MS, last_result="done"), 1: DirtyState()},
     {"group": 0, "partitions": 2, "dirty": "0%", "dirtiest": 0, "dirtiestDirty": "0%",
      "lastCompaction": "1970-01-02T00:00:00Z"}),
    ({0: DirtyState(), 1: DirtyState(last_started_ms=0, last_result="failed", last_reason="no room")},
     {"group": 0, "partitions": 2, "dirty": "0%", "dirtiest": 0, "dirtiestDirty": "0%",
      "lastCompaction": "1970-01-01T00:00:00Z", "failed": "partition 1: no room"}),
])  # fmt: skip
def test_a_row_says_how_dirty_when_compacted_and_what_failed(
    states: dict[int, DirtyState], row: dict[str, Any] | None
) -> None:
    assert row_of(0, states) == row


def test_what_differs_is_told_and_nothing_while_it_is_the_same() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        put(server, "quotes")
        host.add("quotes", DirtyState(dirty_bytes=10, clean_bytes=90))
        await until(lambda: [row["dirty"] for row in shown(server)] == ["10%"], "it is told")
        await looked(host)
        assert len(list(server.writes())) == 1
        host.add("quotes", DirtyState(dirty_bytes=90, clean_bytes=10))
        await until(lambda: [row["dirty"] for row in shown(server)] == ["90%"], "it is told again")
        assert len(list(server.writes())) == 2

    run(test)


def test_what_keeps_changing_is_told_again_only_after_a_while() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        put(server, "quotes")
        for percent in range(0, 100, 10):
            host.add("quotes", DirtyState(dirty_bytes=percent, clean_bytes=100 - percent))
            await looked(host, 2)
        assert len(list(server.writes())) == 1

    run(test, Pace(tick_s=0.01, rest_s=LONG_S, pause_s=LONG_S, again_s=LONG_S))


def test_what_has_come_to_rest_is_told_and_what_changes_is_not_yet() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        put(server, "quotes")
        put(server, "resting")
        host.add("resting", DirtyState(dirty_bytes=1))
        host.add("quotes", DirtyState())
        host.restless = "quotes"
        await until(lambda: bool(shown(server) and shown(server, "resting")), "the first time counts at once")
        written = len(list(server.writes()))
        host.add("resting", DirtyState(clean_bytes=1))
        await until(lambda: shown(server, "resting")[0]["dirty"] == "0%", "the one at rest is told")
        assert len(list(server.writes())) == written + 1

    run(test, Pace(tick_s=0.01, rest_s=0.05, pause_s=0.0, again_s=LONG_S))


def test_a_new_master_that_would_say_the_same_writes_nothing() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        put(server, "quotes")
        host.add("quotes", DirtyState(dirty_bytes=10, clean_bytes=90))
        await until(lambda: len(shown(server)) == 1, "it is told")
        host.is_leading = False
        before, asks = len(server.asked), host.asks
        await until(lambda: host.asks >= asks + 3, "it has seen that it leads no more")
        assert len(server.asked) == before
        host.is_leading = True
        await until(lambda: len(server.asked) > before, "the new master looks")
        await looked(host)
        assert len(list(server.writes())) == 1

    run(test)


def test_topics_without_a_resource_of_this_cluster_or_without_bytes_are_told_nothing_of() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        put(server, "others", cluster="other")
        put(server, "anew", topic_id="1")
        put(server, "empty")
        put(server, "quotes")
        dirty = DirtyState(dirty_bytes=1)
        for name in ("anew", "nobodys", "others", "quotes"):
            host.add(name, dirty)
        host.add("empty", DirtyState())
        await until(lambda: len(shown(server)) == 1, "quotes is told of")
        await looked(host)
        assert [each.path.split("/")[-2] for each in server.writes()] == ["quotes"]
        assert not any(each.path.endswith("/empty") for each in server.asked)

    run(test)


def test_a_hundred_topics_are_all_told_of_in_turn() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        for number in range(100):
            put(server, f"t{number}")
            host.add(f"t{number}", DirtyState(dirty_bytes=1))
        await until(lambda: all(shown(server, f"t{n}") for n in range(100)), "all are told of")
        assert len(list(server.writes())) == 100

    run(test)
