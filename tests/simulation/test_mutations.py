"""Every clause that keeps a group's records is needed: without it, the simulation finds what goes wrong."""

import pytest
from firn_sim.mutations import MUTATIONS, Mutation, find, run_mutated

SEEDS = 150


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_dropped_clause_is_found_out(mutation: Mutation) -> None:
    found = find(mutation, SEEDS)
    assert found is not None, f"{SEEDS} seeds are not enough to miss: {mutation.dropped}"
    seeds, violated = found
    print(f"{mutation.name}: {seeds} seeds, {violated.name}")


def test_the_faults_that_find_a_dropped_clause_break_no_rule_in_force() -> None:
    for mutation in MUTATIONS:
        for seed in range(2):
            run_mutated(mutation.in_force(), seed)
