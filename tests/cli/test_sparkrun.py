"""What a child process of Spark says is taken whole."""

from pathlib import Path
from typing import Any

import pytest

from firn.cli import sparkrun
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
