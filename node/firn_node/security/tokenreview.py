"""Tokens of service accounts: the Kubernetes API says whose they are (TokenReview), for one audience.

Invariants:

- what was answered counts for ``KEPT_S`` at most, by a clock that nobody sets, and never beyond the token's own expiry;
  a token that is in use is asked about again when half of that is over, in the background, so that nobody waits and no
  stream ends for it;
- the event loop never waits within a check: ``prepare`` is awaited before a request is looked at, ``find`` answers
  from what is known then;
- what cannot be a token for this audience, by what it says itself, costs the API no request; how many are asked at
  once, how many new ones a second, and how many answers are kept is bounded, good answers and refusals each by itself:
  tokens that somebody makes up drive out nobody's, and leave the API server to the leases;
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
from firn_node.security.decision import Principal

PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
SERVICE_ACCOUNT = "system:serviceaccount:"
KEPT_S = 60.0
AGAIN_S = KEPT_S / 2
REFUSED_S = 5.0  # a token that was refused is asked about again after this
FAILED_S = 0.5  # ... and one that got no answer
AT_ONCE = 16
WAITING_MAX = 512
NEW_PER_S = 50.0  # and as many at once
ANSWERS_MAX = 10_000
REFUSALS_MAX = 1_000
_ASK_S = 5.0
_GROUPS_MAX = 64

log = logging.getLogger("firn.security")


@dataclass(frozen=True, slots=True)
class _Known:
    """An account's token, proven. Moments of ``Clock.monotonic``, but for ``expires_ms``."""

    token: str
    principal: Principal
    again_at: float
    until: float
    expires_ms: int


@dataclass(frozen=True, slots=True)
class _Refused:
    error: FirnError
    until: float


class TokenReviews:
    """It owns ``api``."""

    def __init__(self, api: Api, audience: str, clock: Clock) -> None:
        self.audience = audience
        self.asked = 0
        self._api = api
        self._clock = clock
        self._known: dict[bytes, _Known] = {}  # the oldest answer first
        self._refused: dict[bytes, _Refused] = {}
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._allowance, self._allowed_at = NEW_PER_S, clock.monotonic()

    async def prepare(self, digest: bytes, token: str) -> None:
        """Return once ``find`` knows what there is to be known of a token.

        Errors: Unavailable when too many are asked about.
        """
        now = self._clock.monotonic()
        known = self._counting(digest)
        refused = self._refused.get(digest)
        if known is not None or (refused is not None and now < refused.until):
            return
        if claims_of(token, self.audience) is None:
            return
        if digest not in self._asking and (len(self._asking) >= WAITING_MAX or not self._may_ask(now)):
            raise Unavailable("too many tokens are being asked about; try again")
        await asyncio.wait([self._ask(digest, token)])

    def find(self, digest: bytes) -> Principal:
        """Who a token speaks for now.

        Errors: Unauthorized; Unavailable when the API has not said.
        """
        now = self._clock.monotonic()
        found = self._known.get(digest)
        if found is None:
            refused = self._refused.get(digest)
            if refused is not None and now < refused.until:
                raise refused.error
            raise Unauthorized("the token is not known here, or has expired")
        if now >= found.again_at and len(self._asking) < WAITING_MAX:
            self._ask(digest, found.token)
        if self._counting(digest) is None:
            raise Unavailable("whose this token is, is being asked for again; try again")
        return found.principal

    def _counting(self, digest: bytes) -> _Known | None:
        """What is known of a token and counts now."""
        found = self._known.get(digest)
        if found is None or self._clock.monotonic() >= found.until:
            return None
        return found if self._clock.wall_ms() < found.expires_ms else None

    def _may_ask(self, now: float) -> bool:
        self._allowance = min(NEW_PER_S, self._allowance + (now - self._allowed_at) * NEW_PER_S)
        self._allowed_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _ask(self, digest: bytes, token: str) -> "asyncio.Task[None]":
        """The question that is under way."""
        task = self._asking.get(digest)
        if task is None:
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
        async with self._places:
            self.asked += 1
            sent = self._clock.monotonic()
            try:
                found = await self._api.request("POST", PATH, body=body, within_s=_ASK_S)
            except ApiError as error:
                log.warning("a service account's token could not be checked: %s", error)
                if self._counting(digest) is None:
                    self._known.pop(digest, None)
                    why = Unavailable("the Kubernetes API did not say whose this token is; try again")
                    self._refuse(digest, why, FAILED_S)
                return
        try:
            principal = _principal_of(found.get("status") or {}, self.audience)
        except Unauthorized as error:
            self._known.pop(digest, None)
            self._refuse(digest, error, REFUSED_S)
            return
        claims = claims_of(token, self.audience) or {}
        before = self._known.pop(digest, None)
        if before is not None and before.principal == principal:
            principal = before.principal  # rights are kept by the principal's identity
        self._refused.pop(digest, None)
        self._known[digest] = _Known(
            token, principal, sent + AGAIN_S, sent + KEPT_S, int(float(claims.get("exp", 0)) * 1000)
        )
        if len(self._known) > ANSWERS_MAX:
            del self._known[next(iter(self._known))]

    def _refuse(self, digest: bytes, error: FirnError, seconds: float) -> None:
        self._refused.pop(digest, None)
        self._refused[digest] = _Refused(error, self._clock.monotonic() + seconds)
        if len(self._refused) > REFUSALS_MAX:
            del self._refused[next(iter(self._refused))]

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
    except (binascii.Error, ValueError, RecursionError):
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
