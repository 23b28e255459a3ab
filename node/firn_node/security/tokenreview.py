"""Tokens of service accounts: the Kubernetes API says whose they are (TokenReview), for one audience.

Invariants:

- what was answered counts for ``KEPT_MS`` at most, and never beyond the token's own expiry; a token that is in use is
  asked about again when half of that is over, in the background, so that nobody waits and no stream ends for it;
- the event loop never waits within a check: ``prepare`` is awaited before a request is looked at, ``find`` answers
  from what is known then;
- what cannot be a token for this audience, by what it says itself, costs the API no request; how many are asked at
  once and how many answers are kept is bounded;
- no answer is no refusal: ``Unavailable``, so that clients ask again.

A token that the API knows counts for service accounts alone: no other name that it may give is taken.
"""

import asyncio
import base64
import binascii
import json
import logging
from dataclasses import dataclass
from typing import Any

from firn.access import check_principal
from firn.errors import FirnError, Invalid, Unauthorized, Unavailable
from firn_node.clock import Clock
from firn_node.kubernetes.api import Api, ApiError, Object
from firn_node.security.certificates import Identity
from firn_node.security.decision import Principal

PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
SERVICE_ACCOUNT = "system:serviceaccount:"
KEPT_MS = 60_000
AGAIN_MS = KEPT_MS // 2
REFUSED_MS = 5_000  # a token that was refused is asked about again after this
FAILED_MS = 500  # ... and one that got no answer
AT_ONCE = 16
WAITING_MAX = 512
_ANSWERS_KEPT = 10_000
_ASK_S = 5.0
_GROUPS_MAX = 64

log = logging.getLogger("firn.security")


@dataclass(slots=True)
class _Answer:
    """What is known of a token. ``token``: to ask again; None for one that was refused."""

    token: str | None
    principal: Principal | None
    refusal: FirnError | None
    again_ms: int  # from then on it is asked about again
    until_ms: int


class TokenReviews:
    """It owns ``api``."""

    def __init__(self, api: Api, audience: str, clock: Clock) -> None:
        self.audience = audience
        self.asked = 0
        self._api = api
        self._clock = clock
        self._known: dict[bytes, _Answer] = {}
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)

    async def prepare(self, digest: bytes, token: str) -> None:
        """Return once ``find`` knows what there is to be known of a token."""
        known = self._known.get(digest)
        if known is not None and self._clock.wall_ms() < known.until_ms:
            return
        if claims_of(token, self.audience) is None:
            return
        task = self._ask(digest, token)
        if task is not None:
            await asyncio.wait([task])

    def find(self, digest: bytes) -> Identity:
        """Who a token speaks for, and until when that counts without another look.

        Errors: Unauthorized; Unavailable when the API has not said.
        """
        now = self._clock.wall_ms()
        known = self._known.get(digest)
        if known is None:
            raise Unauthorized("the token is not known here, or has expired")
        if now >= known.again_ms and known.token is not None:
            self._ask(digest, known.token)
        if now >= known.until_ms:
            raise Unavailable("whose this token is, is being asked for again; try again")
        if known.principal is None:
            raise known.refusal or Unauthorized("the token is not known here, or has expired")
        look_again = known.again_ms if now < known.again_ms else now + FAILED_MS
        return Identity(known.principal, min(look_again, known.until_ms))

    def _ask(self, digest: bytes, token: str) -> "asyncio.Task[None] | None":
        """The question that is under way; None when there are too many."""
        task = self._asking.get(digest)
        if task is None:
            if len(self._asking) >= WAITING_MAX:
                return None
            task = asyncio.create_task(self._review(digest, token), name="firn token review")
            self._asking[digest] = task
            task.add_done_callback(lambda _: self._asking.pop(digest, None))
        return task

    async def _review(self, digest: bytes, token: str) -> None:
        """Know the answer. Without one, what was known counts for as long as it did."""
        body = {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self.audience]},
        }  # fmt: skip
        sent = self._clock.wall_ms()
        try:
            async with self._places:
                self.asked += 1
                found = await self._api.request("POST", PATH, body=body, within_s=_ASK_S)
        except ApiError as error:
            log.warning("a service account's token could not be checked: %s", error)
            refusal = Unavailable("the Kubernetes API did not say whose this token is; try again")
            known = self._known.get(digest)
            if known is None or known.until_ms <= self._clock.wall_ms():
                until = self._clock.wall_ms() + FAILED_MS
                self._keep(digest, _Answer(None, None, refusal, until, until))
            return
        claims = claims_of(token, self.audience) or {}
        try:
            principal = _principal_of(found.get("status") or {}, self.audience)
        except Unauthorized as error:
            until = sent + REFUSED_MS
            self._keep(digest, _Answer(None, None, error, until, until))
            return
        expires_ms = int(claims.get("exp", 0)) * 1000
        until = min(sent + KEPT_MS, expires_ms)
        self._keep(digest, _Answer(token, principal, None, min(sent + AGAIN_MS, until), until))

    def _keep(self, digest: bytes, answer: _Answer) -> None:
        if len(self._known) >= _ANSWERS_KEPT:
            now = self._clock.wall_ms()
            self._known = {at: each for at, each in self._known.items() if each.until_ms > now}
            while len(self._known) >= _ANSWERS_KEPT:
                del self._known[next(iter(self._known))]
        known = self._known.pop(digest, None)
        if known is not None and known.principal == answer.principal and known.principal is not None:
            answer.principal = known.principal  # rights are kept by the principal's identity
        self._known[digest] = answer

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._api.close()


def claims_of(token: str, audience: str) -> dict[str, Any] | None:
    """What a token says of itself, unproven; None when it cannot be one for this audience."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):
        return None
    if not isinstance(found, dict) or type(found.get("exp")) not in (int, float):
        return None
    named = found.get("aud")
    audiences = [named] if isinstance(named, str) else named
    return found if isinstance(audiences, list) and audience in audiences else None


def _principal_of(status: Object, audience: str) -> Principal:
    """Errors: Unauthorized."""
    user = status.get("user") or {}
    if status.get("authenticated") is not True:
        raise Unauthorized("the token is not known to Kubernetes, or has expired")
    if audience not in (status.get("audiences") or ()):
        raise Unauthorized(f"the token is not for the audience {audience}")
    name, groups = user.get("username"), user.get("groups") or []
    if not isinstance(name, str) or not name.startswith(SERVICE_ACCOUNT):
        raise Unauthorized("the token is of no service account")
    try:
        check_principal(name, "the service account")
        members = tuple(check_principal(group, "a group") for group in groups[:_GROUPS_MAX])
    except Invalid as error:
        raise Unauthorized(error.message) from None
    return Principal(name, groups=members)
