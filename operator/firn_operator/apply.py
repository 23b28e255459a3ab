"""``python -m firn_operator.apply``: what the chart's values wish for, applied by the API server.

The chart runs it as a Job, because the resource definitions come with the same release: until they count, the API server
knows no such kind, and this waits. Server-side apply under a field manager of its own: fields that people have set
otherwise by other means are taken over, as `helm upgrade` does; what is no longer wished is left alone.
"""

import argparse
import asyncio
import sys
from typing import Any, Protocol

import yaml

FIELD_MANAGER = "firn-chart"
TRIES_S = 240.0
PAUSE_S = 1.0
_PLURALS = {
    "BrokerCluster": "brokerclusters",
    "CompactedTopic": "compactedtopics",
    "ForceCompaction": "forcecompactions",
}
_NOT_YET = (404, 429, 502, 503, 504)  # 404: the kind is not known yet


class Server(Protocol):
    async def apply(self, namespace: str, plural: str, document: dict[str, Any]) -> tuple[int, str]:
        """Status and text of the answer to a server-side apply. *Errors*: OSError when nobody answers."""


async def apply_all(
    server: Server,
    documents: list[dict[str, Any]],
    namespace: str,
    *,
    seconds: float = TRIES_S,
    pause: float = PAUSE_S,
) -> str | None:
    """Apply each in its order, again while the API server cannot take it yet. None, or a sentence why not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    for document in documents:
        kind, name = document["kind"], document["metadata"]["name"]
        if kind not in _PLURALS:
            return f"{kind} {name}: only {', '.join(_PLURALS)} are applied by this"
        while True:
            try:
                status, text = await server.apply(namespace, _PLURALS[kind], document)
            except OSError as error:
                status, text = 503, str(error)
            if status < 300:
                print(f"{kind} {name}: applied", flush=True)
                break
            if status not in _NOT_YET or loop.time() + pause >= deadline:
                return f"{kind} {name}: the API server answered {status}: {text}"
            await asyncio.sleep(pause)
    return None


class KubernetesServer:
    """The API server of the pod that this runs in, or of the kubeconfig."""

    def __init__(self, api: Any) -> None:
        self._api = api  # CustomObjectsApi

    async def apply(self, namespace: str, plural: str, document: dict[str, Any]) -> tuple[int, str]:
        import aiohttp
        from kubernetes.aio.client.exceptions import ApiException

        group, _, version = document["apiVersion"].partition("/")
        try:
            await self._api.patch_namespaced_custom_object(
                group=group, version=version, namespace=namespace, plural=plural, name=document["metadata"]["name"],
                body=document, field_manager=FIELD_MANAGER, field_validation="Strict", force=True,
                _content_type="application/apply-patch+yaml", _request_timeout=30.0,
            )  # fmt: skip
        except ApiException as error:
            return int(error.status or 503), _message(error.body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(str(error)) from error
        return 200, ""


def _message(body: str | None) -> str:
    try:
        found = yaml.safe_load(body or "")
    except yaml.YAMLError:
        found = None
    return str(found.get("message", body)) if isinstance(found, dict) else str(body)


async def _main(path: str, namespace: str) -> str | None:
    from kubernetes.aio import client
    from kubernetes.aio import config as untyped

    config: Any = untyped
    with open(path, encoding="utf-8") as file:
        documents = [document for document in yaml.safe_load_all(file) if document]
    try:
        config.load_incluster_config()
    except config.ConfigException:
        await config.load_kube_config()
    async with client.ApiClient() as api:
        return await apply_all(KubernetesServer(client.CustomObjectsApi(api)), documents, namespace)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m firn_operator.apply", description="Apply firn's resources."
    )
    parser.add_argument("--namespace", required=True)
    parser.add_argument("file")
    given = parser.parse_args()
    problem = asyncio.run(_main(given.file, given.namespace))
    if problem is not None:
        print(problem, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
