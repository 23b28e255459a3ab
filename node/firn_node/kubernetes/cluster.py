"""What a broker in a pod does besides serving, put together: its group's BrokerGroup, and the cluster's topics."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from firn_node.clock import Clock, RealClock, RealRandomness
from firn_node.coordinator.kubernetes import KubernetesCoordinator
from firn_node.engine.api import FIRST_GROUP, TopicInfo
from firn_node.engine.partition import DirtyState
from firn_node.kubernetes.api import Api, connect
from firn_node.kubernetes.groupstatus import GroupKeeper
from firn_node.kubernetes.topicfacts import TopicFacts
from firn_node.kubernetes.topics import Ours, TopicKeeper
from firn_node.security.tokenreview import TokenReviews
from firn_node.settings import GroupSettings

if TYPE_CHECKING:
    from firn_node.engine.broker import Broker

_AGAIN_S = 5.0


class _Topics:
    """A broker's topics, as ``topicfacts`` asks for them."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker

    def leads(self) -> bool:
        group = self._broker.group
        return group is not None and group.is_master and self._broker.is_ready()

    def topics_here(self) -> list[TopicInfo]:
        core = self._broker.core
        return [
            topic for topic in core.catalogue.by_name.values()
            if not topic.name.startswith("__") and topic.partitions_in(core.group)
        ]  # fmt: skip

    def dirty_states(self, topic: TopicInfo) -> dict[int, DirtyState]:
        numbers = topic.partitions_in(self._broker.core.group)
        return {number: self._broker.partitions.state_of(topic.topic_id, number) for number in numbers}


log = logging.getLogger("firn.kubernetes")


async def coordinator_of(place: GroupSettings) -> KubernetesCoordinator:
    """The Leases of the cluster's groups, over a connection of their own. *Errors*: Invalid without an API."""
    return KubernetesCoordinator(
        await connect(), place.namespace, place.object_of, lease_ttl_s=place.lease_ttl_ms / 1000
    )


async def reviews_for(audience: str, clock: Clock) -> TokenReviews:
    """Service accounts' tokens, over a connection of their own. *Errors*: Invalid without an API."""
    return TokenReviews(await connect(), audience, clock)


@contextlib.asynccontextmanager
async def looked_after(broker: "Broker", place: GroupSettings) -> AsyncIterator[None]:
    """Meanwhile the broker's part in its cluster is played."""
    api = await connect()
    task = asyncio.create_task(_look_after(broker, place, api), name="firn in Kubernetes")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


async def _look_after(broker: "Broker", place: GroupSettings, api: Api) -> None:
    """The boundary of what is done beside: a bug there stops no broker; it is logged, and begun again."""
    while True:
        try:
            async with asyncio.TaskGroup() as tasks:
                clock, randomness = RealClock(), RealRandomness()
                group = GroupKeeper(broker, api, place, clock, randomness)
                tasks.create_task(group.run())
                ours = Ours(place.namespace, place.cluster)
                tasks.create_task(TopicFacts(_Topics(broker), api, ours, place.group).run())
                if place.group == FIRST_GROUP:
                    topics = TopicKeeper(broker, api, ours, group.known, clock, randomness)
                    tasks.create_task(topics.run())
        except Exception as error:
            log.exception("the broker's part in its cluster failed")
            broker.core.health.troubles["kubernetes"] = str(error)
        await asyncio.sleep(_AGAIN_S)
