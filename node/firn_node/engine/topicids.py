"""Ids of topics: where in group 0's log a topic was created, and after which loss.

===== =====================================================================================================
bits  content
===== =====================================================================================================
0-51  the position of the creating record: 4 PiB of log
52-62 of the newest epoch of group 0 that was elected by accepted data loss, modulo 2048; 0: there was none
===== =====================================================================================================

Invariant: an id is one topic's for good. A position is given once, but by a log that has lost its end: who produces to
a topic that was lost with it must not write into the one that begins there now. Two topics would share an id only if
that end were lost again after exactly 2048 elections, or a multiple, each of which writes a record.

Ids grow with the log, and with each loss. A topic of a group that never lost anything has its position as its id.
"""

from firn.errors import LimitExceeded

POSITION_BITS = 52
_EPOCHS = 1 << 11


def topic_id_at(position: int, forced_epoch: int) -> int:
    """The id of a topic that is created there. *Errors*: LimitExceeded beyond 4 PiB of log."""
    if position >> POSITION_BITS:
        raise LimitExceeded(f"the log of this group has come to {position}; topics can be created below 2^52")
    return (forced_epoch % _EPOCHS) << POSITION_BITS | position


def position_of(topic_id: int) -> int:
    """Where it was created."""
    return topic_id & ((1 << POSITION_BITS) - 1)
