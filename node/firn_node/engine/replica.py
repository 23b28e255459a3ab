"""What a group orders of the engine that serves its log (``replication.serving.Engine``).

A master dispatches what it appended, as it lies in memory; a standby reads it back from its log, in portions, so that
a long catch-up does not hold up the event loop. Either way only what is committed and durable here is dispatched, so a
cut of the log never reaches anything derived. What a master appended and had not dispatched when it stepped down lives
on in its log alone: memory forgets it, and dispatch finds it there again, or a cut removes it.

A new master needs no second way to read its log to the end (rule 22): its epoch-start record is committed soon, and
with it all before it; it takes writes once that is dispatched.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from firn.errors import FirnError, InvariantBroken
from firn.types import Epoch, Position
from firn_node.engine.appender import Appender, Written, WrittenRecord
from firn_node.engine.core import Core
from firn_node.engine.dispatcher import Dispatcher
from firn_node.engine.groupcommits import GroupCommits
from firn_node.engine.lookup import Lookup
from firn_node.engine.partitions import Partitions
from firn_node.rebuild import folder
from firn_node.replication.state import Role

_log = logging.getLogger(__name__)
_TURN_BYTES = 1 << 20  # read back and dispatched in one turn of the event loop: some 5 ms of it
_RETRY_S = 1.0


class Group(Protocol):
    """What is asked of the driver."""

    @property
    def role(self) -> Role: ...
    @property
    def has_others_in_sync(self) -> bool: ...
    def dispatched(self, position: int) -> None: ...
    def topics_changed(self, *, largest_min_in_sync: int, has_interval: bool) -> None: ...
    def rebuilt(self) -> None: ...


class Replica:
    def __init__(
        self,
        core: Core,
        partitions: Partitions,
        lookup: Lookup,
        dispatcher: Dispatcher,
        appender: Appender,
        commits: GroupCommits,
        *,
        first_position: int,
    ) -> None:
        self._core = core
        self._partitions = partitions
        self._dispatcher = dispatcher
        self._lookup = lookup
        self._appender = appender
        self._commits = commits
        self._first_position = first_position
        self._target = core.dispatched_position
        self._later: asyncio.TimerHandle | asyncio.Handle | None = None
        self._topics_told = -1
        self.holds: Callable[[], bool] = lambda: False  # what precedes the log is not here yet
        self._group: Group

    def join(self, group: Group) -> None:
        """Before its first order."""
        self._group = group

    # Orders.

    def dispatch(self, position: Position) -> Position:
        self._target = max(self._target, position)
        if not self.holds():
            self._go_on()
        return Position(self._core.dispatched_position)

    async def load_state(self, epoch: Epoch) -> None:
        try:
            await self._commits.wait(self._core.log.written_end)
        except FirnError as error:
            _log.info("epoch %d ended before its log was read: %s", epoch, error.message)

    def stepped_down(self, reason: str) -> None:
        """Forget what was appended and not dispatched; nobody waits for it any more."""
        self._commits.stepped_down(reason)
        self._appender.written.clear()
        self._core.catalogue.changing.clear()
        for partition in self._partitions:
            partition.forget_undispatched()
        self._lookup.batches.clear()

    def cut(self, end: Position) -> None:
        """Nothing of what is cut was dispatched, and nothing else of it is remembered since ``stepped_down``."""

    def release(self) -> None:
        """Dispatch what was held: what precedes the log is here."""
        self._later = self._later or asyncio.get_running_loop().call_soon(self._go_on_later)

    def begin(self, start: Position) -> None:
        if self._core.index.checkpoint not in (0, start):
            self._give_up(f"the log begins at {start}, what precedes it was got for another beginning")
            return
        self._core.dispatched_position = self._target = start

    def _give_up(self, reason: str) -> None:
        self.rebuild(reason, keeps_tail=False)
        self._core.health.fail(reason)

    def rebuild(self, reason: str, *, keeps_tail: bool) -> None:
        """Order the next process of this folder to start anew, unless that would destroy the only copy."""
        if not self._group.has_others_in_sync:
            _log.error("no other replica is in sync: this folder is kept as it is, although %s", reason)
            return
        core = self._core
        wanted = folder.Order(reason, core.identity.log_id, keeps_tail)
        folder.order(core.disk, core.settings.data, wanted)

    def stopped(self, reason: str, *, is_bug: bool) -> None:
        self._core.health.fail(reason)

    # Dispatch.

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._target = 0

    def _go_on(self) -> None:
        """Dispatch as much as one turn may; the rest later."""
        core = self._core
        if self._later is not None:
            return  # it comes to that
        left = _TURN_BYTES
        try:
            while left > 0 and core.dispatched_position < self._target:
                before = core.dispatched_position
                self._dispatch_some()
                left -= core.dispatched_position - before
        except Exception as error:  # dispatch stands still and says why; acknowledged records stay unread
            _log.exception("dispatch failed")
            core.health.index_error = f"dispatch failed: {error}"
            self._later = asyncio.get_running_loop().call_later(_RETRY_S, self._go_on_later)
            return
        core.health.index_error = None
        self._commits.settle()
        self._tell_topics()
        if core.dispatched_position < self._target:
            self._later = asyncio.get_running_loop().call_soon(self._go_on_later)

    def _go_on_later(self) -> None:
        self._later = None
        before = self._core.dispatched_position
        self._go_on()
        if self._core.dispatched_position != before:
            self._group.dispatched(self._core.dispatched_position)

    def _dispatch_some(self) -> None:
        """The appended writes that come next, or one portion of the log."""
        core, written = self._core, self._appender.written
        ready: list[Written | WrittenRecord] = []
        at = core.dispatched_position
        while written and written[0].start == at and written[0].end <= self._target:
            ready.append(written.popleft())
            at = ready[-1].end
        if ready:
            try:
                self._dispatcher.dispatch(ready)
            except BaseException:
                written.extendleft(reversed(ready))  # idempotent: tried again as a whole
                raise
            return
        end = min(self._target, written[0].start) if written else self._target
        for position, chunk in core.log.scan(at, end, chunk=_TURN_BYTES):
            self._dispatcher.replay(position, chunk)
            return
        raise InvariantBroken(f"commit log: no whole batch lies in [{at}, {end}), which is committed")

    def _tell_topics(self) -> None:
        catalogue = self._core.catalogue
        if self._group.role is Role.BLANK and self._core.log.start == self._first_position:
            self._group.rebuilt()  # the log goes back to the first record: nothing precedes it
        if catalogue.changes == self._topics_told:
            return
        self._topics_told = catalogue.changes
        durability = catalogue.durability()
        self._group.topics_changed(
            largest_min_in_sync=durability.min_in_sync, has_interval=durability.flush == "interval"
        )
