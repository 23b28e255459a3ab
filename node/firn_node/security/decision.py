"""The decision, pure: principal, action, topic and its rules in; nothing, or the 401 or 403, out.

============ ============================================ =====================================================
action       who may                                      asked for by
============ ============================================ =====================================================
OPEN         everybody                                    health
KNOWN        every client that has proven who it is       lists, status (each shows only what may be seen), and
                                                          what is decided per message or batch
SEE          who has any right on the topic               a topic's spec and state
READ, WRITE, who has this right on the topic              see ``firn.access``
COMPACT
ADMIN        the role ``admin``                           topics made, changed and deleted; metrics
REPLICATE    nodes of the cluster                         ``/v1/replicate``, rebuild, ``/v1/catalogue``
============ ============================================ =====================================================

The role ``admin`` has every right on every topic: it could grant them to itself anyway. A node may replicate and
nothing else; nobody else may replicate.

What is said never tells whether a topic exists that the asker may not see: an unknown topic has no rules, and is
denied with the same words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from firn.access import ALL_RIGHTS, AccessRule, Right, Rights, rights_of
from firn.errors import FirnError, Forbidden, Unauthorized


class Action(Enum):
    OPEN = "open"
    KNOWN = "known"
    SEE = "see"
    READ = "read"
    WRITE = "write"
    COMPACT = "compact"
    ADMIN = "admin"
    REPLICATE = "replicate"


_RIGHTS = {Action.READ: Right.READ, Action.WRITE: Right.WRITE, Action.COMPACT: Right.COMPACT}


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who has proven who they are. ``node``: the name, where it is a replica of this cluster; ``groups``: names
    that rules may give rights to as well.
    """

    name: str
    is_admin: bool = False
    node: str | None = None
    groups: tuple[str, ...] = ()


def topic_rights(principal: Principal, rules: Sequence[AccessRule]) -> Rights:
    """The rights on a topic with these rules."""
    if principal.node is not None:
        return frozenset()
    if principal.is_admin:
        return ALL_RIGHTS
    return frozenset().union(*(rights_of(name, rules) for name in (principal.name, *principal.groups)))


def is_allowed(principal: Principal, action: Action, rights: Rights) -> bool:
    """``rights``: those on the topic that the action is about, if it is about one."""
    if action is Action.OPEN:
        return True
    if action is Action.REPLICATE:
        return principal.node is not None
    if principal.node is not None:
        return False
    if action is Action.KNOWN:
        return True
    if action is Action.ADMIN:
        return principal.is_admin
    if action is Action.SEE:
        return bool(rights)
    return _RIGHTS[action] in rights


def decide(
    principal: Principal | None, action: Action, topic: str | None = None, rules: Sequence[AccessRule] = ()
) -> FirnError | None:
    """None: go on. Else the answer. ``rules``: those of the topic; none when there is no such topic."""
    if action is Action.OPEN:
        return None
    if principal is None:
        return no_credentials()
    if is_allowed(principal, action, topic_rights(principal, rules)):
        return None
    return denial(principal, action, topic)


def no_credentials() -> Unauthorized:
    return Unauthorized("who are you? Connect with a client certificate, or send a bearer token")


def denial(principal: Principal, action: Action, topic: str | None) -> Forbidden:
    """Names the principal and what is missing."""
    missing = "see" if action is Action.SEE else action.value
    details = {"principal": principal.name, "missing": missing}
    if principal.node is not None:
        return Forbidden(f"{principal.name} is a node: its certificate is for replication alone", **details)
    if action is Action.REPLICATE:
        return Forbidden(f"{principal.name} is no node of this cluster", **details)
    if action is Action.ADMIN:
        return Forbidden(f"{principal.name} has not the role admin", **details)
    return Forbidden(f"{principal.name} may not {missing} topic {topic}", **details)
