"""The chart's release comes, changes, goes and comes back while a topic is written to: its data does not notice.

The next release has the images of this tree by other names, so that all that follows from a new image happens: for
clusters that name none, the brokers roll. Brokers of another tree beside these are `firn drill run upgrade`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import images
from cluster.client import WholeCluster
from cluster.fixtures import breakable
from shop_kit import CHART, SYSTEM, UNREACHABLE_PEERS, Shop, ensure_installed, helm, image_values
from shop_watch import AwayWatch

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings(UNREACHABLE_PEERS)]

WAIT = ("--wait", "--timeout", "300s")
NEXT = "-next"  # what the names of the next release's images end in


@pytest.fixture
def released(nodes: WholeCluster) -> Iterator[WholeCluster]:
    """A cluster with the chart's release; it is there again at the end, for the tests that follow."""
    ensure_installed(nodes)
    for node in breakable(nodes).nodes:
        for image in (images.NODE, images.OPERATOR):
            node.tag(image.reference(), image.reference() + NEXT)
    yield nodes
    helm(nodes, "upgrade", "--install", "firn", str(CHART), *image_values(), *WAIT)


@pytest.fixture
def shop(released: WholeCluster, tmp_path: Path) -> Iterator[Shop]:
    with released.namespace("shop") as space:
        shop = Shop(released, space, tmp_path)
        shop.apply(replicas=2)
        shop.until_ready()
        shop.until_in_sync(2)
        yield shop


def until_all_run(shop: Shop, image: str) -> None:
    def do() -> bool:
        return len(shop.uids()) == 2 and shop.images() == {image}

    shop.cluster.until(do, f"both brokers run {image}", seconds=300)
    shop.until_in_sync(2)


def test_brokers_roll_one_by_one_with_upgrade_and_rollback_and_run_on_through_uninstall_and_a_new_install(
    shop: Shop,
) -> None:
    cluster = shop.cluster

    def deployed() -> str:
        image = "jsonpath={.spec.template.spec.containers[0].image}"
        return cluster.kubectl("get", "deploy", "firn-operator", "-n", SYSTEM, "-o", image)

    before = int(
        helm(cluster, "history", "firn", "--max", "1", "-o", "json").partition('"revision":')[2].split(",")[0]
    )
    uid = cluster.kubectl("get", "ct", "quotes", "-n", shop.space, "-o", "jsonpath={.metadata.uid}")
    with shop.load() as load, AwayWatch(shop) as watch:
        until_all_run(shop, images.NODE.reference())
        helm(cluster, "upgrade", "firn", str(CHART), *image_values(suffix=NEXT), *WAIT)
        assert deployed() == images.OPERATOR.reference() + NEXT
        until_all_run(shop, images.NODE.reference() + NEXT)
        load.until_more()
        helm(cluster, "rollback", "firn", str(before), *WAIT)
        assert deployed() == images.OPERATOR.reference()
        until_all_run(shop, images.NODE.reference())
        load.until_more()
        brokers = shop.made()
        helm(cluster, "uninstall", "firn", *WAIT)
        assert "firn-operator" not in cluster.kubectl("get", "deploy", "-n", SYSTEM, "-o", "name")
        load.until_more()
        claims = cluster.kubectl("get", "pvc", "-n", shop.space, "-o", "name").split()
        assert claims == ["persistentvolumeclaim/data-main-0-0", "persistentvolumeclaim/data-main-0-1"]
        helm(cluster, "install", "firn", str(CHART), *image_values(), *WAIT)
        load.until_more()
    assert load.refused == []
    assert watch.most_away == 1
    pair = replace(shop, name="pair")
    pair.apply_brokers(groups=2, replicas=1)
    told = helm(cluster, "test", "firn", "--timeout", "300s")
    assert told.count("Succeeded") == 3, told  # its topic, its account, its pod
    assert cluster.kubectl("get", "ct", "quotes", "-n", shop.space, "-o", "jsonpath={.metadata.uid}") == uid
    shop.until_ready()
    assert shop.made() == brokers, "a new release of the same stopped them"
    cluster.until(lambda: len(pair.uids()) == 2, "the new operator has made two groups")
