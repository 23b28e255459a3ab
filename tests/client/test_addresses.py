"""In which order a client tries the brokers that it knows."""

from firn.client.addresses import ASIDE_FAILURES, Addresses


def test_the_preferred_one_comes_first_and_one_that_failed_last() -> None:
    addresses = Addresses("a:1,b:2,c:3")
    addresses.prefer("c:3")
    assert addresses.in_turn() == ["c:3", "a:1", "b:2"]
    addresses.put_last("c:3")
    assert addresses.in_turn() == ["a:1", "b:2", "c:3"]


def test_one_where_nobody_answered_stays_behind_those_that_refuse() -> None:
    addresses = Addresses("dead:1,b:2,c:3")
    addresses.set_aside("dead:1")
    for _ in range(ASIDE_FAILURES - 1):
        refusing = addresses.preferred
        assert refusing != "dead:1"
        addresses.put_last(refusing)
        assert addresses.in_turn()[-1] == "dead:1"


def test_one_that_was_set_aside_is_tried_again_after_enough_failures_of_others() -> None:
    addresses = Addresses("dead:1,b:2")
    addresses.set_aside("dead:1")
    tried = []
    for _ in range(2 * ASIDE_FAILURES):
        tried.append(addresses.preferred)
        addresses.put_last(addresses.preferred)
    assert "dead:1" in tried


def test_one_that_is_named_as_the_master_counts_at_once() -> None:
    addresses = Addresses("dead:1,b:2")
    addresses.set_aside("dead:1")
    addresses.prefer("dead:1")
    assert addresses.preferred == "dead:1"


def test_where_nobody_answers_all_are_tried_in_turn() -> None:
    addresses = Addresses("a:1,b:2")
    tried = []
    for _ in range(4):
        tried.append(addresses.preferred)
        addresses.set_aside(addresses.preferred)
    assert tried == ["a:1", "b:2", "a:1", "b:2"]
