"""Principal x action x topic: the pure decision, every cell."""

import re
from itertools import product

import pytest

from firn.access import AccessRule, Right, parse_access, rights_of
from firn.errors import Forbidden, Invalid, Unauthorized
from firn.topicspec import parse_spec
from firn_node.security.decision import Action, Principal, decide

RULES = parse_access(
    [
        {"principals": ["reader", "both"], "allow": ["read"]},
        {"principals": ["writer", "both"], "allow": ["write"]},
        {"principals": ["spark-*"], "allow": ["read", "compact"]},
    ]
)
WHO = {
    "nobody": None,
    "stranger": Principal("stranger"),
    "reader": Principal("reader"),
    "writer": Principal("writer"),
    "both": Principal("both"),
    "spark": Principal("spark-run-7"),
    "admin": Principal("root", is_admin=True),
    "node": Principal("firn-1", node="firn-1"),
    "admin node": Principal("firn-1", is_admin=True, node="firn-1"),
}
OK, UNKNOWN, NO = None, Unauthorized, Forbidden
#                OPEN, KNOWN,   SEE,     READ,    WRITE,   COMPACT, ADMIN,   REPLICATE
EXPECTED = {
    "nobody":     [OK, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN],
    "stranger":   [OK, OK,      NO,      NO,      NO,      NO,      NO,      NO],
    "reader":     [OK, OK,      OK,      OK,      NO,      NO,      NO,      NO],
    "writer":     [OK, OK,      OK,      NO,      OK,      NO,      NO,      NO],
    "both":       [OK, OK,      OK,      OK,      OK,      NO,      NO,      NO],
    "spark":      [OK, OK,      OK,      OK,      NO,      OK,      NO,      NO],
    "admin":      [OK, OK,      OK,      OK,      OK,      OK,      OK,      NO],
    "node":       [OK, NO,      NO,      NO,      NO,      NO,      NO,      OK],
    "admin node": [OK, NO,      NO,      NO,      NO,      NO,      NO,      OK],
}  # fmt: skip
CELLS = [
    (who, action, kind) for who, row in EXPECTED.items() for action, kind in zip(Action, row, strict=True)
]


@pytest.mark.parametrize(("who", "action", "kind"), CELLS)
def test_each_principal_may_what_the_table_says(who: str, action: Action, kind: type | None) -> None:
    found = decide(WHO[who], action, "flights", RULES)
    assert (found if kind is None else type(found)) is kind


def test_a_denial_names_the_principal_the_missing_right_and_the_topic() -> None:
    found = decide(WHO["reader"], Action.WRITE, "flights", RULES)
    assert found is not None
    assert found.message == "reader may not write topic flights"
    assert found.details == {"principal": "reader", "missing": "write"}
    found = decide(WHO["reader"], Action.ADMIN, "flights", RULES)
    assert found is not None
    assert found.message == "reader has not the role admin"


@pytest.mark.parametrize("action", [Action.SEE, Action.READ, Action.WRITE, Action.COMPACT])
def test_a_topic_that_may_not_be_seen_is_denied_as_one_that_does_not_exist(action: Action) -> None:
    hidden = decide(WHO["stranger"], action, "secret", RULES)
    absent = decide(WHO["stranger"], action, "secret", ())
    assert hidden is not None
    assert absent is not None
    assert hidden.document() == absent.document()


def test_a_topic_without_rules_is_closed_to_all_but_administrators() -> None:
    assert decide(WHO["reader"], Action.READ, "flights", ()) is not None
    assert decide(WHO["admin"], Action.WRITE, "flights", ()) is None


@pytest.mark.parametrize(
    ("pattern", "principal", "matches"),
    [
        ("alice", "alice", True),
        ("alice", "alice2", False),
        ("alice", "malice", False),
        ("system:serviceaccount:shop:*", "system:serviceaccount:shop:web", True),
        ("system:serviceaccount:shop:*", "system:serviceaccount:shopping:web", False),
        ("*", "anybody", True),
        ("*:web", "a:b:web", True),
        ("*:web", "a:web:c", False),
        ("a.c", "abc", False),
        ("[a]*", "ab", False),
        ("a*", "a\nb", True),
        ("a*a", "a", False),
        ("a*b*c", "a-c-b-c", True),
        ("a*b*c", "a-c-b", False),
    ],
)
def test_only_a_star_is_special_in_a_pattern(pattern: str, principal: str, matches: bool) -> None:
    rules = [AccessRule((pattern,), frozenset([Right.READ]))]
    assert rights_of(principal, rules) == (frozenset([Right.READ]) if matches else frozenset())


def test_a_pattern_of_many_stars_is_answered_as_any_other() -> None:
    patterns = ["".join(signs) for size in range(6) for signs in product("ab*", repeat=size)]
    names = ["".join(signs) for size in range(6) for signs in product("ab", repeat=size)]
    for pattern in patterns:
        as_known = re.compile(".*".join(map(re.escape, pattern.split("*"))))
        for name in names:
            found = AccessRule((pattern,), frozenset()).names(name)
            assert found == (as_known.fullmatch(name) is not None), (pattern, name)
    costly = AccessRule(("*a" * 127 + "*b",), frozenset())  # a search that goes back never ends
    assert not costly.names("system:serviceaccount:shop:" + "a" * 220)


@pytest.mark.parametrize(
    ("access", "named"),
    [
        ({}, "spec.access"),
        (["alice"], r"spec.access\[0\]"),
        ([{"principals": ["a"], "allow": ["read"], "deny": []}], r"spec.access\[0\].deny"),
        ([{"principals": ["a"]}], r"spec.access\[0\].allow"),
        ([{"principals": [], "allow": ["read"]}], r"spec.access\[0\].principals"),
        ([{"principals": "a", "allow": ["read"]}], r"spec.access\[0\].principals"),
        ([{"principals": [7], "allow": ["read"]}], r"spec.access\[0\].principals"),
        ([{"principals": [" a"], "allow": ["read"]}], r"spec.access\[0\].principals"),
        ([{"principals": ["a"], "allow": ["READ"]}], r"spec.access\[0\].allow"),
        ([{"principals": ["a"], "allow": ["read"]}, {"principals": ["a"], "allow": [["read"]]}], r"\[1\]"),
    ],
)
def test_a_rule_that_is_none_is_refused_by_field(access: object, named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_access(access)
    with pytest.raises(Invalid, match=named):
        parse_spec({"access": access})


def test_the_rules_of_a_topic_are_kept_as_they_were_written() -> None:
    access = [{"principals": ["a*"], "allow": ["write", "read"]}]
    spec = parse_spec({"access": access})
    assert spec.document()["access"] == access
    assert parse_spec(spec.document()) == spec
