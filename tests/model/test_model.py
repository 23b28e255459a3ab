"""The model and the code say the same: no clause can be left out of the one that the other does not know of.

TLC itself runs by ``make model``.
"""

import re
import sys
from inspect import getmembers, isfunction
from pathlib import Path
from typing import get_args

import pytest
from firn_model import __main__ as command
from firn_model import page
from firn_model.coverage import CLAUSES_OF, ELSEWHERE, NO_CLAUSE, NO_RUN, NO_STEP, STEPS_OF
from firn_model.runs import DROPPED, HOLDING, LARGE, QUICK, REACHED, RUNS, Bounds
from firn_model.tlc import MODEL, configuration, read_output
from firn_sim.mutations import MUTATIONS

from firn_node.replication.events import Event
from firn_node.replication.rules import Rules

MODULES = {path.stem: path.read_text() for path in MODEL.glob("*.tla")}
CLAUSES = {run.drop for run in DROPPED}


def steps_of(module: str) -> set[str]:
    return set(re.findall(r"^(\w+)(?:\([\w, ]+\))? ==", MODULES[module], re.MULTILINE))


def test_every_rule_that_a_test_can_switch_off_has_a_run_without_it_or_a_reason() -> None:
    methods = {name for name, _ in getmembers(Rules, isfunction) if not name.startswith("_")}
    assert methods == CLAUSES_OF.keys() | NO_CLAUSE.keys()
    assert not CLAUSES_OF.keys() & NO_CLAUSE.keys()


def test_every_event_of_the_core_is_a_step_of_the_model_or_has_a_reason() -> None:
    assert {event.__name__ for event in get_args(Event)} == STEPS_OF.keys() | NO_STEP.keys()
    assert not STEPS_OF.keys() & NO_STEP.keys()
    steps = set().union(*(steps_of(module) for module in MODULES))
    assert {step for found in STEPS_OF.values() for step in found} <= steps


def test_every_clause_of_the_model_stands_for_something_in_the_code() -> None:
    named = {clause for clauses in CLAUSES_OF.values() for clause in clauses}
    assert named | ELSEWHERE.keys() == CLAUSES


def test_every_mutation_of_the_simulation_has_a_run_without_its_clause_or_a_reason() -> None:
    names = {mutation.name for mutation in MUTATIONS}
    assert names <= CLAUSES | NO_RUN.keys()
    assert not CLAUSES & NO_RUN.keys()


def test_the_simulation_and_the_model_call_a_clause_the_same() -> None:
    said = {run.drop: (run.rule, run.says) for run in DROPPED}
    for mutation in MUTATIONS:
        assert said.get(mutation.name) == (mutation.rule, mutation.dropped)


def test_every_clause_that_the_model_can_leave_out_is_left_out_by_a_run() -> None:
    for module, text in MODULES.items():
        dropped = {run.drop for run in DROPPED if run.module == module}
        assert set(re.findall(r'Rule\("(\w+)"\)', text)) == dropped, module
    assert len(DROPPED) == len(CLAUSES)


def test_every_part_of_the_model_is_switched_on_by_a_run_that_must_hold() -> None:
    parts = set(re.findall(r'"(\w+)" \\(?:in|notin) With', MODULES["Group"]))
    assert parts == {part for run in HOLDING if isinstance(run.bounds, Bounds) for part in run.bounds.parts}


def test_every_module_of_the_model_has_runs_of_each_kind() -> None:
    for kind in ("holds", "violated", "reached"):
        assert {run.module for run in RUNS.values() if run.expected == kind} == MODULES.keys()


def test_the_model_defines_what_its_runs_check() -> None:
    for run in RUNS.values():
        assert set(run.invariants) <= steps_of(run.module), run.name


def test_the_invariants_of_the_simulation_hold_in_the_model() -> None:
    source = (Path(command.__file__).parents[1] / "firn_sim" / "checkers.py").read_text()
    names = set(re.findall(r'fail\(\s*"(\w+)"|name = "(\w+)"|else "(\w+)"', source))
    simulated = {name for found in names for name in found if name}
    assert {"Agreement", "OneMaster", "ReadFresh"} <= simulated
    assert simulated <= {name for run in HOLDING for name in run.invariants}


def test_every_run_gives_each_constant_of_the_model_a_value() -> None:
    for module, text in MODULES.items():
        declared = text.split("CONSTANTS", 1)[1].split("VARIABLES", 1)[0]
        names = set(re.findall(r"\b[A-Z]\w+", re.sub(r"\\\*.*", "", declared)))
        for run in (run for run in RUNS.values() if run.module == module):
            given = set(re.findall(r"^  (\w+) =", configuration(run), re.MULTILINE))
            assert given == names, run.name


def test_the_page_shows_every_clause_that_was_left_out_and_every_state_that_is_reached() -> None:
    rows = page.read_rows(page.PAGE.read_text()).keys()
    assert {run.name for run in (*DROPPED, *REACHED)} <= rows


def test_the_page_shows_each_run_as_it_must_end() -> None:
    rows = page.read_rows(page.PAGE.read_text())
    for run in DROPPED:
        cells = [cell.strip() for cell in rows[run.name].split("|")]
        assert cells[4] in run.invariants, run.name
        assert cells[1:4] == [run.rule, f"`{run.drop}`", run.says], run.name
    for run in (run for run in (*HOLDING, *LARGE) if run.name in rows):
        assert rows[run.name].endswith("holds |"), run.name
        assert rows[run.name].startswith(f"| `{run.name}` | {run.says} | {run.bounds} |"), run.name


def test_the_quick_runs_are_some_of_all() -> None:
    assert set(QUICK) < RUNS.keys()
    assert {run.expected for run in RUNS.values() if run.name in QUICK} >= {"holds", "violated", "reached"}


def test_what_tlc_says_is_read_as_a_violation_an_end_or_neither() -> None:
    whole = "5 states generated, 3 distinct states found, 0 left\nModel checking completed. No error has been found."
    found = read_output(whole, 1.0)
    assert (found.is_whole, found.violated, found.distinct, found.generated) == (True, "", 3, 5)
    broken = read_output("Error: Invariant Agreement is violated.\nState 1: <Init>\nState 2: <Next>\n", 1.0)
    assert (broken.is_whole, broken.violated, broken.steps) == (False, "Agreement", 2)
    stopped = read_output("Progress: 1,200 states generated (9 s/min), 700 distinct states found", 1.0)
    assert (stopped.is_whole, stopped.violated, stopped.distinct) == (False, "", 700)
    progress = (
        "Computed 12 initial states...\nProgress: 800 states checked.\nProgress: 4321 states checked.\n"
    )
    walked = read_output(f"{progress}Finished in 18s at (2026-11-21 16:19:20)\n", 1.0)
    assert (walked.is_whole, walked.violated, walked.generated) == (True, "", 4321)
    assert not read_output(progress, 1.0).is_whole  # ended by its limit
    holding, dropped = HOLDING[0], next(run for run in DROPPED if "Agreement" in run.invariants)
    assert [each.is_as_expected(holding) for each in (found, broken, stopped)] == [True, False, False]
    assert [each.is_as_expected(dropped) for each in (found, broken, stopped)] == [False, True, False]
    assert not any(each.is_as_expected(REACHED[0]) for each in (found, broken, stopped))


@pytest.mark.parametrize("there", [(), ("java",)])
def test_without_java_or_maven_a_sentence_says_what_is_missing(
    there: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in there:
        (tmp_path / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["--cache", str(tmp_path / "cache"), "tiny"]) == 1
    missing = "mvn" if there else "java"
    assert f"no `{missing}` on the PATH" in capsys.readouterr().err
