"""Finding raw records by key and time range, and by message id.

A message id is ``GROUP-POSITION-ROW-TOPICID``, all in hex. It resolves as long as the commit log
retains the record.
"""

from collections.abc import Iterator

from firn.batch import Batch
from firn.errors import Corrupt, Invalid, MalformedBatch
from firn.record import Record, message_id, records_of
from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.lookup import BatchCache


def records_by_key(
    core: Core, topic: TopicInfo, key: bytes, since_ms: int, until_ms: int
) -> Iterator[Record]:
    """The raw records of a key with a timestamp in [since_ms, until_ms), oldest first; committed ones only."""
    end = core.dispatched_position
    for position, data, rows in core.key_query.find(topic.topic_id, key, since_ms, until_ms):
        if position >= end:
            return
        records = list(records_of(Batch(data), topic.name))
        for row in rows:
            if since_ms <= records[row].timestamp < until_ms:
                yield records[row]._replace(id=message_id(core.group, position, row, topic.topic_id))


def record_by_id(core: Core, batches: BatchCache, topic: TopicInfo, id: str) -> Record | None:
    """The record that a message id names; None when it has expired or never was of this topic.

    Errors: Invalid for a malformed id; NotMaster for one of another broker group.
    """
    try:
        group, position, row, topic_id = (int(n, 16) for n in id.split("-"))
    except ValueError as error:
        raise Invalid(f"message id {id!r}: expected GROUP-POSITION-ROW-TOPICID, all in hex") from error
    if topic_id == topic.topic_id and group != core.group and group in core.groups:
        raise core.elsewhere(f"message id {id!r} is of", group)
    if group != core.group or topic_id != topic.topic_id or position % 8:
        return None
    if not core.log.start <= position < core.dispatched_position:
        return None
    try:
        batch = batches.at(position)
    except (Corrupt, MalformedBatch):
        return None  # no batch begins there
    if batch.header.topic_id != topic_id or not 0 <= row < batch.header.records:
        return None
    return list(records_of(batch, topic.name))[row]._replace(id=id)
