"""A snapshot of a topic in several broker groups: all of its parts, or none."""

import asyncio
from typing import Any

import pytest
from snapshot_kit import Brokers, Group

from firn.client.snapshot import Snapshot
from firn.errors import Unavailable


def opened(brokers: Any) -> Snapshot:
    return asyncio.run(Snapshot.open("t", brokers))


def test_a_snapshot_has_the_parts_of_all_groups_in_their_order() -> None:
    brokers = Brokers(Group(0, end=5), Group(1, end=6))
    found = opened(brokers)
    assert (found.id, found.ends) == ("s0,s1", {0: 5, 1: 6})
    assert [group.held for group in brokers.transports] == [{"s0"}, {"s1"}]


def test_the_parts_of_the_others_are_given_back_when_a_group_is_away() -> None:
    brokers = Brokers(Group(0), Group(1, is_away=True), Group(2))
    with pytest.raises(Unavailable, match="nobody answers"):
        opened(brokers)
    assert [group.held for group in brokers.transports] == [set(), set(), set()]


def test_a_group_that_goes_away_keeps_no_other_from_dropping_what_is_pinned() -> None:
    brokers = Brokers(Group(0), Group(1))
    found = opened(brokers)
    brokers.transports[0].is_away = True
    with pytest.raises(Unavailable, match="nobody answers"):
        asyncio.run(found.close())
    assert [group.held for group in brokers.transports] == [{"s0"}, set()]
