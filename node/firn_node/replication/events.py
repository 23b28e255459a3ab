"""What happens to a node's core, and what it wants done. All values; time comes beside them.

Events are facts: what was written, synced, received, answered, asked by a person. Actions are orders to the
driver, carried out in their order. The driver may delay them; it may not reorder those that touch the log.
"""

from dataclasses import dataclass
from enum import Enum

from firn.types import Epoch, Position
from firn_node.replication.messages import Frame, Handshake, History, Message
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.state import Meta, OpenWrite

# Events.


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; at least every ``Timing.tick`` seconds."""


@dataclass(frozen=True, slots=True)
class Received:
    message: Message


@dataclass(frozen=True, slots=True)
class Arriving:
    """Log bytes come from the master that is followed, no frame of them whole yet: a slow link is no lost stream."""


@dataclass(frozen=True, slots=True)
class RecordRead:
    """The coordinator's record, by a read or a watch; None: there is none.

    ``at_least``: of a consistent read, one that misses nothing that was written before it was asked for, the
    version of its ``ReadRecord``; None for a watch, a cache, or a read that may be late.
    """

    record: GroupRecord | None
    at_least: int | None = None


class Outcome(Enum):
    APPLIED = "applied"
    CONFLICT = "conflict"  # proves nothing: libraries retry, and find their own request applied
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SwapAnswered:
    new: GroupRecord
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class MetaStored:
    meta: Meta


@dataclass(frozen=True, slots=True)
class Written:
    """The log has grown to ``end``; ``writes`` are requests in it that wait for an answer."""

    end: Position
    starts: History = ()
    writes: tuple[OpenWrite, ...] = ()


@dataclass(frozen=True, slots=True)
class Durable:
    """A sync ended that began after ``cuts`` cuts and covered the log up to ``end``."""

    end: Position
    cuts: int


@dataclass(frozen=True, slots=True)
class LogCut:
    """The log ends at ``end``, durably."""

    end: Position


@dataclass(frozen=True, slots=True)
class Released:
    """Retention has removed what lay before ``start``."""

    start: Position


@dataclass(frozen=True, slots=True)
class Dispatched:
    position: Position


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The log is read to its end: catalogue, next offsets, producer state, newest offset per key."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class TopicsChanged:
    """What the log says of all topics: the largest ``minInSync``, and whether any has ``flush: interval``."""

    largest_min_in_sync: int
    has_interval: bool = False


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The rebuild is complete: what precedes the own log is here, by key."""


@dataclass(frozen=True, slots=True)
class LogDamaged:
    """A bad batch below the durable end: this log can be trusted no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class SwitchoverAsked:
    to: LogId


@dataclass(frozen=True, slots=True)
class DataLossAccepted:
    """A person wants this node to be master, whatever others may hold that it does not."""

    by: str


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This process is about to stop: the others need not find out by waiting for it."""


@dataclass(frozen=True, slots=True)
class RemovalAsked:
    """``is_withdrawn``: it may join again, as anybody may."""

    log_id: LogId
    is_withdrawn: bool = False


Event = (
    Tick
    | Received
    | Arriving
    | RecordRead
    | SwapAnswered
    | MetaStored
    | Written
    | Durable
    | LogCut
    | Released
    | Dispatched
    | StateLoaded
    | TopicsChanged
    | Rebuilt
    | LogDamaged
    | SwitchoverAsked
    | DataLossAccepted
    | LeaveAsked
    | RemovalAsked
)

# Actions.


@dataclass(frozen=True, slots=True)
class Send:
    to: LogId
    message: Message


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Ask the coordinator; the answer, if any, is ``RecordRead`` with this ``at_least``."""

    at_least: int


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Ask the coordinator once; the answer, if any, is ``SwapAnswered``."""

    expected: int
    new: GroupRecord


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """Make it durable in the data folder, then ``MetaStored``."""

    meta: Meta


@dataclass(frozen=True, slots=True)
class AppendEpochStart:
    """Append the control record of the epoch, then ``Written`` with its start."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LoadState:
    """Read the log to its end, then ``StateLoaded``."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """Append the frame's bytes, then ``Written``."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class CutLog:
    """Cut the log to ``end``, durably, then ``LogCut``."""

    end: Position


@dataclass(frozen=True, slots=True)
class BeginLog:
    """The log is empty; its first byte will be at ``start``."""

    start: Position


@dataclass(frozen=True, slots=True)
class StartStream:
    """Send the log from ``start`` on, in frames of the given epoch and handshake; ends an older stream to it."""

    to: LogId
    epoch: Epoch
    handshake: Handshake
    start: Position


@dataclass(frozen=True, slots=True)
class StopStream:
    """End the stream to a standby; it opens another handshake."""

    to: LogId


@dataclass(frozen=True, slots=True)
class StopStreams:
    """End all streams."""


@dataclass(frozen=True, slots=True)
class Acknowledge:
    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndRequests:
    """Every open request ends with ``Timeout``: its outcome is unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class DispatchTo:
    """Committed and durable here up to ``position``: may be dispatched, and is then readable."""

    position: Position


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Start again under a new log_id with an empty folder; ``keeps_tail``: put the old log aside first."""

    reason: str
    keeps_tail: bool = False


@dataclass(frozen=True, slots=True)
class SwitchoverEnded:
    """A switchover was given up: the node is master as before."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End this process's part in the group, and tell people why."""

    reason: str
    is_bug: bool = False


Action = (
    Send
    | ReadRecord
    | CompareAndSet
    | StoreMeta
    | AppendEpochStart
    | LoadState
    | WriteFrame
    | CutLog
    | BeginLog
    | StartStream
    | StopStream
    | StopStreams
    | Acknowledge
    | EndRequests
    | DispatchTo
    | Rebuild
    | SwitchoverEnded
    | Stop
)
