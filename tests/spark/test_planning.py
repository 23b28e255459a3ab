"""What planning leaves behind when it fails: nothing."""

import asyncio
from typing import Any

import pytest
from snapshot_kit import Brokers, Group

from firn.errors import BadOffset, Unavailable
from firn_spark.filters import Wanted
from firn_spark.options import read_options
from firn_spark.planning import _plan


def planned(brokers: Brokers, **options: str) -> Any:
    link: Any = brokers
    return asyncio.run(_plan(link, read_options({"topic": "t", **options}), Wanted()))


def test_a_snapshot_is_given_back_when_the_read_that_it_was_opened_for_is_refused() -> None:
    brokers = Brokers(Group(0), Group(1))
    with pytest.raises(BadOffset, match="offset 9 is past the end 5"):
        planned(brokers, startingOffsets='{"1": 9}')
    assert [group.held for group in brokers.transports] == [set(), set()]


def test_a_snapshot_of_all_groups_but_one_is_given_back() -> None:
    brokers = Brokers(Group(0), Group(1, is_away=True), Group(2))
    with pytest.raises(Unavailable):
        planned(brokers)
    assert [group.held for group in brokers.transports] == [set(), set(), set()]


def test_a_plan_names_the_snapshot_that_its_tasks_read_and_somebody_has_to_hold() -> None:
    brokers = Brokers(Group(0), Group(1))
    found = planned(brokers)
    assert found.lease is not None
    assert found.lease.id == "s0,s1"
    assert [(part.partition, part.end, part.snapshot) for task in found.tasks for part in task] == [
        (0, 5, "s0,s1"), (1, 5, "s0,s1"),
    ]  # fmt: skip
    assert [group.held for group in brokers.transports] == [{"s0"}, {"s1"}]
