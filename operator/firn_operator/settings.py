"""When a change of a resource counts: one row a field, for documentation, tests and the definitions.

======== =====================================================================================
live     at once, without a restart
restart  after a roll by the operator, one broker at a time: the field is part of the pods
immutable refused by the API server, in a sentence that says what to do instead
======== =====================================================================================

``.*`` stands for all fields below. Tests hold the rows to what is there: every field of a spec has one, those that are
``restart`` change the rendered pods and no others do, those that are ``immutable`` have a rule in the definition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Apply = Literal["live", "restart", "immutable"]


@dataclass(frozen=True, slots=True)
class Setting:
    kind: str
    field: str
    default: str
    apply: Apply
    note: str = ""


_TOPIC, _CLUSTER = "CompactedTopic", "BrokerCluster"

SETTINGS = (
    Setting(_TOPIC, "partitions", "1", "immutable", "keys would move"),
    Setting(_TOPIC, "clusterRef", "a cluster of its own", "immutable", "the records would stay behind"),
    Setting(_TOPIC, "brokers.*", "1 group of 3 replicas", "live", "as the fields of that cluster"),
    Setting(_TOPIC, "compaction.*", "[as everywhere](operating.md#topics)", "live"),
    Setting(_TOPIC, "retention.*", "[as everywhere](operating.md#topics)", "live"),
    Setting(_TOPIC, "durability.*", "[as everywhere](operating.md#topics)", "live"),
    Setting(_TOPIC, "forceCompaction.*", "no schedule; `engine: auto`", "live", "runs that are made from then on"),
    Setting(_TOPIC, "access", "the topic's own namespace may read and write", "live"),
    Setting(_TOPIC, "deletionPolicy", "`Delete`", "live"),
    Setting(_CLUSTER, "groups", "1", "restart", "so that all groups know of the new one; upwards alone"),
    Setting(_CLUSTER, "replicas", "3", "live", "a new one is rebuilt, one that goes leaves the record first"),
    Setting(_CLUSTER, "image", "the operator's", "restart"),
    Setting(_CLUSTER, "imagePullPolicy", "`IfNotPresent`", "restart"),
    Setting(_CLUSTER, "imagePullSecrets", "none", "restart"),
    Setting(_CLUSTER, "resources.*", "250m CPU, 1Gi", "restart"),
    Setting(_CLUSTER, "config.index", "`rocksdb`", "immutable", "migrated offline"),
    Setting(_CLUSTER, "config.*", "[as everywhere](operating.md#settings)", "restart"),
    Setting(_CLUSTER, "storage.size", "20Gi", "live", "upwards alone"),
    Setting(_CLUSTER, "storage.className", "the default class", "immutable", "volumes cannot move"),
    Setting(_CLUSTER, "storage.deletionPolicy", "`Retain`", "live", "what becomes of volumes when the cluster is deleted"),
    Setting(_CLUSTER, "security.insecure", "false", "immutable", "replicas with and without TLS do not reach one another"),
    Setting(_CLUSTER, "security.networkPolicy", "true", "live"),
    Setting(_CLUSTER, "scheduling.*", "spread over nodes, where there are enough", "restart"),
)  # fmt: skip


def setting_of(kind: str, field: str) -> Setting | None:
    """The row of a field, the one that says most of it."""
    found = [each for each in SETTINGS if each.kind == kind and _covers(each.field, field)]
    return max(found, key=lambda each: len(each.field), default=None)


def _covers(pattern: str, field: str) -> bool:
    whole = pattern.removesuffix(".*")
    return field == whole or field.startswith(f"{whole}.")


def table() -> Iterator[str]:
    """The rows of the documentation's table."""
    yield "| resource | field | default | a change counts |"
    yield "|---|---|---|---|"
    for each in SETTINGS:
        how = f"{each.apply}: {each.note}" if each.note else each.apply
        yield f"| {each.kind} | `{each.field}` | {each.default} | {how} |"
