"""The invariants of a whole group, by the names of the model, checked after every step of every node.

What no node knows is kept here: the longest log ever committed (``committed``), the longest ever acknowledged
under ``flush: interval`` (``promised``), the highest position acknowledged to or read by a client (``seen``).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firn_sim.coordinator import SimCoordinator
from firn_sim.node import SimNode
from firn_sim.replicalog import EPOCH_START, Map, ReplicaLog, apply, record_of
from firn_sim.world import World

from firn_node.replication import core
from firn_node.replication import events as ev
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.rules import Rules
from firn_node.replication.state import Mastery, State

READERS = 3  # that ask any replica


class Violated(AssertionError):
    """``name`` is that of the model; ``story`` says who and where."""

    def __init__(self, name: str, story: str, at: float) -> None:
        super().__init__(f"{name} violated at {at:.3f} s: {story}")
        self.name = name
        self.story = story


@contextlib.contextmanager
def telling(story: Sequence[str], seed: int) -> Iterator[None]:
    """What is raised within has the last lines of the story, as it is then, as its notes."""
    try:
        yield
    except Exception as error:
        for line in story[-30:]:
            error.add_note(line)
        error.add_note(f"seed {seed}")
        raise


@dataclass(slots=True)
class Prefix:
    """A log up to a position, as the hash of it."""

    end: int = 0
    chain: int = 0

    def is_in(self, log: ReplicaLog, end: int) -> bool:
        """Whether the log holds it before ``end``; what a rebuilt log does not hold was pulled by key."""
        if self.end > end:
            return False
        return self.end <= log.base or log.chain_at(self.end) == self.chain


@dataclass(frozen=True, slots=True)
class Promise:
    """What a client asked for that wrote up to ``end``."""

    end: int
    is_interval: bool
    min_in_sync: int


@dataclass(slots=True)
class Counts:
    """What a run has reached, so that a tame one is noticed."""

    steps: int = 0
    elections: int = 0
    failovers: int = 0  # elections of another node than the last master, which had not chosen it
    committing_epochs: int = 0
    acknowledged: int = 0
    reads: int = 0
    standby_reads: int = 0
    cuts: int = 0
    durable_cuts: int = 0
    rebuilds: int = 0
    orderly_stops: int = 0
    removals: int = 0
    two_masters: int = 0
    forced: int = 0
    resignations: int = 0
    in_sync_changes: int = 0


def _is_as_before(before: State | None, state: State) -> bool:
    """Whether a step changed nothing that an invariant of the group speaks of, the log apart."""
    return (
        before is not None
        and before.mastery is state.mastery
        and before.role is state.role
        and before.committed == state.committed
        and before.dispatched == state.dispatched
    )


class Checkers:
    """A ``Watcher`` that raises ``Violated``."""

    def __init__(self, world: World, coordinator: SimCoordinator, *, has_interval: bool) -> None:
        self.nodes: list[SimNode] = []
        self.committed = Prefix()
        self.promised = Prefix()
        self.seen = 0
        self.seen_written = (
            0  # the highest position acknowledged under flush interval, while that is to be kept
        )
        self.shown = [0] * READERS  # to each reader that asks any replica
        self.is_excused = False
        self.forced_epoch = 0
        self.counts = Counts()
        self.written: dict[int, Promise] = {}  # by ticket
        self._chains: dict[int, int] = {0: 0}  # of all that is committed
        self._idents: dict[int, int] = {}  # of the committed entry that ends there, in their order
        self._first: dict[tuple[int, int], int] = {}  # (epoch, end): hash of the first log that had it
        self._checked: dict[LogId, int] = {}
        self._epochs_committing: set[int] = set()
        self._last_master: LogId | None = None
        self._checked_group: tuple[int, int, int] | None = None  # version, committed, seen
        self._world = world
        self._coordinator = coordinator
        self._has_interval = has_interval

    def fail(self, name: str, story: str) -> None:
        raise Violated(name, story, self._world.now)

    # What happened.

    def record_changed(self, old: GroupRecord | None, new: GroupRecord) -> None:
        counts = self.counts
        if old is None or new.epoch > old.epoch:
            counts.elections += 1
            self._note_master(old, new)
        if old is not None and new.in_sync != old.in_sync:
            counts.in_sync_changes += 1
        if new.master is None:
            counts.resignations += 1
        if new.forced_epoch > self.forced_epoch:
            counts.forced += 1
            self._give_up(new)
        self.excuse()

    def _note_master(self, old: GroupRecord | None, new: GroupRecord) -> None:
        assert new.master is not None, "an epoch begins with its master"
        chosen = old.successor if old is not None else new.master.log_id
        self.counts.failovers += new.master.log_id not in (self._last_master, chosen)
        self._last_master = new.master.log_id

    def _give_up(self, record: GroupRecord) -> None:
        """A person accepted the loss of whatever the new master does not have."""
        self.forced_epoch = record.forced_epoch
        master = next(node for node in self.nodes if node.folder.log_id in record.in_sync)
        log = master.folder.log
        kept = max(
            (end for end, chain in self._chains.items() if log.chain_at(end) == chain), default=log.base
        )
        self._chains = {end: chain for end, chain in self._chains.items() if end <= kept}
        self.committed = Prefix(kept, self._chains.get(kept, 0))
        self._idents = {end: ident for end, ident in self._idents.items() if end <= kept}
        self.seen = min(self.seen, kept)
        self.shown = [min(position, kept) for position in self.shown]
        self.seen_written = 0
        self.promised = Prefix()

    def excuse(self) -> None:
        """Flush interval: once every in-sync node is unclean at one moment, what was only written may be lost."""
        record = self._coordinator.record
        if not self._has_interval or record is None:
            return
        by_id = {node.folder.log_id: node.folder for node in self.nodes}
        if all(i not in by_id or by_id[i].has_lost_tail for i in record.in_sync):
            self.is_excused = True
            self.seen_written = 0

    def stepped(self, node: SimNode, before: State | None) -> None:
        state = node.state
        self.counts.steps += 1
        if state is None:
            return
        has_new_log = before is None or (before.log is not state.log and before.log != state.log)
        if has_new_log:
            self._check_log(node, before, state)
        if before is None or before.committed != state.committed:
            self._check_committed(node, before, state)
        if self._has_interval and state.mastery is not None:
            self._note_promised(node, state.mastery)
        known = (self._coordinator.version, self.committed.end, self.seen)
        if has_new_log or known != self._checked_group or not _is_as_before(before, state):
            self._checked_group = known
            self.check_group()

    def acknowledged(self, node: SimNode, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            promise = self.written.pop(ticket)
            end = promise.end
            self.counts.acknowledged += 1
            if promise.is_interval:
                if not self.is_excused and not self._has_given_up(node):
                    self.seen_written = max(self.seen_written, end)
                continue
            self.seen = max(self.seen, end)
            if self._has_given_up(node):
                continue
            if self._chains.get(end) != node.folder.log.chain_at(end):
                self.fail("Agreement", f"{node.name} acknowledged a write that ends at {end}, not committed")
            if self._holders(node, end) < promise.min_in_sync:
                self.fail(
                    "EnoughInSync",
                    f"{node.name} acknowledged {end}, fewer hold it than {promise.min_in_sync}",
                )

    def _holders(self, node: SimNode, end: int) -> int:
        """How many in sync hold a log durably up to a position; whoever has lost its disk since did."""
        record, chain = self._coordinator.record, node.folder.log.chain_at(end)
        logs = {each.folder.log_id: each.folder.log for each in self.nodes}
        in_sync = record.in_sync if record is not None else frozenset[LogId]()
        return sum(
            log_id not in logs
            or (logs[log_id].durable >= end and logs[log_id].chain_at(end) in (chain, None))
            for log_id in in_sync
        )

    def committed_chain(self, position: int) -> int:
        return self._chains.get(position, 0)

    def committed_map(self, position: int) -> Map:
        idents = [ident for end, ident in self._idents.items() if end <= position]
        return apply({}, [record_of(ident) for ident in idents if ident != EPOCH_START])

    def ended(self, node: SimNode) -> None:
        return

    def stopped(self, node: SimNode, action: ev.Stop) -> None:
        if action.is_bug:
            self.fail("CommittedPrefix", f"{node.name} stopped: {action.reason}")

    def read(self, node: SimNode, position: int, seen: int) -> None:
        """A client has read at a master."""
        self.counts.reads += 1
        if position < seen and not self._has_given_up(node):
            self.fail("ReadFresh", f"{node.name} answered a read at {position}, {seen} was known before")
        self.seen = max(self.seen, position)

    def read_at_standby(self, node: SimNode, reader: int, position: int) -> None:
        """A client has read at a standby: what is committed, and no less than it was shown before (rule 17)."""
        self.counts.standby_reads += 1
        if self._has_given_up(node):
            return
        if position < self.shown[reader]:
            self.fail("ReadFresh", f"{node.name} shows {position} to who was shown {self.shown[reader]}")
        log = node.folder.log
        if position > log.base and self._chains.get(position) != log.chain_at(position):
            self.fail("CommittedPrefix", f"{node.name} shows {position}, where another log is committed")
        self.shown[reader] = position
        self.seen = max(self.seen, position)

    # The invariants.

    def _has_given_up(self, node: SimNode) -> bool:
        """Its log belongs to what was given up by accepted data loss, and it has not heard of it."""
        state = node.state
        return self.forced_epoch > 0 and state is not None and state.log.last_epoch < self.forced_epoch

    def _check_log(self, node: SimNode, before: State | None, state: State) -> None:
        """LogMatching: an epoch's bytes are written once, and on top of the same bytes."""
        log = node.folder.log
        if before is not None and before.log.cuts != state.log.cuts:
            self.counts.cuts += 1
            self.counts.durable_cuts += before.log.durable > state.log.written
        start = self._checked.get(node.folder.log_id, log.base)
        for end in log.ends_between(min(start, log.written), log.written):
            epoch, chain = log.entry_ending_at(end).epoch, log.chain_at(end)
            if self._first.setdefault((epoch, end), chain or 0) != chain:
                self.fail("LogMatching", f"{node.name} has other bytes before {end} of epoch {epoch}")
        self._checked[node.folder.log_id] = log.written

    def _check_committed(self, node: SimNode, before: State | None, state: State) -> None:
        """Agreement, and the other half of CommittedPrefix. A master may commit and resign in one step."""
        end, log = state.committed, node.folder.log
        mastery = state.mastery or (before.mastery if before is not None else None)
        if end <= log.base or self._has_given_up(node):
            return
        chain = log.chain_at(end)
        if end <= self.committed.end:
            if self._chains.get(end, chain) != chain:
                name = "Agreement" if mastery is not None else "CommittedPrefix"
                self.fail(name, f"{node.name} holds {end} for committed, where another log was committed")
            return
        if mastery is None:
            self.fail("CommittedPrefix", f"{node.name} holds {end} for committed, nobody committed it")
        if self.committed.end > log.base and log.chain_at(self.committed.end) != self.committed.chain:
            self.fail("Agreement", f"{node.name} commits {end} without all that was committed before")
        for at in log.ends_between(max(self.committed.end, log.base), end):
            self._chains[at] = log.chain_at(at) or 0
            self._idents[at] = log.entry_ending_at(at).ident
        self.committed = Prefix(end, chain or 0)
        assert mastery is not None, "only a master commits first"
        if mastery.epoch not in self._epochs_committing:
            self._epochs_committing.add(mastery.epoch)
            self.counts.committing_epochs += 1

    def _note_promised(self, node: SimNode, mastery: Mastery) -> None:
        end = mastery.acknowledged
        if end > self.promised.end and not self._has_given_up(node):
            self.promised = Prefix(end, node.folder.log.chain_at(end) or 0)

    def check_group(self) -> None:
        """Those that a step of anyone may break; time alone only takes from a master what it may do."""
        record = self._coordinator.record
        if record is None:
            return
        acting: dict[int, SimNode] = {}
        for node in self.nodes:
            folder, state = node.folder, node.state
            if folder.log_id in record.in_sync and not self.committed.is_in(folder.log, folder.log.durable):
                self.fail("InSyncComplete", f"{node.name} is in sync without {self.committed.end}, durable")
            if state is None or state.mastery is None:
                continue
            mastery = state.mastery
            if mastery.epoch in acting:
                self.fail("OneMaster", f"{node.name} and {acting[mastery.epoch].name} in {mastery.epoch}")
            acting[mastery.epoch] = node
            if record.epoch == mastery.epoch and record.master == state.me.as_master:
                self._check_master(node, folder.log)
            if not node.is_paused and state.committed < self.seen and not self._has_given_up(node):
                self._check_fresh(node, state, node.rules)
        self.counts.two_masters += len(acting) > 1

    def _check_master(self, node: SimNode, log: ReplicaLog) -> None:
        if not self.committed.is_in(log, log.written):
            self.fail("MasterComplete", f"{node.name} is master without {self.committed.end}")
        if self._has_interval and not self.is_excused and not self.promised.is_in(log, log.written):
            self.fail("IntervalComplete", f"{node.name} is master without {self.promised.end}")

    def _check_fresh(self, node: SimNode, state: State, rules: Rules) -> None:
        if core.may_read(state, node.now, rules):
            self.fail(
                "ReadFresh",
                f"{node.name} may answer reads at {state.committed}, {self.seen} is known to clients",
            )
