"""Who waits for a group: writes for their acknowledgement, people for a switchover.

Invariants: every wait ends exactly once; writes of one turn of the event loop that ask for the same share a ticket,
and so an answer: they are written, synced and replicated together.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from firn.errors import FirnError, Timeout, Unavailable
from firn.types import Epoch, Position
from firn_node.replication.events import Written
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.state import OpenWrite

Wait = asyncio.Future[None]


@dataclass(slots=True)
class _Turn:
    """What was appended in this turn of the event loop: the log's end, and by what is asked for, end and wait."""

    end: int = 0
    writes: dict[tuple[int, bool], tuple[int, Wait]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Switchover:
    """A change of master that somebody waits for, asked for in ``epoch``."""

    to: LogId
    epoch: Epoch
    wait: Wait


class Requests:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn: _Turn | None = None
        self._tickets: dict[int, Wait] = {}
        self._newest_ticket = 0
        self._switchover: _Switchover | None = None

    # Writes.

    @property
    def has_turn(self) -> bool:
        return self._turn is not None

    def write(self, end: int, *, min_in_sync: int, is_interval: bool) -> Wait:
        """Done once the append that ended at ``end`` may be acknowledged; one waiter may go without the others."""
        turn = self._turn = self._turn or _Turn()
        turn.end = end
        key = (min_in_sync, is_interval)
        _, wait = turn.writes.get(key) or (0, self._loop.create_future())
        turn.writes[key] = end, wait
        return asyncio.shield(wait)

    def take_turn(self) -> Written | None:
        """What was appended since this was last asked, as one event; None: nothing."""
        turn, self._turn = self._turn, None
        if turn is None:
            return None
        writes = []
        for (min_in_sync, is_interval), (end, wait) in turn.writes.items():
            self._newest_ticket += 1
            self._tickets[self._newest_ticket] = wait
            writes.append(OpenWrite(self._newest_ticket, Position(end), min_in_sync, is_interval))
        return Written(Position(turn.end), (), tuple(writes))

    def acknowledge(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            _finish(self._tickets.pop(ticket, None))

    def time_out(self, reason: str, tickets: Iterable[int] | None = None) -> None:
        """The outcome of these writes, or of all, is unknown."""
        error = Timeout(f"the outcome is unknown: {reason}; ask again with the same sequence")
        for ticket in list(self._tickets if tickets is None else tickets):
            _refuse(self._tickets.pop(ticket, None), error)

    # A switchover.

    @property
    def successor(self) -> LogId | None:
        """Who is to become master, while somebody waits for it."""
        return self._switchover.to if self._switchover is not None else None

    def begin_switchover(self, to: LogId, epoch: Epoch) -> Wait:
        """Done once ``to`` is master, in an epoch after ``epoch``. *Errors*: Unavailable while another is under way."""
        if self._switchover is not None:
            raise Unavailable("another switchover is under way; try again when it has ended")
        self._switchover = _Switchover(to, epoch, self._loop.create_future())
        return self._switchover.wait

    def note_master(self, record: GroupRecord) -> None:
        """The record names somebody: whoever was waited for, or another one."""
        waiting = self._switchover
        if waiting is None or record.master is None or record.epoch <= waiting.epoch:
            return
        if record.master.log_id == waiting.to:
            self._switchover = None
            _finish(waiting.wait)
        else:
            self.refuse_switchover(f"{record.members[record.master.log_id].node} became master instead")

    def end_switchover(self, wait: Wait) -> None:
        """Who began it waits no more."""
        if self._switchover is not None and self._switchover.wait is wait:
            self._switchover = None

    def refuse_switchover(self, reason: str) -> bool:
        """Whether someone was waiting for one."""
        waiting, self._switchover = self._switchover, None
        if waiting is None:
            return False
        _refuse(waiting.wait, Unavailable(reason))
        return True


def _finish(wait: Wait | None) -> None:
    if wait is not None and not wait.done():
        wait.set_result(None)


def _refuse(wait: Wait | None, error: FirnError) -> None:
    if wait is not None and not wait.done():
        wait.set_exception(error)
        wait.exception()  # nobody need be waiting any more
