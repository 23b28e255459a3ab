"""Drill 33, at the end of a run: whatever an account of firn asked for is named by its rules, and every rule was used.

Last by its name among the tests here, so that all they did is in the API server's audit log.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cluster.api import Json
from cluster.audit import Request
from cluster.bare import BareCluster
from cluster.rights import Right, asked_by, rights_of, used_by
from shop_kit import SYSTEM

from firn.runs import driver_account, executor_account
from firn_operator.names import BROKER_CLUSTER_ROLE, SPARK_CLUSTER_ROLE

pytestmark = pytest.mark.cluster

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_OPERATOR = "firn-operator"
_DRIVER, _EXECUTOR = driver_account(""), executor_account("")
OWN, OTHER = "<own>", "<another's>"
# Of Spark, for a label on an executor's pod: whether an executor that is lost is marked before it is deleted, is chance.
BY_CHANCE = {"driver": {Right("", "pods", "patch", "")}}


@dataclass
class Holder:
    """Accounts of one kind: what they may do, what they did, and what they asked for beyond it."""

    granted: set[Right] = field(default_factory=set)
    used: set[Right] = field(default_factory=set)
    beyond: set[Right] = field(default_factory=set)

    def note(self, rights: Iterable[Right], own: str, request: Request) -> None:
        """One request of an account that is called `own`, and has these rights at one time or another."""
        rights = list(rights)
        self.granted |= {_shape(right, own) for right in rights}
        asked = asked_by(request)
        if asked and not any(right.covers(asked) for right in rights):
            self.beyond.add(asked)
        for use in used_by(request):
            self.used |= {_shape(right, own) for right in rights if right.covers(use)}


def _shape(right: Right, own: str) -> Right:
    """The same for each group of brokers: names of objects are its own or another's."""
    if not right.name or right.resource == "clusterroles":
        return right
    return replace(right, name=OWN if right.name == own else OTHER)


@pytest.fixture(scope="module")
def holders(bare: BareCluster) -> dict[str, Holder]:
    requests = list(bare.audit.since())
    granted = _roles_of_brokers(requests)
    review = list(rights_of(_rules(bare, f"clusterroles/{BROKER_CLUSTER_ROLE}")))
    spark = list(rights_of(_rules(bare, f"clusterroles/{SPARK_CLUSTER_ROLE}")))
    leader = _rules(bare, f"namespaces/{SYSTEM}/roles/{_OPERATOR}-leader")
    operator = [*rights_of(_rules(bare, f"clusterroles/{_OPERATOR}")), *rights_of(leader)]
    found = {kind: Holder() for kind in ("operator", "broker", "driver", "executor")}
    for request in requests:
        namespace, _, name = request.user.removeprefix("system:serviceaccount:").partition(":")
        if (namespace, name) == (SYSTEM, _OPERATOR):
            found["operator"].note(operator, name, request)
        elif (namespace, name) in granted:
            found["broker"].note([*granted[namespace, name], *review], name, request)
        elif name.startswith(_DRIVER):
            found["driver"].note(spark, name, request)
        elif name.startswith(_EXECUTOR):
            found["executor"].note([], name, request)
    return found


def _roles_of_brokers(requests: Iterable[Request]) -> dict[tuple[str, str], set[Right]]:
    """What the operator wrote into each Role, which is called as the account that has it."""
    granted: dict[tuple[str, str], set[Right]] = defaultdict(set)
    for request in requests:
        if request.is_write and request.resource == "roles" and request.user.endswith(f":{_OPERATOR}"):
            granted[request.namespace, request.name] |= set(rights_of(request.body["rules"]))
    return granted


def _rules(bare: BareCluster, path: str) -> list[Json]:
    rules: list[Json] = bare.api.get(f"{_RBAC}/{path}")["rules"]
    return rules


@pytest.mark.parametrize("kind", ["operator", "broker", "driver", "executor"])
def test_nobody_asks_for_what_no_rule_of_his_names(holders: dict[str, Holder], kind: str) -> None:
    assert sorted(holders[kind].beyond) == []


@pytest.mark.parametrize("kind", ["operator", "broker", "driver"])
def test_every_right_is_used_by_a_run_of_all_tests_here(
    holders: dict[str, Holder], kind: str, request: pytest.FixtureRequest
) -> None:
    ran = {item.path for item in request.session.items}
    if left := sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path not in ran):
        pytest.skip(f"what uses the rights was not run: {', '.join(left)}")
    unused = holders[kind].granted - holders[kind].used - BY_CHANCE.get(kind, set())
    assert sorted(unused) == []
