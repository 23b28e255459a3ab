"""The demo's topic in its Kubernetes: clients beside the pods, who is master, and how it dies."""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster.api import ApiError
from cluster.bare import BareCluster

from firn.client import Client

NAMESPACE = "shop"
TOPIC = "flights"
PORT = 7700
REQUEST_S = 60.0  # a failover is to be waited for
MADE_S = 300.0  # until a cluster that was applied is there, on a busy machine


class Place:
    """One BrokerCluster of the topic's name, once the operator has made its administrator's credentials.

    These lie in a folder of their own until ``close``.
    """

    def __init__(self, cluster: BareCluster) -> None:
        self.cluster = cluster
        secret = cluster.until(self._secret, "the administrator's credentials are there", seconds=MADE_S)
        self._folder = Path(tempfile.mkdtemp(prefix="firn-demo-cluster-"))
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (self._folder / name).write_bytes(base64.b64decode(secret["data"][name]))

    def close(self) -> None:
        shutil.rmtree(self._folder)

    def _secret(self) -> Any:
        try:
            return self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{TOPIC}-admin")
        except ApiError as error:
            if error.reason != "NotFound":
                raise
            return None

    def client(self, *, timeout: float = REQUEST_S) -> Client:
        """An administrator at the pods' own addresses, which this machine reaches."""
        names = [f"{TOPIC}-0-{ordinal}" for ordinal in range(3)]
        return Client(
            ",".join(f"{name}.{TOPIC}-0.{NAMESPACE}.svc:{PORT}" for name in names),
            tls_ca=str(self._folder / "ca.crt"), tls_cert=str(self._folder / "tls.crt"),
            tls_key=str(self._folder / "tls.key"), timeout=timeout, dial=self._dial,
        )  # fmt: skip

    async def _dial(self, address: str) -> str:
        """A pod's IP by its name: the DNS that knows it is the cluster's own."""
        pod = address.partition(".")[0]
        try:
            found = await asyncio.to_thread(self._pod, pod)
        except ApiError as error:
            raise ConnectionError(f"no pod {pod}") from error
        if not (ip := found["status"].get("podIP")):
            raise ConnectionError(f"pod {pod} has no address yet")
        return f"{ip}:{PORT}"

    def _pod(self, name: str) -> Any:
        return self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")

    def wait_ready(self) -> None:
        """Until the topic says so."""
        self.cluster.kubectl("wait", "--for=condition=Ready", f"ct/{TOPIC}", "-n", NAMESPACE, "--timeout=5m")

    def master(self) -> str:
        """The pod that holds the group's Lease."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{TOPIC}-0"
        return str(self.cluster.api.get(path)["spec"]["holderIdentity"])

    def kill(self, pod: str) -> None:
        """Its processes by SIGKILL, so that nothing is handed over, and then the pod itself."""
        wanted = {f"POD_NAME={pod}".encode(), f"POD_NAMESPACE={NAMESPACE}".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                    os.kill(int(process.name), signal.SIGKILL)
        self.cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}", {"gracePeriodSeconds": 0})

    def wait_whole(self) -> float:
        """Seconds until all replicas are in sync again."""
        began = time.perf_counter()
        path = f"/apis/firn.dev/v1alpha1/namespaces/{NAMESPACE}/brokergroups/{TOPIC}-0"

        def is_whole() -> bool:
            return len(self.cluster.api.get(path).get("status", {}).get("inSync", ())) == 3

        self.cluster.until(is_whole, "all three replicas are in sync again", seconds=300)
        return time.perf_counter() - began
