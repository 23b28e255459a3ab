"""What a broker stores or tells is read by one that is a version older or newer, while a cluster is rolled and back."""

import msgpack
import pytest

from firn.errors import Invalid
from firn.topicspec import TopicSpec, parse_spec, stored_spec
from firn_node.engine.api import TopicInfo
from firn_node.engine.catalogue import told_of, topic_of, topic_value
from firn_node.engine.partition import DirtyState, unpack_state
from firn_node.engine.producers import ProducerRow, unpack_row

NEWER_SPEC = {
    "partitions": 3,
    "compaction": {"minLag": "5s", "colour": "blue"},
    "retention": {"time": "1h"},
    "durability": {"flush": "interval", "copies": 7},
    "weather": {"rain": True},
}


def test_a_partitions_state_with_a_newer_firns_fields_is_read() -> None:
    state = DirtyState(position=7, next_offset=8, last_result="done", forced=3)
    newer = msgpack.packb([*msgpack.unpackb(state.pack()), "what a newer firn knows", 1])
    assert unpack_state(newer) == state


def test_a_partitions_state_that_lacks_this_firns_newest_field_is_read() -> None:
    state = DirtyState(position=7, next_offset=8, last_result="done")
    older = msgpack.packb(msgpack.unpackb(state.pack())[:-1])
    assert unpack_state(older) == state


def test_a_producers_row_with_a_newer_firns_fields_is_read() -> None:
    row = ProducerRow(epoch=2, last_use_ms=1000)
    row.add(5, 40, 10, dispatched_end=0)
    stored = row.pack(before=50)
    assert stored is not None
    epoch, batches = msgpack.unpackb(stored[8:])
    newer = stored[:8] + msgpack.packb([epoch, [[*batch, "newer"] for batch in batches], "newer"])
    assert unpack_row(newer) == unpack_row(stored) == row


def test_a_topic_with_a_newer_firns_fields_is_read_without_them() -> None:
    topic = TopicInfo("t", 4096, parse_spec({"partitions": 3}), (0, 1))
    fields = msgpack.unpackb(topic_value(topic, told=(2, 9000)))
    newer = msgpack.packb({**fields, "spec": NEWER_SPEC, "told": [2, 9000, "newer"], "mood": "good"})
    known = parse_spec(
        {"partitions": 3, "compaction": {"minLag": "5s"}, "retention": {"time": "1h"},
         "durability": {"flush": "interval"}}
    )  # fmt: skip
    assert topic_of("t", newer) == TopicInfo("t", 4096, known, (0, 1))
    assert told_of(newer) == (2, 9000)


def test_a_field_that_nobody_knows_is_refused_where_a_person_asks_for_it() -> None:
    with pytest.raises(Invalid, match="weather"):
        parse_spec(NEWER_SPEC)


def test_a_stored_spec_is_what_was_stored() -> None:
    spec = parse_spec({"partitions": 2, "durability": {"minInSync": 2}, "deletionPolicy": "Retain"})
    assert stored_spec(spec.document()) == spec
    assert stored_spec(TopicSpec().document()) == TopicSpec()
