"""Durations, sizes, topic documents, partitions and errors: what people write is read exactly or refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.errors import BY_CODE, Conflict, FirnError, Invalid, NotMaster, Timeout, from_document
from firn.partitioner import murmur2, partition_of, partitions_of
from firn.topicspec import (
    CompactionSpec,
    DurabilitySpec,
    RetentionSpec,
    TopicSpec,
    check_topic_name,
    default_min_in_sync,
    parse_documents,
    parse_spec,
    set_field,
)
from firn.units import duration_ms, duration_text, size_bytes, size_text


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("0s", 0), ("5m", 300_000), ("24h", 86_400_000), ("7d", 604_800_000), ("30s", 30_000)],
)
def test_a_duration_is_one_number_and_one_unit(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["", "5", "5 m", "-5s", "1.5h", "5M", "5s5s", "٥s", None, 5, "99999999999999d"]
)
def test_anything_else_is_no_duration_and_the_message_names_the_field(text: object) -> None:
    with pytest.raises(Invalid, match=r"maxLag: .*24h"):
        duration_ms(text, field="maxLag")


@pytest.mark.parametrize(
    ("text", "count"),
    [("64Ki", 65_536), ("16Mi", 16 << 20), ("1Gi", 1 << 30), ("2Ti", 2 << 40), ("100", 100), (7, 7)],
)
def test_a_size_is_one_number_and_a_binary_unit(text: object, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "1K", "1MB", "-1Ki", "1.5Gi", True, None, -1, "9999999999Ti"])
def test_anything_else_is_no_size_and_the_message_names_the_field(text: object) -> None:
    with pytest.raises(Invalid, match=r"memory: .*64Ki"):
        size_bytes(text, field="memory")


@given(st.integers(0, 1 << 53))
def test_a_duration_and_a_size_read_back_as_what_was_written(value: int) -> None:
    assert duration_ms(duration_text(value)) == value
    assert size_bytes(size_text(value)) == value


DURATIONS = st.integers(1, 10**12)
SPECS = st.builds(
    TopicSpec,
    partitions=st.integers(1, 1000),
    compaction=st.builds(
        CompactionSpec,
        min_dirty_ratio=st.floats(0, 1),
        min_lag_ms=st.just(0),
        max_lag_ms=DURATIONS,
        delete_retention_ms=DURATIONS,
        backlog_threshold_bytes=DURATIONS,
        max_segment_age_ms=DURATIONS,
        segment_bytes=st.integers(4096, 1 << 40),
        memory_bytes=st.integers(65_536, 1 << 40),
    ),
    retention=st.builds(RetentionSpec, time_ms=DURATIONS, size_bytes=DURATIONS),
    durability=st.builds(
        DurabilitySpec, min_in_sync=st.integers(1, 5), flush=st.sampled_from(["sync", "interval"])
    ),
)


@given(SPECS)
def test_a_spec_read_from_its_own_document_is_the_same(spec: TopicSpec) -> None:
    assert parse_spec(spec.document()) == spec


def test_an_empty_spec_has_the_documented_defaults() -> None:
    assert parse_spec(None).document() == {
        "partitions": 1,
        "compaction": {
            "minDirtyRatio": 0.5, "minLag": "0s", "maxLag": "1d", "deleteRetention": "1d",
            "backlogThreshold": "1Gi", "maxSegmentAge": "1h", "segmentBytes": "256Mi", "memory": "64Mi",
        },
        "retention": {"time": "3d", "size": "10Gi"},
        "durability": {"minInSync": 1, "flush": "sync"},
    }  # fmt: skip


def test_three_replicas_ask_for_two_in_sync_unless_told_otherwise() -> None:
    assert parse_spec({}, min_in_sync=default_min_in_sync(3)).durability.min_in_sync == 2
    assert (
        parse_spec(
            {"durability": {"minInSync": 1}}, min_in_sync=default_min_in_sync(3)
        ).durability.min_in_sync
        == 1
    )


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"partition": 4}, "spec.partition: unknown field"),
        ({"compaction": {"minDirtyRation": 0.2}}, "spec.compaction.minDirtyRation: unknown field"),
        ({"partitions": 0}, "spec.partitions: expected a whole number"),
        ({"partitions": True}, "spec.partitions"),
        ({"partitions": 100_001}, "spec.partitions: 100001 are too many"),
        ({"compaction": {"minDirtyRatio": 1.5}}, "from 0 to 1"),
        ({"compaction": {"maxLag": "0s"}}, "maxLag: must be above 0s"),
        ({"compaction": {"maxLag": "1m", "minLag": "2m"}}, "not below minLag"),
        ({"compaction": {"memory": "63Ki"}}, "at least 64Ki"),
        ({"compaction": []}, "spec.compaction: expected a mapping"),
        ({"durability": {"flush": "never"}}, "expected sync or interval"),
        ({"deletionPolicy": "Keep"}, "deletionPolicy"),
        ([], "spec: expected a mapping"),
    ],
)
def test_a_wrong_spec_is_refused_by_the_name_of_the_field(document: dict[str, object], named: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_spec(document)
    assert named in caught.value.message


DOCUMENT = """
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: flights}
spec: {partitions: 4}
---
---
apiVersion: firn.dev/v1alpha1
kind: CompactedTopic
metadata: {name: planes}
"""


def test_a_file_may_hold_several_topics_and_empty_documents() -> None:
    found = parse_documents(DOCUMENT)
    assert [(topic.name, topic.spec.partitions) for topic in found] == [("flights", 4), ("planes", 1)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("v1alpha1", "v2"), "apiVersion: expected firn.dev/v1alpha1, found 'firn.dev/v2'"),
        (("kind: CompactedTopic", "kind: Topic"), "kind: expected CompactedTopic"),
        (("partitions: 4", "partitons: 4"), "spec.partitons: unknown field"),
        (("name: flights", "name: __topics"), "internal topics"),
        (("metadata: {name: flights}", "metadata: flights"), "metadata: expected a mapping"),
        (("metadata: {name: flights}", "data: 1"), "data: unknown field"),
    ],
)
def test_a_wrong_document_is_named_by_file_and_number(change: tuple[str, str], named: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_documents(DOCUMENT.replace(*change), source="topics.yaml")
    assert caught.value.message.startswith("topics.yaml, document 1: ")
    assert named in caught.value.message


def test_text_that_is_not_yaml_is_refused_by_the_name_of_its_file() -> None:
    with pytest.raises(Invalid, match=r"topics\.yaml: not YAML"):
        parse_documents("a: [", source="topics.yaml")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a b", "é", "x" * 250, None, 3, "__offsets"])
def test_a_topic_name_that_could_become_a_path_or_an_internal_topic_is_refused(name: object) -> None:
    with pytest.raises(Invalid, match="topic name"):
        check_topic_name(name)


def test_a_field_is_set_by_its_path_and_a_path_through_a_value_is_refused() -> None:
    document: dict[str, object] = {"partitions": 1}
    set_field(document, "compaction.minLag", "5m")
    assert document == {"partitions": 1, "compaction": {"minLag": "5m"}}
    with pytest.raises(Invalid, match="partitions is not a mapping"):
        set_field(document, "partitions.x", 1)


# From Kafka's own tests of murmur2 (UtilsTest.testMurmur2), as signed 32-bit numbers.
KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", list(KAFKA))
def test_keys_go_to_the_partitions_that_kafka_gives_them(key: bytes) -> None:
    assert murmur2(key) == KAFKA[key] & 0xFFFFFFFF
    assert partition_of(key, 12) == (KAFKA[key] & 0x7FFFFFFF) % 12


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, 50))
def test_many_keys_go_where_each_would_go_alone(keys: list[bytes], partitions: int) -> None:
    alone = [partition_of(key, partitions) for key in keys]
    assert partitions_of(keys, partitions).tolist() == alone
    lengths = np.array([len(key) for key in keys], np.int64)
    assert partitions_of(keys, partitions, lengths).tolist() == alone


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_an_error_crosses_the_wire_as_the_class_it_was(code: str) -> None:
    error = BY_CODE[code]("why", partition=3)
    found = from_document(error.document())
    assert (type(found), found.message, found.details) == (type(error), "why", {"partition": 3})


def test_an_unknown_error_keeps_its_text() -> None:
    found = from_document({"error": "from_the_future", "message": "why", "retry": True})
    assert type(found) is FirnError
    assert found.message == "why"


def test_errors_tell_whether_the_same_request_may_be_repeated() -> None:
    assert Timeout("t").document()["retry"] is True
    assert NotMaster("n").document()["retry"] is True
    assert Conflict("c", newest_offset=17).document() == {
        "error": "conflict", "message": "c", "retry": False, "newest_offset": 17,
    }  # fmt: skip
