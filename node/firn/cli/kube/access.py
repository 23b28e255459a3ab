"""A client of a cluster in Kubernetes: who the user is there, and the way to the brokers.

An administrator shows the certificate of the Secret ``CLUSTER-admin``; whoever may not read that Secret takes a token of
a ServiceAccount (``--service-account``), made for brokers alone (audience ``firn.dev``). Keys lie in a folder that only
the user can read, for as long as the command runs.
"""

import atexit
import base64
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn.cli.kube.finding import (
    Object,
    belongs_to,
    broker_addresses,
    chosen_cluster,
    is_insecure,
    of_kind,
)
from firn.cli.kube.forwarding import Forwards
from firn.cli.kube.kubectl import Kubectl, Refused
from firn.cli.running import Failure, KubernetesPlace
from firn.client import Client

CREDENTIALS = ("FIRN_TLS_CA", "FIRN_TLS_CERT", "FIRN_TLS_KEY", "FIRN_TOKEN", "FIRN_TOKEN_FILE")
AUDIENCE = "firn.dev"
TOKEN_TIME = "24h"  # the API server may grant less
RESOURCES = (
    "brokerclusters.firn.dev,brokergroups.firn.dev,compactedtopics.firn.dev,forcecompactions.firn.dev,pods"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A cluster's objects, as they were when it was asked for."""

    cluster: Object
    objects: list[dict[str, Any]]  # all of the namespace, by RESOURCES

    def groups(self) -> list[Object]:
        return [item for item in of_kind(self.objects, "BrokerGroup") if belongs_to(item, self.cluster)]

    @property
    def name(self) -> str:
        return str(self.cluster["metadata"]["name"])


def find(kubectl: Kubectl, cluster: str | None) -> Found:
    """The cluster that is meant. *Errors*: Failure when there is none, or it cannot be told which."""
    try:
        objects = kubectl.items(RESOURCES)
    except Refused as error:
        if "doesn't have a resource type" in str(error):
            raise Failure(
                "this Kubernetes cluster knows no BrokerCluster; install firn there: helm install firn helm/"
            ) from error
        raise
    return Found(chosen_cluster(of_kind(objects, "BrokerCluster"), cluster, kubectl.namespace), objects)


def cluster_client(place: KubernetesPlace, *, timeout: float, read_from: str = "master") -> "ClusterClient":
    """A client of the cluster that is meant. Credentials of the environment are for other brokers."""
    for name in CREDENTIALS:
        os.environ.pop(name, None)
    kubectl = Kubectl(place.context, place.namespace)
    return ClusterClient(
        kubectl, find(kubectl, place.cluster), timeout=timeout, service_account=place.service_account,
        read_from=read_from,
    )  # fmt: skip


class ClusterClient(Client):
    """A client whose connections are forwarded, and whose keys go when it is closed."""

    def __init__(
        self, kubectl: Kubectl, found: Found, *, timeout: float, service_account: str | None = None,
        read_from: str = "master",
    ) -> None:  # fmt: skip
        """Errors: Failure when no broker runs, or the user may not have credentials."""
        addresses = broker_addresses(found.cluster, found.groups(), of_kind(found.objects, "Pod"))
        self.folder = Path(tempfile.mkdtemp(prefix="firn-"))  # mode 0700
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._forwards = Forwards(kubectl)
        credentials = (
            {} if is_insecure(found.cluster) else _credentials(kubectl, found, service_account, self.folder)
        )
        super().__init__(
            ",".join(addresses), timeout=timeout, dial=self._forwards, tls_ca=credentials.get("tls_ca"),
            tls_cert=credentials.get("tls_cert"), tls_key=credentials.get("tls_key"), token=credentials.get("token"),
            read_from=read_from,
        )  # fmt: skip

    async def close(self, *, flush: bool = True) -> None:
        try:
            await super().close(flush=flush)
        finally:
            await self._forwards.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _credentials(kubectl: Kubectl, found: Found, service_account: str | None, folder: Path) -> dict[str, str]:
    if service_account is not None:
        ca = kubectl.get("configmap", f"{found.name}-ca").get("data", {}).get("ca.crt", "")
        token = kubectl.run(
            "create", "token", service_account, "--audience", AUDIENCE, "--duration", TOKEN_TIME
        ).strip()
        return {"tls_ca": _kept(folder, "ca.crt", ca.encode()), "token": token}
    secret = f"{found.name}-admin"
    try:
        data = kubectl.get("secret", secret).get("data", {})
    except Refused as error:
        raise Failure(
            f"{error}; to be somebody else than an administrator give --service-account NAME, whose token you may make"
        ) from error
    parts = {name: base64.b64decode(data.get(name, "")) for name in ("ca.crt", "tls.crt", "tls.key")}
    missing = [name for name, text in parts.items() if not text]
    if missing:
        raise Failure(
            f"Secret {secret} has no {missing[0]}; the operator makes it: see `kubectl describe bc {found.name}`"
        )
    files = {name: _kept(folder, name, text) for name, text in parts.items()}
    return {"tls_ca": files["ca.crt"], "tls_cert": files["tls.crt"], "tls_key": files["tls.key"]}


def _kept(folder: Path, name: str, data: bytes) -> str:
    """A file that nobody else can read."""
    path = str(folder / name)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return path
