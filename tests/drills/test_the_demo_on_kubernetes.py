"""What ``make demo-cluster`` passes with: the bars of time that the project has, and nothing lost."""

import pytest
from demo_cluster.report import Report


def report(**figures: float) -> Report:
    made = Report(first_write_seconds=12.0, gap_seconds=3.4, lost=0, doubled=0)
    for name, value in figures.items():
        setattr(made, name, value)
    return made


def test_a_run_within_its_bars_passes() -> None:
    assert not report().has_failed
    assert not report(first_write_seconds=19.9, gap_seconds=4.9).has_failed


@pytest.mark.parametrize(
    ("name", "value"),
    [("first_write_seconds", 20.0), ("first_write_seconds", 0.0), ("gap_seconds", 5.0), ("gap_seconds", 0.0)],
)
def test_a_run_that_is_slower_than_its_bar_or_did_not_measure_it_fails_and_says_so(
    name: str, value: float
) -> None:
    late = report(**{name: value})
    assert late.has_failed
    assert len(late.late()) == 1


@pytest.mark.parametrize("name", ["lost", "doubled", "mismatches"])
def test_a_run_that_lost_doubled_or_changed_a_record_fails(name: str) -> None:
    assert report(**{name: 1}).has_failed
