"""A cluster with the chart in it, and a topic of three replicas that the tests here break and leave whole."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.bare import BareCluster
from cluster.client import WholeCluster
from shop_kit import Shop, ensure_installed


@pytest.fixture(scope="session")
def installed(nodes: WholeCluster) -> WholeCluster:
    ensure_installed(nodes)
    return nodes


@pytest.fixture(scope="session")
def shop(installed: WholeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One topic for the whole run: `whole` looks that each test left it with three replicas in sync."""
    with installed.namespace("shop") as space:
        shop = Shop(installed, space, Path(tmp_path_factory.mktemp("credentials")))
        shop.apply()
        yield shop


@pytest.fixture
def whole(shop: Shop) -> Iterator[None]:
    shop.until_ready()
    shop.until_in_sync(3)
    shop.cluster.until(lambda: len(shop.uids()) == 3, "three brokers are ready by their kubelets too")
    yield
    if isinstance(shop.cluster, BareCluster):
        for node in shop.cluster.nodes:
            node.heal()
    gc.collect()  # what `UNREACHABLE_PEERS` is for is told here, and not in a test of something else
