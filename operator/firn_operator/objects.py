"""What a cluster is made of, rendered from its spec: pure functions, one per kind, tabled in ``docs/kubernetes.md``.

Every object carries the cluster's labels, an owner reference to the BrokerCluster (so that deleting it takes them
along) and the hash of itself. Three have no owner: the Lease with the group record, which lives as long as the volumes
that it describes, the claims, and the ClusterRoleBinding, which a namespaced object cannot own.
"""

import json
from typing import Any

from firn_operator.kube import (
    BUDGET,
    CLUSTER_ROLE_BINDING,
    CONFIG_MAP,
    GROUP,
    LEASE,
    NETWORK_POLICY,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
    Obj,
)  # fmt: skip
from firn_operator.names import (
    API_VERSION,
    BROKER_CLUSTER_ROLE,
    CLIENT_PORT,
    CONFIG_HASH,
    HEALTH_PORT,
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    LABEL_GROUP,
    LABEL_NAME,
    RESTART,
    TOKEN_AUDIENCE,
    USER,
    GroupName,
    bootstrap_name,
    ca_name,
    cluster_labels,
    config_name,
    group_labels,
    group_name,
    pod_labels,
    reviewer_name,
    tls_name,
)  # fmt: skip
from firn_operator.same import digest, sealed
from firn_operator.spec import ClusterSpec

GRACE_S = 60  # a broker steps aside and closes in seconds; a large index may take longer to flush
STARTUP_S = 300  # until the process has an event loop; recovery is not part of it
CONFIG_FILE = "broker.yaml"
CONFIG_FOLDER, TLS_FOLDER, DATA_FOLDER = "/etc/firn/config", "/etc/firn/tls", "/data"


def _object(
    kind: Kind, cluster: ClusterSpec, name: str, labels: dict[str, str], *, owned: bool = True, **fields: Any
) -> Obj:
    meta: Obj = {"name": name, "labels": labels}
    if kind.is_namespaced:
        meta["namespace"] = cluster.namespace
    if owned:
        meta["ownerReferences"] = [owner_of(cluster)]
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, **fields}


def owner_of(cluster: ClusterSpec) -> Obj:
    """The owner without ``blockOwnerDeletion``: an API server that guards it (OwnerReferencesPermissionEnforcement, as
    OpenShift's does) refuses all such objects for up to 30 s after the definitions are installed. The cluster's finalizer
    holds up its end where that matters.
    """
    return {
        "apiVersion": API_VERSION, "kind": "BrokerCluster", "name": cluster.name, "uid": cluster.id.uid, "controller": True,
    }  # fmt: skip


# Of the cluster.


def cluster_objects(cluster: ClusterSpec, trust: str | None) -> list[Obj]:
    """All but Secrets; ``trust``: the PEM of the CAs that clients are to trust, None while there is none."""
    made = [bootstrap_service(cluster), config_map(cluster)]
    if not cluster.is_insecure:
        made.append(reviewers(cluster))
        if trust:
            made.append(trust_map(cluster, trust))
    if cluster.has_network_policy:
        made.append(network_policy(cluster))
    return [sealed(each) for each in made]


def bootstrap_service(cluster: ClusterSpec) -> Obj:
    selector = {LABEL_NAME: "firn", LABEL_CLUSTER: cluster.name, LABEL_COMPONENT: "broker"}
    ports = [{"name": "firn", "port": CLIENT_PORT, "targetPort": "firn", "protocol": "TCP"}]
    return _object(
        SERVICE, cluster, bootstrap_name(cluster.name), cluster_labels(cluster.name),
        spec={"type": "ClusterIP", "selector": selector, "ports": ports},
    )  # fmt: skip


def config_text(cluster: ClusterSpec) -> str:
    """The brokers' ``--config`` file: JSON, which is YAML."""
    return json.dumps(dict(cluster.config), indent=1, sort_keys=True) + "\n"


def config_map(cluster: ClusterSpec) -> Obj:
    return _object(
        CONFIG_MAP, cluster, config_name(cluster.name), cluster_labels(cluster.name),
        data={CONFIG_FILE: config_text(cluster)},
    )  # fmt: skip


def trust_map(cluster: ClusterSpec, trust: str) -> Obj:
    return _object(
        CONFIG_MAP, cluster, ca_name(cluster.name), cluster_labels(cluster.name), data={"ca.crt": trust}
    )


def reviewers(cluster: ClusterSpec) -> Obj:
    """Brokers may ask whose token they were shown: a right of the whole Kubernetes cluster."""
    subjects = [
        {"kind": "ServiceAccount", "name": group_name(cluster.name, group), "namespace": cluster.namespace}
        for group in range(cluster.groups)
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": BROKER_CLUSTER_ROLE}
    return _object(
        CLUSTER_ROLE_BINDING, cluster, reviewer_name(cluster.namespace, cluster.name), cluster_labels(cluster.name),
        owned=False, subjects=subjects, roleRef=role,
    )  # fmt: skip


def network_policy(cluster: ClusterSpec) -> Obj:
    """Who may not talk to brokers at all: everybody, but on the two ports of theirs.

    Which client may do what is decided by the brokers, who see more of it than an address.
    """
    ports = [{"port": port, "protocol": "TCP"} for port in (CLIENT_PORT, HEALTH_PORT)]
    return _object(
        NETWORK_POLICY, cluster, cluster.name, cluster_labels(cluster.name),
        spec={
            "podSelector": {"matchLabels": {LABEL_CLUSTER: cluster.name, LABEL_COMPONENT: "broker"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": ports}],
        },
    )  # fmt: skip


# Of a group.


def empty_lease(cluster: ClusterSpec, group: int) -> Obj:
    """The place of the group record; made once, never written again by the operator, and owned by nobody."""
    name = group_name(cluster.name, group)
    return _object(LEASE, cluster, name, group_labels(cluster.name, group), owned=False, spec={})


def broker_group(cluster: ClusterSpec, group: int) -> Obj:
    return sealed(_object(
        GROUP, cluster, group_name(cluster.name, group), group_labels(cluster.name, group),
        spec={
            "clusterRef": {"name": cluster.name}, "group": group, "groups": cluster.groups,
            "replicas": cluster.replicas,
        },
    ))  # fmt: skip


def group_objects(cluster: ClusterSpec, group: int, *, image: str, pods: int) -> list[Obj]:
    """Everything of a group but its BrokerGroup and its Lease; ``pods``: how many its StatefulSet is to run."""
    return [
        sealed(each)
        for each in (
            service_account(cluster, group), role(cluster, group), role_binding(cluster, group),
            headless_service(cluster, group), budget(cluster, group), stateful_set(cluster, group, image=image, pods=pods),
        )
    ]  # fmt: skip


def service_account(cluster: ClusterSpec, group: int) -> Obj:
    name = group_name(cluster.name, group)
    return _object(
        SERVICE_ACCOUNT, cluster, name, group_labels(cluster.name, group), automountServiceAccountToken=False
    )


def role(cluster: ClusterSpec, group: int) -> Obj:
    own = group_name(cluster.name, group)
    others = [group_name(cluster.name, each) for each in range(cluster.groups) if each != group]
    leases, firn = ["coordination.k8s.io"], ["firn.dev"]
    rules: list[Obj] = [
        {"apiGroups": leases, "resources": ["leases"], "resourceNames": [own], "verbs": ["get", "watch", "patch"]},
        {"apiGroups": firn, "resources": ["brokergroups"], "resourceNames": [own], "verbs": ["list", "watch"]},
        {"apiGroups": firn, "resources": ["brokergroups/status"], "resourceNames": [own], "verbs": ["patch"]},
        {"apiGroups": firn, "resources": ["compactedtopics"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": firn, "resources": ["compactedtopics/status"], "verbs": ["patch"]},
    ]  # fmt: skip
    if others:
        rules.append(
            {"apiGroups": leases, "resources": ["leases"], "resourceNames": others, "verbs": ["get", "watch"]}
        )
    return _object(ROLE, cluster, own, group_labels(cluster.name, group), rules=rules)


def role_binding(cluster: ClusterSpec, group: int) -> Obj:
    name = group_name(cluster.name, group)
    return _object(
        ROLE_BINDING, cluster, name, group_labels(cluster.name, group),
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": cluster.namespace}],
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
    )  # fmt: skip


def headless_service(cluster: ClusterSpec, group: int) -> Obj:
    """Names of the pods; also of those that are not ready, because replicas must find one another before they are."""
    return _object(
        SERVICE, cluster, group_name(cluster.name, group), group_labels(cluster.name, group),
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(cluster, group),
            "ports": [
                {"name": "firn", "port": CLIENT_PORT, "targetPort": "firn", "protocol": "TCP"},
                {"name": "health", "port": HEALTH_PORT, "targetPort": "health", "protocol": "TCP"},
            ],
        },
    )  # fmt: skip


def budget(cluster: ClusterSpec, group: int) -> Obj:
    """At most one of a group is away by a wish; a pod is ready when it is in sync, so that is what is counted."""
    return _object(
        BUDGET, cluster, group_name(cluster.name, group), group_labels(cluster.name, group),
        spec={"maxUnavailable": 1, "selector": {"matchLabels": _selector(cluster, group)}},
    )  # fmt: skip


def _selector(cluster: ClusterSpec, group: int) -> dict[str, str]:
    return {LABEL_CLUSTER: cluster.name, LABEL_GROUP: str(group), LABEL_COMPONENT: "broker"}


def stateful_set(cluster: ClusterSpec, group: int, *, image: str, pods: int) -> Obj:
    name = group_name(cluster.name, group)
    claim: Obj = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": cluster.storage_size}},
    }
    if cluster.storage_class is not None:
        claim["storageClassName"] = cluster.storage_class
    labels = pod_labels(cluster.name, group)
    return _object(
        STATEFUL_SET, cluster, name, group_labels(cluster.name, group),
        spec={
            "serviceName": name,
            "replicas": pods,
            "podManagementPolicy": "Parallel",  # a rebuilding replica holds up nobody
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 5,
            # Always: pods also go in hibernation. The operator itself deletes claims, with the cluster, by its policy.
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
            "selector": {"matchLabels": _selector(cluster, group)},
            "template": {
                "metadata": {"labels": labels, "annotations": _pod_annotations(cluster)},
                "spec": _pod(cluster, group, name, image),
            },
            "volumeClaimTemplates": [
                {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "data", "labels": group_labels(cluster.name, group)}, "spec": claim,
                }
            ],
        },
    )  # fmt: skip


def _pod_annotations(cluster: ClusterSpec) -> dict[str, str]:
    annotations = {CONFIG_HASH: digest(config_text(cluster))}
    if cluster.restart:
        annotations[RESTART] = cluster.restart
    return annotations


def _pod(cluster: ClusterSpec, group: int, name: GroupName, image: str) -> Obj:
    scheduling = cluster.scheduling
    volumes: list[Obj] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "config", "configMap": {"name": config_name(cluster.name)}},
    ]
    if not cluster.is_insecure:
        volumes.append({"name": "tls", "secret": {"secretName": tls_name(name), "defaultMode": 0o440}})
    pod: Obj = {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": scheduling.get("topologyKey", "kubernetes.io/hostname"),
                "whenUnsatisfiable":
                    "DoNotSchedule" if scheduling.get("spread") == "Required" else "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(cluster, group)},
            }
        ],
        "containers": [_container(cluster, group, name, image)],
        "volumes": volumes,
    }  # fmt: skip
    for field in ("nodeSelector", "tolerations", "priorityClassName"):
        if scheduling.get(field):
            pod[field] = scheduling[field]
    if cluster.pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in cluster.pull_secrets]
    return pod


def _container(cluster: ClusterSpec, group: int, name: GroupName, image: str) -> Obj:
    mounts = [
        {"name": "data", "mountPath": DATA_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
    ]
    if not cluster.is_insecure:
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    live = {"httpGet": {"path": "/livez", "port": "health"}}
    container: Obj = {
        "name": "broker",
        "image": image,
        "imagePullPolicy": cluster.pull_policy,
        "args": ["up", "--insecure"] if cluster.is_insecure else ["up"],
        "env": _environment(cluster, group, name),
        "ports": [
            {"name": "firn", "containerPort": CLIENT_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
        ],
        "startupProbe": {**live, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": STARTUP_S // 2},
        "livenessProbe": {**live, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 2,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }  # fmt: skip
    if cluster.resources:
        container["resources"] = dict(cluster.resources)
    return container


def _environment(cluster: ClusterSpec, group: int, name: GroupName) -> list[Obj]:
    def field(variable: str, path: str) -> Obj:
        return {"name": variable, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}

    values = {
        "FIRN_CONFIG": f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        "FIRN_DATA": DATA_FOLDER,
        "FIRN_LISTEN": f"0.0.0.0:{CLIENT_PORT}",
        "FIRN_HEALTH_LISTEN": f"0.0.0.0:{HEALTH_PORT}",
        "FIRN_ADVERTISE": f"$(POD_NAME).{name}.{cluster.namespace}.svc:{CLIENT_PORT}",
        "FIRN_NODE": "$(POD_NAME)",
        "FIRN_COORDINATOR": "kubernetes",
        "FIRN_CLUSTER": cluster.name,
        "FIRN_GROUP": str(group),
        "FIRN_GROUPS": str(cluster.groups),
    }
    if not cluster.is_insecure:
        values |= {
            "FIRN_SERVER_TLS_CERT": f"{TLS_FOLDER}/$(POD_NAME).crt",
            "FIRN_SERVER_TLS_KEY": f"{TLS_FOLDER}/$(POD_NAME).key",
            "FIRN_SERVER_TLS_CA": f"{TLS_FOLDER}/ca.crt",
            "FIRN_TOKEN_REVIEW": TOKEN_AUDIENCE,
        }
    # Variables that others are made of come first: $(POD_NAME) is replaced by what stands before.
    fields = [
        field("POD_NAME", "metadata.name"), field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_IP", "status.podIP"), field("NODE_NAME", "spec.nodeName"),
    ]  # fmt: skip
    return fields + [{"name": variable, "value": value} for variable, value in values.items()]
