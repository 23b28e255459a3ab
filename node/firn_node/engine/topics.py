"""Create, change and delete topics: each is one record of ``__topics``, decided by the appender's order."""

from firn.batch import Identity, columns_of, encode
from firn.errors import Invalid, TopicExists, Unavailable
from firn.topicspec import TopicSpec, check_topic_name
from firn.types import TOPICS_TOPIC_ID
from firn_node.engine.api import TopicInfo
from firn_node.engine.appender import Appender
from firn_node.engine.catalogue import topic_value
from firn_node.engine.core import Core


class Topics:
    def __init__(self, core: Core, appender: Appender) -> None:
        self._core = core
        self._appender = appender

    async def create(self, name: str, spec: TopicSpec) -> TopicInfo:
        """A new topic. *Effects*: durable and visible on return. *Errors*: Invalid, TopicExists."""
        check_topic_name(name)
        if name in self._core.catalogue.by_name or name in self._core.catalogue.changing:
            raise TopicExists(
                f"topic {name!r} exists; choose another name, or change it with `firn up -f`", topic=name
            )
        # Nothing is awaited between planning the position and appending at it: the id is the position.
        size = len(self._record(name, topic_value(0, spec)))
        topic_id = self._core.log.plan([size])[0]
        await self._append(name, self._record(name, topic_value(topic_id, spec)))
        return self._core.catalogue.named(name)

    async def update(self, name: str, spec: TopicSpec) -> TopicInfo:
        """Change a topic's spec. *Errors*: Invalid when the number of partitions would change."""
        topic = self._core.catalogue.named(name)
        self._check_user(topic)
        if spec.partitions != topic.spec.partitions:
            raise Invalid(
                f"topic {name!r}: partitions cannot change from {topic.spec.partitions} to {spec.partitions}, because "
                "keys would move; create a topic with the new number and copy the records into it"
            )
        forced = self._core.catalogue.forced.get(topic.topic_id, 0)
        await self._append(name, self._record(name, topic_value(topic.topic_id, spec, forced)))
        return self._core.catalogue.named(name)

    async def force_compaction(self, topic: TopicInfo) -> None:
        """Ask every replica of the group to compact a topic by force. *Effects*: durable, and begun here, on return."""
        forced = self._core.catalogue.forced.get(topic.topic_id, 0) + 1
        value = topic_value(topic.topic_id, topic.spec, forced)
        await self._append(topic.name, self._record(topic.name, value))

    async def delete(self, name: str) -> None:
        """Delete a topic and all of its records. *Effects*: durable on return; its bytes are never seen again."""
        self._check_user(self._core.catalogue.named(name))
        await self._append(name, self._record(name, None))

    def _check_user(self, topic: TopicInfo) -> None:
        if topic.name.startswith("__"):
            raise Invalid(f"topic {topic.name!r} is internal; it cannot be changed or deleted")

    def _record(self, name: str, value: bytes | None) -> bytes:
        columns = columns_of([name.encode()], [value], self._core.machine_clock.wall_ms())
        return encode(columns, Identity(topic_id=TOPICS_TOPIC_ID, partition=0))

    async def _append(self, name: str, batch: bytes) -> None:
        changing = self._core.catalogue.changing
        if name in changing:
            raise Unavailable(f"topic {name!r} is being changed by another request; try again", topic=name)
        changing.add(name)
        try:
            committed = self._appender.append_internal(batch)
        except BaseException:
            changing.discard(name)
            raise
        await committed

    def listed(self, *, after: str, limit: int) -> list[TopicInfo]:
        """User topics by name, those after ``after``, at most ``limit``."""
        names = sorted(n for n in self._core.catalogue.by_name if not n.startswith("__") and n > after)
        return [self._core.catalogue.by_name[n] for n in names[:limit]]
