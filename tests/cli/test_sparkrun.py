"""What a child process of Spark says is taken whole."""

from pathlib import Path
from typing import Any

import pytest

from firn.cli import sparkrun
from firn.cli.compact import plan_bar
from firn.cli.sparkrun import compact_by_spark

CHILD = """import json, signal, sys
signal.alarm(60)  # nobody takes what it says
print(json.dumps({"phase": "mapping"}), file=sys.stderr, flush=True)
print("words of Spark")
print(json.dumps({"topic": sys.argv[-1], "partitions": ["x" * 300] * 4096}), flush=True)
print("a_child: partition 0 was not compacted", file=sys.stderr)
sys.exit(1)
"""


def test_a_document_of_thousands_of_partitions_is_taken_from_a_child_that_also_tells_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sparkrun, "MODULE", "a_child")
    told: list[dict[str, Any]] = []
    found = compact_by_spark("t", [], told.append)
    assert (found["topic"], len(found["partitions"])) == ("t", 4096)
    assert told == [{"phase": "mapping"}]


def test_the_bar_says_that_spark_reads_until_it_has_read_everything() -> None:
    plan = {"state": "open", "partitions": 3, "partitions_done": 0, "rows_done": 0, "rows_to_write": 0}
    mapping = {**plan, "phase": "mapping", "rows_read": 40, "rows_total": 90}
    assert plan_bar(plan) == ("Spark reads, 0/3 partitions", 0, 1), "as a plan begins"
    assert plan_bar(mapping) == ("Spark reads, 0/3 partitions", 40, 90)
    writing = {"partitions_done": 1, "rows_done": 5, "rows_to_write": 20}
    for told in ({"rows_read": 90}, {"phase": "applying"}):
        assert plan_bar({**mapping, **writing, **told}) == ("brokers write, 1/3 partitions", 5, 20)
