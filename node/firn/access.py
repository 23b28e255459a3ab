"""Who may do what with a topic: the rules of ``spec.access``, parsed and applied.

A rule grants rights to principals, rights add up, and what no rule grants is denied. A principal is named in full,
or by a pattern in which ``*`` stands for any run of characters::

    access:
      - principals: ["system:serviceaccount:shop:*", alice]
        allow: [read, write]

========= ==================================================================================
right     what it is for
========= ==================================================================================
read      consume, get, query, look up ids and times, snapshots, a group's offsets
write     produce, put, delete by key
compact   ask for a compaction of this topic, cancel it
========= ==================================================================================

Any of them is enough to see the topic: its spec, its status, that it is there at all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from firn.errors import Invalid

PRINCIPAL_CHARACTERS_MAX = 256


class Right(StrEnum):
    READ = "read"
    WRITE = "write"
    COMPACT = "compact"


Rights = frozenset[Right]
NO_RIGHTS: Rights = frozenset()
ALL_RIGHTS: Rights = frozenset(Right)


@dataclass(frozen=True, slots=True)
class AccessRule:
    principals: tuple[str, ...]
    allow: Rights

    def names(self, principal: str) -> bool:
        return any(_matches(pattern, principal) for pattern in self.principals)


def rights_of(principal: str, rules: Iterable[AccessRule]) -> Rights:
    """All that the rules grant to a principal."""
    return NO_RIGHTS.union(*(rule.allow for rule in rules if rule.names(principal)))


def parse_access(value: Any) -> tuple[AccessRule, ...]:
    """The rules of ``spec.access``; absent: none.

    Errors: Invalid, naming the field, what was expected and what was found.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise Invalid(f"spec.access: expected a list of rules, found {value!r}")
    return tuple(_parse_rule(rule, f"spec.access[{at}]") for at, rule in enumerate(value))


def check_principal(value: Any, field: str) -> str:
    """A principal's name or pattern. Errors: Invalid."""
    if (
        isinstance(value, str)
        and 0 < len(value) <= PRINCIPAL_CHARACTERS_MAX
        and value.isprintable()
        and value == value.strip()
    ):
        return value
    raise Invalid(
        f"{field}: expected 1 to {PRINCIPAL_CHARACTERS_MAX} printable characters without blanks at the ends, "
        f"found {value!r}"
    )


def _parse_rule(rule: Any, field: str) -> AccessRule:
    if not isinstance(rule, Mapping):
        raise Invalid(f"{field}: expected a mapping with principals and allow, found {rule!r}")
    unknown = [name for name in rule if name not in ("principals", "allow")]
    if unknown:
        raise Invalid(f"{field}.{unknown[0]}: unknown field; known ones are principals, allow")
    principals = _entries(rule, "principals", field)
    allow = _entries(rule, "allow", field)
    return AccessRule(
        tuple(check_principal(name, f"{field}.principals") for name in principals),
        frozenset(_parse_right(name, f"{field}.allow") for name in allow),
    )


def _entries(rule: Mapping[str, Any], name: str, field: str) -> list[Any]:
    found = rule.get(name)
    if isinstance(found, list) and found:
        return found
    raise Invalid(f"{field}.{name}: expected a list with at least one entry, found {found!r}")


def _parse_right(value: Any, field: str) -> Right:
    try:
        return Right(value)
    except ValueError:
        raise Invalid(f"{field}: expected {', '.join(Right)}, found {value!r}") from None


def _matches(pattern: str, principal: str) -> bool:
    """In one walk: a pattern is anybody's who may make a topic, and must not cost more than it is long."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == principal
    *middle, last = rest
    at, end = len(first), len(principal) - len(last)
    if at > end or not principal.startswith(first) or not principal.endswith(last):
        return False
    for part in middle:
        at = principal.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
