"""Every reason of an Event is documented, and every reason that needs a person has its advice."""

import re
from pathlib import Path

from firn_operator.events import REASONS

ROOT = Path(__file__).parents[2]


def test_the_documented_reasons_are_those_there_are() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text().split("## Conditions and Events", 1)[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    assert {name: (about, type_, when) for name, about, type_, when in rows} == {
        name: (each.about, each.type, each.when) for name, each in REASONS.items()
    }


def test_every_reason_in_the_code_is_in_the_list() -> None:
    said = set()
    for path in (ROOT / "operator/firn_operator").glob("*.py"):
        text = path.read_text()
        said |= set(re.findall(r'\.post\(\s*[\w.]+,\s*"(\w+)"', text))
        said |= set(re.findall(r'(?:troubles|failed)\.append\(\s*\(\s*"(\w+)"', text))
    assert len(said) > 8
    assert said <= REASONS.keys()


def test_a_cluster_that_needs_a_person_has_a_runbook_row_for_each_reason() -> None:
    text = (ROOT / "docs/runbooks.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text.split("## FirnClusterDegraded", 1)[1], re.MULTILINE))
    ours = {
        name for name, each in REASONS.items()
        if "cluster" in each.about and each.type == "Warning" and name not in ("NotReady", "VolumeGivenUp")
    }  # fmt: skip
    assert rows | {"RecordLost"} == ours
