"""Create, change and delete topics: each is one record of ``__topics``, decided by the appender's order.

In a cluster of several groups only group 0 does; the others take its records over (``following``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from firn.batch import Identity, columns_of, encode
from firn.errors import Invalid, TopicExists, Unavailable
from firn.topicspec import TopicSpec, check_topic_name
from firn.types import TOPICS_TOPIC_ID
from firn_node.engine.api import TopicInfo
from firn_node.engine.appender import Appender
from firn_node.engine.catalogue import Told, topic_value
from firn_node.engine.commits import Commits
from firn_node.engine.core import Core
from firn_node.engine.topicids import topic_id_at

if TYPE_CHECKING:
    from firn_node.engine.following import Followers

FOLLOW_S = 10.0  # how long a change waits for the other groups; without a failover they take milliseconds


class Topics:
    def __init__(self, core: Core, appender: Appender, commits: Commits) -> None:
        self._core = core
        self._appender = appender
        self._commits = commits
        self._followers: Followers | None = None

    def lead(self, followers: "Followers") -> None:
        """Other groups follow this one: a topic is whole once they have it too."""
        self._followers = followers

    async def create(self, name: str, spec: TopicSpec, *, wait_s: float | None = FOLLOW_S) -> TopicInfo:
        """A new topic. *Effects*: durable and visible on return, in all groups. *Errors*: Invalid, TopicExists;
        Unavailable when a group does not have it after ``wait_s`` (None: nobody waits): it is there, and that group
        will follow.
        """
        check_topic_name(name)
        if name in self._core.catalogue.by_name or name in self._core.catalogue.changing:
            raise TopicExists(
                f"topic {name!r} exists; choose another name, or change it with `firn up -f`", topic=name
            )
        # Nothing is awaited between planning the position and appending at it: the id tells it.
        topic = TopicInfo(name, 0, spec, self._core.groups)
        size = len(self._record({name: topic_value(topic)}))
        position = self._core.log.plan([size])[0]
        topic = replace(topic, topic_id=topic_id_at(position, self._commits.forced_epoch))
        end = await self._append({name: topic_value(topic)})
        await self._followed(f"topic {name!r} is created", name, end, wait_s)
        return self._core.catalogue.named(name)

    async def update(self, name: str, spec: TopicSpec, *, wait_s: float | None = FOLLOW_S) -> TopicInfo:
        """Change a topic's spec. *Errors*: Invalid when the number of partitions would change; as ``create``."""
        topic = self._core.catalogue.named(name)
        self._check_user(topic)
        if spec.partitions != topic.spec.partitions:
            raise Invalid(
                f"topic {name!r}: partitions cannot change from {topic.spec.partitions} to {spec.partitions}, because "
                "keys would move; create a topic with the new number and copy the records into it"
            )
        forced = self._core.catalogue.forced.get(topic.topic_id, 0)
        end = await self._append({name: topic_value(replace(topic, spec=spec), forced=forced)})
        await self._followed(f"topic {name!r} is changed", name, end, wait_s)
        return self._core.catalogue.named(name)

    async def force_compaction(self, topic: TopicInfo, plan: str = "") -> None:
        """Ask every replica of the group to compact a topic by force; ``plan``: who asks, where a plan does.

        *Effects*: durable, and begun here, on return.
        """
        catalogue = self._core.catalogue
        forced = catalogue.forced.get(topic.topic_id, 0) + 1
        await self._append({topic.name: topic_value(topic, forced=forced, plan=plan, told=catalogue.told)})

    async def delete(self, name: str, *, wait_s: float | None = FOLLOW_S) -> None:
        """Delete a topic and all of its records. *Effects*: durable on return; its bytes are never seen again.

        *Errors*: as ``create``.
        """
        self._check_user(self._core.catalogue.named(name))
        end = await self._append({name: None})
        await self._followed(f"topic {name!r} is deleted", name, end, wait_s)

    async def take_over(self, news: Mapping[str, TopicInfo | None], told: Told) -> None:
        """Write topics as group 0 has them, as of the state ``told``; None: deleted. *Effects*: durable on return."""
        forced = self._core.catalogue.forced
        values: dict[str, bytes | None] = dict.fromkeys(news)
        for name, topic in news.items():
            if topic is not None:
                values[name] = topic_value(topic, forced=forced.get(topic.topic_id, 0), told=told)
        await self._append(values)

    async def _followed(self, what: str, name: str, end: int, wait_s: float | None) -> None:
        if self._followers is None or wait_s is None:
            return
        lacking = await self._followers.wait(end, wait_s)
        if lacking:
            named = f"group{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking))}"
            refused = Unavailable(
                f"{what}, but {named} could not take that over within {wait_s:g} s; it follows by itself once its "
                f"master can be reached, and `firn topics describe {name}` shows when",
                topic=name, lacking=lacking,
            )  # fmt: skip
            refused.retry = False
            raise refused

    def _check_user(self, topic: TopicInfo) -> None:
        if topic.name.startswith("__"):
            raise Invalid(f"topic {topic.name!r} is internal; it cannot be changed or deleted")

    def _record(self, values: Mapping[str, bytes | None]) -> bytes:
        names = [name.encode() for name in values]
        columns = columns_of(names, list(values.values()), self._core.machine_clock.wall_ms())
        return encode(columns, Identity(topic_id=TOPICS_TOPIC_ID, partition=0))

    async def _append(self, values: Mapping[str, bytes | None]) -> int:
        """Write topics' records, and wait for their commit; where they end in the log."""
        changing = self._core.catalogue.changing
        if busy := changing & values.keys():
            name = min(busy)
            raise Unavailable(f"topic {name!r} is being changed by another request; try again", topic=name)
        changing.update(values)
        try:
            frees = any(value is None for value in values.values())
            committed = self._appender.append_internal(self._record(values), frees=frees)
        except BaseException:
            changing.difference_update(values)
            raise
        end = self._core.log.written_end
        await committed
        return end

    def listed(self, *, after: str, limit: int) -> list[TopicInfo]:
        """User topics by name, those after ``after``, at most ``limit``."""
        names = sorted(n for n in self._core.catalogue.by_name if not n.startswith("__") and n > after)
        return [self._core.catalogue.by_name[n] for n in names[:limit]]
