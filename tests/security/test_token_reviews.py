"""Tokens of service accounts: how long an answer of the Kubernetes API counts, and what is asked of it."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kube_kit import Asked, FakeKubernetes, fake_kubernetes
from security_kit import AUDIENCE, Asking, SetClock, Site, account, account_token, guarded

from firn.errors import Unauthorized, Unavailable
from firn.topicspec import parse_spec
from firn.wire import Op
from firn_node.security import tokenreview
from firn_node.security.tokenreview import TokenReviews, claims_of
from firn_node.security.tokens import digest_of
from server.serving import StandIn, batch

TILL = account_token("till")
DIGEST = digest_of(TILL)
NAME = "system:serviceaccount:shop:till"

Test = Callable[[FakeKubernetes, TokenReviews, SetClock], Awaitable[None]]


def run(test: Test) -> None:
    async def scene() -> None:
        async with fake_kubernetes() as kubernetes:
            kubernetes.tokens[TILL] = account("shop", "till")
            clock = SetClock()
            reviews = TokenReviews(kubernetes.api(), AUDIENCE, clock)
            try:
                await test(kubernetes, reviews, clock)
            finally:
                await reviews.close()

    asyncio.run(scene())


async def until_asked(reviews: TokenReviews, times: int) -> None:
    async with asyncio.timeout(60):
        while reviews.asked < times or reviews._asking:
            await asyncio.sleep(0.001)


def test_a_token_is_asked_about_once_and_its_holder_has_name_and_groups() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await asyncio.gather(*(reviews.prepare(DIGEST, TILL) for _ in range(20)))
        principal = reviews.find(DIGEST)
        assert (principal.name, principal.is_admin, principal.node) == (NAME, False, None)
        assert "system:serviceaccounts:shop" in principal.groups
        await reviews.prepare(DIGEST, TILL)
        [asked] = kubernetes.asked
        assert asked.body is not None
        assert asked.body["spec"] == {"token": TILL, "audiences": [AUDIENCE]}

    run(test)


def test_an_answer_counts_for_a_minute_at_most_and_is_asked_for_again_at_half_of_it() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(DIGEST, TILL)
        found = reviews.find(DIGEST)
        clock.advance(seconds=31)
        assert reviews.find(DIGEST) is found
        await until_asked(reviews, 2)
        clock.advance(seconds=50)
        assert reviews.find(DIGEST) is found
        await until_asked(reviews, 3)
        clock.advance(seconds=61)
        with pytest.raises(Unavailable):
            reviews.find(DIGEST)
        await until_asked(reviews, 4)
        assert reviews.find(DIGEST) is found

    run(test)


def test_a_token_that_kubernetes_takes_back_counts_no_longer_than_a_minute() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(DIGEST, TILL)
        kubernetes.tokens[TILL] = {"authenticated": False}
        clock.advance(seconds=31)
        reviews.find(DIGEST)
        await until_asked(reviews, 2)
        with pytest.raises(Unauthorized):
            reviews.find(DIGEST)

    run(test)


def test_no_answer_counts_beyond_the_tokens_own_expiry() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        short = account_token("till", seconds=20)
        kubernetes.tokens[short] = account("shop", "till")
        await reviews.prepare(digest_of(short), short)
        assert reviews.find(digest_of(short)).name == NAME
        clock.advance(seconds=21)
        with pytest.raises(Unavailable):
            reviews.find(digest_of(short))

    run(test)


def test_what_was_known_counts_for_its_minute_while_the_api_is_away_and_then_nobody_is_refused() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(DIGEST, TILL)
        kubernetes.disturb = lambda asked: "500"
        clock.advance(seconds=45)
        assert reviews.find(DIGEST).name == NAME
        await until_asked(reviews, 2)
        assert reviews.find(DIGEST).name == NAME
        clock.advance(seconds=20)
        await reviews.prepare(DIGEST, TILL)
        with pytest.raises(Unavailable):
            reviews.find(DIGEST)
        other = account_token("other")
        await reviews.prepare(digest_of(other), other)
        with pytest.raises(Unavailable, match="did not say"):
            reviews.find(digest_of(other))
        kubernetes.disturb = lambda asked: None
        clock.advance(seconds=1)
        await reviews.prepare(DIGEST, TILL)
        assert reviews.find(DIGEST).name == NAME

    run(test)


def test_a_refusal_is_remembered_for_a_few_seconds() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        other = account_token("other")
        for _ in range(3):
            await reviews.prepare(digest_of(other), other)
            with pytest.raises(Unauthorized):
                reviews.find(digest_of(other))
        assert len(kubernetes.asked) == 1
        kubernetes.tokens[other] = account("shop", "other")
        clock.advance(seconds=6)
        await reviews.prepare(digest_of(other), other)
        assert reviews.find(digest_of(other)).name.endswith(":other")

    run(test)


@pytest.mark.parametrize(
    "token",
    [
        "", "a", "a.b", "a.b.c", "..", "firn_0123456789abcdef", "é.é.é",
        account_token("till", audience="vault"), account_token("till", audience=7),
        "x." + base64.urlsafe_b64encode(b"[" * 2500).decode() + ".x",
        "x." + base64.urlsafe_b64encode(json.dumps([AUDIENCE]).encode()).decode() + ".x",
        "x." + base64.urlsafe_b64encode(json.dumps({"aud": [AUDIENCE]}).encode()).decode() + ".x",
    ],
)  # fmt: skip
def test_what_cannot_be_a_token_for_brokers_is_refused_without_asking(token: str) -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(digest_of(token), token)
        with pytest.raises(Unauthorized):
            reviews.find(digest_of(token))
        assert not kubernetes.asked

    assert claims_of(token, AUDIENCE) is None
    run(test)


def test_a_clock_that_is_set_back_lets_no_answer_count_for_longer() -> None:
    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(DIGEST, TILL)
        kubernetes.disturb = lambda asked: "500"
        clock.set_back(hours=1)
        clock.advance(seconds=61)
        with pytest.raises(Unavailable):
            reviews.find(DIGEST)

    run(test)


def test_made_up_tokens_drive_out_nobodys_and_are_asked_about_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenreview, "ANSWERS_MAX", 8)
    monkeypatch.setattr(tokenreview, "REFUSALS_MAX", 8)

    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        await reviews.prepare(DIGEST, TILL)
        for number in range(40):
            token = account_token(f"a{number}")
            await reviews.prepare(digest_of(token), token)
        assert len(reviews._refused) == 8
        assert reviews.find(DIGEST).name == NAME
        too_many = [account_token(f"b{number}") for number in range(200)]
        answers = await asyncio.gather(
            *(reviews.prepare(digest_of(token), token) for token in too_many), return_exceptions=True
        )
        assert sum(isinstance(answer, Unavailable) for answer in answers) > 100
        assert all(answer is None or isinstance(answer, Unavailable) for answer in answers)
        clock.advance(seconds=31)
        assert reviews.find(DIGEST).name == NAME
        clock.advance(seconds=1)
        for number in range(20):
            token = account_token(f"c{number}")
            kubernetes.tokens[token] = account("shop", f"c{number}")
            await reviews.prepare(digest_of(token), token)
        assert len(reviews._known) == 8

    run(test)


def test_questions_under_way_are_bounded_and_whoever_comes_then_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenreview, "WAITING_MAX", 4)

    async def test(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        tokens = [account_token(f"b{number}") for number in range(20)]
        answers = await asyncio.gather(
            *(reviews.prepare(digest_of(token), token) for token in tokens), return_exceptions=True
        )
        assert reviews.asked == 4
        assert sum(isinstance(answer, Unavailable) for answer in answers) == 16

    run(test)


def test_an_open_stream_outlives_its_answer_and_ends_being_heard_when_the_token_is_taken_back(
    tmp_path: Path,
) -> None:
    async def main(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        broker = StandIn()
        rules = [{"principals": ["system:serviceaccounts:shop"], "allow": ["write"]}]
        await broker.create_topic("t", parse_spec({"access": rules}))
        site = Site(tmp_path)
        async with (
            guarded(site, broker, clock=clock, reviews=reviews) as server,
            Asking(server.address, site.with_token(TILL)) as ask,
            ask.stream() as peer,
        ):

            async def produced(number: int) -> str | None:
                found = await peer.ask(Op.PRODUCE, number, {}, batch(8, (b"k", b"v")))
                error: str | None = found.meta.get("error")
                return error

            for number in range(4):
                assert await produced(number) is None
                clock.advance(seconds=31)
                assert await produced(10 + number) is None
                await until_asked(reviews, number + 2)
            kubernetes.tokens[TILL] = {"authenticated": False}
            clock.advance(seconds=31)
            await produced(20)
            await until_asked(reviews, 6)
            clock.advance(seconds=1)
            assert await produced(21) == "unauthorized"

    run(main)


def test_health_costs_the_api_nothing(tmp_path: Path) -> None:
    async def main(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        site = Site(tmp_path)
        async with (
            guarded(site, StandIn(), clock=clock, reviews=reviews) as server,
            Asking(server.address, site.with_token(TILL)) as ask,
        ):
            assert (await ask("GET", "/healthz"))[0] == 200
            assert not kubernetes.asked

    run(main)


def test_a_token_of_the_file_is_not_shown_to_kubernetes(tmp_path: Path) -> None:
    async def main(kubernetes: FakeKubernetes, reviews: TokenReviews, clock: SetClock) -> None:
        seen: list[Asked] = kubernetes.asked
        site = Site(tmp_path, tokens={TILL: "principal: ops, roles: [admin]"})
        async with (
            guarded(site, StandIn(), clock=clock, reviews=reviews) as server,
            Asking(server.address, site.with_token(TILL)) as ask,
        ):
            assert (await ask("GET", "/v1/topics"))[0] == 200
            assert not seen

    run(main)
