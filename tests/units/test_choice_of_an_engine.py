"""Which engine a forced compaction takes, by bytes."""

import pytest

from firn.engines import (
    EXECUTORS_FROM_BYTES,
    SPARK_FROM_BYTES,
    bytes_to_compact,
    choose_engine,
    choose_runner,
)


@pytest.mark.parametrize(
    ("size", "has_spark", "engine"),
    [
        (0, True, "broker"),
        (SPARK_FROM_BYTES - 1, True, "broker"),
        (SPARK_FROM_BYTES, True, "spark"),
        (1 << 50, False, "broker"),
    ],
)
def test_spark_is_chosen_from_its_bytes_on_where_it_is_there(size: int, has_spark: bool, engine: str) -> None:
    chosen, why = choose_engine(size, has_spark=has_spark)
    assert chosen == engine
    assert why


def test_executors_are_chosen_from_their_bytes_on() -> None:
    assert choose_runner(EXECUTORS_FROM_BYTES - 1)[0] == "local"
    assert choose_runner(EXECUTORS_FROM_BYTES)[0] == "job"


def test_what_is_dirty_counts_beside_what_is_clean() -> None:
    rows = [
        {"compacted_bytes": 300, "raw_bytes": 1000, "dirty_ratio": 0.25},  # 100 of 400 are dirty
        {"compacted_bytes": 0, "raw_bytes": 50, "dirty_ratio": 1.0},
        {"compacted_bytes": 10, "raw_bytes": 5, "dirty_ratio": 0.9},  # no more than there is
        {},
    ]
    assert bytes_to_compact(rows) == 400 + 50 + 15
