"""The partition index: offset -> position in the commit log, light queues, producers, checkpoint."""

from firn_node.index.base import (
    Entry,
    LightEntry,
    LightRow,
    NewEntry,
    NewLight,
    PartitionEnd,
    PartitionIndex,
    ProducerRow,
)
from firn_node.index.migrate import Migration, migrate
from firn_node.index.opening import open_index
from firn_node.index.verify import verify

__all__ = [
    "Entry",
    "LightEntry",
    "LightRow",
    "Migration",
    "NewEntry",
    "NewLight",
    "PartitionEnd",
    "PartitionIndex",
    "ProducerRow",
    "migrate",
    "open_index",
    "verify",
]
