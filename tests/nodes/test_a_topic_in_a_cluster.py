"""What a person does with a topic, and what befalls its brokers, on real nodes: nothing acknowledged is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.bare import BareCluster
from shop_kit import Shop, install

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="session")
def installed(nodes: BareCluster) -> BareCluster:
    install(nodes)
    return nodes


@pytest.fixture(scope="module")
def shop(installed: BareCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One topic for all of these: each leaves it with three replicas in sync."""
    with installed.namespace("shop") as space:
        shop = Shop(installed, space, Path(tmp_path_factory.mktemp("credentials")))
        shop.apply()
        yield shop


@pytest.fixture(autouse=True)
def _whole(shop: Shop) -> Iterator[None]:
    shop.until_ready()
    shop.until_in_sync(3)
    yield
    for node in shop.cluster.nodes:
        node.heal()


def test_an_applied_topic_takes_writes(shop: Shop) -> None:
    with shop.load() as load:
        load.until_more()
    assert load.refused == []


def test_the_death_of_the_masters_pod_loses_nothing(shop: Shop) -> None:
    before = shop.master()
    with shop.load() as load:
        shop.delete_pod(before, seconds=0)
        shop.until_master(other_than=before)
        load.until_more()
        shop.until_in_sync(3)
    print(f"gap {load.gap_seconds:.1f} s")


def test_a_master_whose_node_is_cut_off_is_replaced_and_follows_later(shop: Shop) -> None:
    before = shop.master()
    node = shop.cluster.node(shop.pod(before)["spec"]["nodeName"])
    with shop.load() as load:
        node.cut()
        shop.until_master(other_than=before)
        load.until_more()
        assert before not in shop.in_sync()
        node.heal()
        shop.until_in_sync(3)
    print(f"gap {load.gap_seconds:.1f} s")


def test_a_replica_whose_volume_is_gone_is_rebuilt_from_its_peers(shop: Shop) -> None:
    master = shop.master()
    lost = next(name for name in shop.in_sync() if name != master)
    claims = f"/api/v1/namespaces/{shop.space}/persistentvolumeclaims"
    claim = shop.cluster.api.get(f"{claims}/data-{lost}")
    with shop.load() as load:
        shop.cluster.api.delete(f"{claims}/data-{lost}")
        shop.delete_pod(lost, seconds=0)
        shop.until_in_sync(2)
        load.until_more()
        shop.until_in_sync(3)
    again = shop.cluster.api.get(f"{claims}/data-{lost}")
    assert again["metadata"]["uid"] != claim["metadata"]["uid"]
