"""``make drill-cluster``: a master lost again and again on a real Kubernetes, under load. Exit code 1 beyond a bound.

Each round of `kill` and `cut` loses the master of a group of three, waits for the next one and for three replicas in
sync, and says how long nobody's write was acknowledged. At the end every acknowledged record has to be there.

======  ================================================================  ===============================
way     what happens                                                      passes
======  ================================================================  ===============================
kill    SIGKILL to the processes of the pod, then the pod is deleted      the 99th percentile of the gaps
                                                                          is below 5 s
cut     the link of the pod's node is down until there is a new master,   a new master within 15 s, all
        and for ten seconds more                                          in sync 180 s after the link is up
rest    nothing, for five minutes, nobody writes                          nothing is written to the API server
                                                                          but renewals of Leases
======  ================================================================  ===============================

`leaseTtl` is 3 s. Where a gap comes from is told by moments of the round, in seconds after the blow: when the Lease
was last renewed and when the next master was elected, by the Lease's own times, and when a write was acknowledged.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cluster.bare import BareCluster
from cluster.errors import CannotRun, DidNotBuild, DidNotStart
from shop_kit import Load, Shop, install
from shop_rest import LEASES, others_than_renewals, writes_since
from shop_watch import LeaseWatch, wall_seconds

GAP_P99_SECONDS = 5.0
MASTER_SECONDS = 15.0
IN_SYNC_SECONDS = 180.0
SETTLE_SECONDS = 30.0  # until what was made is told
CUT_SECONDS = 10.0  # beyond the next master: time enough to answer what it must not


@dataclass(frozen=True, slots=True)
class Round:
    """Moments in seconds after the blow."""

    lost: str
    master: str
    renewed: float
    elected: float
    acknowledged: float
    gap: float
    in_sync: float  # after the blow, or after the link was up again

    def line(self, number: int) -> str:
        return (
            f"{number:3}  {self.lost} -> {self.master}  renewed {self.renewed:+5.2f}  elected {self.elected:5.2f}"
            f"  acknowledged {self.acknowledged:5.2f}  gap {self.gap:5.2f}  in sync {self.in_sync:6.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster_drill", description=__doc__)
    parser.add_argument("way", choices=["kill", "cut", "rest"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="of rest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster does not outlive the drill
    try:
        with BareCluster.start(3) as cluster, tempfile.TemporaryDirectory() as folder:
            install(cluster)
            with cluster.namespace("drill") as space:
                shop = Shop(cluster, space, Path(folder))
                shop.apply()
                shop.until_ready()
                shop.until_in_sync(3)
                if options.way == "rest":
                    return _rest(cluster, shop, options.seconds)
                with shop.load() as load:
                    rounds = [_round(shop, load, options.way, number) for number in range(options.rounds)]
                return _judge(rounds, options.way, load)
    except (CannotRun, DidNotBuild, DidNotStart) as error:
        print(f"cluster_drill: {error}", file=sys.stderr)
        return 1


def _round(shop: Shop, load: Load, way: str, number: int) -> Round:
    load.until_more()
    lost = shop.master()
    node = shop.node_of(lost)
    with LeaseWatch(shop) as watch:
        load.gap_seconds = 0.0
        time.sleep(0.1 * (number % 6))  # at another point between two renewals each time
        blow, blow_time = time.monotonic(), wall_seconds()
        if way == "kill":
            shop.kill_broker(lost)
            shop.delete_pod(lost, seconds=0)
        else:
            node.cut()
        shop.until_master(other_than=lost)
        load.until_more(1)
        acknowledged = load.resumed_at
        load.until_more(20)
    healed = blow
    if way == "cut":
        time.sleep(CUT_SECONDS)
        node.heal()
        healed = time.monotonic()
    shop.until_in_sync(3)
    found = Round(
        lost, watch.master, watch.renewed - blow_time, watch.elected - blow_time, acknowledged - blow,
        load.gap_seconds, time.monotonic() - healed,
    )  # fmt: skip
    print(found.line(number), flush=True)
    return found


def _rest(cluster: BareCluster, shop: Shop, seconds: float) -> int:
    """Nobody asks for anything: what is written to the API server."""
    time.sleep(SETTLE_SECONDS)
    mark = cluster.audit.mark()
    time.sleep(seconds)
    renewals = Counter(each.name for each in writes_since(cluster, shop, mark) if each.resource == LEASES)
    written = others_than_renewals(cluster, shop, mark)
    told = ", ".join(f"{name} {count}" for name, count in sorted(renewals.items()))
    print(f"{seconds:.0f} s at rest: {len(written)} writes beside the renewals of Leases ({told})")
    print(*written, sep="\n")
    return 1 if written else 0


def _judge(rounds: list[Round], way: str, load: Load) -> int:
    gaps = sorted(each.gap for each in rounds)
    p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    print(
        f"{len(rounds)} rounds, {load.total():,} records acknowledged, 0 lost, {len(load.refused)} refused; "
        f"gap p50 {statistics.median(gaps):.2f} s, p99 {p99:.2f} s"
    )
    if way == "kill":
        return 0 if p99 < GAP_P99_SECONDS else 1
    is_in_time = all(each.elected <= MASTER_SECONDS and each.in_sync <= IN_SYNC_SECONDS for each in rounds)
    return 0 if is_in_time else 1


if __name__ == "__main__":
    sys.exit(main())
