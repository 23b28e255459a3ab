"""Whether a stored object says what was rendered: the test that keeps the operator from writing twice.

The API server adds defaults and rewrites quantities (``0.5`` becomes ``500m``); both count as the same. Lists of named
things are compared by name, others by place. What others added is theirs. That a field is no longer *wished* shows in the
hash of what was applied last (annotation ``firn.dev/applied``), which goes with each object.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from firn_operator.kube import Obj
from firn_operator.names import APPLIED

_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_UNITS = {
    None: Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18), "Ki": Decimal(1 << 10), "Mi": Decimal(1 << 20),
    "Gi": Decimal(1 << 30), "Ti": Decimal(1 << 40), "Pi": Decimal(1 << 50), "Ei": Decimal(1 << 60),
}  # fmt: skip


def quantity(value: object) -> Decimal | None:
    """The number that a Kubernetes quantity stands for; None for what is none."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int) else None
    return Decimal(match[1]) * _UNITS[match[2]] if match else None


def digest(value: object) -> str:
    """A short name of a JSON value, the same for equal ones."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def sealed(obj: Obj) -> Obj:
    """The object with the hash of itself: what is applied."""
    meta = obj["metadata"]
    annotations = {**(meta.get("annotations") or {}), APPLIED: digest(obj)}
    return {**obj, "metadata": {**meta, "annotations": annotations}}


def is_applied(live: Obj | None, wanted: Obj) -> bool:
    """Whether ``wanted``, sealed, is what is stored."""
    return live is not None and covers(live, wanted)


def covers(live: Any, wanted: Any) -> bool:
    """Whether every field of ``wanted`` is in ``live`` with the same value."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return not wanted and live is None
        return all(covers(live.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list | tuple):
        return _covers_list(live if live is not None else [], wanted)
    if live == wanted:
        return True
    if wanted in ("", None, False, 0) and live is None:
        return True
    number = quantity(wanted)
    return number is not None and type(wanted) is not bool and number == quantity(live)


def _covers_list(live: Any, wanted: Sequence[Any]) -> bool:
    if not isinstance(live, list | tuple):
        return False
    if wanted and all(isinstance(each, Mapping) and "name" in each for each in wanted):
        by_name = {each.get("name"): each for each in live if isinstance(each, Mapping)}
        return all(each["name"] in by_name and covers(by_name[each["name"]], each) for each in wanted)
    return len(live) == len(wanted) and all(covers(a, b) for a, b in zip(live, wanted, strict=True))
