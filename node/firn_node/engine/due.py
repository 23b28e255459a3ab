"""When a partition is due for compaction, and how urgently: a pure function of its state row and its topic's spec.

Rule by rule, in the words of the design; the sentence it returns is log line, status and test assertion.
"""

from dataclasses import dataclass

from firn.topicspec import CompactionSpec
from firn_node.engine.partition import DirtyState


@dataclass(frozen=True, slots=True)
class Due:
    urgency: float  # 1 and more; the most urgent goes first
    reason: str
    with_active: bool  # cover the active segment too


def when_due(
    state: DirtyState,
    spec: CompactionSpec,
    *,
    now_ms: int,
    reclaim_age_ms: int,
    holds_retention: bool = False,
    active_since_ms: int = 0,
) -> Due | None:
    """Why the partition should be compacted now, or None.

    Units: bytes and log clock ms. ``active_since_ms`` 0: not known, the oldest dirty record stands for it.
    """
    if now_ms < state.retry_ms:
        return None
    if 0 <= state.next_tombstone_ms <= now_ms:
        return Due(1.0, "a tombstone's time is over", with_active=False)
    if state.oldest_masked_ms >= 0 and now_ms - state.oldest_masked_ms >= reclaim_age_ms:
        return Due(1.0, "a masked row is older than reclaimAge", with_active=False)
    if not state.is_dirty or now_ms - state.oldest_ms < spec.min_lag_ms:
        return None
    age = now_ms - state.oldest_ms
    found: list[Due] = []
    if age >= spec.max_lag_ms:
        found.append(Due(2.0 * age / spec.max_lag_ms, "its oldest dirty record is older than maxLag", True))
    if holds_retention:
        found.append(Due(2.0, "it holds back retention", True))
    if state.dirty_bytes >= spec.backlog_threshold_bytes:
        share = state.dirty_bytes / max(1, spec.backlog_threshold_bytes)
        found.append(Due(share, "its dirty bytes passed backlogThreshold", True))
    since = active_since_ms or state.oldest_ms
    active_is_old = now_ms - since >= min(spec.max_segment_age_ms, spec.max_lag_ms)
    eligible = state.dirty_bytes if active_is_old else min(state.sealed_bytes, state.dirty_bytes)
    ratio = eligible / max(1, eligible + state.clean_bytes)
    if eligible > 0 and ratio > spec.min_dirty_ratio:
        found.append(Due(1.0 + ratio, f"its dirty ratio is {ratio:.2f}", active_is_old))
    return max(found, key=lambda due: due.urgency, default=None)
