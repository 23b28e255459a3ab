"""Names within a cluster: CoreDNS in a pod on every node, asked by the pods of that node.

One on every node, and not a Deployment: a node that is cut off must not take the names of the others with it.
"""

from cluster.api import Json
from cluster.control import SERVICE_DOMAIN

IMAGE = "localhost/coredns:1"
_SPACE = "kube-system"
_LABELS = {"k8s-app": "kube-dns"}
_COREFILE = f""".:53 {{
  errors
  health
  ready
  kubernetes {SERVICE_DOMAIN} in-addr.arpa {{
    pods insecure
    ttl 5
  }}
  cache 5
}}
"""


def manifests(address: str) -> Json:
    """All of it, as a list for ``kubectl apply``; `address` is that of the Service, known to every kubelet."""
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coredns"}
    account = {"kind": "ServiceAccount", "name": "coredns", "namespace": _SPACE}
    container = {
        "name": "coredns",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    template = {"metadata": {"labels": _LABELS}, "spec": pod}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    service = {
        "clusterIP": address,
        "selector": _LABELS,
        "ports": ports,
        "internalTrafficPolicy": "Local",
    }
    rbac = "rbac.authorization.k8s.io/v1"
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            _object("v1", "ServiceAccount", "coredns"),
            _object(rbac, "ClusterRole", "coredns", namespaced=False, rules=rules),
            _object(
                rbac, "ClusterRoleBinding", "coredns", namespaced=False, roleRef=role, subjects=[account]
            ),
            _object("v1", "ConfigMap", "coredns", data={"Corefile": _COREFILE}),
            _object(
                "apps/v1",
                "DaemonSet",
                "coredns",
                spec={"selector": {"matchLabels": _LABELS}, "template": template},
            ),
            _object("v1", "Service", "kube-dns", spec=service),
        ],
    }


def _object(version: str, kind: str, name: str, *, namespaced: bool = True, **fields: object) -> Json:
    metadata = {"name": name} | ({"namespace": _SPACE} if namespaced else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}
