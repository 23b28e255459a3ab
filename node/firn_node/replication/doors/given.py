"""What a driver is given."""

from dataclasses import dataclass, field

from firn_node.clock import Clock, LogClock, Randomness
from firn_node.coordinator import Coordinator
from firn_node.log import CommitLog
from firn_node.replication.doors.peers import Dialling
from firn_node.replication.doors.startup import Folder
from firn_node.replication.serving import Engine
from firn_node.replication.state import Timing


@dataclass(frozen=True, slots=True)
class Doors:
    """What a driver is given; everything that is not a decision."""

    log: CommitLog
    folder: Folder
    coordinator: Coordinator
    engine: Engine
    clock: Clock
    log_clock: LogClock
    randomness: Randomness
    timing: Timing = field(default_factory=Timing)
    flush_interval_s: float = 0.0  # how long a write of ``flush: interval`` may stay unsynced
    dialling: Dialling = field(default_factory=Dialling)
