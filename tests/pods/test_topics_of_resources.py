"""CompactedTopics become topics: what is decided, what is written, and how often."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kube_kit import Asked, FakeKubernetes, fake_kubernetes
from pods_kit import CLUSTER, FIRN, NAMESPACE, until

from firn.access import Right, parse_access, rights_of
from firn.errors import NotMaster, TopicExists, Unavailable, UnknownTopic
from firn.runs import driver_account, executor_account
from firn.topicspec import TopicSpec
from firn_node.clock import RealClock, RealRandomness
from firn_node.engine.api import TopicInfo
from firn_node.kubernetes.api import Object
from firn_node.kubernetes.conditions import condition
from firn_node.kubernetes.topics import Create, Delete, Keep, Leave, Ours, Refuse, TopicKeeper, Update, plan

OURS = Ours(NAMESPACE, CLUSTER)
TOPICS = f"{FIRN}/compactedtopics"


def resource(name: str = "quotes", **spec: Any) -> Object:
    return {
        "apiVersion": "firn.dev/v1alpha1", "kind": "CompactedTopic", "metadata": {"name": name},
        "spec": {"clusterRef": {"name": CLUSTER}, **spec}, "status": {},
    }  # fmt: skip


def topic(of: Object, topic_id: int = 8192) -> TopicInfo:
    step = plan(of, None, OURS, default_min_in_sync=2)
    assert isinstance(step, Create)
    return TopicInfo(of["metadata"]["name"], topic_id, step.spec)


class Host:
    """A broker's topics, in memory."""

    def __init__(self) -> None:
        self.default_min_in_sync = 2
        self.is_deciding = True
        self.topics: dict[str, TopicInfo] = {}
        self.calls: list[tuple[str, str]] = []
        self.failure: Exception | None = None

    def decides(self) -> bool:
        return self.is_deciding

    def topic(self, name: str) -> TopicInfo:
        if name not in self.topics:
            raise UnknownTopic(name)
        return self.topics[name]

    def _call(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        if self.failure is not None:
            raise self.failure

    async def create_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None) -> TopicInfo:
        self._call("create", name)
        if name in self.topics:
            raise TopicExists(name)
        self.topics[name] = TopicInfo(name, 4096 + len(self.calls), spec)
        return self.topics[name]

    async def update_topic(self, name: str, spec: TopicSpec, *, wait_s: float | None) -> TopicInfo:
        self._call("update", name)
        self.topics[name] = TopicInfo(name, self.topics[name].topic_id, spec)
        return self.topics[name]

    async def delete_topic(self, name: str, *, wait_s: float | None) -> None:
        self._call("delete", name)
        del self.topics[name]


def run(test: Callable[[FakeKubernetes, Host], Awaitable[None]]) -> None:
    async def scene() -> None:
        async with fake_kubernetes() as server:
            host, api, may_begin = Host(), server.api(), asyncio.Event()
            may_begin.set()
            keeper = TopicKeeper(host, api, OURS, may_begin, RealClock(), RealRandomness())
            task = asyncio.create_task(keeper.run())
            try:
                await test(server, host)
                assert not task.done(), task.exception()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await api.close()

    asyncio.run(scene())


def applied(server: FakeKubernetes, name: str = "quotes") -> tuple[str, str] | None:
    found = server.get(f"{TOPICS}/{name}")
    said = condition(found, "Applied") if found else None
    return (said["status"], said["reason"]) if said else None


class TestThePlan:
    def test_a_resource_is_of_the_cluster_that_it_names_or_of_one_of_its_own_name(self) -> None:
        own = {"metadata": {"name": CLUSTER}, "spec": {}}
        for found, is_ours in (
            (resource(), True),
            (resource(clusterRef={"name": "other"}), False),
            (own, True),
            ({**own, "metadata": {"name": "quotes"}}, False),
        ):
            assert OURS.has(found) is is_ours

    def test_a_new_one_is_created_with_the_groups_default_of_min_in_sync_unless_it_says_one(self) -> None:
        step = plan(resource(partitions=4), None, OURS, default_min_in_sync=2)
        assert isinstance(step, Create)
        assert (step.spec.partitions, step.spec.durability.min_in_sync) == (4, 2)
        said = plan(resource(durability={"minInSync": 1}), None, OURS, default_min_in_sync=2)
        assert isinstance(said, Create)
        assert said.spec.durability.min_in_sync == 1

    def test_one_that_is_as_it_is_to_be_is_kept_and_keeps_its_min_in_sync(self) -> None:
        found = resource()
        assert plan(found, topic(found), OURS, default_min_in_sync=1) == Keep()

    def test_sizes_may_be_numbers(self) -> None:
        found = topic(resource(retention={"size": "1Mi"}))
        assert plan(resource(retention={"size": 1 << 20}), found, OURS, default_min_in_sync=2) == Keep()

    def test_a_changed_one_is_updated_but_for_its_partitions(self) -> None:
        found = topic(resource())
        step = plan(resource(retention={"time": "1h"}), found, OURS, default_min_in_sync=2)
        assert isinstance(step, Update)
        assert step.spec.retention.time_ms == 3_600_000
        refused = plan(resource(partitions=7), found, OURS, default_min_in_sync=2)
        assert isinstance(refused, Refuse)
        assert "1 partition(s) and this resource says 7" in refused.message

    @pytest.mark.parametrize(
        ("spec", "why"),
        [
            ({"compaction": {"maxLag": "0s"}}, "maxLag"),
            ({"surprise": 1}, "spec.surprise"),
            ({"access": [{"principals": ["a"], "allow": ["fly"]}]}, "fly"),
        ],
    )
    def test_what_no_topic_can_be_is_refused_in_a_sentence(self, spec: dict[str, Any], why: str) -> None:
        step = plan(resource(**spec), None, OURS, default_min_in_sync=2)
        assert isinstance(step, Refuse)
        assert why in step.message

    def test_a_name_that_no_topic_may_have_is_refused(self) -> None:
        assert isinstance(plan(resource("__topics"), None, OURS, default_min_in_sync=2), Refuse)

    def test_one_that_goes_takes_its_topic_along_unless_it_is_to_be_retained(self) -> None:
        gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        for spec, step in (({}, Delete()), ({"deletionPolicy": "Retain"}, Leave())):
            found = resource(**spec)
            known = topic(found)
            found["metadata"].update(gone)
            assert plan(found, known, OURS, default_min_in_sync=2) == step

    @pytest.mark.parametrize("access", [None, []])
    def test_without_rules_service_accounts_of_its_namespace_may_read_and_write(self, access: Any) -> None:
        step = plan(resource(access=access), None, OURS, default_min_in_sync=2)
        assert isinstance(step, Create)
        rules = parse_access(step.spec.operator["access"])
        assert rights_of(f"system:serviceaccount:{NAMESPACE}:till", rules) == {Right.READ, Right.WRITE}
        assert not rights_of(f"system:serviceaccount:{NAMESPACE}y:till", rules)
        given = plan(
            resource(access=[{"principals": ["a"], "allow": ["read"]}]), None, OURS, default_min_in_sync=2
        )
        assert isinstance(given, Create)
        assert not rights_of(
            f"system:serviceaccount:{NAMESPACE}:till", parse_access(given.spec.operator["access"])
        )

    @pytest.mark.parametrize("access", [None, [{"principals": ["a"], "allow": ["write"]}]])
    def test_runs_of_spark_on_it_may_read_and_compact_it_and_no_other_topic(self, access: Any) -> None:
        step = plan(resource("quotes", access=access), None, OURS, default_min_in_sync=2)
        assert isinstance(step, Create)
        rules = parse_access(step.spec.operator["access"])
        for name in (driver_account("quotes"), executor_account("quotes")):
            rights = rights_of(f"system:serviceaccount:{NAMESPACE}:{name}", rules)
            assert {Right.READ, Right.COMPACT} <= rights
            other = rights_of(f"system:serviceaccount:{NAMESPACE}:{name}x", rules)
            assert Right.COMPACT not in other

    def test_a_topic_of_any_name_has_rules_that_count(self) -> None:
        for name in ("t" * 249, "a.b-c"):
            assert isinstance(plan(resource(name), None, OURS, default_min_in_sync=2), Create)
        assert driver_account("t" * 248 + "a") != driver_account("t" * 248 + "b")


def test_a_resource_is_made_changed_and_said_so_once_each() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        made = server.put(f"{TOPICS}/quotes", resource(partitions=3))
        await until(lambda: applied(server) == ("True", "Created"), "it is made")
        status = server.get(f"{TOPICS}/quotes")["status"]
        assert (status["topicId"], status["partitions"], status["minInSync"]) == ("4097", 3, 2)
        assert status["conditions"][0]["observedGeneration"] == 1
        changed = server.get(f"{TOPICS}/quotes")
        server.put(f"{TOPICS}/quotes", {**changed, "spec": {**made["spec"], "retention": {"time": "1h"}}})
        await until(lambda: applied(server) == ("True", "Updated"), "it is changed")
        assert server.get(f"{TOPICS}/quotes")["status"]["conditions"][0]["observedGeneration"] == 2
        assert host.calls == [("create", "quotes"), ("update", "quotes")]
        assert len(list(server.writes())) == 2

    run(test)


def test_a_new_master_that_finds_everything_as_it_is_to_be_writes_nothing() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        for name in ("a", "b"):
            server.put(f"{TOPICS}/{name}", resource(name))
        await until(lambda: applied(server, "a") and applied(server, "b"), "they are made")
        host.is_deciding = False
        await until(lambda: not server.watching, "it looks after them no more")
        writes, lists = len(list(server.writes())), len(server.asked)
        host.is_deciding = True
        server.put(f"{TOPICS}/c", resource("c"))
        await until(lambda: applied(server, "c") == ("True", "Created"), "the next one is made")
        assert len(list(server.writes())) == writes + 1
        assert len(server.asked) > lists

    run(test)


def test_many_resources_at_once_cost_one_write_each() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        host.is_deciding = False
        names = [f"t{number}" for number in range(300)]
        for name in names:
            server.put(f"{TOPICS}/{name}", resource(name))
        host.is_deciding = True
        await until(lambda: all(applied(server, name) for name in names), "all are made")
        assert len(list(server.writes())) == len(names)
        assert len(host.calls) == len(names)

    run(test)


def test_topics_and_resources_of_others_are_left_alone() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        host.topics["by-hand"] = topic(resource("by-hand"))
        server.put(f"{TOPICS}/foreign", resource("foreign", clusterRef={"name": "other"}))
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) is not None, "its own is made")
        server.remove(f"{TOPICS}/quotes")
        server.put(f"{TOPICS}/last", resource("last"))
        await until(lambda: applied(server, "last") is not None, "the last is made")
        assert [name for _, name in host.calls] == ["quotes", "last"]
        assert host.topics.keys() == {"by-hand", "quotes", "last"}
        assert applied(server, "foreign") is None

    run(test)


def deleting(found: Object) -> Object:
    return {**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}


def test_a_topic_goes_with_its_resource_and_one_made_again_begins_anew() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) is not None, "it is made")
        server.put(f"{TOPICS}/quotes", deleting(server.get(f"{TOPICS}/quotes")))
        await until(lambda: applied(server) == ("False", "Deleted"), "it is deleted")
        assert "topicId" not in server.get(f"{TOPICS}/quotes")["status"]
        assert not host.topics
        server.remove(f"{TOPICS}/quotes")
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) == ("True", "Created"), "it is made again")
        assert [what for what, _ in host.calls] == ["create", "delete", "create"]

    run(test)


def at_the_last_look(server: FakeKubernetes, happens: Callable[[], None]) -> list[Asked]:
    """Let something happen when the resource is read again before its topic goes; what comes back holds that request."""
    seen: list[Asked] = []

    def disturb(asked: Asked) -> str | None:
        if asked.method == "GET" and asked.path.endswith("/quotes") and not seen:
            seen.append(asked)
            happens()
        return None

    server.disturb = disturb
    return seen


def test_a_deletion_that_the_server_does_not_know_of_any_more_deletes_nothing() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) is not None, "it is made")

        def becomes_another_one_of_the_same_name() -> None:
            server.remove(f"{TOPICS}/quotes")
            server.put(f"{TOPICS}/quotes", resource())

        seen = at_the_last_look(server, becomes_another_one_of_the_same_name)
        server.put(f"{TOPICS}/quotes", deleting(server.get(f"{TOPICS}/quotes")))
        await until(lambda: seen and applied(server) == ("True", "Created"), "the other one is kept")
        assert [what for what, _ in host.calls] == ["create"]

    run(test)


def test_a_deletion_that_is_repented_keeps_the_topic() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) is not None, "it is made")

        def says_that_its_topic_is_to_stay() -> None:
            server.put(f"{TOPICS}/quotes", deleting(resource(deletionPolicy="Retain")))

        seen = at_the_last_look(server, says_that_its_topic_is_to_stay)
        server.put(f"{TOPICS}/quotes", deleting(server.get(f"{TOPICS}/quotes")))
        server.put(f"{TOPICS}/last", resource("last"))
        await until(lambda: seen and applied(server, "last"), "the other one is made")
        assert ("delete", "quotes") not in host.calls

    run(test)


def test_a_malformed_resource_is_refused_and_stops_no_other() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        server.put(f"{TOPICS}/a", resource("a", clusterRef="main"))
        server.put(f"{TOPICS}/b", resource("b", durability={"minInSync": {}}))
        server.put(f"{TOPICS}/c", resource("c"))
        await until(lambda: applied(server, "c") == ("True", "Created"), "the good one is made")
        await until(lambda: applied(server, "a") == ("False", "Refused"), "a malformed one is refused")
        await until(lambda: applied(server, "b") == ("False", "Refused"), "an invalid one is refused")

    run(test)


def test_a_server_that_resets_watches_is_asked_less_and_less_often() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        await until(lambda: server.watching, "it watches")

        def disturb(asked: Asked) -> str | None:
            return "cut" if asked.query.get("watch") else None

        server.disturb = disturb
        await server.stop()
        await server.start()
        before = len(server.asked)

        def tries() -> list[float]:
            return [each.at for each in server.asked[before:] if each.query.get("watch")]

        await until(lambda: len(tries()) >= 10, "it tries again")
        # Two requests a try, because the HTTP library repeats it once; pauses of at least 0.1, 0.2, 0.4 and 0.8 s.
        assert tries()[9] - tries()[0] >= 1.5

    run(test)


def test_what_cannot_be_done_yet_is_said_once_and_tried_again() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        host.failure = Unavailable("no replica is in sync")
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) == ("False", "Waiting"), "it says that it waits")
        await until(lambda: len(host.calls) >= 3, "it tries again")
        assert len(list(server.writes())) == 1
        host.failure = None
        await until(lambda: applied(server) == ("True", "Created"), "it is made")
        assert len(list(server.writes())) == 2

    run(test)


def test_who_is_master_no_more_says_nothing() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        host.failure = NotMaster("not the master", address=None)
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: host.calls, "it has tried")
        host.is_deciding = False
        await until(lambda: not server.watching, "it looks after them no more")
        assert not list(server.writes())

    run(test)


@pytest.mark.parametrize("fault", ["409", "429", "500", "apply and cut"])
def test_a_status_that_could_not_be_written_is_written_later(fault: str) -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        failed = []

        def disturb(asked: Asked) -> str | None:
            if asked.method == "GET" or len(failed) >= 2:
                return None
            failed.append(asked)
            return fault

        server.disturb = disturb
        server.put(f"{TOPICS}/quotes", resource())
        await until(lambda: applied(server) == ("True", "Created") and failed, "it is said")
        assert host.calls == [("create", "quotes")]

    run(test)


def test_what_happens_while_a_watch_is_broken_or_forgotten_is_seen_afterwards() -> None:
    async def test(server: FakeKubernetes, host: Host) -> None:
        server.put(f"{TOPICS}/a", resource("a"))
        await until(lambda: applied(server, "a") is not None, "the first is made")
        server.forget()
        server.put(f"{TOPICS}/b", resource("b"))
        await until(lambda: applied(server, "b") is not None, "the second is made")
        await server.stop()
        server.put(f"{TOPICS}/c", resource("c"))
        server.remove(f"{TOPICS}/a")
        await server.start()
        await until(lambda: applied(server, "c") is not None, "the third is made")
        assert [name for _, name in host.calls] == ["a", "b", "c"]

    run(test)
