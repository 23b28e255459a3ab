"""The commit log, its retention summaries and the key query index."""

from firn_node.log.commitlog import CommitLog, Hold
from firn_node.log.keyquery import KeyQueryIndex
from firn_node.log.segment import SegmentInfo

__all__ = ["CommitLog", "Hold", "KeyQueryIndex", "SegmentInfo"]
