"""One step in the making: the state so far, the actions so far, and what every role needs to do to both.

A ``Turn`` lives for one call of ``step`` and is the only mutable thing of the core.
"""

from dataclasses import replace
from typing import Any

from firn.errors import InvariantBroken
from firn.types import Epoch, Position
from firn_node.replication.events import Action, CompareAndSet, DispatchTo, ReadRecord, Send, Stop, StoreMeta
from firn_node.replication.messages import Handshake, Header, Message
from firn_node.replication.record import NO_VERSION, GroupRecord, LogId
from firn_node.replication.rules import Rules
from firn_node.replication.state import (
    ROLE_CHANGES,
    Asked,
    Following,
    Heard,
    LogView,
    Mastery,
    State,
)

_CHANGES = {change.label: change for change in ROLE_CHANGES}


class Turn:
    __slots__ = ("actions", "now", "rules", "state")

    def __init__(self, state: State, now: float, rules: Rules) -> None:
        self.state = state
        self.now = now
        self.rules = rules
        self.actions: list[Action] = []

    # The state.

    def update(self, **changes: Any) -> None:
        self.state = self.state.but(**changes)

    def update_log(self, **changes: Any) -> None:
        self.state = self.state.but(log=self.state.log.but(**changes))

    def update_mastery(self, **changes: Any) -> None:
        self.state = self.state.but(mastery=self.mastery.but(**changes))

    def update_following(self, **changes: Any) -> None:
        self.state = self.state.but(following=self.following.but(**changes))

    @property
    def log(self) -> LogView:
        return self.state.log

    @property
    def mastery(self) -> Mastery:
        found = self.state.mastery
        if found is None:
            raise InvariantBroken(f"{self.state.role} has no mastery")
        return found

    @property
    def following(self) -> Following:
        found = self.state.following
        if found is None:
            raise InvariantBroken(f"{self.state.role} follows nobody")
        return found

    @property
    def known_version(self) -> int:
        """The newest version of the record that this data folder has seen."""
        record = self.state.record
        return max(self.state.stored.version, record.version if record is not None else NO_VERSION)

    def hear(self, log_id: LogId, heard: Heard) -> None:
        self.update(heard={**self.state.heard, log_id: heard})

    def change_role(self, label: str) -> None:
        """*Errors*: InvariantBroken for a change that ``ROLE_CHANGES`` does not list."""
        change = _CHANGES[label]
        if self.state.role not in change.before:
            raise InvariantBroken(f"role change {label!r} from {self.state.role}")
        self.update(role=change.after)

    # Orders.

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def name_handshake(self) -> Handshake:
        """The next one of this process."""
        number = self.state.handshakes + 1
        self.update(handshakes=number)
        return Handshake(self.state.me.incarnation, number, self.state.wanted.starts)

    def header(self, handshake: Handshake | None = None, epoch: Epoch | None = None) -> Header:
        me, known = self.state.me, self.state.epoch
        return Header(me.group_id, known if epoch is None else epoch, me.log_id, handshake)

    def send(self, to: LogId, message: Message) -> None:
        self.do(Send(to, message))

    def read_record(self) -> None:
        self.update(read_at=self.now)
        self.do(ReadRecord(self.known_version))

    def ask(self, new: GroupRecord) -> None:
        """One compare-and-set against the known version; a repeated request counts as sent when it first was."""
        known = self.state.record
        if not any(asked.new == new for asked in self.state.asked):
            self.update(asked=(*self.state.asked, Asked(new, self.now)))
        self.update(is_asking=True, asked_at=self.now)
        self.do(CompareAndSet(known.version if known is not None else NO_VERSION, new))

    def forget_answer(self) -> None:
        """The outcome of the last compare-and-set is unknown: it may be applied at any later time."""
        self.update(is_asking=False, asked=self.rules.after_unknown(self.state.asked))

    def want(self, **changes: Any) -> None:
        """Store facts in the data folder, if they are not there or on their way."""
        self.update(wanted=replace(self.state.wanted, **changes))
        self.store_wanted()

    def store_wanted(self) -> None:
        """One at a time: what is wanted meanwhile is stored as a whole after it, so that on a slow disk the
        newest facts wait for one write, however often they changed."""
        wanted = self.state.wanted
        if not self.state.is_storing and wanted != self.state.stored:
            self.update(is_storing=True)
            self.do(StoreMeta(wanted))

    def dispatch(self) -> None:
        """Hand over what is committed and durable here."""
        position = Position(min(self.state.committed, self.log.durable))
        if position > self.state.dispatching:
            self.update(dispatching=position)
            self.do(DispatchTo(position))

    def stop(self, reason: str, *, is_bug: bool = False) -> None:
        """For good: only a new process, or a new log_id, takes part again."""
        self.change_role("stops")
        self.update(stop_reason=reason, following=None, candidacy=None, mastery=None)
        self.do(Stop(reason, is_bug))
