"""How far the shared commit log may be cut: the pure rule."""

from dataclasses import dataclass

from firn.topicspec import RetentionSpec, TopicSpec
from firn_node.engine.api import TopicInfo
from firn_node.engine.retention import plan_retention


@dataclass(frozen=True)
class Segment:
    start: int
    end: int
    topics: dict[int, tuple[int, int]]
    sealed: bool = True


def topics(**retention: int) -> dict[int, TopicInfo]:
    return {8: TopicInfo("t", 8, TopicSpec(retention=RetentionSpec(**retention)))}


SEGMENTS = [
    Segment(0, 100, {8: (100, 1000)}),
    Segment(100, 200, {8: (100, 2000)}),
    Segment(200, 260, {8: (60, 3000)}, sealed=False),
]
FOREVER = 1 << 62


def plan(segments=SEGMENTS, known=None, *, now=10_000, checkpoint=FOREVER, oldest=FOREVER, **retention):
    known = topics(**{"time_ms": FOREVER, "size_bytes": FOREVER, **retention}) if known is None else known
    found = plan_retention(segments, known, now_ms=now, checkpoint=checkpoint, oldest_dirty=oldest)
    return found.release, found.expired


def test_a_segment_goes_when_all_in_it_is_older_than_the_time():
    assert plan(time_ms=8500) == (100, 100)
    assert plan(time_ms=9000) == (0, 0)
    assert plan(time_ms=0) == (200, 200), "the active one never goes"


def test_a_segment_goes_when_enough_bytes_lie_in_newer_ones():
    assert plan(size_bytes=160) == (100, 100)
    assert plan(size_bytes=161) == (0, 0)


def test_one_topic_that_does_not_let_go_holds_the_segment():
    segments = [Segment(0, 100, {8: (50, 0), 16: (50, 0)}), *SEGMENTS[1:]]
    known = topics(time_ms=0, size_bytes=0) | {
        16: TopicInfo("u", 16, TopicSpec(retention=RetentionSpec(FOREVER, FOREVER)))
    }
    assert plan(segments, known) == (0, 0)
    del known[16]
    assert plan(segments, known) == (200, 200), "a deleted topic lets go"


def test_a_dirty_record_or_the_checkpoint_holds_what_has_expired():
    assert plan(time_ms=0, oldest=150) == (100, 200), "it is named as expired: its partition is due"
    assert plan(time_ms=0, checkpoint=150) == (100, 100)
