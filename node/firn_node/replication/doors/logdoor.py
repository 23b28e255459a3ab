"""What the core orders of the log, carried out; each append is told as the event that it is.

The epochs of a copy are read off its own headers, not taken from the frame that announced it.
"""

from firn.batch import Buffer
from firn.errors import InvariantBroken
from firn.types import Epoch, Position
from firn_node.clock import LogClock
from firn_node.log import CommitLog
from firn_node.replication.doors.epochfile import EpochFile
from firn_node.replication.epochstart import epoch_start_batch
from firn_node.replication.events import Written
from firn_node.replication.messages import EpochStart, Frame, History
from firn_node.replication.state import Me


class LogDoor:
    """``cuts``: cuts that have ended; what began before one proves nothing after it."""

    def __init__(self, commit_log: CommitLog, epoch_file: EpochFile, me: Me, clock: LogClock) -> None:
        self._log = commit_log
        self._epoch_file = epoch_file
        self._me = me
        self._clock = clock
        self.cuts = 0

    def append_epoch_start(self, epoch: Epoch) -> Written:
        """*Errors*: as of ``CommitLog.append``."""
        me = self._me
        batch = epoch_start_batch(epoch, group_id=me.group_id, log_id=me.log_id, now_ms=self._clock.now_ms())
        [position] = self._log.append([batch])
        return Written(Position(self._log.written_end), (EpochStart(epoch, Position(position)),))

    def append_frame(self, frame: Frame, data: Buffer, *, after: Epoch) -> Written:
        """Append what a master has sent; ``after``: the epoch of what lies before.

        *Errors*: as of ``CommitLog.append_copy``; nothing is appended then.
        """
        if len(data) != frame.end - frame.start:
            raise InvariantBroken("a frame is written in the step that received it")
        found = self._log.append_copy(frame.start, data, after=after)
        return Written(frame.end, tuple(EpochStart(Epoch(e), Position(p)) for e, p in found))

    def cut(self, history: History, end: Position) -> None:
        """Cut the log: 1. the epoch file, 2. the log. *Effects*: durable on return; takes its time."""
        self._epoch_file.cut(tuple(entry for entry in history if entry.start < end), end)
        self._log.truncate(end)
        self.cuts += 1

    def begin(self, start: Position) -> None:
        """Let the empty log begin at ``start``. *Effects*: durable on return."""
        self._epoch_file.cut((), start)
        self._log.begin_at(start)
