"""Drill 25 on real nodes: SIGKILL to all operators while a cluster is made, rolled by a setting and scaled, under load.

Whenever they die, the next ones come to the same end, never are two brokers stopped at once, and no write is refused. The
setting is one that needs new pods.
"""

import random
from pathlib import Path

import pytest
from cluster.bare import BareCluster
from cluster.client import WholeCluster
from cluster.fixtures import breakable
from shop_kit import TOPIC, UNREACHABLE_PEERS, Shop
from shop_operators import kill_while
from shop_watch import AwayWatch

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.filterwarnings(UNREACHABLE_PEERS)]


@pytest.fixture
def bare(installed: WholeCluster) -> BareCluster:
    return breakable(installed)


def test_operators_killed_at_any_moment_make_roll_by_a_setting_and_scale_a_cluster_that_is_written_to(
    bare: BareCluster, tmp_path: Path
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # of the moments
    chance = random.Random(seed)
    with bare.namespace("dying") as space:
        shop = Shop(bare, space, tmp_path)
        shop.apply()
        kill_while(bare, lambda: _is_ready(shop), "the topic is ready", times=2, chance=chance)
        shop.until_in_sync(3)
        first = shop.made()
        with shop.load() as load, AwayWatch(shop) as watch:
            shop.patch({"spec": {"config": {"openFiles": 640}}})
            rolled = "every broker is a new one"
            kill_while(bare, lambda: shop.are_all_others_than(first), rolled, times=2, chance=chance)
            shop.until_in_sync(3)
            shop.patch({"spec": {"replicas": 2}})
            kill_while(bare, lambda: len(shop.pods()) == 2, "two brokers are left", times=1, chance=chance)
            shop.until_in_sync(2)
            load.until_more()
        assert watch.most_away == 1
        assert load.refused == []
        assert shop.members() == 2
        shop.until_ready()


def _is_ready(shop: Shop) -> bool:
    return shop.condition("compactedtopic", TOPIC) == "True"
