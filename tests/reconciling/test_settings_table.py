"""The table of when a change counts, held to the definitions, to the rendered pods and to the documentation."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from firn.topicspec import TopicSpec, parse_spec
from firn.units import duration_ms, size_bytes
from firn_node.config import SETTINGS as OF_BROKERS
from firn_node.config import default_text
from firn_operator.objects import stateful_set
from firn_operator.settings import SETTINGS, Setting, setting_of, table
from firn_operator.spec import parse_cluster

ROOT = Path(__file__).parents[2]
CRDS = {"CompactedTopic": "compactedtopic.yaml", "BrokerCluster": "brokercluster.yaml"}
CHANGED: dict[str, Any] = {  # another value of each field of a BrokerCluster
    "groups": 2, "replicas": 5, "image": "firn:2", "imagePullPolicy": "Always", "imagePullSecrets": [{"name": "s"}],
    "resources.requests": {"cpu": "2"}, "resources.limits": {"memory": "9Gi"}, "storage.deletionPolicy": "Delete",
    "security.networkPolicy": False, "scheduling.nodeSelector": {"a": "b"},
    "scheduling.tolerations": [{"operator": "Exists"}], "scheduling.priorityClassName": "high",
    "scheduling.topologyKey": "zone", "scheduling.spread": "Required", "config.leaseTtl": "9s",
}  # fmt: skip


# What a pod's place, its certificates and the operator decide: nobody wishes it in ``config``.
THE_PODS_OWN = {
    "data", "listen", "advertise", "healthListen", "node", "tlsCert", "tlsKey", "tlsCa", "tlsClientCa", "tokens",
    "tokenReview", "auditLog", "coordinator", "cluster", "group", "groupReplicas", "ordinal",
}  # fmt: skip
PATTERNS = {duration_ms: "^[0-9]+(ms|s|m|h|d)$", size_bytes: "^[0-9]+(Ki|Mi|Gi|Ti)?$"}


def spec_of(kind: str) -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / "crds" / CRDS[kind]).read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return dict(schema)


def fields_of(kind: str) -> set[str]:
    """Of a spec, two levels deep."""
    found = set()
    for name, value in spec_of(kind)["properties"].items():
        below = value.get("properties")
        found |= {f"{name}.{each}" for each in below} if below else {name}
    return found


@pytest.mark.parametrize("kind", CRDS)
def test_every_field_of_a_spec_has_a_row_and_every_row_a_field(kind: str) -> None:
    rows = {field: setting_of(kind, field) for field in fields_of(kind)}
    assert [field for field, row in rows.items() if row is None] == []
    used = {row for row in rows.values() if row is not None}
    assert {row for row in SETTINGS if row.kind == kind} == used


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: f"{each.kind}.{each.field}")
def test_what_is_immutable_and_nothing_else_has_a_rule_that_it_stays(setting: Setting) -> None:
    rules = [each["rule"] for each in spec_of(setting.kind)["x-kubernetes-validations"]]
    stays = [rule for rule in rules if f"oldSelf.{setting.field}" in rule and ">=" not in rule]
    assert bool(stays) == (setting.apply == "immutable")


@pytest.mark.parametrize("field", sorted(fields_of("BrokerCluster")))
def test_what_restarts_is_what_changes_the_pods(field: str) -> None:
    setting = setting_of("BrokerCluster", field)
    assert setting is not None
    if setting.apply == "immutable":
        return
    if field == "storage.size":
        changed: Any = "40Gi"
    elif field.startswith("config."):
        changed = CHANGED["config.leaseTtl"]
    else:
        changed = CHANGED[field]
    first, _, last = field.partition(".")
    spec = {first: {last: changed}} if last else {first: changed}
    assert (pods({}) != pods(spec)) == (setting.apply == "restart")


def pods(spec: dict[str, Any]) -> Any:
    cluster = parse_cluster(
        {
            "apiVersion": "firn.dev/v1alpha1",
            "kind": "BrokerCluster",
            "metadata": {"name": "main", "namespace": "shop"},
            "spec": {"image": "firn:1", **spec},
        }
    )
    return stateful_set(cluster, 0, image=cluster.image, pods=3)["spec"]["template"]


def test_every_setting_of_a_broker_that_is_not_its_pods_own_is_a_field_of_config() -> None:
    fields = spec_of("BrokerCluster")["properties"]["config"]["properties"]
    wished = {each.name: each for each in OF_BROKERS if each.name not in THE_PODS_OWN}
    assert set(fields) == set(wished)
    assert {name: fields[name].get("pattern") for name in fields} == {
        name: PATTERNS.get(each.parse) for name, each in wished.items()
    }
    numbers = {name for name, field in fields.items() if field.get("type") in ("integer", "number")}
    assert numbers == {name for name, each in wished.items() if _is_number(default_text(each))}


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and text != "0"


def test_every_field_of_a_topic_is_one_of_the_definition_with_the_same_default() -> None:
    fields, shown = spec_of("CompactedTopic")["properties"], {}
    for section in ("compaction", "retention", "durability"):
        below = fields[section]["properties"]
        assert set(below) == set(TopicSpec().document()[section])
        shown[section] = {name: field["default"] for name, field in below.items() if "default" in field}
        assert set(below) - set(shown[section]) <= {"minInSync"}  # follows from the number of replicas
    assert parse_spec(shown) == TopicSpec()
    assert parse_spec({"compaction": fields["compaction"]["default"]}) == TopicSpec()


def test_the_documented_table_is_this_one() -> None:
    assert "\n".join(table()) in (ROOT / "docs/kubernetes.md").read_text()
