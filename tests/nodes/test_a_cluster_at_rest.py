"""Brokers and operators that nobody asks anything of write nothing but the renewals of their Leases."""

import time

import pytest
from cluster.bare import BareCluster
from cluster.fixtures import breakable
from shop_kit import Shop
from shop_rest import others_than_renewals, writes_since

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("whole")]
REST_SECONDS = 30.0  # `python -m cluster_drill rest` looks for five minutes


@pytest.fixture
def bare(shop: Shop) -> BareCluster:
    return breakable(shop.cluster)


def test_a_cluster_at_rest_renews_its_leases_and_writes_nothing_else(shop: Shop, bare: BareCluster) -> None:
    mark, since = bare.audit.mark(), time.monotonic()
    written: list[str] = []

    def has_rested() -> bool:
        nonlocal mark, since
        if found := others_than_renewals(bare, shop, mark):
            written.extend(found)
            mark, since = bare.audit.mark(), time.monotonic()
        return time.monotonic() - since >= REST_SECONDS

    try:
        bare.until(has_rested, f"{REST_SECONDS:.0f} s without a write", seconds=150)
    finally:
        print("before that:", *written, sep="\n")
    assert {each.name for each in writes_since(bare, shop, mark)} == {shop.group, "firn-operator"}
