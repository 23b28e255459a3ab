"""The door to the brokers' administrative paths: a switchover, a forced compaction.

Everything else goes through resources. The operator proves itself by the cluster's administrator's certificate.
"""

import base64
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from firn.client import Client
from firn.errors import Unavailable
from firn_operator.kube import Obj
from firn_operator.names import CLIENT_PORT, GroupName, admin_name, host_of
from firn_operator.observe import ClusterState, GroupState

SWITCHOVER_S = 20.0  # longer than a broker waits for a successor


@dataclass(frozen=True, slots=True)
class Way:
    """How the brokers of a cluster are reached."""

    addresses: tuple[str, ...]
    secret: Obj | None  # the administrator's certificate; None: the cluster is insecure


class Brokers(Protocol):
    async def switch_over(self, way: Way, group: int, to: str) -> None:
        """Done when ``to`` is master. Errors: FirnError says why it was not done."""
        ...

    async def compact(self, way: Way, topic: str) -> Mapping[str, Any]:
        """Begin a forced compaction; its document."""
        ...

    async def compaction(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        """The newest compaction that was asked for."""
        ...

    async def cancel(self, way: Way, topic: str) -> None: ...

    async def describe(self, way: Way, topic: str) -> Mapping[str, Any]:
        """The topic's spec and the state of its partitions."""
        ...

    async def plan(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        """The newest plan of a forced compaction by Spark."""
        ...

    async def cancel_plan(self, way: Way, topic: str) -> None:
        """Drop the open plan; where there is none nothing is done."""
        ...


def way_to(state: ClusterState, group: GroupState | None = None) -> Way:
    """To the ready brokers of a group, or of the whole cluster."""
    groups = state.groups if group is None else (group,)
    spec = state.spec
    addresses = tuple(
        f"{host_of(pod.name, GroupName(each.name), spec.namespace)}:{CLIENT_PORT}"
        for each in groups for pod in each.pods if pod.is_ready
    )  # fmt: skip
    return Way(addresses, None if spec.is_insecure else state.secrets.get(admin_name(spec.name)))


class RealBrokers:
    """``Brokers`` by firn's own client."""

    async def switch_over(self, way: Way, group: int, to: str) -> None:
        async with _client(way, timeout=SWITCHOVER_S) as client:
            await client.switchover(group, to=to)

    async def compact(self, way: Way, topic: str) -> Mapping[str, Any]:
        async with _client(way) as client:
            return await client.compact(topic, force=True)

    async def compaction(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        async with _client(way) as client:
            return await client.compaction(topic)

    async def cancel(self, way: Way, topic: str) -> None:
        async with _client(way) as client:
            await client.cancel_compaction(topic)

    async def describe(self, way: Way, topic: str) -> Mapping[str, Any]:
        async with _client(way) as client:
            return await client.describe(topic)

    async def plan(self, way: Way, topic: str) -> Mapping[str, Any] | None:
        async with _client(way) as client:
            return await client.compaction_plan(topic)

    async def cancel_plan(self, way: Way, topic: str) -> None:
        async with _client(way) as client:
            await client.cancel_plan(topic)


@contextlib.asynccontextmanager
async def _client(way: Way, **settings: Any) -> AsyncIterator[Client]:
    with _Files(way) as files:
        async with Client(",".join(way.addresses), **settings, **files.credentials) as client:
            yield client


class _Files:
    """The administrator's certificate as files, for as long as they are used: ``ssl`` reads nothing else."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.credentials: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "_Files":
        if not self._way.addresses:
            raise Unavailable("no broker is ready that could be asked")
        if self._way.secret is None:
            return self
        self._folder = tempfile.TemporaryDirectory(prefix="firn-admin-")
        for name, argument in (("ca.crt", "tls_ca"), ("tls.crt", "tls_cert"), ("tls.key", "tls_key")):
            path = os.path.join(self._folder.name, name)
            with open(path, "wb", opener=_private) as file:
                file.write(base64.b64decode((self._way.secret.get("data") or {}).get(name, "")))
            self.credentials[argument] = path
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
