"""Which of the rights that roles grant were used, told from the audit log.

A request uses the right that it names, and beyond that what the API server asks for on the way:

=============================================  ===========================================================
request                                        it also uses
=============================================  ===========================================================
an apply that made its object                  ``create`` of that kind
a Role or ClusterRole written                  every right in it: nobody gives what he has not
a RoleBinding or ClusterRoleBinding written    ``bind`` of the role that it names
an owner whose deletion the object holds up    ``update`` of the owner's finalizers (an admission plugin)
=============================================  ===========================================================
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cluster.api import Json
from cluster.audit import Request

_RBAC = "rbac.authorization.k8s.io"
_CREATED = 201


@dataclass(frozen=True, slots=True, order=True)
class Right:
    group: str  # the API group; "" for the core one
    resource: str  # with its subresource
    verb: str
    name: str = ""  # of the only object that may be named; "": any

    def covers(self, other: "Right") -> bool:
        same = (self.group, self.resource, self.verb) == (other.group, other.resource, other.verb)
        return same and self.name in ("", other.name)


def rights_of(rules: Iterable[Json]) -> Iterator[Right]:
    """What the rules of a role come to, one by one."""
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames") or [""]:
                        yield Right(group, resource, verb, name)


def asked_by(request: Request) -> Right | None:
    """The right that a request needs; None where it is for no resource (``/version``, discovery)."""
    if request.resource.startswith("/"):
        return None
    return Right(request.group, request.resource, request.verb, request.name)


def used_by(request: Request) -> Iterator[Right]:
    """All that a request needs, if it was answered well."""
    asked = asked_by(request)
    if asked is None:
        return
    yield asked
    if not request.is_write or request.code >= 400 or not isinstance(request.body, dict):
        return
    if request.verb == "patch" and request.code == _CREATED:
        yield Right(request.group, request.resource, "create")
    if request.group == _RBAC and request.resource in ("roles", "clusterroles"):
        yield from rights_of(request.body.get("rules") or ())
    if request.group == _RBAC and request.resource in ("rolebindings", "clusterrolebindings"):
        role = request.body.get("roleRef") or {}
        yield Right(_RBAC, f"{role.get('kind', '').lower()}s", "bind", role.get("name", ""))
    for owner in (request.body.get("metadata") or {}).get("ownerReferences") or ():
        if owner.get("blockOwnerDeletion"):
            group = owner["apiVersion"].rpartition("/")[0]
            yield Right(group, f"{owner['kind'].lower()}s/finalizers", "update", owner["name"])
