"""The topics that exist, as the records of the internal topic ``__topics`` tell.

A record's key is the topic's name, its value a msgpack map ``{id, spec}``; a tombstone deletes. ``id`` is the
commit log position of the creating record, 16 hex digits so that its length is known before its value is. ``forced``,
where it is more than 0, counts the compactions by force that a group was asked for: a record in which it has grown is
such a request, to every replica.
Records are applied in log order, and only once committed: every replica holds the same catalogue.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack

from firn.errors import UnknownTopic
from firn.topicspec import CompactionSpec, DurabilitySpec, RetentionSpec, TopicSpec, parse_spec
from firn.types import OFFSETS_TOPIC, OFFSETS_TOPIC_ID, TOPICS_TOPIC, TOPICS_TOPIC_ID
from firn_node.engine.api import TopicInfo

# Internal topics let go of the commit log as soon as a compaction has covered them.
_INTERNAL_SPEC = TopicSpec(
    compaction=CompactionSpec(segment_bytes=16 << 20, max_segment_age_ms=600_000),
    retention=RetentionSpec(time_ms=0, size_bytes=0),
)
INTERNAL = (
    TopicInfo(TOPICS_TOPIC, TOPICS_TOPIC_ID, _INTERNAL_SPEC),
    TopicInfo(OFFSETS_TOPIC, OFFSETS_TOPIC_ID, _INTERNAL_SPEC),
)


def topic_value(topic_id: int, spec: TopicSpec, forced: int = 0) -> bytes:
    """The value of a ``__topics`` record; its length does not depend on ``topic_id``."""
    count = {"forced": forced} if forced else {}
    return bytes(msgpack.packb({"id": f"{topic_id:016x}", "spec": spec.document(), **count}))


def topic_of(name: str, value: bytes) -> TopicInfo:
    """The topic that a ``__topics`` record makes or changes."""
    fields = msgpack.unpackb(value)
    return TopicInfo(name, int(fields["id"], 16), parse_spec(fields["spec"]))


def forced_of(value: bytes) -> int:
    """How many compactions by force it counts."""
    return int(msgpack.unpackb(value).get("forced", 0))


@dataclass(slots=True)
class Catalogue:
    """Committed topics by name and id. ``on_delete`` is called with each topic that goes, ``on_force`` with each that is
    to be compacted by force, but for what is applied before it is set."""

    on_delete: Callable[[TopicInfo], None]
    on_force: Callable[[TopicInfo], None] = lambda topic: None
    forced: dict[int, int] = field(default_factory=dict)  # by topic id
    by_name: dict[str, TopicInfo] = field(default_factory=lambda: {t.name: t for t in INTERNAL})
    by_id: dict[int, TopicInfo] = field(default_factory=lambda: {t.topic_id: t for t in INTERNAL})
    # Names that an appended, not yet committed record creates, changes or deletes.
    changing: set[str] = field(default_factory=set)
    # Records of ``__topics`` below it are applied. A replay must pass over them: an older "create" would delete
    # the topic that has the name now.
    applied_end: int = 0
    changes: int = 0  # grows with every record applied

    def named(self, name: str) -> TopicInfo:
        found = self.by_name.get(name)
        if found is None:
            raise UnknownTopic(
                f"topic {name!r} does not exist; create it with `firn topics create {name}`", topic=name
            )
        return found

    def durability(self) -> DurabilitySpec:
        """The strictest ``minInSync`` of all topics, and ``interval`` where any topic has that."""
        all_of_them = [topic.spec.durability for topic in self.by_id.values()]
        has_interval = any(durability.flush == "interval" for durability in all_of_them)
        return DurabilitySpec(max(d.min_in_sync for d in all_of_them), "interval" if has_interval else "sync")

    def apply(self, name: str, value: bytes | None) -> None:
        """Apply one committed record. Applying it again changes nothing."""
        known = self.by_name.get(name)
        self.changes += 1
        if value is None:
            if known is not None:
                self._remove(known)
            return
        topic = topic_of(name, value)
        if known is not None and known.topic_id != topic.topic_id:
            self._remove(known)
        self.by_name[name] = topic
        self.by_id[topic.topic_id] = topic
        forced, before = forced_of(value), self.forced.get(topic.topic_id, 0)
        self.forced[topic.topic_id] = forced
        if forced > before:
            self.on_force(topic)

    def _remove(self, topic: TopicInfo) -> None:
        del self.by_name[topic.name]
        del self.by_id[topic.topic_id]
        self.forced.pop(topic.topic_id, None)
        self.on_delete(topic)
