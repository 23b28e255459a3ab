"""docs/replication.md says what the tables of the core say."""

from pathlib import Path
from typing import get_args

from firn_node.replication import events as ev
from firn_node.replication.rules import Rules
from firn_node.replication.state import ROLE_CHANGES

PAGE = (Path(__file__).parents[2] / "docs" / "replication.md").read_text()


def test_the_page_lists_every_role_change() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.count("|") == 5]
    listed = {row[1].strip(): row[3].strip() for row in rows}
    assert {change.label: change.after.value for change in ROLE_CHANGES}.items() <= listed.items()


def test_the_page_names_every_event_and_every_action() -> None:
    named = {name.__name__ for name in (*get_args(ev.Event), *get_args(ev.Action))}
    assert {name for name in named if f"`{name}`" not in PAGE} == set()


def test_the_page_names_every_rule() -> None:
    rules = {name for name in vars(Rules) if not name.startswith("_")}
    assert {name for name in rules if f"`{name}`" not in PAGE} <= {"reported"}
