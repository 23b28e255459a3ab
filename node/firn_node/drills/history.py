"""What a drill's load asked for, was answered, and saw: everything that the checker decides by.

A record says who it is: its timestamp is its *id*, ``session * SESSION + number``. A session is one producer's life;
its records of one partition must stand in the order of their numbers, unless it is a session of single writes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from firn.record import Record
from firn_node.drills.linear import Operation

SESSION = 10**6


class Row(NamedTuple):
    """A record where it was found."""

    partition: int
    offset: int
    id: int
    key: bytes
    value: bytes | None


def row_of(record: Record) -> Row:
    return Row(record.partition, record.offset, record.timestamp, record.key, record.value)


@dataclass(slots=True)
class Pass:
    """What one reader saw from one start on; ``is_whole``: it began at the first record and came to the end."""

    name: str
    view: str  # raw or compacted
    rows: list[Row] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class History:
    sent: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)  # id -> key, value
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> partition, offset
    refused: set[int] = field(default_factory=set)  # certainly not written
    unordered: set[int] = field(default_factory=set)  # sessions
    operations: list[Operation] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @property
    def unknown(self) -> int:
        """How many outcomes nobody knows."""
        return len(self.sent) - len(self.acknowledged) - len(self.refused)


@dataclass(slots=True)
class End:
    """What the cluster shows once all is quiet."""

    raw: list[Row] = field(default_factory=list)
    view: list[Row] = field(default_factory=list)
    gets: dict[bytes, Row | None] = field(default_factory=dict)
