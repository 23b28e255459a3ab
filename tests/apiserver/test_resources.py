"""What a real API server accepts of our kinds, and in which words it refuses the rest (drill 31)."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.api import ApiError
from cluster.apiserver import ApiServer

from firn.topicspec import parse_spec

pytestmark = pytest.mark.apiserver
CRDS = sorted((Path(__file__).parents[2] / "crds").glob("*.yaml"))
Obj = dict[str, Any]

PLURALS = {
    "CompactedTopic": "compactedtopics", "BrokerCluster": "brokerclusters", "BrokerGroup": "brokergroups",
    "ForceCompaction": "forcecompactions",
}  # fmt: skip


@pytest.fixture(scope="module")
def space(apiserver: ApiServer) -> Iterator[str]:
    for path in CRDS:
        apiserver.apply(path)
    apiserver.until_served(*(f"{plural}.firn.dev" for plural in PLURALS.values()))
    with apiserver.namespace() as name:
        yield name


def resource(kind: str, name: str, spec: Any) -> Obj:
    return {"apiVersion": "firn.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def topic(spec: Any = None, name: str = "quotes") -> Obj:
    return resource("CompactedTopic", name, {"clusterRef": {"name": "main"}, **(spec or {})})


def own(spec: Any, name: str = "quotes") -> Obj:
    return resource("CompactedTopic", name, spec)


def compaction(**values: Any) -> Obj:
    return topic({"compaction": values})


def cluster(spec: Any = None, name: str = "main") -> Obj:
    return resource("BrokerCluster", name, spec or {})


def group(**values: Any) -> Obj:
    return resource(
        "BrokerGroup",
        "main-0",
        {"clusterRef": {"name": "main"}, "group": 0, "groups": 1, "replicas": 3, **values},
    )


def spark(**values: Any) -> Obj:
    return force(engine="spark", spark=values)


def scheduled(**values: Any) -> Obj:
    return topic({"forceCompaction": values})


def force(**values: Any) -> Obj:
    return resource("ForceCompaction", "now", {"topicRef": {"name": "quotes"}, **values})


COPY = "copy the records (python -m firn_spark.copy OLD NEW --checkpoint FOLDER)"
LABEL = "must be a DNS label of at most 45 characters that begins with a letter"
CREATED: list[tuple[str, Obj, str]] = [
    # Topics: what is good.
    ("a topic of a cluster", topic(), ""),
    ("a topic alone", own({}), ""),
    ("many partitions", topic({"partitions": 100_000}), ""),
    ("days", compaction(maxLag="7d", minLag="24h"), ""),
    ("equal lags in different units", compaction(maxLag="24h", minLag="1440m"), ""),
    ("milliseconds", compaction(minLag="500ms"), ""),
    ("bytes as a number", compaction(segmentBytes=4096), ""),
    ("the least memory", compaction(memory="64Ki"), ""),
    ("the least memory in bytes", compaction(memory="65536"), ""),
    ("a ratio of one", compaction(minDirtyRatio=1), ""),
    ("flush by interval", topic({"durability": {"flush": "interval"}}), ""),
    ("access", topic({"access": [{"principals": ["system:serviceaccount:shop:*"], "allow": ["read", "write"]}]}), ""),
    ("a schedule", topic({"forceCompaction": {"schedule": "0 3 * * *", "engine": "broker"}}), ""),
    ("a schedule of Spark", scheduled(schedule="*/5 1-4 * * MON", historyLimit=0, spark={"executors": 4}), ""),
    ("a schedule without an engine", scheduled(schedule="0 3 * * *"), ""),
    ("records to be kept", topic({"deletionPolicy": "Retain"}), ""),
    ("a topic with dots, in a cluster", topic(name="orders.eu"), ""),
    ("brokers of its own", own({"brokers": {"replicas": 5}, "durability": {"minInSync": 4}}), ""),
    # Topics: what is not.
    ("a schedule of four fields", scheduled(schedule="0 3 * *  "), "should match"),
    ("a schedule of the brokers with Spark", scheduled(engine="broker", spark={"cores": 1}), "spark is for the engines"),
    ("less than no history", scheduled(historyLimit=-1), "should be greater than or equal to 0"),
    ("no partitions", topic({"partitions": 0}), "should be greater than or equal to 1"),
    ("too many partitions", topic({"partitions": 100_001}), "should be less than or equal to 100000"),
    ("partitions in words", topic({"partitions": "four"}), "must be of type integer"),
    ("no lag at all", compaction(maxLag="0s"), "maxLag must be above 0s"),
    ("maxLag below minLag", compaction(maxLag="1h", minLag="2h"), "maxLag must not be below minLag"),
    ("maxLag below minLag in other units", compaction(maxLag="59s", minLag="1m"), "maxLag must not be below minLag"),
    ("maxLag below minLag in days", compaction(maxLag="47h", minLag="2d"), "maxLag must not be below minLag"),
    ("a duration without a unit", compaction(maxLag="24"), "should match"),
    ("a duration in weeks", compaction(maxLag="1w"), "should match"),
    ("a duration of two units", compaction(maxLag="1h30m"), "should match"),
    ("a negative duration", compaction(minLag="-1s"), "should match"),
    ("a duration of many digits", compaction(minLag="1234567890123s"), "may not be more than 12"),
    ("too little memory", compaction(memory="63Ki"), "memory is too little; at least 64Ki"),
    ("too little memory in bytes", compaction(memory=65535), "memory is too little; at least 64Ki"),
    ("no memory", compaction(memory="0Mi"), "memory is too little; at least 64Ki"),
    ("small segments", compaction(segmentBytes="3Ki"), "segmentBytes is too little; at least 4Ki"),
    ("a size in decimal units", compaction(backlogThreshold="1G"), "should match"),
    ("a ratio above one", compaction(minDirtyRatio=1.5), "should be less than or equal to 1"),
    ("a negative ratio", compaction(minDirtyRatio=-0.1), "should be greater than or equal to 0"),
    ("nobody in sync", topic({"durability": {"minInSync": 0}}), "should be greater than or equal to 1"),
    ("an unknown flush", topic({"durability": {"flush": "never"}}), "supported values"),
    ("a cluster and brokers", topic({"brokers": {}}), "brokers describes"),
    ("more in sync than replicas by default", own({"durability": {"minInSync": 4}}), "minInSync is more than"),
    ("too few replicas", own({"durability": {"minInSync": 2}, "brokers": {"replicas": 1}}), "raise brokers.replicas"),
    ("a cluster without a name", topic({"clusterRef": {}}), "spec.clusterRef.name: Required value"),
    ("a cluster of a strange name", topic({"clusterRef": {"name": "Main"}}), "should match"),
    ("dots in the name of a topic alone", own({}, name="orders.eu"), LABEL),
    ("a digit first in the name of a topic alone", own({}, name="1st"), LABEL),
    ("a long name of a topic alone", own({}, name="x" * 46), LABEL),
    ("access for nobody", topic({"access": [{"principals": [], "allow": ["read"]}]}), "should have at least 1 items"),
    ("access to do an unknown thing", topic({"access": [{"principals": ["a"], "allow": ["admin"]}]}), "supported values"),
    ("access of a blank name", topic({"access": [{"principals": [" a"], "allow": ["read"]}]}), "should match"),
    ("a schedule of four fields", topic({"forceCompaction": {"schedule": "0 3 * *"}}), "spec.forceCompaction.schedule"),
    ("an unknown policy", topic({"deletionPolicy": "Keep"}), "supported values"),
    # Clusters.
    ("a cluster", cluster(), ""),
    ("a cluster of two groups", cluster({"groups": 2, "replicas": 5}), ""),
    ("settings", cluster({"config": {"leaseTtl": "10s", "index": "files", "indexCache": "64Mi"}}), ""),
    ("no replicas", cluster({"replicas": 0}), "should be greater than or equal to 1"),
    ("ten replicas", cluster({"replicas": 10}), "should be less than or equal to 9"),
    ("a lease of no time", cluster({"config": {"leaseTtl": "500ms"}}), "leaseTtl is too short; at least 1s"),
    ("an unknown index", cluster({"config": {"index": "btree"}}), "supported values"),
    ("a size that is none", cluster({"storage": {"size": "big"}}), "should match"),
    ("an unknown storage policy", cluster({"storage": {"deletionPolicy": "Keep"}}), "supported values"),
    ("dots in the name of a cluster", cluster(name="a.b"), "a cluster's name is a DNS label"),
    ("a long name of a cluster", cluster(name="c" * 46), "a cluster's name is a DNS label"),
    ("a strange quantity", cluster({"resources": {"limits": {"memory": "lots"}}}), "should match"),
    # Groups and compactions.
    ("a group", group(), ""),
    ("a group beyond its cluster", group(group=1), "group is a number below groups"),
    ("a compaction", force(), ""),
    ("a compaction by Spark", force(engine="spark", spark={"executors": 2, "memory": "2Gi"}), ""),
    ("a driver of Spark alone", spark(runner="local", cores=2, memory="1024Mi"), ""),
    ("Spark that may be asked", force(engine="auto", spark={"runner": "job", "executors": 4}), ""),
    ("executors of a driver alone", spark(runner="local", executors=2), "executors are for the runner job"),
    ("no executors", spark(executors=0), "should be greater than or equal to 1"),
    ("an unknown runner", spark(runner="yarn"), "supported values"),
    ("little memory for Spark", spark(memory="512Mi"), "at least 1Gi"),
    ("no memory for Spark", spark(memory="0Gi"), "at least 1Gi"),
    ("memory of Spark without a unit", spark(memory="2000000000"), "should match"),
    ("a compaction of nothing", resource("ForceCompaction", "now", {}), "spec.topicRef: Required value"),
    ("an unknown engine", force(engine="fast"), "supported values"),
    ("Spark for the brokers' engine", force(engine="broker", spark={"executors": 1}), "spark is for the engines"),
]  # fmt: skip

CHANGED: list[tuple[str, Obj, Obj, str]] = [
    ("another retention", topic(), topic({"retention": {"time": "1h"}}), ""),
    ("more partitions", topic({"partitions": 2}), topic({"partitions": 4}), "because keys would move"),
    ("fewer partitions", topic({"partitions": 2}), topic({"partitions": 1}), "make a topic under another name"),
    ("partitions that records are to be copied to", topic({"partitions": 2}), topic({"partitions": 3}), COPY),
    ("another cluster", topic(), topic({"clusterRef": {"name": "other"}}), "clusterRef cannot change"),
    ("a cluster of its own", topic(), own({}), "clusterRef cannot change"),
    ("larger volumes", cluster(), cluster({"storage": {"size": "30Gi"}}), ""),
    ("the same size in other words", cluster({"storage": {"size": "1Gi"}}), cluster({"storage": {"size": "1024Mi"}}), ""),
    ("smaller volumes", cluster(), cluster({"storage": {"size": "19Gi"}}), "storage.size cannot become smaller"),
    ("another class of volumes", cluster(), cluster({"storage": {"className": "fast"}}), "storage.className cannot change"),
    ("more groups", cluster(), cluster({"groups": 3}), ""),
    ("fewer groups", cluster({"groups": 3}), cluster({"groups": 2}), "groups cannot become fewer"),
    ("fewer replicas", cluster({"replicas": 5}), cluster({"replicas": 3}), ""),
    ("another index", cluster(), cluster({"config": {"index": "files"}}), "config.index cannot change"),
    ("the default index by its name", cluster(), cluster({"config": {"index": "rocksdb"}}), ""),
    ("without TLS", cluster(), cluster({"security": {"insecure": True}}), "security.insecure cannot change"),
    ("another group", group(groups=2), group(groups=2, group=1), "clusterRef and group cannot change"),
    ("more executors for a run", force(spark={"executors": 1}), force(spark={"executors": 2}), "a run cannot change once"),
    ("another topic to compact", force(), force(topicRef={"name": "other"}), "a run cannot change once it was asked for"),
    ("a longer memory of a run", force(), force(ttlSecondsAfterFinished=60), ""),
]  # fmt: skip


def path(space: str, obj: Obj, *, name: bool = True) -> str:
    base = f"/apis/firn.dev/v1alpha1/namespaces/{space}/{PLURALS[obj['kind']]}"
    return f"{base}/{obj['metadata']['name']}" if name else base


def test_there_are_sixty_objects_and_more_in_the_tables() -> None:
    assert len(CREATED) + len(CHANGED) >= 60


@pytest.mark.parametrize(("what", "obj", "said"), CREATED, ids=[row[0] for row in CREATED])
def test_what_is_created_is_taken_or_refused_in_these_words(
    apiserver: ApiServer, space: str, what: str, obj: Obj, said: str
) -> None:
    where = path(space, obj, name=False)
    if not said:
        apiserver.api.post(where, copy.deepcopy(obj))
        apiserver.api.delete(path(space, obj))
        return
    with pytest.raises(ApiError) as refused:
        apiserver.api.post(where, copy.deepcopy(obj))
    assert said in str(refused.value), what


@pytest.mark.parametrize(("what", "old", "new", "said"), CHANGED, ids=[row[0] for row in CHANGED])
def test_what_is_changed_is_taken_or_refused_in_these_words(
    apiserver: ApiServer, space: str, what: str, old: Obj, new: Obj, said: str
) -> None:
    made = apiserver.api.post(path(space, old, name=False), copy.deepcopy(old))
    try:
        wanted = copy.deepcopy(new)
        wanted["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
        if not said:
            apiserver.api.put(path(space, old), wanted)
            return
        with pytest.raises(ApiError) as refused:
            apiserver.api.put(path(space, old), wanted)
        assert said in str(refused.value), what
    finally:
        apiserver.api.delete(path(space, old))


def test_the_defaults_are_those_of_firn_without_kubernetes(apiserver: ApiServer, space: str) -> None:
    made = apiserver.api.post(path(space, own({}), name=False), own({}))
    apiserver.api.delete(path(space, own({})))
    assert parse_spec(made["spec"]).compaction == parse_spec({}).compaction
    assert parse_spec(made["spec"]).retention == parse_spec({}).retention
    assert parse_spec(made["spec"]).durability == parse_spec({}).durability
    assert parse_spec(made["spec"]).partitions == parse_spec({}).partitions


def test_what_is_left_out_here_is_left_out_there(apiserver: ApiServer, space: str) -> None:
    made = apiserver.api.post(path(space, own({}), name=False), own({}))
    apiserver.api.delete(path(space, own({})))
    assert "minInSync" not in made["spec"]["durability"]
    assert "clusterRef" not in made["spec"]


@pytest.mark.parametrize("file", CRDS, ids=lambda each: each.stem)
def test_every_kind_has_names_columns_and_a_status_of_its_own(file: Path) -> None:
    crd = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
    (version,) = crd["versions"]
    assert version["subresources"]["status"] == {}
    assert len(crd["names"]["shortNames"]) == 1
    assert "firn" in crd["names"]["categories"]
    assert any(column["name"] == "Age" for column in version["additionalPrinterColumns"])
    conditions = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
