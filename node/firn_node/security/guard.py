"""What the server asks before it does anything: one ``Guard`` a broker, one ``Access`` a connection.

A broker without authentication has no guard, and pays nothing for this. Invariants:

- nothing is decided from what was true before: each check proves the credentials against the trust that is in
  force now, and takes the topic's rules as they are now (both are compared by identity, which is cheap);
- every denial is in the audit log, and says nothing about topics that the asker may not see;
- a batch names its topic by id alone: an id that the asker has no right on is answered as one that does not exist;
- where this broker may not know all topics, the asker is told to try again, or elsewhere, before any right is denied.
"""

import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from firn.access import AccessRule, Rights, parse_access
from firn.batch import MAGIC, VERSION, Buffer
from firn.errors import FirnError, Unauthorized, UnknownTopic
from firn_node.clock import Clock
from firn_node.engine.api import TopicInfo
from firn_node.security.audit import AuditLog
from firn_node.security.decision import (
    Action,
    Principal,
    denial,
    is_allowed,
    no_credentials,
    topic_rights,
)
from firn_node.security.tokens import digest_of
from firn_node.security.trust import Caller, Reviews, TrustFiles

_SCHEME = "bearer "
_RULES_KEPT = 10_000  # topics whose rules are kept parsed
_BATCH_TOPIC = struct.Struct("<IH6xI16xQ")  # of a batch's header: magic, version, size, topic's id


class Topics(Protocol):
    """The broker's topics, as the guard looks them up."""

    def topic(self, name: str) -> TopicInfo: ...

    def topic_of_id(self, topic_id: int) -> TopicInfo | None: ...

    def unknown_id(self, topic_id: int) -> FirnError: ...


@dataclass(slots=True)
class Guard:
    files: TrustFiles
    clock: Clock
    topics: Topics
    audit: AuditLog | None = None
    reviews: Reviews | None = None  # of service accounts' tokens
    denials: Counter[str] = field(default_factory=Counter)  # code
    _rules: dict[int, tuple[TopicInfo, tuple[AccessRule, ...]]] = field(default_factory=dict)

    def access(self, address: str, certificate: bytes | None) -> "Access":
        """``certificate``: what TLS has checked, as DER; None when the peer has shown none."""
        return Access(self, address, self.caller(certificate, None))

    def caller(self, certificate: bytes | None, digest: bytes | None) -> Caller:
        return Caller(self.files, self.clock, certificate, digest, self.reviews)

    async def prepare(self, authorization: str | None) -> None:
        """Have whoever can tell say whose a request's token is, before the request is looked at."""
        if self.reviews is None or authorization is None or not _is_bearer(authorization):
            return
        token = _token_in(authorization)
        digest = digest_of(token)
        if self.files.current.tokens.find(digest) is None:
            await self.reviews.prepare(digest, token)

    def rules_of(self, topic: TopicInfo) -> tuple[AccessRule, ...]:
        found = self._rules.get(topic.topic_id)
        if found is None or found[0] is not topic:
            if len(self._rules) >= _RULES_KEPT:
                self._rules.clear()
            found = topic, parse_access(topic.spec.operator.get("access"))
            self._rules[topic.topic_id] = found
        return found[1]

    def named(self, topic: str) -> TopicInfo | None:
        try:
            return self.topics.topic(topic)
        except UnknownTopic:
            return None

    def note(
        self, principal: Principal | None, address: str, action: str, target: str | None, outcome: str
    ) -> None:
        if self.audit is not None:
            name = None if principal is None else principal.name
            self.audit.note(principal=name, address=address, action=action, target=target, outcome=outcome)


class Access:
    """What one peer may do. Checks are made on the event loop, one after another."""

    __slots__ = ("_caller", "_certificate", "_guard", "_rights", "address")

    def __init__(self, guard: Guard, address: str, caller: Caller) -> None:
        self.address = address
        self._guard = guard
        self._caller = caller
        self._certificate = caller.certificate
        self._rights: dict[int, tuple[TopicInfo, Principal, Rights]] = {}

    def present(self, authorization: str | None) -> None:
        """Take a request's ``Authorization`` header; without one, the connection's certificate counts.

        Errors: Unauthorized for one of another scheme.
        """
        digest = None if authorization is None else _digest_in(authorization)
        if digest != self._caller.digest:
            self._caller = self._guard.caller(self._certificate, digest)

    def principal(self) -> Principal | None:
        """Errors: Unauthorized when the credentials are no good (any more)."""
        return self._caller.principal()

    def check(self, action: Action, topic: str | None = None, *, what: str) -> None:
        """Go on, or not. ``topic``: by name, there or not; ``what``: the action as the audit log shall name it.

        Errors: Unauthorized, Forbidden.
        """
        if action is Action.OPEN:
            return
        principal = None
        try:
            principal = self._known()
            found = None if topic is None else self._guard.named(topic)
            if not is_allowed(principal, action, self._rights_on(found, principal)):
                raise denial(principal, action, topic)
        except FirnError as error:
            self._denied(principal, what, topic, error)
            raise

    def check_batches(self, data: Buffer, *, what: str) -> None:
        """Go on if every batch that its headers tell of may be written.

        Errors: Unauthorized; Forbidden; for an id with no topic that the peer may see UnknownTopic, or what sends it to
        who knows.
        """
        principal, target = None, None
        try:
            principal = self._known()
            for topic_id in topic_ids(data):
                target = f"id {topic_id}"
                self._check_write(principal, topic_id)
        except FirnError as error:
            self._denied(principal, what, target, error)
            raise

    def may_see(self, topic: TopicInfo) -> bool:
        """Errors: Unauthorized."""
        return bool(self._rights_on(topic, self._known()))

    def done(self, what: str, topic: str | None, outcome: str = "done") -> None:
        """Note an administrative action and how it ended."""
        try:
            principal = self.principal()
        except Unauthorized:
            principal = None
        self._guard.note(principal, self.address, what, topic, outcome)

    def _known(self) -> Principal:
        principal = self._caller.principal()
        if principal is None:
            raise no_credentials()
        return principal

    def _check_write(self, principal: Principal, topic_id: int) -> None:
        topic = self._guard.topics.topic_of_id(topic_id)
        rights = self._rights_on(topic, principal)
        if topic is None or not rights:
            raise self._guard.topics.unknown_id(topic_id)
        if not is_allowed(principal, Action.WRITE, rights):
            raise denial(principal, Action.WRITE, topic.name)

    def _rights_on(self, topic: TopicInfo | None, principal: Principal) -> Rights:
        if (
            topic is None
        ):  # as if it had no rules: an administrator goes on, and is told that it does not exist
            return topic_rights(principal, ())
        known = self._rights.get(topic.topic_id)
        if known is not None and known[0] is topic and known[1] is principal:
            return known[2]
        if len(self._rights) >= _RULES_KEPT:
            self._rights.clear()
        rights = topic_rights(principal, self._guard.rules_of(topic))
        self._rights[topic.topic_id] = topic, principal, rights
        return rights

    def _denied(self, principal: Principal | None, what: str, topic: str | None, error: FirnError) -> None:
        self._guard.denials[error.code] += 1
        self._guard.note(principal, self.address, what, topic, error.code)


def topic_ids(data: Buffer) -> "set[int]":
    """The topics of batches that lie one after another, as far as their headers lead.

    The engine walks by the same headers, and stops where it cannot trust one, here or before: it finds no others.
    """
    found: set[int] = set()
    at, end = 0, len(data) - _BATCH_TOPIC.size
    while at <= end:
        magic, version, size, topic_id = _BATCH_TOPIC.unpack_from(data, at)
        if magic != MAGIC or version != VERSION:
            break
        found.add(topic_id)
        at += max(size, _BATCH_TOPIC.size)
    return found


def _digest_in(authorization: str) -> bytes:
    if not _is_bearer(authorization):
        raise Unauthorized("Authorization: expected a bearer token")
    return digest_of(_token_in(authorization))


def _is_bearer(authorization: str) -> bool:
    return authorization[: len(_SCHEME)].lower() == _SCHEME


def _token_in(authorization: str) -> str:
    return authorization[len(_SCHEME) :].strip()
