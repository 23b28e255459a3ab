"""Where the group records are kept: the protocol, a SQLite file for one machine, a dictionary for tests.

See ``docs/coordinator.md``.
"""

from firn_node.coordinator.api import (
    Absent,
    Coordinator,
    Done,
    Found,
    Reading,
    Refused,
    Swap,
    Unknown,
    Unreachable,
    Unusable,
)
from firn_node.coordinator.memory import MemoryCoordinator, Records
from firn_node.coordinator.sqlite import SqliteCoordinator

__all__ = [
    "Absent",
    "Coordinator",
    "Done",
    "Found",
    "MemoryCoordinator",
    "Reading",
    "Records",
    "Refused",
    "SqliteCoordinator",
    "Swap",
    "Unknown",
    "Unreachable",
    "Unusable",
]
