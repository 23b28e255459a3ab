"""A simulated broker that is told to stop (SIGTERM), in the steps of ``firn_node.engine.operating.step_aside``.

1. A master hands over, and waits until it follows the new one. 2. It leaves ``in_sync``, if the group can spare it.
3. Its process ends in order, after ``STEP_ASIDE_S`` at the latest: what it has written is durable, and the folder
says so. What does not succeed is left out, as the broker does.
"""

import random
from collections.abc import Callable
from functools import partial

from firn_sim.node import SimNode
from firn_sim.world import World

from firn_node.engine.operating import STEP_ASIDE_S
from firn_node.replication import events as ev
from firn_node.replication.state import Phase, Role, State

LOOKS_EVERY = 0.02
MASTERS = (Role.MASTER, Role.RESIGNING)


class OrderlyStop:
    def __init__(
        self, node: SimNode, world: World, rng: random.Random, stopped: Callable[[SimNode], None]
    ) -> None:
        """``stopped``: called once the process has ended in order; never, if it dies before."""
        self._node, self._world, self._rng = node, world, rng
        self._stopped = stopped
        self._life = node.life
        self._deadline = world.now + STEP_ASIDE_S
        self._has_left = False

    @property
    def is_under_way(self) -> bool:
        return self._node.state is not None and self._node.life == self._life

    def begin(self) -> None:
        state = self._node.state
        if state is None:
            return
        self._was_master = state.role in MASTERS
        if state.role is Role.MASTER:
            others = sorted(state.record.in_sync - {state.me.log_id}) if state.record is not None else []
            if not others:
                self._stop()
                return
            self._node.feed(ev.SwitchoverAsked(self._rng.choice(others)))
        self._go_on()

    def _go_on(self) -> None:
        state = self._node.state
        if state is None or self._node.life != self._life:
            return
        if self._node.is_paused:
            self._later()
        elif self._world.now >= self._deadline or state.role is Role.STOPPED:
            self._stop()
        elif state.role in MASTERS or (self._was_master and not _follows(state) and not self._has_left):
            self._later()
        elif not self._has_left:
            self._has_left = True
            self._node.feed(ev.LeaveAsked())
            self._later()
        elif state.following is None and _is_in_sync(state):
            self._later()
        else:
            self._stop()

    def _later(self) -> None:
        self._world.at(LOOKS_EVERY, self._go_on)

    def _stop(self) -> None:
        self._node.shut_down()
        self._world.at(0.0, partial(self._stopped, self._node))


def _follows(state: State) -> bool:
    return state.following is not None and state.following.phase is Phase.FOLLOWING


def _is_in_sync(state: State) -> bool:
    return state.record is not None and state.me.log_id in state.record.in_sync
