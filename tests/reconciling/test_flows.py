"""The life of a cluster, from nothing to nothing, in a Kubernetes in memory."""

import asyncio
import copy
import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from operator_kit import IMAGE, NAMESPACE, Request, World, new_operator, one_round, rounds

from firn.errors import Forbidden
from firn_operator.brokers import Way
from firn_operator.kube import (
    CLAIM,
    CLUSTER,
    GROUP,
    LEASE,
    NODE,
    POD,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    TOPIC,
    Obj,
    name_of,
)
from firn_operator.names import PAUSED, RECORD


def go(world: World, count: int = 40) -> None:
    asyncio.run(rounds(world, new_operator(world), count))


@pytest.fixture
def world() -> World:
    made = World()
    for number in range(4):
        made.node(f"node-{number}")
    return made


@pytest.fixture
def settled(world: World) -> World:
    world.cluster()
    go(world, 15)
    assert world.condition(CLUSTER, "main", "Ready")["status"] == "True"
    return world


def set_spec(world: World, **values: object) -> None:
    def change(obj: Obj) -> None:
        obj["spec"].update(values)

    world.change(CLUSTER, "main", change)


def annotate(name: str, value: str) -> Callable[[Obj], None]:
    def change(obj: Obj) -> None:
        obj["metadata"].setdefault("annotations", {})[name] = value

    return change


def test_a_cluster_comes_up_ready_with_all_that_its_pods_need(settled: World) -> None:
    kinds = {obj["kind"] for obj in settled.objects.values()}
    assert kinds >= {
        "StatefulSet", "Service", "ConfigMap", "Secret", "Role", "RoleBinding", "ServiceAccount", "NetworkPolicy",
        "PodDisruptionBudget", "ClusterRoleBinding", "Lease", "BrokerGroup",
    }  # fmt: skip
    cluster = settled.find(CLUSTER, "main")
    assert cluster is not None
    assert cluster["status"]["inSync"] == "3/3"
    assert cluster["status"]["groups"][0]["currentMaster"] == "main-0-0"
    assert settled.condition(CLUSTER, "main", "Progressing")["status"] == "False"
    assert settled.condition(CLUSTER, "main", "Degraded")["status"] == "False"
    assert settled.events() == ["Ready"]


def test_a_cluster_at_rest_is_written_nothing_to_also_not_by_an_operator_that_begins(settled: World) -> None:
    before = len(settled.requests)
    go(settled, 5)
    assert settled.writes(before) == []


def test_no_object_asks_to_hold_up_the_end_of_its_owner(settled: World) -> None:
    """An API server that guards this refuses such objects for half a minute after the definitions came."""
    settled.topic("alone", cluster=None)
    settled.topic("often", forceCompaction={"schedule": "* * * * *"})
    settled.topic("quotes")
    go(settled)
    settled.force("now", "quotes", engine="spark", spark={"runner": "job"})
    settled.now += timedelta(minutes=2)
    go(settled, 3)
    owned = [
        (obj["kind"], owner)
        for obj in settled.objects.values()
        for owner in obj["metadata"].get("ownerReferences") or ()
    ]
    assert {kind for kind, _ in owned} >= {
        "StatefulSet", "Secret", "Service", "BrokerGroup", "BrokerCluster", "Job", "ServiceAccount", "ForceCompaction",
    }  # fmt: skip
    assert [kind for kind, owner in owned if "blockOwnerDeletion" in owner] == []


def test_what_somebody_changed_in_an_owned_object_is_changed_back(settled: World) -> None:
    def change(obj: Obj) -> None:
        obj["spec"]["selector"] = {"app": "other"}

    settled.change(SERVICE, "main-bootstrap", change)
    before = len(settled.requests)
    go(settled, 3)
    assert [(each.verb, each.name) for each in settled.writes(before)] == [("apply", "main-bootstrap")]


def test_a_new_image_rolls_standbys_first_and_the_old_master_last(settled: World) -> None:
    set_spec(settled, image="firn:2")
    order = watched_images(settled, 60)
    assert settled.images() == ["firn:2"] * 3
    assert [pod for pod, _ in order] == ["main-0-2", "main-0-1", "main-0-0"]
    assert settled.most_down == 1
    assert settled.lost_writes == []
    assert [to for _, to in settled.switchovers] == ["main-0-1"]
    assert "SwitchedOver" in settled.events()
    assert "PodRestarted" in settled.events()


def watched_images(world: World, count: int) -> list[tuple[str, str]]:
    """The pods in the order in which they changed their image."""
    seen = dict(zip(map(name_of, world.pods()), world.images(), strict=True))
    order = []
    operator = new_operator(world)

    async def run() -> None:
        for _ in range(count):
            await rounds(world, operator, 1)
            for pod in world.pods():
                if seen.get(name_of(pod)) != pod["spec"]["image"]:
                    seen[name_of(pod)] = pod["spec"]["image"]
                    order.append((name_of(pod), pod["spec"]["image"]))

    asyncio.run(run())
    return order


def test_a_roll_stops_and_says_so_when_the_first_new_pod_does_not_get_ready(settled: World) -> None:
    settled.bad_images.add("firn:bad")
    set_spec(settled, image="firn:bad")
    go(settled, 320)
    assert sorted(settled.images()) == [IMAGE, IMAGE, "firn:bad"]
    assert settled.condition(CLUSTER, "main", "Degraded")["reason"] == "PodStuck"
    assert "ImagePullBackOff" in settled.condition(CLUSTER, "main", "Progressing")["message"]
    assert settled.most_down == 1


def test_a_roll_that_is_stuck_goes_on_when_the_image_is_corrected(settled: World) -> None:
    settled.bad_images.add("firn:bad")
    set_spec(settled, image="firn:bad")
    go(settled, 20)
    set_spec(settled, image="firn:3")
    go(settled, 60)
    assert settled.images() == ["firn:3"] * 3
    assert settled.most_down == 1
    assert settled.condition(CLUSTER, "main", "Ready")["status"] == "True"


def test_a_single_replica_restarts_without_anybody_to_hand_over_to(world: World) -> None:
    world.cluster(replicas=1)
    go(world, 15)
    set_spec(world, image="firn:2")
    go(world, 15)
    assert world.images() == ["firn:2"]
    assert world.condition(CLUSTER, "main", "Ready")["status"] == "True"


def test_more_replicas_join_without_a_restart_of_the_others(world: World) -> None:
    world.cluster(replicas=2)
    go(world, 15)
    uids = [pod["metadata"]["uid"] for pod in world.pods()]
    set_spec(world, replicas=3)
    go(world, 15)
    assert [pod["metadata"]["uid"] for pod in world.pods()][:2] == uids
    assert world.records["main-0"].in_sync == {"main-0-0", "main-0-1", "main-0-2"}


def test_a_replica_leaves_the_record_before_its_pod_goes(settled: World) -> None:
    set_spec(settled, replicas=2)
    asyncio.run(rounds(settled, new_operator(settled), 1))
    assert len(settled.pods()) == 3
    go(settled, 10)
    assert len(settled.pods()) == 2
    assert settled.records["main-0"].members == {"main-0-0", "main-0-1"}
    assert settled.find(CLAIM, "data-main-0-2") is not None
    assert settled.most_down == 0


def test_a_master_that_is_to_go_hands_over_first(settled: World) -> None:
    asyncio.run(settled.switch_over(Way(("somewhere",), None), 0, "main-0-2"))
    set_spec(settled, replicas=2)
    go(settled, 15)
    assert settled.switchovers[-1] == (0, "main-0-0")
    assert len(settled.pods()) == 2
    assert settled.lost_writes == []


def test_fewer_replicas_than_a_topic_asks_for_are_refused_with_a_sentence(settled: World) -> None:
    settled.topic("orders", durability={"minInSync": 3})
    set_spec(settled, replicas=2)
    go(settled, 10)
    assert len(settled.pods()) == 3
    degraded = settled.condition(CLUSTER, "main", "Degraded")
    assert degraded["reason"] == "ScaleBelowMinInSync"
    assert "orders" in degraded["message"]
    assert settled.records["main-0"].members == {"main-0-0", "main-0-1", "main-0-2"}


def test_a_further_group_is_made_whole_and_the_first_one_restarts_to_know_of_it(settled: World) -> None:
    set_spec(settled, groups=2)
    go(settled, 60)
    assert {name_of(group) for group in settled.all(GROUP)} == {"main-0", "main-1"}
    assert settled.condition(CLUSTER, "main", "Ready")["status"] == "True"
    assert settled.most_down == 1
    assert settled.lost_writes == []


def test_a_network_policy_that_is_wished_no_more_goes_and_comes_back_when_it_is(settled: World) -> None:
    def policies() -> int:
        return sum(obj["kind"] == "NetworkPolicy" for obj in settled.objects.values())

    set_spec(settled, security={"networkPolicy": False})
    go(settled)
    assert policies() == 0
    set_spec(settled, security={})
    go(settled)
    assert policies() == 1


def test_volumes_grow_without_a_restart(settled: World) -> None:
    uids = {pod["metadata"]["uid"] for pod in settled.pods()}
    set_spec(settled, storage={"size": "40Gi"})
    go(settled, 15)
    assert {claim["spec"]["resources"]["requests"]["storage"] for claim in settled.all(CLAIM)} == {"40Gi"}
    stateful_set = settled.find(STATEFUL_SET, "main-0")
    assert stateful_set is not None
    assert (
        stateful_set["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "40Gi"
    )
    assert {pod["metadata"]["uid"] for pod in settled.pods()} == uids


def test_volumes_that_are_wished_smaller_stay_and_it_is_said_why(settled: World) -> None:
    set_spec(settled, storage={"size": "1Gi"})
    before = len(settled.requests)
    go(settled, 5)
    degraded = settled.condition(CLUSTER, "main", "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "StorageShrinks")
    assert "copy the topics" in degraded["message"]
    assert {each.kind for each in settled.writes(before)} <= {"BrokerCluster", "BrokerGroup", "Event"}
    assert {claim["spec"]["resources"]["requests"]["storage"] for claim in settled.all(CLAIM)} == {"20Gi"}


def test_a_storage_class_that_cannot_expand_is_named_as_the_reason(settled: World) -> None:
    def refuse(request: Request) -> None:
        if request.verb == "patch" and request.kind == "PersistentVolumeClaim":
            raise Forbidden("only dynamically provisioned pvc can be resized")

    settled.on_request = refuse
    set_spec(settled, storage={"size": "40Gi"})
    go(settled, 3)
    degraded = settled.condition(CLUSTER, "main", "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "StorageCannotGrow")
    assert "allowVolumeExpansion" in degraded["message"]
    assert settled.find(STATEFUL_SET, "main-0") is not None


def test_a_volume_that_is_still_growing_is_waited_for_in_words(settled: World) -> None:
    def growing(claim: Obj) -> None:
        claim["status"] = {"conditions": [{"type": "FileSystemResizePending", "status": "True"}]}

    settled.change(CLAIM, "data-main-0-1", growing)
    go(settled, 2)
    assert "data-main-0-1 grows" in settled.condition(CLUSTER, "main", "Progressing")["message"]


def lose(world: World, pod: str, *, volume: Obj | None = None, since_s: float = 600) -> None:
    """The node of a pod is no more, and the pod finds no other place."""
    world.remove(NODE, f"node-{pod[-1]}")
    since = (world.now - timedelta(seconds=since_s)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def unplaced(obj: Obj) -> None:
        obj["spec"].pop("nodeName")
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "lastTransitionTime": since,
        }
        obj["status"] = {"conditions": [condition]}

    world.change(POD, pod, unplaced)
    world._running.pop(pod)
    world.stuck.add(pod)
    if volume is not None:
        world.put(volume)
        world.change(CLAIM, f"data-{pod}", lambda claim: claim["spec"].update(volumeName=name_of(volume)))


def volume_on(node: str | None) -> Obj:
    spec: Obj = {}
    if node is not None:
        expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        spec = {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"}, "spec": spec}


def test_a_volume_whose_node_is_no_more_is_given_up_and_rebuilt(settled: World) -> None:
    lose(settled, "main-0-2", volume=volume_on("node-2"))
    log = settled.volumes["data-main-0-2"]
    go(settled, 12)
    assert settled.volumes["data-main-0-2"] != log
    assert settled.records["main-0"].in_sync == {"main-0-0", "main-0-1", "main-0-2"}
    assert "VolumeGivenUp" in settled.events()


@pytest.mark.parametrize(
    ("volume", "since_s"),
    [(volume_on(None), 600), (volume_on("node-1"), 600), (volume_on("node-2"), 10), (None, 600)],
    ids=["over the network", "on a node that is there", "only a moment ago", "nothing is known of it"],
)
def test_a_volume_that_may_still_be_there_is_not_given_up(
    settled: World, volume: Obj | None, since_s: float
) -> None:
    lose(settled, "main-0-2", volume=volume, since_s=since_s)
    log = settled.volumes["data-main-0-2"]
    go(settled, 12)
    assert settled.volumes["data-main-0-2"] == log
    assert settled.find(CLAIM, "data-main-0-2") is not None


def test_a_volume_is_not_given_up_while_its_group_has_no_other_master(settled: World) -> None:
    lose(settled, "main-0-0", volume=volume_on("node-0"))
    asyncio.run(one_round(new_operator(settled)))
    claim = settled.find(CLAIM, "data-main-0-0")
    assert claim is not None
    assert "deletionTimestamp" not in claim["metadata"]


def test_an_operator_that_ended_between_claim_and_pod_leaves_what_the_next_one_finishes(
    settled: World,
) -> None:
    lose(settled, "main-0-2", volume=volume_on("node-2"))
    for _ in range(2):
        settled.turn()
    settled.end(CLAIM, "data-main-0-2")
    log = settled.volumes["data-main-0-2"]
    go(settled, 12)
    assert settled.volumes["data-main-0-2"] != log
    assert settled.records["main-0"].in_sync == {"main-0-0", "main-0-1", "main-0-2"}


def test_taints_that_the_cluster_tolerates_are_no_drain(world: World) -> None:
    tolerations = [{"key": "dedicated", "operator": "Equal", "value": "firn", "effect": "NoSchedule"}]
    taints = [{"key": "dedicated", "value": "firn", "effect": "NoSchedule"}]
    for number in range(3):
        world.change(NODE, f"node-{number}", lambda node: node["spec"].update(taints=taints))
    world.cluster(scheduling={"tolerations": tolerations})
    go(world, 15)
    assert world.switchovers == []
    assert world.condition(CLUSTER, "main", "Progressing")["status"] == "False"
    world.change(
        NODE, "node-0", lambda node: node["spec"].update(taints=[{"key": "other", "effect": "NoExecute"}])
    )
    go(world, 3)
    assert world.switchovers == [(0, "main-0-1")]


def test_a_replica_out_of_sync_restarts_before_those_that_others_rest_on(settled: World) -> None:
    settled.never_in_sync.add((IMAGE, "main-0-1"))
    settled.records["main-0"].in_sync.discard("main-0-1")
    settled.turn()
    set_spec(settled, image="firn:2")
    order = watched_images(settled, 60)
    assert [pod for pod, _ in order] == ["main-0-1", "main-0-2", "main-0-0"]
    assert settled.most_down == 1


def foreign(kind: str, name: str, **fields: object) -> Obj:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}, **fields}


def test_objects_of_others_under_the_clusters_names_are_left_as_they_are(world: World) -> None:
    body = foreign("Secret", "main-ca", data={"tls.key": "eA=="})
    service = foreign("Service", "main-0", spec={"type": "ExternalName"})
    for each in (body, service):
        world.put(each)
    world.cluster()
    go(world, 5)
    assert world.find(SECRET, "main-ca") == body
    assert world.find(SERVICE, "main-0") == service
    degraded = world.condition(CLUSTER, "main", "Degraded")
    assert degraded["reason"] == "NameTaken"
    assert "main-ca" in degraded["message"]
    assert "Service main-0" in degraded["message"]


def test_a_lease_of_somebody_else_is_not_taken_for_the_place_of_a_record(world: World) -> None:
    lease = {
        "apiVersion": LEASE.api_version,
        "kind": "Lease",
        "metadata": {"name": "main-0", "namespace": NAMESPACE},
        "spec": {},
    }
    world.put(lease)
    world.cluster()
    go(world, 5)
    assert world.find(GROUP, "main-0") is None
    assert world.condition(CLUSTER, "main", "Degraded")["reason"] == "NameTaken"


def test_a_volume_stays_while_a_node_of_its_host_is_there_under_another_name(settled: World) -> None:
    lose(settled, "main-0-2", volume=volume_on("host-2"))
    settled.put(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "i-0abc", "labels": {"kubernetes.io/hostname": "host-2"}},
        }
    )
    go(settled, 12)
    claim = settled.find(CLAIM, "data-main-0-2")
    assert claim is not None
    assert "deletionTimestamp" not in claim["metadata"]


def test_a_pod_is_not_stopped_while_the_lease_of_its_group_is_gone(settled: World) -> None:
    settled.remove(LEASE, "main-0")
    settled.brokers_report = False
    set_spec(settled, image="firn:2")
    go(settled, 10)
    assert settled.images() == [IMAGE] * 3
    assert "a person must look" in settled.condition(CLUSTER, "main", "Progressing")["message"]


def older(lease: Obj) -> None:
    record = json.loads(lease["metadata"]["annotations"][RECORD])
    lease["metadata"]["annotations"][RECORD] = json.dumps({**record, "version": record["version"] - 1})


def cleared(lease: Obj) -> None:
    del lease["metadata"]["annotations"][RECORD]


def damaged(lease: Obj) -> None:
    lease["metadata"]["annotations"][RECORD] = "{"


@pytest.mark.parametrize(("what", "said"), [
    (None, "is gone"), (older, "is older"), (cleared, "has lost the record"), (damaged, "cannot be read"),
], ids=["gone", "older", "cleared", "damaged"])  # fmt: skip
def test_a_record_that_is_lost_under_its_group_is_said_until_it_is_back(
    settled: World, what: Callable[[Obj], None] | None, said: str
) -> None:
    lease = settled.find(LEASE, "main-0")
    assert lease is not None
    kept = copy.deepcopy(lease)
    settled.elects = False
    if what is None:
        settled.remove(LEASE, "main-0")
    else:
        settled.change(LEASE, "main-0", what)
    go(settled, 3)
    degraded = settled.condition(CLUSTER, "main", "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "RecordLost")
    assert said in degraded["message"]
    assert settled.events().count("RecordLost") == 1
    settled.put(kept)
    settled.elects = True
    go(settled, 3)
    assert settled.condition(CLUSTER, "main", "Degraded")["status"] == "False"


def test_a_topic_that_says_nonsense_holds_up_no_other_one(settled: World) -> None:
    settled.topic("bad")
    settled.change(
        TOPIC, "bad", lambda obj: obj["spec"].update(clusterRef={}, durability={"minInSync": "two"})
    )
    settled.topic("good")
    go(settled, 5)
    assert settled.condition(TOPIC, "good", "Ready")["status"] == "True"
    assert settled.condition(CLUSTER, "main", "Ready")["status"] == "True"


def test_a_master_on_a_node_that_is_cordoned_hands_over_to_one_on_another(settled: World) -> None:
    uids = {pod["metadata"]["uid"] for pod in settled.pods()}
    settled.node("node-0", unschedulable=True)
    settled.node("node-1", unschedulable=True)
    go(settled, 3)
    assert settled.switchovers == [(0, "main-0-2")]
    assert {pod["metadata"]["uid"] for pod in settled.pods()} == uids


def test_a_paused_cluster_is_left_alone(settled: World) -> None:
    settled.change(CLUSTER, "main", annotate(PAUSED, "true"))
    set_spec(settled, image="firn:2")
    go(settled, 10)
    assert settled.images() == [IMAGE] * 3
    assert settled.condition(CLUSTER, "main", "Progressing")["reason"] == "Paused"


def test_a_hibernating_cluster_has_volumes_and_records_and_no_pods(settled: World) -> None:
    settled.change(CLUSTER, "main", annotate("firn.dev/hibernate", "true"))
    go(settled, 5)
    assert settled.pods() == []
    assert len(settled.all(CLAIM)) == 3
    settled.change(CLUSTER, "main", annotate("firn.dev/hibernate", "false"))
    go(settled, 15)
    assert settled.condition(CLUSTER, "main", "Ready")["status"] == "True"


def test_the_restart_annotation_rolls_once_for_each_value(settled: World) -> None:
    uids = {pod["metadata"]["uid"] for pod in settled.pods()}
    settled.change(CLUSTER, "main", annotate("firn.dev/restart", "2026-01-01T00:00:00Z"))
    go(settled, 60)
    renewed = {pod["metadata"]["uid"] for pod in settled.pods()}
    assert not uids & renewed
    go(settled, 10)
    assert {pod["metadata"]["uid"] for pod in settled.pods()} == renewed


@pytest.mark.parametrize(("policy", "left"), [("Retain", 3), ("Delete", 0)])
def test_a_deleted_cluster_leaves_volumes_and_records_by_its_policy(
    world: World, policy: str, left: int
) -> None:
    world.cluster(storage={"deletionPolicy": policy})
    go(world, 15)
    world.end(CLUSTER, "main")
    go(world, 10)
    assert world.find(CLUSTER, "main") is None
    assert len(world.all(CLAIM)) == left
    assert len(world.all(LEASE)) == (1 if left else 0)
    kept = ("BrokerCluster", "StatefulSet", "Pod", "BrokerGroup", "Secret", "Service", "ClusterRoleBinding")
    assert [obj["kind"] for obj in world.objects.values() if obj["kind"] in kept] == []


def test_a_cluster_made_again_over_its_volumes_goes_on_with_their_record(settled: World) -> None:
    settled.end(CLUSTER, "main")
    go(settled, 10)
    lease = settled.find(LEASE, "main-0")
    assert lease is not None
    record = lease["metadata"]["annotations"][RECORD]
    settled.cluster()
    asyncio.run(one_round(new_operator(settled)))
    kept = settled.find(LEASE, "main-0")
    assert kept is not None
    assert kept["metadata"]["annotations"][RECORD] == record


def test_volumes_without_their_record_are_not_given_a_new_one(settled: World) -> None:
    settled.end(CLUSTER, "main")
    go(settled, 10)
    settled.remove(LEASE, "main-0")
    settled.cluster()
    go(settled, 5)
    assert settled.find(LEASE, "main-0") is None
    assert settled.find(STATEFUL_SET, "main-0") is None
    assert settled.condition(CLUSTER, "main", "Degraded")["reason"] == "RecordLost"


def test_the_operator_never_writes_a_lease_that_is_there(settled: World) -> None:
    set_spec(settled, image="firn:2")
    go(settled, 50)
    wrote = [each for each in settled.writes() if each.kind == "Lease"]
    assert [(each.verb, each.name) for each in wrote] == [("create", "main-0")]


# Topics.


def test_a_topic_is_ready_once_the_brokers_have_it(settled: World) -> None:
    before = len(settled.requests)
    settled.topic("quotes", partitions=4)
    go(settled, 5)
    assert settled.condition(TOPIC, "quotes", "Ready")["status"] == "True"
    mine = [each for each in settled.writes(before) if each.name == "quotes"]
    assert [(each.verb, each.kind) for each in mine] == [
        ("patch", "CompactedTopic"),
        ("apply-status", "CompactedTopic"),
    ]


def test_a_topic_without_a_cluster_gets_one_and_takes_it_along(world: World) -> None:
    world.topic("quotes", cluster=None)

    def image(obj: Obj) -> None:
        obj["spec"]["image"] = IMAGE

    go(world, 2)
    world.change(CLUSTER, "quotes", image)
    go(world, 20)
    assert world.condition(TOPIC, "quotes", "Ready")["status"] == "True"
    world.end(TOPIC, "quotes")
    go(world, 15)
    left = [obj["kind"] for obj in world.objects.values() if obj["kind"] not in ("Node", "Event")]
    assert left == []


def test_a_topic_told_to_keep_its_records_right_before_its_end_keeps_them(world: World) -> None:
    world.topic("quotes", cluster=None)
    go(world, 2)
    world.change(CLUSTER, "quotes", lambda obj: obj["spec"].update(image=IMAGE))
    go(world, 20)
    world.change(TOPIC, "quotes", lambda obj: obj["spec"].update(deletionPolicy="Retain"))
    world.end(TOPIC, "quotes")
    go(world, 15)
    assert world.find(TOPIC, "quotes") is None
    assert world.find(CLUSTER, "quotes") is None
    assert len(world.all(CLAIM)) == 3
    assert world.find(LEASE, "quotes-0") is not None


def test_a_topic_of_a_cluster_that_is_not_there_says_so(world: World) -> None:
    world.topic("quotes", cluster="nowhere")
    world.now += timedelta(seconds=30)
    go(world, 2)
    ready = world.condition(TOPIC, "quotes", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoCluster")
    assert "nowhere" in ready["message"]


def test_a_topic_that_asks_for_more_than_its_cluster_has_says_what_to_do(settled: World) -> None:
    settled.topic("quotes", durability={"minInSync": 5})
    settled.now += timedelta(seconds=30)
    go(settled, 2)
    degraded = settled.condition(TOPIC, "quotes", "Degraded")
    assert degraded["reason"] == "MinInSyncTooHigh"
    assert "lower it, or raise" in degraded["message"]


def test_a_deleted_topic_waits_for_its_records_to_go(settled: World) -> None:
    settled.topic("quotes")
    go(settled, 5)
    settled.end(TOPIC, "quotes")
    asyncio.run(rounds(settled, new_operator(settled), 1))
    assert settled.find(TOPIC, "quotes") is not None
    go(settled, 3)
    assert settled.find(TOPIC, "quotes") is None


def test_a_topic_to_be_kept_goes_at_once_and_its_records_stay(settled: World) -> None:
    settled.topic("quotes", deletionPolicy="Retain")
    go(settled, 5)
    settled.end(TOPIC, "quotes")
    asyncio.run(rounds(settled, new_operator(settled), 1))
    assert settled.find(TOPIC, "quotes") is None


def test_a_topic_is_not_held_by_a_cluster_that_is_gone(settled: World) -> None:
    settled.topic("quotes")
    go(settled, 5)
    settled.end(CLUSTER, "main")
    settled.end(TOPIC, "quotes")
    go(settled, 10)
    assert settled.find(TOPIC, "quotes") is None
    assert settled.find(CLUSTER, "main") is None
