"""``make demo-cluster``: from a bare machine to a topic that survives the death of its master. Exit code 1 otherwise.

A real Kubernetes of three nodes (``cluster``), the images, the chart, a topic by ``kubectl apply``, the flights of
``make demo`` produced into it, the first as soon as anybody takes it, the master's pod killed meanwhile; then every
acknowledged record is looked for, and the compacted view compared with pandas.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path

from cluster import images
from cluster.bare import BareCluster
from cluster.errors import CannotRun, DidNotBuild, DidNotStart
from cluster.tools import tool
from demo_cluster.load import Load
from demo_cluster.place import NAMESPACE, TOPIC, Place
from demo_cluster.report import Report

from firn_node.demo.flights import Flights, load
from firn_node.demo.report import say

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "firn-system"
TOPIC_YAML = f"""\
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {{name: {TOPIC}}}
spec:
  partitions: 4
"""


def main() -> int:
    report = Report()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster does not outlive the demo
    try:
        began = time.perf_counter()
        say(
            "starting Kubernetes: three nodes as network namespaces of this machine (the first time it is built: minutes)"
        )
        with BareCluster.start(nodes=3) as cluster:
            report.cluster_seconds = time.perf_counter() - began
            say(f"{len(cluster.nodes)} nodes are ready after {report.cluster_seconds:.1f} s")
            _load_images(cluster, report)
            _install(cluster, report)
            flights = load()
            _apply(cluster, report)
            asyncio.run(_run(cluster, flights, report))
            _show_status(cluster)
    except (CannotRun, DidNotBuild, DidNotStart) as error:
        say(f"demo-cluster: {error}")
        return 1
    report.total_seconds = time.perf_counter() - began
    report.print()
    return 1 if report.has_failed else 0


def _load_images(cluster: BareCluster, report: Report) -> None:
    began = time.perf_counter()
    cluster.load(images.archive(images.NODE), images.archive(images.OPERATOR))
    report.images_seconds = time.perf_counter() - began
    say(f"the images of the broker and of the operator are on every node after {report.images_seconds:.1f} s")


def _install(cluster: BareCluster, report: Report) -> None:
    began = time.perf_counter()
    chosen = []
    for which, image in (("node", images.NODE), ("operator", images.OPERATOR)):
        repository, _, tag = image.reference().rpartition(":")
        chosen += [
            "--set",
            f"image.{which}.repository={repository}",
            "--set-string",
            f"image.{which}.tag={tag}",
        ]
    say(f"$ helm install firn helm/ --namespace {SYSTEM} --create-namespace --wait")
    where = ["--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "5m"]
    cluster.run([str(tool("helm")), "install", "firn", str(ROOT / "helm"), *where, *chosen])
    report.install_seconds = time.perf_counter() - began
    say(f"the operator runs after {report.install_seconds:.1f} s")


def _apply(cluster: BareCluster, report: Report) -> None:
    """The topic, and no more: a cluster of its own is made for it."""
    cluster.kubectl("create", "namespace", NAMESPACE)
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", NAMESPACE, restricted)
    say(f"$ kubectl apply --namespace {NAMESPACE} -f - <<EOF\n{TOPIC_YAML}EOF")
    report.applied_at = time.perf_counter()
    say(cluster.apply(TOPIC_YAML, namespace=NAMESPACE).strip())


async def _run(cluster: BareCluster, flights: Flights, report: Report) -> None:
    place = Place(cluster)
    try:
        await Load(place, flights, report).run()
    finally:
        place.close()


def _show_status(cluster: BareCluster) -> None:
    say(f"$ kubectl firn status --namespace {NAMESPACE}")
    program = "import sys; sys.argv[0] = 'kubectl-firn'; from firn.cli.main import main; main()"
    say(cluster.run([sys.executable, "-c", program, "status", "--namespace", NAMESPACE]).rstrip())


if __name__ == "__main__":
    sys.exit(main())
