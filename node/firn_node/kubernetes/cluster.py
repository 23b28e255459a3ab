"""The parts of a broker in a pod that speak to the Kubernetes API, put together."""

from firn_node.coordinator.kubernetes import KubernetesCoordinator
from firn_node.kubernetes.api import connect
from firn_node.settings import GroupSettings


async def coordinator_of(place: GroupSettings) -> KubernetesCoordinator:
    """The Leases of the cluster's groups, over a connection of their own. *Errors*: Invalid without an API."""
    return KubernetesCoordinator(
        await connect(), place.namespace, place.object_of, lease_ttl_s=place.lease_ttl_ms / 1000
    )
