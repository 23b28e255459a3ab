"""The chart's Job against an API server in this process: a real HTTP server that answers as scripted."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from firn_operator.apply import FIELD_MANAGER, KubernetesServer, apply_all


def document(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "firn.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": {}}


class Api:
    """Answers with the statuses of ``answers`` in turn, then with 200."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, dict[str, str], Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/apply-patch+yaml"
        self.seen.append((request.path, dict(request.query), json.loads(await request.text())))
        status = self.answers.pop(0) if self.answers else 200
        message = "spec.partitons: unknown field" if status == 400 else "not now"
        return web.json_response({} if status == 200 else {"message": message}, status=status)

    @contextlib.asynccontextmanager
    async def server(self) -> AsyncIterator[KubernetesServer]:
        app = web.Application()
        app.router.add_patch("/{path:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        configuration.retries = 1
        async with client.ApiClient(configuration) as api:
            yield KubernetesServer(client.CustomObjectsApi(api))
        await runner.cleanup()


def test_documents_are_applied_in_order_and_again_while_the_kind_is_not_known_yet() -> None:
    async def main() -> None:
        api = Api(404, 404, 503, 200)
        documents = [
            document("BrokerCluster", "main"),
            document("CompactedTopic", "flights"),
            document("ForceCompaction", "nightly"),
        ]
        async with api.server() as server:
            assert await apply_all(server, documents, "shop", pause=0.001) is None
        paths = [path for path, _, _ in api.seen]
        cluster = "/apis/firn.dev/v1alpha1/namespaces/shop/brokerclusters/main"
        topic = "/apis/firn.dev/v1alpha1/namespaces/shop/compactedtopics/flights"
        run = "/apis/firn.dev/v1alpha1/namespaces/shop/forcecompactions/nightly"
        assert paths == [cluster] * 4 + [topic, run]
        _, query, body = api.seen[0]
        assert query == {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        assert body == documents[0]

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 403, 422, 500])
def test_what_the_api_server_refuses_ends_it_with_its_words(status: int) -> None:
    async def main() -> None:
        api = Api(status)
        async with api.server() as server:
            problem = await apply_all(server, [document("CompactedTopic", "flights")], "shop", pause=0.001)
        assert problem is not None
        assert problem.startswith(f"CompactedTopic flights: the API server answered {status}: ")
        assert len(api.seen) == 1

    asyncio.run(main())


def test_an_api_server_that_never_gets_ready_is_given_up_and_named() -> None:
    async def main() -> None:
        api = Api(*[404] * 1000)
        async with api.server() as server:
            problem = await apply_all(
                server, [document("CompactedTopic", "flights")], "shop", seconds=0.05, pause=0.01
            )
        assert problem == "CompactedTopic flights: the API server answered 404: not now"

    asyncio.run(main())


def test_nobody_there_is_as_not_yet() -> None:
    class Away:
        tries = 0

        async def apply(self, namespace: str, plural: str, document: dict[str, Any]) -> tuple[int, str]:
            self.tries += 1
            if self.tries < 3:
                raise OSError("connection refused")
            return 200, ""

    server = Away()
    assert asyncio.run(apply_all(server, [document("CompactedTopic", "t")], "shop", pause=0.001)) is None
    assert server.tries == 3
