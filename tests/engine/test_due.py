"""When a partition is due: one row per rule, by the sentence that says why."""

import pytest

from firn.topicspec import CompactionSpec
from firn_node.engine.due import when_due
from firn_node.engine.partition import DirtyState

SPEC = CompactionSpec(min_lag_ms=0, max_lag_ms=1000, max_segment_age_ms=100, backlog_threshold_bytes=10_000)
DIRTY = {"oldest_position": 0, "oldest_ms": 0, "dirty_bytes": 100}


@pytest.mark.parametrize(
    ("state", "now", "options", "reason"),
    [
        ({}, 10**9, {}, None),
        (DIRTY, 50, {}, None),
        (DIRTY, 100, {}, "ratio is 1.00"),
        ({**DIRTY, "clean_bytes": 101}, 100, {}, None),
        ({**DIRTY, "clean_bytes": 101}, 1000, {}, "maxLag"),
        ({**DIRTY, "sealed_bytes": 100, "clean_bytes": 99}, 1, {}, "ratio is 0.50"),
        ({**DIRTY, "sealed_bytes": 100, "clean_bytes": 100}, 1, {}, None),
        ({**DIRTY, "sealed_bytes": 99, "clean_bytes": 100}, 1, {}, None),
        ({**DIRTY, "dirty_bytes": 10_000}, 1, {}, "backlogThreshold"),
        ({**DIRTY, "clean_bytes": 10**6}, 1, {"holds_retention": True}, "retention"),
        ({"next_tombstone_ms": 500}, 499, {}, None),
        ({"next_tombstone_ms": 500}, 500, {}, "tombstone"),
        ({"oldest_masked_ms": 100}, 10_099, {}, None),
        ({"oldest_masked_ms": 100}, 10_100, {}, "reclaimAge"),
        ({**DIRTY, "retry_ms": 2000}, 1500, {}, None),
        (DIRTY, 150, {"active_since_ms": 60}, None),
    ],
)
def test_a_partition_is_due_for_exactly_these_reasons(state, now, options, reason):
    due = when_due(DirtyState(**state), SPEC, now_ms=now, reclaim_age_ms=10_000, **options)
    if reason is None:
        assert due is None
    else:
        assert due is not None
        assert reason in due.reason


def test_a_ratio_of_one_leaves_even_an_uncompacted_partition_to_the_other_reasons():
    spec = CompactionSpec(min_lag_ms=0, max_lag_ms=1000, max_segment_age_ms=100, min_dirty_ratio=1.0)
    state = DirtyState(**{**DIRTY, "sealed_bytes": 100})
    assert when_due(state, spec, now_ms=999, reclaim_age_ms=10_000) is None
    assert when_due(state, spec, now_ms=1000, reclaim_age_ms=10_000) is not None


def test_nothing_younger_than_min_lag_makes_a_partition_due():
    spec = CompactionSpec(min_lag_ms=500, max_lag_ms=1000)
    state = DirtyState(**{**DIRTY, "sealed_bytes": 100})
    assert when_due(state, spec, now_ms=499, reclaim_age_ms=10_000) is None
    assert when_due(state, spec, now_ms=500, reclaim_age_ms=10_000) is not None


def test_the_older_of_two_is_more_urgent():
    old, young = DirtyState(**DIRTY), DirtyState(**{**DIRTY, "oldest_ms": 900})
    first = when_due(old, SPEC, now_ms=2000, reclaim_age_ms=10_000)
    second = when_due(young, SPEC, now_ms=2000, reclaim_age_ms=10_000)
    assert first is not None
    assert second is not None
    assert first.urgency > second.urgency
