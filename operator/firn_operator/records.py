"""Is a group's record where it belongs? Asked when its replicas are not all ready, and of a group that is yet to be made.

Brokers go on without their record until the lease ends, and then wait for a person: nobody may elect by a record that is
missing, damaged or older than one that counted. The operator looks by ``GET``: it does not watch Leases, which change
several times a second.
"""

from collections.abc import Mapping
from typing import Any

from firn_operator.guard import record_of
from firn_operator.kube import GROUP, LEASE, POD, Kube, Obj, name_of
from firn_operator.names import LABEL_COMPONENT, group_name
from firn_operator.observe import Cache, cluster_of, group_of, pod_state
from firn_operator.spec import ClusterSpec


async def record_troubles(kube: Kube, cache: Cache, cluster: ClusterSpec) -> dict[str, str]:
    """By group name what is wrong with the record of a group that has one, in a sentence; groups at rest are not asked
    about.
    """
    found: dict[str, str] = {}
    for number in range(cluster.groups):
        name = group_name(cluster.name, number)
        group = cache.get(GROUP, cluster.namespace, name)
        if group is None or _is_whole(cache, cluster, number):
            continue
        trouble = trouble_of(await kube.get(LEASE, cluster.namespace, name), group)
        if trouble:
            found[name] = trouble
    return found


def _is_whole(cache: Cache, cluster: ClusterSpec, number: int) -> bool:
    if cluster.is_hibernating:
        return True
    ready = 0
    for pod in cache.all(POD, cluster.namespace):
        mine = cluster_of(pod) == cluster.name and group_of(pod) == number
        if mine and LABEL_COMPONENT in pod["metadata"]["labels"]:
            ready += pod_state(pod).is_ready
    return ready >= cluster.replicas


def trouble_of(lease: Obj | None, group: Obj) -> str:
    """What is wrong with the record of a group; empty: nothing that is known."""
    name = name_of(group)
    status: Mapping[str, Any] = group.get("status") or {}
    told = int(status.get("version") or 0)
    if lease is None:
        return f"the Lease {name} with the record of its group is gone"
    if cluster_of(lease) != cluster_of(group):
        return f"the Lease {name} is not the one that was made for its group"
    record = record_of(lease)
    if record is None:
        return f"the Lease {name} has lost the record of its group" if told else ""
    if not record.is_known:
        return f"the record in the Lease {name} cannot be read"
    if record.version < told:
        return f"the record in the Lease {name} is older (version {record.version}) than one that counted ({told})"
    return ""
