"""Names, labels, annotations and ports that operator and brokers share: the tables of ``docs/kubernetes.md``.

Everything of a cluster is named after it, everything of a group after the group (``CLUSTER-GROUP``), so that a name
says what it belongs to, and no two clusters of a namespace want the same one.
"""

import re
from typing import NewType

API_GROUP = "firn.dev"
API_VERSION = "firn.dev/v1alpha1"
MANAGER = "firn-operator"  # field manager of everything that the operator applies
BROKER_MANAGER = "firn-broker"  # field manager of what the brokers write into status

TOPIC_FINALIZER = "firn.dev/topic"
CLUSTER_FINALIZER = "firn.dev/cluster"
COMPACTION_FINALIZER = "firn.dev/compaction"

RECORD = "firn.dev/group-record"  # annotation of a group's Lease
APPLIED = "firn.dev/applied"  # hash of what the operator applied last
CONFIG_HASH = "firn.dev/config-hash"
PAUSED, HIBERNATE, RESTART = (f"firn.dev/{verb}" for verb in ("paused", "hibernate", "restart"))
STAGE = "firn.dev/ca-stage"  # of the change of a CA, and since when

LABEL_NAME, LABEL_MANAGED_BY = "app.kubernetes.io/name", "app.kubernetes.io/managed-by"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_CLUSTER, LABEL_GROUP = "firn.dev/cluster", "firn.dev/group"
LABEL_RUN = "firn.dev/run"  # of what belongs to a run of Spark
LABEL_SCHEDULED = "firn.dev/scheduled"  # of forced compactions that a topic's schedule asked for
SELECTOR = f"{LABEL_MANAGED_BY}={MANAGER}"  # of everything that the operator owns

CLIENT_PORT, HEALTH_PORT = 7700, 7701
USER = 10001
TOKEN_AUDIENCE = "firn.dev"
BROKER_CLUSTER_ROLE = "firn-broker"  # the chart's: brokers may ask for TokenReviews
SPARK_CLUSTER_ROLE = "firn-spark"  # the chart's: a driver may start its executors
CLUSTER_NAME_MAX = 45
_CLUSTER_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

GroupName = NewType("GroupName", str)


def is_cluster_name(name: str) -> bool:
    return len(name) <= CLUSTER_NAME_MAX and _CLUSTER_NAME.fullmatch(name) is not None


def group_name(cluster: str, group: int) -> GroupName:
    """Of a group's BrokerGroup, StatefulSet, Service, budget, ServiceAccount, Role, RoleBinding and Lease."""
    return GroupName(f"{cluster}-{group}")


def pod_name(group: GroupName, ordinal: int) -> str:
    return f"{group}-{ordinal}"


def claim_name(pod: str) -> str:
    return f"data-{pod}"


def ordinal_of(pod: str) -> int:
    """The number behind the last dash; -1 for a name that has none."""
    digits = pod.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else -1


def bootstrap_name(cluster: str) -> str:
    return f"{cluster}-bootstrap"


def config_name(cluster: str) -> str:
    return f"{cluster}-config"


def ca_name(cluster: str) -> str:
    """Of the Secret with the CA's key, and of the ConfigMap with what clients trust."""
    return f"{cluster}-ca"


def admin_name(cluster: str) -> str:
    return f"{cluster}-admin"


def tls_name(group: GroupName) -> str:
    return f"{group}-tls"


def reviewer_name(namespace: str, cluster: str) -> str:
    """Of the ClusterRoleBinding that lets the cluster's brokers ask for TokenReviews; no name has a colon in it."""
    return f"firn-broker:{namespace}:{cluster}"


def host_of(pod: str, group: GroupName, namespace: str) -> str:
    return f"{pod}.{group}.{namespace}.svc"


def cluster_labels(cluster: str) -> dict[str, str]:
    return {LABEL_NAME: "firn", LABEL_MANAGED_BY: MANAGER, LABEL_CLUSTER: cluster}


def group_labels(cluster: str, group: int) -> dict[str, str]:
    return {**cluster_labels(cluster), LABEL_GROUP: str(group)}


def pod_labels(cluster: str, group: int) -> dict[str, str]:
    return {**group_labels(cluster, group), LABEL_COMPONENT: "broker"}
