"""``firn status``: all brokers of the cluster and their topics; of a cluster in Kubernetes its resources before them."""

from datetime import UTC, datetime
from typing import Any

import typer

from firn.cli.printing import print_document
from firn.cli.running import (
    BrokerOption,
    Failure,
    KubernetesPlace,
    OutputOption,
    TimeoutOption,
    connect,
    kubernetes_place,
    run,
    sentence_of,
)
from firn.cli.tables import print_status
from firn.errors import FirnError


def register(app: typer.Typer) -> None:
    app.command("status", help="Brokers, topics and partitions as they are now.")(status)


def status(broker: BrokerOption = None, timeout: TimeoutOption = None, output: OutputOption = None) -> None:
    place = kubernetes_place() if broker is None else None
    if place is not None:
        _status_in_kubernetes(place, timeout, output)
        return
    found = run(_asked(broker, timeout))
    if not print_document(found, output):
        print_status(found)


async def _asked(broker: str | None, timeout: str | None) -> dict[str, Any]:
    async with connect(broker, timeout) as opened:
        found: dict[str, Any] = await opened.cluster_status()
        return found


def _status_in_kubernetes(place: KubernetesPlace, timeout: str | None, output: str | None) -> None:
    """The resources, and what the brokers say where one answers: a cluster that is not well is what this is for."""
    from firn.cli.kube.access import find
    from firn.cli.kube.kubectl import Kubectl
    from firn.cli.kube.resources import print_resources, resources_document

    kubectl = Kubectl(place.context, place.namespace)
    found = find(kubectl, place.cluster)
    try:
        claims = kubectl.items("persistentvolumeclaims")
    except Failure:
        claims = []  # not everybody may see them
    resources = resources_document(found.cluster, [*found.objects, *claims], datetime.now(UTC))
    brokers: dict[str, Any] = {"brokers": [], "groups": [], "topics": [], "security": None}
    problem = None
    try:
        brokers = run(_asked(None, timeout))
    except (Failure, FirnError, OSError) as error:
        problem = sentence_of(error)
    if print_document({**brokers, "kubernetes": resources, "problem": problem}, output):
        return
    print_resources(resources)
    print()
    if problem is None:
        print_status(brokers)
    else:
        print(f"the brokers were not asked: {problem}")
