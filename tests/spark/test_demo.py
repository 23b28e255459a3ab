"""``make demo-spark`` fails on any difference."""

import pytest
from demo_spark.report import Report, Rows

WANTED: Rows = {"N1": (10, {"dest": "IAH"}), "N2": (20, {"dest": "SFO"})}


@pytest.mark.parametrize(
    ("found", "mismatches", "said"),
    [
        (WANTED, 0, []),
        ({"N1": WANTED["N1"]}, 1, ["Parquet: N2: expected (20, {'dest': 'SFO'}), found None"]),
        ({**WANTED, "N2": (21, {"dest": "SFO"})}, 1, ["Parquet: N2: expected (20, "]),
        ({**WANTED, "N1": (10, None)}, 1, ["Parquet: N1: expected (10, {'dest': 'IAH'}), found (10, None)"]),
        ({**WANTED, "N3": (30, None)}, 1, ["Parquet: N3 is there, pandas finds none"]),
        ({}, 2, ["Parquet: N1: ", "Parquet: N2: "]),
    ],
)
def test_each_row_that_is_missing_different_or_too_many_is_a_mismatch_and_ends_the_demo_with_1(
    found: Rows, mismatches: int, said: list[str]
) -> None:
    report = Report()
    report.compare("Parquet", found, WANTED)
    assert report.mismatches == mismatches
    assert report.code == (1 if mismatches else 0)
    assert [example[: len(start)] for example, start in zip(report.examples, said, strict=True)] == said
