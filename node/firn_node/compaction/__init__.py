"""The compacted log of a partition, and the compaction that writes it."""

from firn_node.compaction.answers import FoundRow
from firn_node.compaction.compactor import Job, compact
from firn_node.compaction.log import CompactedLog, LogStats, Pin
from firn_node.compaction.manifest import CleanSegment, DirtySegment, Manifest
from firn_node.compaction.throttle import Throttle

__all__ = [
    "CleanSegment", "CompactedLog", "DirtySegment", "FoundRow", "Job", "LogStats", "Manifest", "Pin", "Throttle",
    "compact",
]  # fmt: skip
