"""The epoch-start record: the first batch that a master writes in its epoch.

A batch of the flag CONTROL, of topic 0 (no topic has that id), partition 0, offset 0. Its header's ``epoch`` is
what counts: the epoch history of a log is read off the headers alone. Its one record says, for people, who it was:

======= ==========================================================
part    content
======= ==========================================================
key     the bytes ``epoch-start``
value   msgpack map {group_id: str, epoch: int, log_id: str}
stamps  record and append time: the master's log clock, ms
======= ==========================================================

Dispatch, retention and readers pass over it as over a batch of a deleted topic; clients may not send control
batches.
"""

import msgpack

from firn.batch import Flag, Identity, columns_of, encode
from firn.types import Epoch
from firn_node.replication.record import GroupId, LogId

CONTROL_TOPIC_ID = 0
KEY = b"epoch-start"


def epoch_start_batch(epoch: Epoch, *, group_id: GroupId, log_id: LogId, now_ms: int) -> bytes:
    """The whole batch, as it goes to the log."""
    value = msgpack.packb({"group_id": group_id, "epoch": epoch, "log_id": log_id})
    identity = Identity(
        topic_id=CONTROL_TOPIC_ID, partition=0, epoch=epoch, append_timestamp=now_ms, flags=Flag.CONTROL
    )
    return encode(columns_of([KEY], [value], now_ms), identity)
