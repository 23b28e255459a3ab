"""Which commit log segments go: whole ones, oldest first, once every topic with bytes in them lets go.

A topic lets go of a segment by time (all it has there is older than ``retention.time``) or by size (enough of its
bytes lie in newer segments). A segment stays while the index's checkpoint has not passed it, while a dirty record
lies in it (its partition is then due for compaction), or while a snapshot holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from firn.types import OFFSETS_TOPIC_ID, TOPICS_TOPIC_ID
from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.partition import DirtyState
from firn_node.log import SegmentInfo

_INTERNAL = (TOPICS_TOPIC_ID, OFFSETS_TOPIC_ID)


@dataclass(frozen=True, slots=True)
class Retained:
    """``release``: bytes below it may go. ``expired``: bytes below it would, but for the partitions that hold them."""

    release: int
    expired: int


def plan_retention(
    segments: list[SegmentInfo],
    topics: Mapping[int, TopicInfo],
    *,
    now_ms: int,
    checkpoint: int,
    oldest_dirty: int,
) -> Retained:
    """How far the log may be cut.

    Shape: ``segments`` oldest first, the active one last. Units: positions, log clock ms. ``oldest_dirty``: the
    least position of a dirty record of any partition.
    """
    left: dict[int, int] = {}
    for segment in segments:
        for topic_id, (size, _) in segment.topics.items():
            left[topic_id] = left.get(topic_id, 0) + size
    expired = segments[0].start if segments else 0
    for segment in segments:
        if not segment.sealed or segment.end > checkpoint:
            break
        for topic_id, (size, _) in segment.topics.items():
            left[topic_id] -= size
        if not all(
            _lets_go(topics.get(t), newest, left[t], now_ms) for t, (_, newest) in segment.topics.items()
        ):
            break
        expired = segment.end
    release = segments[0].start if segments else 0
    for segment in segments:
        if segment.end <= min(expired, oldest_dirty):
            release = segment.end
    return Retained(release, expired)


def _lets_go(topic: TopicInfo | None, newest_ms: int, bytes_left: int, now_ms: int) -> bool:
    if topic is None or topic.topic_id in _INTERNAL:
        return True
    retention = topic.spec.retention
    return now_ms - newest_ms > retention.time_ms or bytes_left >= retention.size_bytes


def holders(states: Mapping[tuple[int, int], DirtyState], expired: int) -> set[tuple[int, int]]:
    """The partitions whose dirty records lie below ``expired``: they hold retention back."""
    return {key for key, state in states.items() if state.is_dirty and state.oldest_position < expired}


def current_plan(core: Core, states: Mapping[tuple[int, int], DirtyState]) -> Retained:
    """How far the broker's log may be cut now."""
    dirty = (state.oldest_position for state in states.values() if state.is_dirty)
    return plan_retention(
        core.log.segments(),
        core.catalogue.by_id,
        now_ms=core.clock.now_ms(),
        checkpoint=core.index.checkpoint,
        oldest_dirty=min(dirty, default=core.dispatched_position),
    )
