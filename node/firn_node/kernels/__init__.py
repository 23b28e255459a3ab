"""Compiled array-in array-out loops, each loaded (with a cold cache: compiled) when its module is imported.

``python -m firn_node.kernels.warm`` fills the cache.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import firn_node.kernels.cpu  # noqa: F401 - names the CPU before anything imports Numba

if TYPE_CHECKING:
    from firn_node.kernels.active import ActiveIndex, KeyRows, ascending
    from firn_node.kernels.group import Group, Head, admit_record, fault_error, inspect_group, stamp_group
    from firn_node.kernels.hashing import fingerprint, secret_of
    from firn_node.kernels.lookup import lookup_newest, lookup_range
    from firn_node.kernels.sorting import sort_key_index
    from firn_node.kernels.walking import Fault

__all__ = [
    "ActiveIndex",
    "Fault",
    "Group",
    "Head",
    "KeyRows",
    "admit_record",
    "ascending",
    "fault_error",
    "fingerprint",
    "inspect_group",
    "lookup_newest",
    "lookup_range",
    "secret_of",
    "sort_key_index",
    "stamp_group",
]

_HOMES = {
    "ActiveIndex": "active",
    "Fault": "walking",
    "Group": "group",
    "Head": "group",
    "KeyRows": "active",
    "admit_record": "group",
    "ascending": "active",
    "fault_error": "group",
    "fingerprint": "hashing",
    "inspect_group": "group",
    "lookup_newest": "lookup",
    "lookup_range": "lookup",
    "secret_of": "hashing",
    "sort_key_index": "sorting",
    "stamp_group": "group",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
