"""What replicas say to one another. Every message carries who says it, in which epoch, after which handshake.

================ ================= ==========================================================================
message          from -> to        says
================ ================= ==========================================================================
Hello            standby -> master "this is my log: where do I start?"; opens a handshake
Welcome          master -> standby cut to here (None: rebuild), my log ends there
Refusal          any -> any        not in this epoch, or not here: the header's epoch is the sender's
Frame            master -> standby bytes of the log, ``[start, end)``
Report           standby -> master my written and durable ends, in this epoch
Committed        master -> standby the committed position; also the heartbeat
Leave            standby -> master my log is damaged: take me out of ``in_sync``
Ask              candidate -> any  before it stands: what do you know? Named like a handshake, so the answers are
Answer           any -> candidate  newest version, end of the log, whether something may be missing in it
Fence            candidate -> any  an accepted data loss: nothing more in epochs below the header's
================ ================= ==========================================================================

A message of another group is dropped; a higher epoch deposes, a lower one is refused; what precedes the last
handshake of its connection is dropped (``firn_node.replication.core``).
"""

from dataclasses import dataclass

from firn.types import Epoch, Position
from firn_node.replication.record import GroupId, Incarnation, LogId, Member


@dataclass(frozen=True, slots=True)
class Handshake:
    """Names one handshake, or one candidacy: the process that began it, and its count of them."""

    incarnation: Incarnation
    number: int
    start: int = 0  # of the data folder: a later process of it has a higher one


@dataclass(frozen=True, slots=True)
class EpochStart:
    """An entry of an epoch history: the position of the first batch of an epoch."""

    epoch: Epoch
    start: Position


History = tuple[EpochStart, ...]  # ascending in both fields


@dataclass(frozen=True, slots=True)
class Header:
    group_id: GroupId
    epoch: Epoch
    log_id: LogId  # who sends
    handshake: Handshake | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    header: Header
    member: Member
    history: History
    end: Position
    committed: Position
    is_rebuilt: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    header: Header
    cut: Position | None
    end: Position
    forced_epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refusal:
    header: Header
    reason: str


@dataclass(frozen=True, slots=True)
class Frame:
    """``starts``: the epochs that begin within it. The bytes travel beside it, the core does not see them."""

    header: Header
    start: Position
    end: Position
    starts: History = ()


@dataclass(frozen=True, slots=True)
class Report:
    header: Header
    written: Position
    durable: Position
    is_rebuilt: bool


@dataclass(frozen=True, slots=True)
class Committed:
    header: Header
    position: Position
    end: Position  # of the master's log: a standby that does not get there has lost its stream


@dataclass(frozen=True, slots=True)
class Leave:
    header: Header
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    header: Header
    version: int


@dataclass(frozen=True, slots=True)
class Answer:
    header: Header
    version: int
    last_epoch: Epoch
    end: Position
    is_unclean: bool
    may_stand: bool


@dataclass(frozen=True, slots=True)
class Fence:
    header: Header
    version: int


Message = Hello | Welcome | Refusal | Frame | Report | Committed | Leave | Ask | Answer | Fence
