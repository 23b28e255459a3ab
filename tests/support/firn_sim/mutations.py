"""One clause of the rules left out at a time: each must end in a violation, or the simulation is too tame.

The names are those of the model's runs. A mutation replaces one small method of ``Rules``, or makes the simulated
driver break what the core cannot see (a lost disk that keeps its log_id, a folder that forgets the epoch). One of the
rebuild replaces what the standby asks its master by (``firn_sim.rebuild``).
``InSyncComplete``, the core of the argument, mostly shows first: a member of ``in_sync`` that lacks something is one
election away from the damage.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from firn_sim.checkers import Counts, Violated
from firn_sim.coordinator import CoordinatorFaults
from firn_sim.faults import Profile, draw_profile
from firn_sim.group import Group
from firn_sim.network import NetworkFaults
from firn_sim.rebuild.group import Clauses, NotLive, RebuildCounts, simulate_rebuild
from firn_sim.rebuild.group import Shape as RebuildShape
from firn_sim.rebuild.remote import GoesOn, KeepsOld, WithoutEnds, WithoutPin

from firn.types import Epoch, Position
from firn_node.replication.messages import Committed, Header, Hello
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.rules import Rules
from firn_node.replication.state import Asked, Heard, LogView, State, Timing

SEEDS = 150  # how many runs a mutation is given


class NoDurable(Rules):
    def end_of(self, heard: Heard) -> Position:
        return heard.written

    def own_end(self, log: LogView) -> Position:
        return log.written


class NoIncarnation(Rules):
    def may_act(self, state: State) -> bool:
        record = state.record
        return (
            record is not None
            and record.master is not None
            and record.master.log_id == state.me.log_id
            and record.epoch >= state.epoch
        )


class NobodyAwaited(Rules):
    """Who is waited for is counted, too: without this, that would stand in for the union."""

    def awaited(self, state: State, now: float) -> frozenset[LogId]:
        return frozenset()


class NoUnion(NobodyAwaited):
    def after_unknown(self, asked: tuple[Asked, ...]) -> tuple[Asked, ...]:
        return ()


class NoGrowUnion(NobodyAwaited):
    def counted(self, state: State) -> frozenset[LogId]:
        return state.record.in_sync if state.record is not None else frozenset()


class NoShrinkWait(NobodyAwaited):
    def counted(self, state: State) -> frozenset[LogId]:
        known = super().counted(state)
        for asked in state.asked:
            known = known & asked.new.in_sync
        return known


class NoAckEpoch(Rules):
    def counts(self, heard: Heard, epoch: Epoch) -> bool:
        return True


class NoGrowCommitted(Rules):
    def holds_committed(self, state: State, heard: Heard) -> bool:
        return True


class NoGrowStart(Rules):
    def holds_epoch_start(self, state: State, heard: Heard) -> bool:
        return True


class NoInSync(Rules):
    def is_in_sync(self, state: State) -> bool:
        return True


class NoCut(Rules):
    def cut_point(self, state: State, hello: Hello) -> Position | None:
        exact = super().cut_point(state, hello)
        return exact if not hello.history else Position(min(hello.end, state.log.written))


class NoCutByHistory(Rules):
    def cut_point(self, state: State, hello: Hello) -> Position | None:
        exact, mastery = super().cut_point(state, hello), state.mastery
        if exact is None or mastery is None or mastery.start is None or not hello.history:
            return exact
        return Position(min(hello.end, mastery.start))


class CutAtCommitted(Rules):
    def cut_point(self, state: State, hello: Hello) -> Position | None:
        exact = super().cut_point(state, hello)
        if exact is None or not hello.history:
            return exact
        return Position(max(hello.history[0].start, min(hello.committed, state.log.written)))


class NoRefusal(Rules):
    def is_refused(self, state: State, header: Header) -> bool:
        return False

    def is_deposing(self, state: State, header: Header) -> bool:
        return False


class CommittedBeforeCut(Rules):
    def takes_committed(self, state: State, message: Committed) -> bool:
        return message.header.epoch >= state.epoch


class LeaseBesideRecord(Rules):
    def renewed(self, record: GroupRecord) -> GroupRecord:
        return replace(record, renewals=record.renewals + 1)

    def shows_life(self, known: GroupRecord, read: GroupRecord) -> bool:
        return (read.version, read.renewals) > (known.version, known.renewals)


class NoSilence(Rules):
    def is_silent(self, state: State, now: float) -> bool:
        return True


class NoLeaseToRead(Rules):
    def has_lease_to_read(self, state: State, now: float) -> bool:
        return True


class NoReadBarrier(Rules):
    def has_read_barrier(self, state: State) -> bool:
        return True


class GoesOnWhileResigning(Rules):
    def stops_to_resign(self) -> bool:
        return False


class OpenShrinksCountAsKnown(Rules):
    def in_sync_size(self, state: State) -> int:
        return len(state.record.in_sync) if state.record is not None else 0


class SyncsOutliveCuts(Rules):
    def proves_durable(self, log: LogView, cuts: int) -> bool:
        return True


class UncleanStands(Rules):
    def holds_all(self, state: State, answers: object) -> bool:
        return True


class NoGrowAcknowledged(Rules):
    def holds_acknowledged(self, state: State, heard: Heard) -> bool:
        return True


Shape = Callable[[Profile, random.Random], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str  # of the model
    rule: str
    dropped: str
    rules: Callable[[], Rules] = Rules
    shape: Shape = lambda profile, rng: None
    options: dict[str, bool] = field(default_factory=dict)

    def in_force(self) -> "Mutation":
        """The same faults, and every rule."""
        return replace(self, rules=Rules, options={})


def _two_nodes_and_a_bad_coordinator(profile: Profile, rng: random.Random) -> None:
    """The standby comes and goes; requests are applied late, and nobody hears of it."""
    _slow_replicas(profile, rng)
    profile.nodes = rng.choice((2, 3))
    profile.coordinator = CoordinatorFaults(
        lost_request=0.2, lost_answer=0.5, late_request=0.3, late_delay=(0.2, 2.0)
    )


def _slow_replicas(profile: Profile, rng: random.Random) -> None:
    """Standbys are far behind, and come and go; masters do not last."""
    _fast(profile)
    profile.nodes, profile.fault_every, profile.write_every, profile.fault_after_change = 3, 1.0, 0.03, 0.8
    profile.network = NetworkFaults(delay=(0.005, 0.05))
    profile.sync = (0.01, 0.4)
    profile.weights |= {
        "survivor": 8.0, "pause": 4.0, "cut": 3.0, "heal": 6.0, "isolate": 2.0, "kill": 3.0,
        "power_all": 4.0, "slow": 0.0, "coordinator_down": 0.0, "disk": 0.0, "damage": 0.0, "stale_restart": 0.0,
    }  # fmt: skip


def _fast(profile: Profile) -> None:
    """More of everything in the same time."""
    profile.options = replace(profile.options, timing=Timing(lease_ttl=1.0, replica_max_lag=0.5))


def _slow_replicas_of_interval(profile: Profile, rng: random.Random) -> None:
    _slow_replicas(profile, rng)
    profile.options = replace(profile.options, has_interval=True)
    profile.network.delay = (0.01, 0.1)
    profile.weights |= {"power": 0.0, "power_all": 0.0, "disk": 0.0}


def _lost_tails(profile: Profile, rng: random.Random) -> None:
    """Single nodes lose power, and what they had only written."""
    _fast(profile)
    profile.options = replace(profile.options, has_interval=True)
    profile.nodes, profile.fault_every, profile.write_every = 3, 1.5, 0.03
    profile.sync = (0.05, 0.4)
    profile.network = NetworkFaults()
    profile.weights = {"power": 6.0, "heal": 1.0}


def _unheard_handovers(profile: Profile, rng: random.Random) -> None:
    """Who hands over is cut off, with most of its lease left; the others go on without it."""
    profile.options = replace(profile.options, timing=Timing(lease_ttl=3.0, replica_max_lag=0.3))
    profile.nodes, profile.fault_every, profile.fault_after_change, profile.write_every = 3, 2.0, 0.0, 0.03
    profile.network = NetworkFaults()
    profile.coordinator = CoordinatorFaults(lost_answer=0.1)
    profile.sync = (0.0005, 0.01)
    profile.weights = {"switchover": 8.0, "heal": 2.0}


def _cut_off_masters(profile: Profile, rng: random.Random) -> None:
    """Masters lose the coordinator and the others for longer than their lease; the network is slow, so that they have
    the coordinator again before they hear of anyone."""
    _fast(profile)
    profile.options = replace(profile.options, largest_min_in_sync=1)
    profile.nodes, profile.fault_every, profile.fault_after_change, profile.idle = 3, 3.0, 0.0, 0.1
    profile.network = NetworkFaults(delay=(0.1, 0.3))
    profile.coordinator = CoordinatorFaults(lost_request=0.1, lost_answer=0.1)
    profile.weights = {"split": 10.0}


def _restarts(profile: Profile, rng: random.Random) -> None:
    profile.weights |= {"kill": 5.0, "power": 5.0}


def _short_epochs(profile: Profile, rng: random.Random) -> None:
    """Masters change often and come back, without a restart; what one wrote beside the next master is cut, and most
    epochs are shorter than that."""
    _slow_replicas(profile, rng)
    profile.network = NetworkFaults(delay=(0.01, 0.15))
    profile.idle, profile.fault_after_change = 0.7, 0.4
    profile.weights = {"split": 10.0, "switchover": 4.0, "heal": 3.0, "deposed": 3.0}


def _forgotten_elections(profile: Profile, rng: random.Random) -> None:
    """A new master loses power before anything of its epoch is durable, and finds the old one still there."""
    _slow_replicas(profile, rng)
    profile.network = NetworkFaults(delay=(0.001, 0.01))
    profile.sync = (0.05, 0.3)
    profile.options = replace(profile.options, largest_min_in_sync=1)
    profile.fault_after_change, profile.fault_every = 0.0, 4.0
    profile.weights = {"forgotten": 8.0, "heal": 1.0}


def _lost_disks(profile: Profile, rng: random.Random) -> None:
    profile.weights["disk"] = 5.0


def _bad_network(profile: Profile, rng: random.Random) -> None:
    profile.network = NetworkFaults(loss=0.05, late=0.05, doubled=0.02, is_ordered=False)


def _stale_records(profile: Profile, rng: random.Random) -> None:
    """A deposed master does not hear of it, and who restarts is shown the old record."""
    _slow_replicas(profile, rng)
    profile.weights = {"deposed": 6.0, "split": 3.0, "stale_restart": 8.0, "survivor": 2.0, "kill": 1.0}


def _slow_syncs(profile: Profile, rng: random.Random) -> None:
    """Masters change while syncs are under way, and those that begin next come soon."""
    _short_epochs(profile, rng)
    profile.sync = (0.0005, 0.8)
    profile.network = NetworkFaults(delay=(0.001, 0.01))
    profile.idle, profile.write_every = 0.3, 0.02


def _slow_syncs_of_interval(profile: Profile, rng: random.Random) -> None:
    profile.options = replace(profile.options, has_interval=True)
    profile.sync = (0.05, 0.4)


def _standbys_that_leave(profile: Profile, rng: random.Random) -> None:
    """Standbys come and go under a load that asks for two replicas; the coordinator is slow."""
    _slow_replicas(profile, rng)
    profile.options = replace(profile.options, largest_min_in_sync=2)
    profile.coordinator = CoordinatorFaults(late_request=0.5, late_delay=(0.1, 1.0), lost_answer=0.3)


MUTATIONS = (
    Mutation("durable", "7", "ends count before they are durable", NoDurable, _restarts),
    Mutation("incarnation", "4", "a restarted master goes on in its epoch", NoIncarnation, _restarts),
    Mutation("union", "1, 7", "a grow that timed out is taken as not applied", NoUnion,
             _two_nodes_and_a_bad_coordinator),
    Mutation("growunion", "7", "a grow counts only once applied", NoGrowUnion,
             _two_nodes_and_a_bad_coordinator),
    Mutation("growcom", "8", "a standby joins below the committed position", NoGrowCommitted, _slow_replicas),
    Mutation("growstart", "8", "a standby joins below the epoch's start", NoGrowStart, _slow_replicas),
    Mutation("shrinkwait", "8", "a shrink counts when asked for", NoShrinkWait, _two_nodes_and_a_bad_coordinator),
    Mutation("ackepoch", "7", "reports of an older epoch count", NoAckEpoch, _short_epochs),
    Mutation("insync", "9", "a node outside in_sync stands", NoInSync),
    Mutation("logid", "9", "in_sync holds names, a disk is lost", Rules, _lost_disks, {"keeps_log_id": True}),
    Mutation("trunc_any", "15", "a follower keeps what it has", NoCut),
    Mutation("trunc_history", "15", "cut at the start of the master's epoch only", NoCutByHistory),
    Mutation("trunc_com", "15", "cut at the committed position that the follower knows", CutAtCommitted),
    Mutation("synccut", "15", "a sync that began before the cut reports", SyncsOutliveCuts, _slow_syncs),
    Mutation("refuse", "5", "a lower epoch is followed", NoRefusal, _stale_records,
             {"forgets_version": True}),
    Mutation("durableepoch", "5", "the highest epoch seen is forgotten in a crash", Rules, _forgotten_elections,
             {"forgets_epoch": True}),
    Mutation("comhandshake", "16", "the committed position is taken before the cut", CommittedBeforeCut, _bad_network),
    Mutation("onelease", "section 1", "the lease is an object of its own", LeaseBesideRecord, _cut_off_masters),
    Mutation("silence", "9", "a standby stands before the lease is silent", NoSilence),
    Mutation("leaseread", "10", "a master reads without a lease", NoLeaseToRead),
    Mutation("barrier", "11", "a new master reads before its epoch start is committed", NoReadBarrier),
    Mutation("resignstop", "13", "a master that hands over goes on until it hears", GoesOnWhileResigning,
             _unheard_handovers),
    Mutation("clean", "19", "flush interval: a node that lost its tail stands", UncleanStands, _lost_tails),
    Mutation("growacked", "19", "flush interval: a standby joins below what was acknowledged", NoGrowAcknowledged,
             _slow_replicas_of_interval),
    Mutation("readwait", "18", "flush interval: a read does not wait for what was acknowledged before", Rules,
             _slow_syncs_of_interval, {"reads_at_once": True}),
    Mutation("minopen", "8", "writes are counted against in_sync as known, while a shrink is open",
             OpenShrinksCountAsKnown, _standbys_that_leave),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RebuildMutation:
    """Of part 4 of the design."""

    name: str  # of the design's model
    dropped: str
    clauses: Clauses
    shape: RebuildShape
    rule: str = "section 4"

    def in_force(self) -> "RebuildMutation":
        return replace(self, clauses=Clauses())


def _slowly(**changes: Any) -> RebuildShape:
    """A long pull, of segments that keep their boundaries, so that those of two generations fit."""
    shape = RebuildShape(
        strikes=(60, 80), value_bytes=(900,), min_dead_ratio=(1.0,), by_force=(0.5,), request_s=(0.1, 0.6),
        stray=0.05,
    )  # fmt: skip
    return replace(shape, **changes)


REBUILD_MUTATIONS = (
    RebuildMutation("blank", "a standby keeps what it has and pulls the rest", Clauses(KeepsOld),
                    RebuildShape(away=(12, 20), strikes=(0, 5), value_bytes=(900,), min_dead_ratio=(1.0,),
                                 by_force=(0.2,), while_away={"write": 2, "compact": 3})),
    RebuildMutation("streamfirst", "the stream begins once everything is pulled",
                    Clauses(streams_first=False, checks_gaps=False),
                    _slowly(while_pulling={"write": 3, "compact": 8, "let_go": 6})),
    RebuildMutation("bounds", "next offsets are those behind the records that are there", Clauses(WithoutEnds),
                    RebuildShape(away=(15, 25), strikes=(0, 0), value_bytes=(900,), by_force=(0.8,), stray=0.02,
                                 while_away={"write": 2, "compact": 3, "let_go": 1})),
    RebuildMutation("pin", "each segment is pulled as it is by then", Clauses(WithoutPin),
                    _slowly(while_pulling={"write": 4, "compact": 8})),
    RebuildMutation("startover", "a pull whose pin broke goes on under another one", Clauses(GoesOn),
                    RebuildShape(strikes=(30, 50), value_bytes=(900,), by_force=(0.7,),
                                 while_pulling={"write": 4, "compact": 8, "break_pins": 3})),
)  # fmt: skip


def find(mutation: "Mutation | RebuildMutation", seeds: int, first: int = 0) -> tuple[int, Violated] | None:
    """How many seeds it took to find a violation, and which; None: not within so many."""
    for count in range(1, seeds + 1):
        try:
            run_mutated(mutation, first + count)
        except Violated as violated:
            return count, violated
        except NotLive:  # of a rebuild: what it lacks was seen, and it starts anew for ever
            continue
    return None


def run_mutated(mutation: "Mutation | RebuildMutation", seed: int) -> "Counts | RebuildCounts":
    """One run under the broken rules. *Errors*: Violated, as hoped for."""
    if isinstance(mutation, RebuildMutation):
        return simulate_rebuild(seed, mutation.clauses, mutation.shape)
    rng = random.Random(seed)
    profile = draw_profile(rng)
    mutation.shape(profile, rng)
    profile.options = replace(profile.options, **mutation.options)
    group = Group(seed, profile, mutation.rules())
    group.coordinator.is_checked = False
    return group.run_faults()
