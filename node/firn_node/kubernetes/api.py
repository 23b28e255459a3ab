"""The Kubernetes API as a broker uses it: JSON in, JSON out, every answer within a bounded time.

``kubernetes.aio`` gives addresses, credentials (a pod's token is read again every minute) and connections; its models
are passed over: a broker reads four kinds of objects, and parses them once, where it uses them.

Invariant: a request that changes something is sent once. ``PUT`` and ``DELETE`` are sent again by the HTTP library
when a kept connection has ended meanwhile, so changes are ``PATCH`` and ``POST`` here.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from firn.errors import Invalid

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
GONE, CONFLICT, NOT_FOUND = 410, 409, 404
USER_AGENT = "firn-broker"

Object = dict[str, Any]


class ApiError(Exception):
    """What came of a request instead of an object."""


class NoAnswer(ApiError):
    """Nothing, in time: what was asked may be done, or not, or later."""


class Denied(ApiError):
    """An answer with an error's status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api(Protocol):
    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Object | None = None,
        content: str = "application/json", within_s: float = 10.0,
    ) -> Object:  # fmt: skip
        """The answer. *Errors*: Denied, NoAnswer."""
        ...

    def watch(
        self, path: str, query: Mapping[str, str], *, within_s: float = 10.0
    ) -> AsyncGenerator[Object, None]:
        """The events of a watch until the server ends it. ``within_s``: for its beginning.

        *Errors*: Denied, also for an error that is told in the stream; NoAnswer when it breaks off.
        """
        ...

    async def close(self) -> None: ...


class KubernetesApi:
    """A connection to an API server."""

    def __init__(self, configuration: Configuration) -> None:
        self._client: Any = ApiClient(configuration)  # its annotations are partial
        self._client.user_agent = USER_AGENT

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Object | None = None,
        content: str = "application/json", within_s: float = 10.0,
    ) -> Object:  # fmt: skip
        try:
            async with asyncio.timeout(within_s):
                response = await self._send(method, path, query, body, content, within_s)
                data = await response.read()
        except _NO_ANSWER as error:
            raise NoAnswer(_why(error, within_s)) from error
        if response.status >= 400:
            raise _denied(response.status, data)
        return _answered(data)

    async def watch(
        self, path: str, query: Mapping[str, str], *, within_s: float = 10.0
    ) -> AsyncGenerator[Object, None]:
        try:
            async with asyncio.timeout(within_s):
                response = await self._send("GET", path, {**query, "watch": "true"}, None, "", None)
                if response.status >= 400:
                    raise _denied(response.status, await response.read())
        except _NO_ANSWER as error:
            raise NoAnswer(_why(error, within_s)) from error
        with contextlib.closing(response):
            while True:
                try:
                    line = await response.content.readline()
                except (*_NO_ANSWER, ValueError) as error:
                    raise NoAnswer(_why(error, within_s)) from error
                if not line.endswith(b"\n"):
                    return
                event = _answered(line)
                if event.get("type") == "ERROR":
                    raise _denied(int(event.get("object", {}).get("code") or 500), line)
                yield event

    async def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Object | None, content: str,
        total_s: float | None,
    ) -> aiohttp.ClientResponse:  # fmt: skip
        configuration = self._client.configuration
        headers = {"Accept": "application/json", "User-Agent": USER_AGENT}
        if content:
            headers["Content-Type"] = content
        if (token := (await configuration.auth_settings()).get("BearerToken")) is not None:
            headers["Authorization"] = token["value"] or ""
        url = f"{configuration.host}{path}{f'?{urlencode(query)}' if query else ''}"
        timeout = aiohttp.ClientTimeout(total=total_s)
        found = await self._client.rest_client.request(
            method, url, headers=headers, body=body, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = found.response
        return response

    async def close(self) -> None:
        await self._client.close()


_NO_ANSWER = (TimeoutError, aiohttp.ClientError, OSError, ConfigException, ApiException)


async def connect(environment: Mapping[str, str] | None = None) -> KubernetesApi:
    """The API of the cluster that this pod runs in; elsewhere that of the user's kubeconfig.

    Errors: Invalid when there is neither.
    """
    given = os.environ if environment is None else environment
    configuration = Configuration()
    configuration.retries = False
    loading: Any = config
    try:
        if given.get("KUBERNETES_SERVICE_HOST"):
            loading.load_incluster_config(configuration)
        else:
            await loading.load_kube_config(client_configuration=configuration, persist_config=False)
    except (ConfigException, OSError) as error:
        raise Invalid(
            f"no Kubernetes API is known here: {error}; in a pod mount its service account's token, elsewhere set "
            "$KUBECONFIG"
        ) from error
    return KubernetesApi(configuration)


def _denied(status: int, data: bytes) -> Denied:
    document = _parsed(data)
    status_object = document.get("object") if document.get("type") == "ERROR" else document
    message = status_object.get("message") if isinstance(status_object, dict) else None
    return Denied(status, str(message or data[:200].decode("utf-8", "replace")))


def _answered(data: bytes) -> Object:
    """Errors: NoAnswer: what is no JSON object comes from a proxy, or was cut off."""
    found = _parsed(data)
    if not found:
        raise NoAnswer(f"the answer is no JSON object: {data[:80]!r}")
    return found


def _parsed(data: bytes) -> Object:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _why(error: BaseException, within_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {within_s:g} s"
    return str(error) or type(error).__name__
