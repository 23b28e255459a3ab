"""What a node's core knows: one immutable value, and the table of role changes.

``State`` holds facts only; what follows from them is decided in ``rules``. Times are seconds of the node's own
clock that also counts while the machine sleeps. A mapping in a state is never changed, only replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from firn.types import Epoch, Position
from firn_node.replication.messages import Answer, Handshake, Header, History
from firn_node.replication.record import GroupId, GroupRecord, Incarnation, LogId, Master, Member

NO_EPOCH = Epoch(0)
NEVER = float("-inf")
LOG_BEGIN = Position(0)


class Copied:
    """A frozen value without slots, so that a changed copy is one dict copied (a tenth of ``replace``'s time)."""

    def but(self, **changes: Any) -> Self:
        """A copy with other values in these fields."""
        fields = self.__dict__
        if not changes.keys() <= fields.keys():
            raise TypeError(f"{type(self).__name__} has no {changes.keys() - fields.keys()}")
        copy = object.__new__(type(self))
        copy.__dict__.update(fields, **changes)
        return copy


class Role(Enum):
    BLANK = "blank"  # being rebuilt: follows the master, serves and stands for nothing
    STANDBY = "standby"
    CANDIDATE = "candidate"
    MASTER = "master"
    RESIGNING = "resigning"  # still master, but stopped: waits for its successor to have everything
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RoleChange:
    label: str
    before: frozenset[Role]
    after: Role
    when: str


ROLE_CHANGES = (
    RoleChange("rebuilt", frozenset({Role.BLANK}), Role.STANDBY, "the rebuild is complete and stored"),
    RoleChange(
        "stands", frozenset({Role.STANDBY}), Role.CANDIDATE,
        "in sync, nothing missing, the record silent for leaseTtl or its master gone: asks the others",
    ),
    RoleChange(
        "forced", frozenset({Role.STANDBY}), Role.CANDIDATE,
        "a person accepted data loss: fences the others",
    ),
    RoleChange("gives up", frozenset({Role.CANDIDATE}), Role.STANDBY, "a newer version, or no outcome"),
    RoleChange(
        "elected", frozenset({Role.CANDIDATE, Role.STANDBY, Role.BLANK}), Role.MASTER,
        "the record names this process in the epoch that it asked for (BLANK: it made the record)",
    ),
    RoleChange("resigns", frozenset({Role.MASTER}), Role.RESIGNING, "a switchover was asked for"),
    RoleChange("stays", frozenset({Role.RESIGNING}), Role.MASTER, "the successor did not catch up in time"),
    RoleChange(
        "steps down", frozenset({Role.MASTER, Role.RESIGNING}), Role.STANDBY,
        "it asked to be nobody, or a higher epoch or another master is known",
    ),
    RoleChange("stops", frozenset(Role) - {Role.STOPPED}, Role.STOPPED, "its log or the record is not its own"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. Everything is a share of ``lease_ttl``, so that one setting moves all."""

    lease_ttl: float = 3.0
    replica_max_lag: float = 3.0  # a standby without catch-up for so long leaves in_sync

    @property
    def lease(self) -> float:
        return self.lease_ttl * 2 / 3  # with both clocks 20 % off: 2/3 * 1.2 < 1 / 1.2

    @property
    def tick(self) -> float:
        return self.lease_ttl / 15

    @property
    def renew_every(self) -> float:
        return self.lease_ttl / 6  # four attempts in a lease

    @property
    def read_every(self) -> float:
        return self.lease_ttl / 6

    @property
    def swap_timeout(self) -> float:
        return self.lease_ttl / 6

    @property
    def heartbeat_every(self) -> float:
        return self.lease_ttl / 10

    @property
    def answers_within(self) -> float:
        return self.lease_ttl / 15  # how long a candidate waits for the others

    @property
    def defers_for(self) -> float:
        return self.lease_ttl / 6  # how long a candidate lets a better one go first

    @property
    def awaits_within(self) -> float:
        return self.lease_ttl / 3  # a standby that is no further behind is waited for, so that it can join

    @property
    def awaits_for(self) -> float:
        return self.lease_ttl / 2

    @property
    def awaits_again_after(self) -> float:
        return self.lease_ttl * 4  # one that did not make it costs an eighth of the time, not all of it

    @property
    def asks_again_after(self) -> float:
        return self.lease_ttl / 3  # a Hello without an answer

    @property
    def named_for(self) -> float:
        return self.lease_ttl / 3  # a master of which nothing was heard: three heartbeats, two renewals

    @property
    def silent_after(self) -> float:
        return (
            self.lease_ttl
        )  # a standby that hears nothing asks anew; long enough for a frame on a thin link

    @property
    def stalls_after(self) -> float:
        return self.lease_ttl * 5  # ... and one that hears of more and gets none of it


@dataclass(frozen=True, slots=True)
class Me:
    group_id: GroupId
    log_id: LogId
    incarnation: Incarnation
    member: Member

    @property
    def as_master(self) -> Master:
        return Master(self.log_id, self.incarnation)


@dataclass(frozen=True, slots=True)
class Meta:
    """What a data folder remembers of its group beside the log; stored as a whole, durably."""

    epoch: Epoch = NO_EPOCH  # the highest seen
    version: int = 0  # of the record; a lower bound of what was seen
    is_rebuilt: bool = False  # what precedes the own log is here; False: the folder is blank, or half rebuilt
    is_unclean: bool = False  # acknowledged records of flush=interval may be missing
    boot_id: str = ""  # of the machine's start under which all its processes ran that may live
    starts: int = 0  # processes that have opened the folder, this one included


@dataclass(frozen=True)
class LogView(Copied):
    """The own log, as far as the rules need it. ``cuts`` counts cuts of this process."""

    start: Position = LOG_BEGIN
    written: Position = LOG_BEGIN
    durable: Position = LOG_BEGIN
    history: History = ()
    cuts: int = 0

    @property
    def last_epoch(self) -> Epoch:
        return self.history[-1].epoch if self.history else NO_EPOCH

    @property
    def is_empty(self) -> bool:
        return not self.history


@dataclass(frozen=True, slots=True)
class Startup:
    """What the driver found when it opened the data folder."""

    meta: Meta
    log: LogView
    committed: Position = LOG_BEGIN  # known to be committed: the index's checkpoint
    largest_min_in_sync: int = 1
    old_process_is_dead: bool = True  # folder lock and boot id prove it
    boot_id: str = ""
    was_shut_down: bool = False  # everything written was synced, and it said so
    has_interval: bool = False  # topics of flush=interval exist


@dataclass(frozen=True, slots=True)
class OpenWrite:
    """A request in the log that waits for its answer."""

    ticket: int
    end: Position
    min_in_sync: int = 1
    is_interval: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A compare-and-set against the known version whose outcome no newer version has settled."""

    new: GroupRecord
    sent_at: float


@dataclass(frozen=True, slots=True)
class Heard:
    """The newest report of a replica."""

    epoch: Epoch
    handshake: Handshake
    written: Position
    durable: Position
    is_rebuilt: bool
    at: float


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who a replica says that it is, and when."""

    member: Member
    at: float


class Phase(Enum):
    ASKED = "asked"  # a Hello is out
    STORING = "storing"  # the master's epoch is being made durable
    CUTTING = "cutting"
    FOLLOWING = "following"


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the master's log ended at a moment: what a replica holds, in seconds."""

    at: float
    end: Position


@dataclass(frozen=True)
class Following(Copied):
    master: LogId
    epoch: Epoch
    handshake: Handshake
    phase: Phase
    cut: Position
    whole: Position  # the master's end at the handshake: with it, nothing that it had is missing
    heard_at: float
    progress_at: float  # the last time when the log grew, or all was here that the master had told of
    reported_at: float = NEVER
    end: Position = LOG_BEGIN  # the master's, as last told
    sample: Mark | None = None  # one of the ends told of, until it is durable here
    caught_up_at: float = NEVER  # when a sample was told of that has become durable here since


@dataclass(frozen=True, slots=True)
class Candidacy:
    name: Handshake  # of its questions, and so of their answers
    since: float
    is_forced: bool
    answers: Mapping[LogId, Answer] = field(hash=False)
    has_asked: bool = False  # the compare-and-set is out


@dataclass(frozen=True, slots=True)
class Resignation:
    since: float
    successor: LogId


@dataclass(frozen=True, slots=True)
class Resigned:
    """A mastership that this process has given up, and asks to be rid of until the record says so."""

    epoch: Epoch
    successor: LogId | None


@dataclass(frozen=True)
class Mastery(Copied):
    """What a master knows in its epoch; gone with it."""

    epoch: Epoch
    since: float
    lease_sent_at: float  # when the last successful renewal was sent
    welcomed: Mapping[LogId, Handshake] = field(hash=False)
    streaming: Mapping[LogId, Handshake] = field(hash=False)
    caught_up_at: Mapping[LogId, float] = field(hash=False)  # had all that was written then
    greeted: Mapping[LogId, Greeting] = field(hash=False)  # the last Hello of each
    awaited: Mapping[LogId, float] = field(hash=False)  # close behind since: commits wait for it, for a while
    leaving: Mapping[LogId, Handshake] = field(hash=False)  # since when: out of in_sync as soon as possible
    marks: tuple[Mark, ...] = ()  # one a tick, over replica_max_lag
    removing: frozenset[LogId] = frozenset()  # ... and out of the members
    start: Position | None = None  # of the epoch-start record; None: not yet written
    start_end: Position | None = None
    is_loaded: bool = False
    acknowledged: Position = LOG_BEGIN  # flush=interval: written in the whole counted set
    writes: tuple[OpenWrite, ...] = ()
    resignation: Resignation | None = None
    may_shrink_below: bool = False  # it resigned over this already, and nobody came
    beat_at: float = NEVER


@dataclass(frozen=True)
class State(Copied):
    me: Me
    timing: Timing
    role: Role
    epoch: Epoch  # the highest seen
    wanted: Meta  # being stored, or next
    stored: Meta
    log: LogView
    committed: Position
    dispatching: Position  # told to the driver
    dispatched: Position
    largest_min_in_sync: int
    has_interval: bool
    old_process_is_dead: bool
    boot_id: str
    started_at: float
    is_storing: bool = False  # until MetaStored no further StoreMeta is ordered
    is_cutting: bool = False  # until LogCut nothing is appended, and no log is shown to anyone
    record: GroupRecord | None = None  # the newest seen
    record_at: float = NEVER  # when that version was first seen
    read_at: float = NEVER
    asked: tuple[Asked, ...] = ()
    asked_at: float = NEVER
    is_asking: bool = False  # no answer yet
    asked_epoch: Epoch = NO_EPOCH  # this process asked for it and has not acted in it since
    waits_until: float = NEVER  # resigned, or was fenced: others stand first
    resigned: Resigned | None = None
    resigned_to_shrink: bool = False
    handshakes: int = 0
    ticked_at: float = NEVER
    resumed_at: float = NEVER  # the process had not run for a while
    following: Following | None = None
    candidacy: Candidacy | None = None
    mastery: Mastery | None = None
    heard: Mapping[LogId, Heard] = field(default_factory=dict, hash=False)
    fenced_by: Header | None = None  # waits for an answer until the epoch is stored
    is_leaving: bool = False  # about to stop: follows nobody, stands for nothing
    stop_reason: str = ""
