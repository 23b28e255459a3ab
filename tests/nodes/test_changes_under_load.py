"""What changes while a topic is written to: settings that count at once, and an image that is not there.

A setting that needs new pods goes round in `test_operators_that_die`, where it meets the most.
"""

import pytest
from cluster.api import Json
from shop_kit import UNREACHABLE_PEERS, Shop
from shop_watch import AwayWatch

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("whole"),
    pytest.mark.filterwarnings(UNREACHABLE_PEERS),
]


def test_settings_that_count_at_once_restart_no_broker(shop: Shop) -> None:
    before = shop.made()
    with shop.load() as load, AwayWatch(shop) as watch:
        shop.patch_topic({"spec": {"compaction": {"maxLag": "1h"}, "retention": {"time": "48h"}}})
        shop.patch({"spec": {"storage": {"size": "2Gi"}, "security": {"networkPolicy": False}}})
        shop.cluster.until(lambda: shop.volume_sizes() == {"2Gi"}, "every volume has the new size")
        shop.until_ready()  # by what is said of these generations
        shop.patch({"spec": {"security": {"networkPolicy": True}}})
        shop.until_ready()
        load.until_more()
    assert (load.refused, watch.most_away, shop.made()) == ([], 0, before)


def test_an_image_that_is_not_there_stops_a_roll_at_its_first_pod_until_it_is_put_right(shop: Shop) -> None:
    before, [image] = shop.made(), shop.images()
    with shop.load() as load, AwayWatch(shop) as watch:
        shop.patch({"spec": {"image": f"{image}-that-nobody-built"}})
        shop.cluster.until(lambda: any(map(_waits_for_an_image, shop.pods())), "a pod without an image")
        load.until_more()
        assert len(shop.made() & before) == 2
        shop.patch({"spec": {"image": image}})
        shop.cluster.until(lambda: len(shop.uids()) == 3, "every broker is ready", seconds=300)
        shop.until_in_sync(3)
        load.until_more()
    assert load.refused == []
    assert watch.most_away == 1
    assert len(shop.made() & before) == 2, "those that ran with this image have gone on"


def _waits_for_an_image(pod: Json) -> bool:
    told = pod["status"].get("containerStatuses", [])
    reasons = {each["state"].get("waiting", {}).get("reason") for each in told}
    return bool(reasons & {"ErrImagePull", "ImagePullBackOff"})
