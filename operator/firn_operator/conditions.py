"""Conditions of a status: type, state, a reason in one word, a sentence, and since when.

A condition's time moves only when its state does, so that a pass which finds nothing new writes nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from firn_operator.kube import Obj

READY, PROGRESSING, DEGRADED, APPLIED = "Ready", "Progressing", "Degraded", "Applied"
MESSAGE_MAX = 2048


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    state: bool | None  # None: unknown
    reason: str
    message: str

    @property
    def status(self) -> str:
        return {True: "True", False: "False", None: "Unknown"}[self.state]


def find(obj: Obj | None, type_: str) -> Obj | None:
    """A condition of an object's status."""
    found: Sequence[Any] = ((obj or {}).get("status") or {}).get("conditions") or ()
    return next((dict(each) for each in found if each.get("type") == type_), None)


def is_true(obj: Obj | None, type_: str) -> bool:
    condition = find(obj, type_)
    return condition is not None and condition.get("status") == "True"


def render(wanted: Iterable[Condition], obj: Obj, *, generation: int, now: str) -> list[Obj]:
    """The conditions as status shows them; ``now`` counts for those whose state is another than in ``obj``."""
    shown = []
    for condition in wanted:
        old = find(obj, condition.type)
        same = old is not None and old.get("status") == condition.status
        shown.append({
            "type": condition.type,
            "status": condition.status,
            "reason": condition.reason,
            "message": condition.message[:MESSAGE_MAX],
            "observedGeneration": generation,
            "lastTransitionTime": old["lastTransitionTime"] if same and old is not None else now,
        })  # fmt: skip
    return sorted(shown, key=lambda each: str(each["type"]))


def differs(obj: Obj, wanted: Obj) -> bool:
    """Whether a status that the operator would apply says anything that the object's does not.

    Conditions of others are left out of the comparison; fields that are None count as absent.
    """
    status = obj.get("status") or {}
    for name, value in wanted.items():
        if name == "conditions":
            types = {each["type"] for each in value}
            have = [each for each in status.get("conditions") or () if each.get("type") in types]
            if sorted(have, key=lambda each: str(each["type"])) != value:
                return True
        elif status.get(name) != value:
            return True
    return False
