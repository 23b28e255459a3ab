"""Status as brokers write it: conditions by the API's conventions, and whether a write would change anything."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from firn_node.clock import Clock
from firn_node.kubernetes.api import Object

FIELD_MANAGER = "firn-broker"
_LIST_KEYS = {"conditions": "type", "members": "node"}


def moment(clock: Clock) -> str:
    """Now, as the API writes times."""
    return datetime.fromtimestamp(clock.wall_ms() // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(resource: Object, kind: str) -> dict[str, Any] | None:
    found = (resource.get("status") or {}).get("conditions") or ()
    return next((each for each in found if each.get("type") == kind), None)


def differs(found: Any, wanted: Any, field: str = "") -> bool:
    """Whether ``found`` lacks anything of ``wanted``; what else is in it is somebody else's."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return True
        return any(differs(found.get(name), value, name) for name, value in wanted.items())
    if field in _LIST_KEYS:
        key = _LIST_KEYS[field]
        by_key = {each.get(key): each for each in found or ()}
        return any(differs(by_key.get(each[key]), each) for each in wanted)
    return bool(found != wanted)
