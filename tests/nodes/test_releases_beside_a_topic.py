"""The chart's release comes, changes, goes and comes back while a topic is written to: its data does not notice."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.client import WholeCluster
from shop_kit import CHART, SYSTEM, Shop, ensure_installed, helm, image_values

pytestmark = pytest.mark.cluster

WAIT = ("--wait", "--timeout", "300s")


@pytest.fixture
def released(nodes: WholeCluster) -> Iterator[WholeCluster]:
    """A cluster with the chart's release; it is there again at the end, for the tests that follow."""
    ensure_installed(nodes)
    yield nodes
    helm(nodes, "upgrade", "--install", "firn", str(CHART), *image_values(), *WAIT)


@pytest.fixture
def shop(released: WholeCluster, tmp_path: Path) -> Iterator[Shop]:
    with released.namespace("shop") as space:
        shop = Shop(released, space, tmp_path)
        shop.apply(replicas=1, spec={"groups": 2})
        shop.until_ready()
        yield shop


def test_data_is_there_and_writes_go_on_through_upgrade_rollback_uninstall_and_a_new_install(
    shop: Shop,
) -> None:
    cluster = shop.cluster

    def deployed() -> str:
        return cluster.kubectl(
            "get", "deploy", "firn-operator", "-n", SYSTEM, "-o", "jsonpath={.spec.replicas}"
        )

    before = int(
        helm(cluster, "history", "firn", "--max", "1", "-o", "json").partition('"revision":')[2].split(",")[0]
    )
    uid = cluster.kubectl("get", "ct", "quotes", "-n", shop.space, "-o", "jsonpath={.metadata.uid}")
    with shop.load() as load:
        helm(cluster, "upgrade", "firn", str(CHART), *image_values(), "--set", "operator.replicas=1", *WAIT)
        assert deployed() == "1"
        load.until_more()
        helm(cluster, "rollback", "firn", str(before), *WAIT)
        assert deployed() == "2"
        load.until_more()
        helm(cluster, "uninstall", "firn", *WAIT)
        assert "firn-operator" not in cluster.kubectl("get", "deploy", "-n", SYSTEM, "-o", "name")
        load.until_more()
        claims = cluster.kubectl("get", "pvc", "-n", shop.space, "-o", "name").split()
        assert claims == ["persistentvolumeclaim/data-main-0-0", "persistentvolumeclaim/data-main-1-0"]
        helm(cluster, "install", "firn", str(CHART), *image_values(), *WAIT)
        load.until_more()
    assert load.refused == []
    told = helm(cluster, "test", "firn", "--timeout", "300s")
    assert told.count("Succeeded") == 3, told  # its topic, its account, its pod
    assert cluster.kubectl("get", "ct", "quotes", "-n", shop.space, "-o", "jsonpath={.metadata.uid}") == uid
    shop.until_ready()
