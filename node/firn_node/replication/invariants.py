"""What holds of every state of a node, each a named predicate, checked after every step.

Those of a whole group (Agreement, OneMaster, ...) need all nodes: ``tests/support/firn_sim``.
"""

from collections.abc import Callable

from firn.errors import InvariantBroken
from firn_node.replication.state import Role, State


def orders_its_positions(state: State) -> bool:
    log = state.log
    return log.start <= log.durable <= log.written and state.committed <= log.written


def dispatches_only_committed_and_durable(state: State) -> bool:
    return state.dispatching <= state.committed and state.dispatched <= state.dispatching


def has_mastery_exactly_as_master(state: State) -> bool:
    return (state.mastery is not None) == (state.role in (Role.MASTER, Role.RESIGNING))


def has_candidacy_exactly_as_candidate(state: State) -> bool:
    return (state.candidacy is not None) == (state.role is Role.CANDIDATE)


def follows_nobody_as_master(state: State) -> bool:
    return state.mastery is None or state.following is None


def acts_in_the_highest_epoch_it_knows(state: State) -> bool:
    return state.mastery is None or state.mastery.epoch == state.epoch


def starts_its_epoch_in_its_log(state: State) -> bool:
    mastery = state.mastery
    return mastery is None or mastery.start is None or state.log.last_epoch == mastery.epoch


INVARIANTS: tuple[Callable[[State], bool], ...] = (
    orders_its_positions,
    dispatches_only_committed_and_durable,
    has_mastery_exactly_as_master,
    has_candidacy_exactly_as_candidate,
    follows_nobody_as_master,
    acts_in_the_highest_epoch_it_knows,
    starts_its_epoch_in_its_log,
)


def check_state(state: State) -> None:
    """*Errors*: InvariantBroken: a bug; the process must stop."""
    for holds in INVARIANTS:
        if not holds(state):
            raise InvariantBroken(f"{holds.__name__.replace('_', ' ')}: {state}")
