"""The operators of a cluster that has the chart in it: which of them leads, and how all of them die at once."""

import random
import time
from collections.abc import Callable

from cluster.api import ApiError
from cluster.bare import BareCluster
from cluster.client import WholeCluster
from shop_kit import SYSTEM

_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/firn-operator"
_PODS = f"/api/v1/namespaces/{SYSTEM}/pods"
_OPERATORS = "app.kubernetes.io/component=operator"


def leader(cluster: WholeCluster) -> str:
    """The process that leads, or led when it died; empty: it gave the Lease back."""
    return str(cluster.api.get(_LEASE)["spec"].get("holderIdentity", ""))


def until_led(cluster: WholeCluster, *, not_by: str) -> str:
    """Another process leads than the one that died."""
    found: str = cluster.until(
        lambda: (name := leader(cluster)) and name != not_by and name, "the next operator leads"
    )
    return found


def kill_operators(cluster: BareCluster) -> str:
    """SIGKILL to every process of every operator; who led is returned.

    Their pods are made anew at once: in the same pod a kubelet waits longer each time.
    """
    led = leader(cluster)
    for pod in cluster.api.get(_PODS, labelSelector=_OPERATORS)["items"]:
        meta = pod["metadata"]
        if node := pod["spec"].get("nodeName"):
            cluster.node(node).kill_pod(meta["uid"])
        try:
            cluster.api.delete(f"{_PODS}/{meta['name']}", {"gracePeriodSeconds": 0})
        except ApiError as error:  # one that was on its way out is gone
            if error.reason != "NotFound":
                raise
    return led


def kill_while(
    cluster: BareCluster, is_done: Callable[[], bool], what: str, *, times: int, chance: random.Random
) -> None:
    """Kill the operators so many times on the way to `what`, each time within seconds after one of them led.

    Returns when `is_done`; sooner than the last kill, when that is so before.
    """
    for _ in range(times):
        end = time.monotonic() + chance.uniform(0, 6)
        while time.monotonic() < end and not is_done():
            time.sleep(0.1)
        if is_done():
            return
        until_led(cluster, not_by=kill_operators(cluster))
    cluster.until(is_done, what, seconds=300)
