"""What the engine and the replication of its group are to one another; ``driver.GroupDriver`` is the one that runs.

The engine's side of the contract, in full: ``docs/replication-drivers.md``.
"""

from collections.abc import Awaitable
from typing import Any, Protocol

from firn.errors import FirnError
from firn.types import Epoch, Position
from firn_node.replication.state import Role


class Replication(Protocol):
    """What the engine asks its group."""

    @property
    def role(self) -> Role: ...

    @property
    def is_master(self) -> bool: ...

    @property
    def epoch(self) -> Epoch:
        """The epoch that a master stamps into its batches; asked between ``admit`` and the append."""
        ...

    @property
    def forced_epoch(self) -> Epoch:
        """The newest epoch that was elected by accepted data loss, as far as this node knows; a master knows it."""
        ...

    @property
    def committed(self) -> Position: ...

    def admit(self, min_in_sync: int) -> None:
        """Return when a write may be appended, in this turn of the event loop.

        *Errors*: NotMaster, with the address to go to; NotEnoughInSync, Unavailable, LimitExceeded. Nothing was
        appended.
        """
        ...

    def written(self, end: int, *, min_in_sync: int, is_interval: bool = False) -> Awaitable[None]:
        """Tell of an admitted append; done once it may be acknowledged.

        *Errors*: Timeout: the outcome is unknown.
        """
        ...

    def check_read(self) -> None:
        """Return when a read may be answered now. *Errors*: NotMaster, Unavailable."""
        ...

    def check_any_read(self) -> None:
        """As ``check_read``, of a read that a standby may answer too, if it follows a master."""
        ...

    def not_master(self) -> FirnError:
        """What sends a caller to the master."""
        ...

    def hurry(self) -> None:
        """Somebody waits for what is appended to be committed: sync it now."""
        ...

    def rebuilt(self) -> None:
        """What precedes the own log is here, by key."""
        ...

    def dispatched(self, position: int) -> None:
        """Dispatch has come to ``position`` later than ``dispatch`` returned."""
        ...

    def topics_changed(self, *, largest_min_in_sync: int, has_interval: bool) -> None: ...

    async def checkpoint(self, position: int) -> None:
        """Remember the epochs of what lies before ``position``, which is dispatched: retention may remove it."""
        ...

    def released(self, start: int) -> None:
        """Retention has removed what lay before ``start``."""
        ...

    def damaged(self, reason: str) -> None:
        """The log cannot be trusted: leave the in-sync set, rebuild."""
        ...

    def status(self) -> dict[str, Any]: ...


class Engine(Protocol):
    """What a group orders of the engine that serves its log."""

    def dispatch(self, position: Position) -> Position:
        """Make what lies before ``position``, committed and durable here, readable; how far that came at once."""
        ...

    async def load_state(self, epoch: Epoch) -> None:
        """Read the log to its end: what a master must know before it takes writes (rule 22)."""
        ...

    def stepped_down(self, reason: str) -> None:
        """This node is not the master any more: forget what it appended and has not dispatched."""
        ...

    def cut(self, end: Position) -> None:
        """The log is about to end at ``end``: forget what lay beyond. Nothing of it was dispatched."""
        ...

    def begin(self, start: Position) -> None:
        """The log is empty and now begins at ``start``."""
        ...

    def rebuild(self, reason: str, *, keeps_tail: bool) -> None:
        """This folder is given up: start anew under another log_id, with what was put aside if ``keeps_tail``."""
        ...

    def stopped(self, reason: str, *, is_bug: bool) -> None:
        """This process takes no part in its group any more."""
        ...
