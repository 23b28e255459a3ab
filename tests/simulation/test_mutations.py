"""Every clause that keeps a group's records is needed: without it, the simulation finds what goes wrong."""

from pathlib import Path

import pytest
from firn_sim.mutations import (
    MUTATIONS,
    REBUILD_MUTATIONS,
    SEEDS,
    Mutation,
    RebuildMutation,
    find,
    run_mutated,
)

ALL = (*MUTATIONS, *REBUILD_MUTATIONS)


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_a_dropped_clause_is_found_out(mutation: Mutation | RebuildMutation) -> None:
    found = find(mutation, SEEDS)
    assert found is not None, f"{SEEDS} seeds are not enough to miss: {mutation.dropped}"
    seeds, violated = found
    print(f"{mutation.name}: {seeds} seeds, {violated.name}")


def test_the_table_of_the_page_lists_every_mutation_in_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "replication.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ") and line.count("|") == 6]
    listed = [(row[1].strip(), row[2].strip(" `"), row[3].strip()) for row in rows[1:]]
    assert listed == [(each.rule, each.name, each.dropped) for each in ALL]


def test_the_faults_that_find_a_dropped_clause_break_no_rule_in_force() -> None:
    for mutation in ALL:
        for seed in range(2):
            run_mutated(mutation.in_force(), seed)
