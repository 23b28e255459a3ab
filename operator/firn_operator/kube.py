"""The door to the Kubernetes API: objects as plain dictionaries, errors by what the caller does next.

``Kube`` is all that the rest of the operator knows of an API server; tests put a store in memory in its place.
Answers of writes are the objects as they are stored now, so that the caller's cache knows them before any watch tells.

*Errors*: ``Unavailable`` (429, 5xx, no answer: later), ``Conflict`` (409: read again, decide anew), ``Invalid`` (400,
422: the object is no good), ``Forbidden`` (401, 403: rights are missing). What is not there is ``None``, no error.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient

from firn.errors import Conflict, FirnError, Forbidden, Invalid, Unavailable
from firn_operator.names import MANAGER

Obj = dict[str, Any]
REQUEST_S = 30.0
LIST_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects, and where it is served."""

    api_version: str
    kind: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, *, sub: str = "") -> str:
        root = "/apis/" if "/" in self.api_version else "/api/"
        parts = [root + self.api_version]
        if self.is_namespaced and namespace:
            parts.append(f"namespaces/{quote(namespace, safe='')}")
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if sub:
            parts.append(sub)
        return "/".join(parts)


TOPIC = Kind("firn.dev/v1alpha1", "CompactedTopic", "compactedtopics")
CLUSTER = Kind("firn.dev/v1alpha1", "BrokerCluster", "brokerclusters")
GROUP = Kind("firn.dev/v1alpha1", "BrokerGroup", "brokergroups")
COMPACTION = Kind("firn.dev/v1alpha1", "ForceCompaction", "forcecompactions")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
POD = Kind("v1", "Pod", "pods")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
EVENT = Kind("v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes", is_namespaced=False)
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", is_namespaced=False)
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE_BINDING = Kind(
    "rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", False
)
BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
JOB = Kind("batch/v1", "Job", "jobs")

WATCHED = (TOPIC, CLUSTER, GROUP, COMPACTION)  # all objects of these kinds
OWNED = (  # those that carry the operator's label
    STATEFUL_SET, POD, CLAIM, SERVICE, CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, BUDGET, NETWORK_POLICY,
)  # fmt: skip
KINDS = {
    kind.kind: kind for kind in (*WATCHED, *OWNED, SECRET, EVENT, NODE, CLUSTER_ROLE_BINDING, LEASE, JOB)
}


def name_of(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"]["name"])


def namespace_of(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"].get("namespace", ""))


class Kube(Protocol):
    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        """The object as it is stored, consistently; None when there is none."""
        ...

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> list[Obj]:
        """All of a kind, of all namespaces when none is given."""
        ...

    async def create(self, kind: Kind, namespace: str, body: Obj) -> Obj:
        """Errors: Conflict when the name is taken."""
        ...

    async def apply(self, kind: Kind, namespace: str, body: Obj, *, sub: str = "") -> Obj | None:
        """Server-side apply as the operator, taking fields over from others. None: ``sub`` of what is not there."""
        ...

    async def patch(self, kind: Kind, namespace: str, name: str, body: Obj) -> Obj | None:
        """A merge patch; with ``metadata.resourceVersion`` in it only of that version (Conflict)."""
        ...

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, orphan: bool = False
    ) -> None:
        """Ask for the end of an object; with ``uid`` of that one alone (Conflict). One that is gone is no error."""
        ...

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        """Ask for the end of a pod within its disruption budget; False when that allows none now."""
        ...


def error_of(status: int, body: bytes) -> FirnError:
    """What an answer means for the caller."""
    try:
        said = json.loads(body)
        message = str(said.get("message", "")) if isinstance(said, dict) else ""
    except ValueError:
        message = body[:200].decode("utf-8", "replace")
    text = f"the API server answered {status}: {message or 'no reason given'}"
    if status == 409:
        return Conflict(text)
    if status in (401, 403):
        return Forbidden(text)
    if status in (429, 408, 504) or status >= 500:
        return Unavailable(text)
    return Invalid(text)


class RealKube:
    """``Kube`` over HTTP, with the credentials of ``kubernetes.aio``'s configuration."""

    def __init__(self, client: ApiClient, *, namespaces: tuple[str, ...] = ()) -> None:
        """``namespaces``: those to list when no namespace is given; none: all at once."""
        self._client = client
        self._namespaces = namespaces
        self.requests: dict[str, int] = {}

    async def close(self) -> None:
        await self._client.close()

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Obj | None = None,
        content: str = "application/json",
    ) -> tuple[int, bytes]:  # fmt: skip
        """Status and body of one request. Errors: Unavailable when there was no answer."""
        configuration = self._client.configuration
        headers = {"Content-Type": content, "Accept": "application/json", "User-Agent": MANAGER}
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        url = configuration.host + path + (f"?{urlencode(query)}" if query else "")
        self.requests[method] = self.requests.get(method, 0) + 1
        try:
            answer = await self._client.rest_client.request(
                method,
                url,
                headers=headers,
                body=body,
                _request_timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            )
            return int(answer.status), bytes(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"no answer from the API server: {type(error).__name__} {error}".strip()
            ) from error

    async def _object(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Obj | None = None,
        content: str = "application/json",
    ) -> Obj | None:  # fmt: skip
        status, answer = await self.request(method, path, query=query, body=body, content=content)
        if status == 404:
            return None
        if status >= 400:
            raise error_of(status, answer)
        found = json.loads(answer)
        if not isinstance(found, dict):
            raise Unavailable("the API server answered something that is no object")
        return found

    async def get(self, kind: Kind, namespace: str, name: str) -> Obj | None:
        return await self._object("GET", kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> list[Obj]:
        spaces: tuple[str | None, ...] = (namespace,)
        if namespace is None and kind.is_namespaced and self._namespaces:
            spaces = self._namespaces
        return [item for space in spaces async for item in self._pages(kind, space, selector)]

    async def _pages(self, kind: Kind, namespace: str | None, selector: str) -> AsyncIterator[Obj]:
        query = {"limit": str(LIST_CHUNK)}
        if selector:
            query["labelSelector"] = selector
        while True:
            page = await self._object("GET", kind.path(namespace), query=query)
            if page is None:
                raise Unavailable(f"the API server does not serve {kind.plural} of {kind.api_version}")
            for item in page.get("items") or ():
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
                yield item
            more = page.get("metadata", {}).get("continue")
            if not more:
                return
            query["continue"] = more

    async def create(self, kind: Kind, namespace: str, body: Obj) -> Obj:
        made = await self._object("POST", kind.path(namespace), body=body, query={"fieldManager": MANAGER})
        if made is None:
            raise Unavailable(f"namespace {namespace} is not there, or the API does not serve {kind.plural}")
        return made

    async def apply(self, kind: Kind, namespace: str, body: Obj, *, sub: str = "") -> Obj | None:
        return await self._object(
            "PATCH", kind.path(namespace, name_of(body), sub=sub), body=body,
            query={"fieldManager": MANAGER, "force": "true"}, content="application/apply-patch+yaml",
        )  # fmt: skip

    async def patch(self, kind: Kind, namespace: str, name: str, body: Obj) -> Obj | None:
        return await self._object(
            "PATCH", kind.path(namespace, name), body=body, query={"fieldManager": MANAGER},
            content="application/merge-patch+json",
        )  # fmt: skip

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, orphan: bool = False
    ) -> None:
        body: Obj = {"propagationPolicy": "Orphan" if orphan else "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        await self._object("DELETE", kind.path(namespace, name), body=body)

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        body: Obj = {
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }  # fmt: skip
        status, answer = await self.request("POST", POD.path(namespace, pod, sub="eviction"), body=body)
        if status == 429:
            return False
        if status >= 400 and status != 404:
            raise error_of(status, answer)
        return True


async def load_client(context: str | None = None) -> ApiClient:
    """Credentials of the pod, else of $KUBECONFIG or ~/.kube/config.

    Errors: Invalid when there are none.
    """
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        try:
            file = os.environ.get("KUBECONFIG") or None
            await config.load_kube_config(file, context=context, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise Invalid(f"no way to the Kubernetes API: {error}; give KUBECONFIG") from error
    configuration.retries = None
    return await asyncio.sleep(0, ApiClient(configuration))
