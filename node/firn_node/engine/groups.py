"""Consumer groups' offsets: firn using itself.

A commit is a record of the internal compacted topic ``__offsets``: key msgpack ``[group, topic_id, partition]``,
value msgpack ``[offset, since]``. By topic_id, so that a deleted and re-created topic starts anew. A group has no
membership. In a cluster of several broker groups, group 0 keeps the offsets of all partitions: one request commits
them as one batch, whole or not at all.
"""

import msgpack

from firn.batch import Identity, columns_of, encode
from firn.errors import Invalid
from firn.limits import GROUP_NAME_BYTES_MAX
from firn.types import OFFSETS_TOPIC, OFFSETS_TOPIC_ID
from firn_node.engine.api import TopicInfo
from firn_node.engine.appender import Appender
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.lookup import Lookup
from firn_node.engine.partitions import Partitions

Committed = dict[int, tuple[int, int | None]]


class Groups:
    def __init__(
        self, core: Core, partitions: Partitions, appender: Appender, commits: Commits, lookup: Lookup
    ) -> None:
        self._core = core
        self._partitions = partitions
        self._appender = appender
        self._commits = commits
        self._lookup = lookup

    async def commit(self, group: str, topic: TopicInfo, offsets: Committed) -> None:
        """Remember offset and ``since`` of some partitions. *Effects*: durable on return; may be repeated."""
        _check_group(group)
        if not offsets:
            return
        for number, (offset, _) in offsets.items():
            if not 0 <= number < topic.spec.partitions:
                raise Invalid(
                    f"partition {number}: topic {topic.name!r} has 0 to {topic.spec.partitions - 1}"
                )
            if offset < 0:
                raise Invalid(f"partition {number}: offset {offset} is negative")
        keys = [_key(group, topic.topic_id, number) for number in offsets]
        values = [bytes(msgpack.packb(list(value))) for value in offsets.values()]
        columns = columns_of(keys, values, self._core.machine_clock.wall_ms())
        await self._appender.append_internal(
            encode(columns, Identity(topic_id=OFFSETS_TOPIC_ID, partition=0))
        )

    async def fetch(self, group: str, topic: TopicInfo) -> Committed:
        """What the group committed; partitions without a commit are absent."""
        _check_group(group)
        partition = self._partitions.get(self._core.catalogue.named(OFFSETS_TOPIC), 0)
        with partition.in_use():
            await self._commits.wait(self._core.log.written_end if partition.pending else 0)
        numbers = range(topic.spec.partitions)
        found = self._lookup.get(partition, [_key(group, topic.topic_id, n) for n in numbers])
        committed: Committed = {}
        for number, row in zip(numbers, found, strict=True):
            if row is not None:
                offset, since, *_ = msgpack.unpackb(row.value)
                committed[number] = (offset, since)
        return committed


def _key(group: str, topic_id: int, partition: int) -> bytes:
    return bytes(msgpack.packb([group, topic_id, partition]))


def _check_group(group: str) -> None:
    if not group or len(group.encode()) > GROUP_NAME_BYTES_MAX:
        raise Invalid(f"group name {group!r}: expected 1 to {GROUP_NAME_BYTES_MAX} bytes")
