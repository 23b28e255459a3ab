"""Tokens of ServiceAccounts, made and reviewed by a real API server, asked by an account that may do nothing else."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest
from cluster.api import Api, ApiError
from cluster.apiserver import ApiServer
from kube_kit import configuration_of
from security_kit import AUDIENCE, SetClock

from firn.errors import Unauthorized, Unavailable
from firn_node.kubernetes.api import KubernetesApi
from firn_node.security.tokenreview import FAILED_S, KEPT_S, REFUSED_S, TokenReviews
from firn_node.security.tokens import digest_of

pytestmark = pytest.mark.apiserver

Test = Callable[[TokenReviews, SetClock], Awaitable[None]]
_RBAC = "rbac.authorization.k8s.io"


@pytest.fixture
def space(apiserver: ApiServer) -> Iterator[str]:
    with apiserver.namespace() as name:
        yield name


def run(apiserver: ApiServer, space: str, test: Test, *, may_ask: bool = True) -> None:
    if may_ask:
        rule = {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
        role = {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": f"asks-{space}"}}
        subject = {"kind": "ServiceAccount", "name": "broker", "namespace": space}
        binding = {
            **role, "kind": "ClusterRoleBinding", "subjects": [subject],
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": f"asks-{space}"},
        }  # fmt: skip
        apiserver.apply({**role, "rules": [rule]})
        apiserver.apply(binding)
    kubeconfig = apiserver.account(space, "broker")
    if may_ask:
        apiserver.until_may(kubeconfig, "create", "tokenreviews", group="authentication.k8s.io")

    async def scene() -> None:
        clock = SetClock()
        reviews = TokenReviews(KubernetesApi(await configuration_of(kubeconfig)), AUDIENCE, clock)
        try:
            await test(reviews, clock)
        finally:
            await reviews.close()

    asyncio.run(scene())


def token(apiserver: ApiServer, space: str, *, audience: str = AUDIENCE) -> str:
    with contextlib.suppress(ApiError):  # it is there
        apiserver.api.post(f"/api/v1/namespaces/{space}/serviceaccounts", {"metadata": {"name": "till"}})
    return apiserver.token(space, "till", audiences=[audience])


def test_a_token_for_the_brokers_says_whose_it_is(apiserver: ApiServer, space: str) -> None:
    found = token(apiserver, space)

    async def test(reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(digest_of(found), found)
        principal = reviews.find(digest_of(found))
        assert principal.name == f"system:serviceaccount:{space}:till"
        assert f"system:serviceaccounts:{space}" in principal.groups
        assert not principal.is_admin

    run(apiserver, space, test)


def test_a_token_for_somebody_else_and_one_that_was_tampered_with_are_nobodys(
    apiserver: ApiServer, space: str
) -> None:
    head, claims, signature = token(apiserver, space).split(".")
    forged = f"{head}.{claims}.{signature[::-1]}"
    elsewhere = token(apiserver, space, audience="vault")

    async def test(reviews: TokenReviews, clock: SetClock) -> None:
        for each in (forged, elsewhere):
            await reviews.prepare(digest_of(each), each)
            with pytest.raises(Unauthorized):
                reviews.find(digest_of(each))
        assert reviews.asked == 1, "what says itself that it is for another audience is not sent on"

    run(apiserver, space, test)


@pytest.mark.slow  # the server answers from a cache for ten seconds
def test_the_token_of_an_account_that_is_deleted_counts_no_more(apiserver: ApiServer, space: str) -> None:
    found = token(apiserver, space)

    async def test(reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(digest_of(found), found)
        reviews.find(digest_of(found))
        admin = Api.of(apiserver.kubeconfig)
        admin.delete(f"/api/v1/namespaces/{space}/serviceaccounts/till")
        while True:  # the server itself knows of it from a cache
            clock.advance(seconds=KEPT_S + REFUSED_S)
            await reviews.prepare(digest_of(found), found)
            try:
                reviews.find(digest_of(found))
            except Unauthorized:
                return
            await asyncio.sleep(0.05)

    run(apiserver, space, test)


def test_a_broker_that_may_not_ask_says_that_it_does_not_know(apiserver: ApiServer, space: str) -> None:
    found = token(apiserver, space)

    async def test(reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(digest_of(found), found)
        with pytest.raises(Unavailable):
            reviews.find(digest_of(found))
        clock.advance(seconds=FAILED_S)
        await reviews.prepare(digest_of(found), found)
        assert reviews.asked == 2

    run(apiserver, space, test, may_ask=False)
