"""A plan of a forced compaction by Spark, put together of those of the broker groups."""

from typing import Any

import pytest

from firn.client.plans import joined_newest


def plan(state: str, *partitions: int, run: str = "r") -> dict[str, Any]:
    return {
        "id": run, "run": run, "topic": "t", "topic_id": 5, "engine": "spark", "progress": {}, "state": state,
        "partitions": [{"partition": number} for number in partitions],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["done", "done"], "done"),
        (["done", "open"], "open"),
        (["cancelled", "open"], "open"),
        (["done", "cancelled"], "cancelled"),
        (["done", "expired"], "expired"),
        (["done", None], "open"),
    ],
)
def test_a_plan_is_done_when_it_is_in_every_group(states: list[str | None], state: str) -> None:
    joined = joined_newest([None if each is None else plan(each) for each in states])
    assert joined is not None
    assert joined["state"] == state


def test_partitions_of_all_groups_stand_in_their_order() -> None:
    joined = joined_newest([plan("done", 0, 2), plan("done", 1, 3)])
    assert joined is not None
    assert [row["partition"] for row in joined["partitions"]] == [0, 1, 2, 3]


def test_what_a_group_keeps_of_an_older_run_is_left_out() -> None:
    joined = joined_newest([plan("open", 0), plan("done", 1, run="older")])
    assert joined is not None
    assert [row["partition"] for row in joined["partitions"]] == [0]


def test_no_group_has_one() -> None:
    assert joined_newest([None, None]) is None
