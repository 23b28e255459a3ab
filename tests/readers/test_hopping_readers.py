"""Readers of any speed, started at any time, hopping between two independently compacted copies.

Each ends with a right map or with SnapshotExpired. The second half shows that the property bites: with one of the
reader's two rules switched off a few seeds are enough to find a history that ends in a wrong map.
"""

import pytest
from engine_kit import run
from hopping_kit import HISTORY, Rules, Tally, WrongMap, dense_history, play
from hypothesis import HealthCheck, given, note, settings

SEEDS = range(30)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(HISTORY)
def test_every_reader_ends_with_a_right_map_or_is_told_to_start_anew(history):
    note(f"history: {history!r}")
    run(play(history))


def test_so_does_every_reader_of_long_histories_and_some_of_them_are_told_to_start_anew():
    tally = Tally()
    for seed in SEEDS:
        print(f"dense_history({seed})")
        run(play(dense_history(seed), tally=tally))
    assert tally.expired > 10, "histories that never refuse a reader prove nothing of the since rule"
    assert tally.expired < tally.readers / 2


@pytest.mark.parametrize(
    "rules", [Rules(since=False), Rules(until_end=False)], ids=["since_rule", "until_end_rule"]
)
def test_a_wrong_map_is_found_without_the(rules):
    for seed in SEEDS:
        try:
            run(play(dense_history(seed), rules))
        except WrongMap:
            return
    pytest.fail(f"{len(SEEDS)} long histories: none ends in a wrong map with {rules}")
