"""Which BrokerCluster is meant, and where its brokers are. Pure functions of the objects that kubectl shows.

The names and labels are those of ``docs/kubernetes.md``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from firn.cli.running import Failure

Object = Mapping[str, Any]

CLUSTER_LABEL = "firn.dev/cluster"
GROUP_LABEL = "firn.dev/group"
PORT = 7700


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [item for item in objects if item.get("kind") == kind]


def chosen_cluster(clusters: Iterable[Object], wanted: str | None, namespace: str | None) -> Object:
    """The cluster of that name, or the only one.

    Errors: Failure, which names those that there are.
    """
    found = {item["metadata"]["name"]: item for item in clusters}
    where = f"namespace {namespace}" if namespace else "the namespace of this context"
    if not found:
        raise Failure(f"there is no BrokerCluster in {where}; give another one with --namespace")
    if wanted is not None:
        if wanted not in found:
            raise Failure(
                f"there is no BrokerCluster {wanted} in {where}; there are: {', '.join(sorted(found))}"
            )
        return found[wanted]
    if len(found) > 1:
        raise Failure(
            f"there are several BrokerClusters in {where}: {', '.join(sorted(found))}; choose with --cluster"
        )
    return next(iter(found.values()))


def belongs_to(item: Object, cluster: Object) -> bool:
    """Whether a BrokerGroup, pod or claim is this cluster's, by its label or its reference."""
    meta, name = item["metadata"], cluster["metadata"]["name"]
    reference = (item.get("spec") or {}).get("clusterRef") or {}
    return bool(name in ((meta.get("labels") or {}).get(CLUSTER_LABEL), reference.get("name")))


def is_topic_of(topic: Object, cluster: Object) -> bool:
    """A topic without a reference has a cluster of its own, of its own name."""
    reference = topic["spec"].get("clusterRef") or {}
    return bool(reference.get("name", topic["metadata"]["name"]) == cluster["metadata"]["name"])


def broker_pods(pods: Iterable[Object], cluster: Object) -> list[Object]:
    """The cluster's broker pods, by group and ordinal."""
    own = [pod for pod in pods if belongs_to(pod, cluster) and _component(pod) == "broker"]
    return sorted(own, key=lambda pod: _place(pod["metadata"]["name"]))


def broker_addresses(cluster: Object, groups: Iterable[Object], pods: Iterable[Object]) -> list[str]:
    """Where the running brokers are, the masters first.

    Errors: Failure when none runs.
    """
    masters = {(group.get("status") or {}).get("currentMaster") for group in groups}
    running = [
        pod["metadata"]
        for pod in broker_pods(pods, cluster)
        if (pod.get("status") or {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    if not running:
        meta = cluster["metadata"]
        why = "it hibernates: `firn wake` starts it" if is_set(cluster, "hibernate") else "see `firn status`"
        raise Failure(f"no broker of cluster {meta['name']} in namespace {meta['namespace']} runs; {why}")
    running.sort(key=lambda meta: meta["name"] not in masters)
    return [f"{meta['name']}.{_headless(meta['name'])}.{meta['namespace']}.svc:{PORT}" for meta in running]


def is_set(item: Object, annotation: str) -> bool:
    """Whether ``firn.dev/ANNOTATION`` is "true"."""
    return (item["metadata"].get("annotations") or {}).get(f"firn.dev/{annotation}") == "true"


def is_insecure(cluster: Object) -> bool:
    return bool(((cluster.get("spec") or {}).get("security") or {}).get("insecure"))


def pod_of(address: str) -> str:
    """The pod that an address names: its first label."""
    return address.partition(".")[0]


def group_of(pod: str) -> str:
    """The name of the BrokerGroup, the StatefulSet and the headless Service of a pod."""
    return pod.rpartition("-")[0]


_headless = group_of


def _component(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get("app.kubernetes.io/component", ""))


def _place(pod: str) -> tuple[str, int, int]:
    """Cluster, group and ordinal that a pod's name says; names of others sort behind."""
    name, group, ordinal = ("", *pod.rsplit("-", 2))[-3:] if pod.count("-") >= 2 else (pod, "", "")
    return name, int(group) if group.isdigit() else 1 << 30, int(ordinal) if ordinal.isdigit() else 1 << 30
