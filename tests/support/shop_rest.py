"""What a shop that nobody asks anything of writes to the API server: renewals of Leases, and nothing else."""

from collections.abc import Iterator

from cluster.audit import Request
from cluster.bare import BareCluster
from shop_kit import SYSTEM, Shop

LEASES = "leases"


def writes_since(cluster: BareCluster, shop: Shop, mark: int) -> Iterator[Request]:
    """Of the shop's brokers and of the operators."""
    accounts = tuple(f"system:serviceaccount:{space}:" for space in (shop.space, SYSTEM))
    for request in cluster.audit.since(mark):
        if request.is_write and request.user.startswith(accounts):
            yield request


def others_than_renewals(cluster: BareCluster, shop: Shop, mark: int) -> list[str]:
    return [
        f"{each.user} {each.verb} {each.resource} {each.name}"
        for each in writes_since(cluster, shop, mark)
        if each.resource != LEASES
    ]
