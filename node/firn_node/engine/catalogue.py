"""The topics that exist, as the records of the internal topic ``__topics`` tell.

A record's key is the topic's name, its value a msgpack map; a tombstone deletes:

========== ======================================================================================================
``id``     made of the position of the creating record in group 0's log (``topicids``), 16 hex digits so that its
           length is known before its value is
``spec``   its document
``forced`` where it is more than 0: counts the compactions by force that this group was asked for; a record in
           which it has grown is such a request, to every replica
``groups`` the broker groups that its partitions are dealt to; left out: group 0 alone
``told``   in other groups than 0: [epoch, position], the state of group 0's catalogue that this was taken from
========== ======================================================================================================

Records are applied in log order, and only once committed: every replica holds the same catalogue.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from firn.errors import FirnError, Unavailable, UnknownTopic
from firn.topicspec import CompactionSpec, DurabilitySpec, RetentionSpec, TopicSpec, stored_spec
from firn.types import OFFSETS_TOPIC, OFFSETS_TOPIC_ID, TOPICS_TOPIC, TOPICS_TOPIC_ID
from firn_node.engine.api import FIRST_GROUP, TopicInfo

# Internal topics let go of the commit log as soon as a compaction has covered them.
_INTERNAL_SPEC = TopicSpec(
    compaction=CompactionSpec(segment_bytes=16 << 20, max_segment_age_ms=600_000),
    retention=RetentionSpec(time_ms=0, size_bytes=0),
)


# A state of group 0's catalogue: all that its log has before a position, said in an epoch.
Told = tuple[int, int]
NEVER_TOLD: Told = (0, 0)


def topic_value(topic: TopicInfo, *, forced: int = 0, plan: str = "", told: Told = NEVER_TOLD) -> bytes:
    """The value of a ``__topics`` record; its length does not depend on ``topic_id``. ``plan``: what asks for the last of
    the ``forced`` compactions, where a plan does.
    """
    fields: dict[str, Any] = {"id": f"{topic.topic_id:016x}", "spec": topic.spec.document()}
    if topic.groups != (FIRST_GROUP,):
        fields["groups"] = list(topic.groups)
    if forced:
        fields["forced"] = forced
    if plan:
        fields["plan"] = plan
    if told != NEVER_TOLD:
        fields["told"] = list(told)
    return bytes(msgpack.packb(fields))


def topic_of(name: str, value: bytes) -> TopicInfo:
    """The topic that a ``__topics`` record makes or changes."""
    fields = msgpack.unpackb(value)
    groups = tuple(fields.get("groups", (FIRST_GROUP,)))
    return TopicInfo(name, int(fields["id"], 16), stored_spec(fields["spec"]), groups)


def told_of(value: bytes) -> Told:
    """The state of group 0's catalogue that a ``__topics`` record of another group was taken from."""
    epoch, position, *_ = msgpack.unpackb(value).get("told", NEVER_TOLD)
    return epoch, position


def forced_of(value: bytes) -> int:
    """How many compactions by force it counts."""
    return int(msgpack.unpackb(value).get("forced", 0))


def plan_of(value: bytes) -> str:
    """The id of the plan that asks for the last of them; empty: somebody else does."""
    return str(msgpack.unpackb(value).get("plan", ""))


@dataclass(slots=True)
class Catalogue:
    """Committed topics by name and id, and the internal ones, which every group has for itself.

    ``on_delete`` is called with each topic that goes, ``on_force`` with each that is to be compacted by force, and the id
    of the plan that asks for it or "", but for
    what is applied before it is set; ``group``: the number of this broker's.
    """

    on_delete: Callable[[TopicInfo], None]
    group: int = FIRST_GROUP
    on_force: Callable[[TopicInfo, str], None] = lambda topic, plan: None
    forced: dict[int, int] = field(default_factory=dict)  # by topic id
    by_name: dict[str, TopicInfo] = field(default_factory=dict)
    by_id: dict[int, TopicInfo] = field(default_factory=dict)
    # Names that an appended, not yet committed record creates, changes or deletes.
    changing: set[str] = field(default_factory=set)
    # Records of ``__topics`` below it are applied. A replay must pass over them: an older "create" would delete
    # the topic that has the name now.
    applied_end: int = 0
    changes: int = 0  # grows with every record applied
    # The newest state of group 0's catalogue that is known to be held here; of group 0 itself never.
    told: Told = NEVER_TOLD
    # Of a master that follows group 0's: it has all topics with smaller ids, as far as it knows by now.
    whole_to: Callable[[], int | None] = lambda: None
    # Called with each name that a record changed, and the position where that record ends.
    on_change: Callable[[str, int], None] = lambda name, end: None

    def __post_init__(self) -> None:
        for name, topic_id in ((TOPICS_TOPIC, TOPICS_TOPIC_ID), (OFFSETS_TOPIC, OFFSETS_TOPIC_ID)):
            self.by_name[name] = self.by_id[topic_id] = TopicInfo(
                name, topic_id, _INTERNAL_SPEC, (self.group,)
            )

    def named(self, name: str) -> TopicInfo:
        """*Errors*: UnknownTopic; Unavailable of a master that has yet to ask group 0 which topics there are."""
        found = self.by_name.get(name)
        if found is None:
            if self.whole_to() == 0:
                raise Unavailable(
                    f"topic {name!r} is not known yet in this broker group; try again", topic=name
                )
            raise UnknownTopic(
                f"topic {name!r} does not exist; create it with `firn topics create {name}`", topic=name
            )
        return found

    def unknown(self, topic_id: int) -> FirnError:
        """Why there is no topic of an id: it may be one that this group has yet to hear of from group 0."""
        known_to = self.whole_to()
        if known_to is not None and topic_id >= known_to:
            return Unavailable(f"topic id {topic_id} is not known yet in this broker group; try again")
        return UnknownTopic(f"topic id {topic_id} does not exist (any more); look the topic up again")

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
        if self.group != FIRST_GROUP:
            self.told = max(self.told, told_of(value))
        if known is not None and known.topic_id != topic.topic_id:
            self._remove(known)
        self.by_name[name] = topic
        self.by_id[topic.topic_id] = topic
        forced, before = forced_of(value), self.forced.get(topic.topic_id, 0)
        self.forced[topic.topic_id] = forced
        if forced > before:
            self.on_force(topic, plan_of(value))

    def _remove(self, topic: TopicInfo) -> None:
        del self.by_name[topic.name]
        del self.by_id[topic.topic_id]
        self.forced.pop(topic.topic_id, None)
        self.on_delete(topic)
