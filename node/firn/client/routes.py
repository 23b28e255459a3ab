"""Which brokers a partition's requests go to.

A client begins with one transport, to the addresses that it was given. In a cluster of one broker group that is all:
every partition's. Where the description of a topic tells of several groups, each of them gets a transport of its own,
which follows its masters by itself; what no partition decides on (topics, offsets of groups) stays with the first,
which is led to group 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from firn.client.transport import Transport
from firn.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Target:
    """What a client must know of a topic. ``transports``: of the broker groups that are dealt its partitions."""

    topic_id: int
    partitions: int
    transports: tuple[Transport, ...]

    def transport_of(self, partition: int) -> Transport:
        return self.transports[partition % len(self.transports)]


class Routes:
    def __init__(self, first: Transport) -> None:
        self.first = first
        self._groups: dict[int, Transport] = {}
        self._of_any: dict[Transport, Transport] = {}

    def reading(self, transport: Transport, is_any: bool) -> Transport:
        """The way for reads: another one beside ``transport`` where any replica may answer."""
        if not is_any:
            return transport
        found = self._of_any.get(transport)
        if found is None:
            found = self._of_any[transport] = transport.of_any()
        return found

    def for_reading(self, target: Target, *, is_any: bool) -> Target:
        """``target`` by the ways for reads."""
        return replace(target, transports=tuple(self.reading(way, is_any) for way in target.transports))

    def target(self, document: Mapping[str, Any]) -> Target:
        """What a topic's description says. Errors: Unavailable for a group that has no broker yet."""
        self.learn(document)
        partitions = int(document["spec"]["partitions"])
        groups = document.get("groups", ())[:partitions] if "cluster" in document else ()
        ways = tuple(self.of(int(group)) for group in groups) or (self.first,)
        return Target(int(document["topic_id"]), partitions, ways)

    def learn(self, document: Mapping[str, Any]) -> None:
        """Take in where the groups are."""
        for place in document.get("cluster", ()):
            group, brokers = int(place["group"]), [str(address) for address in place["brokers"]]
            known = self._groups.get(group)
            if known is not None:
                known.addresses.add(brokers)
            elif brokers:
                made = self._groups[group] = self.first.beside(brokers, group)
                if place.get("master") is not None:
                    made.addresses.prefer(str(place["master"]))

    def of(self, group: int) -> Transport:
        """Errors: Unavailable for a group that no description has told of."""
        found = self._groups.get(group)
        if found is None:
            raise Unavailable(f"broker group {group} has no broker yet")
        return found

    def all(self) -> dict[int, Transport]:
        """The transports of the groups that are known, by number; none in a cluster of one."""
        return dict(sorted(self._groups.items()))

    async def close(self) -> None:
        for transport in (*self._groups.values(), *self._of_any.values()):
            await transport.close()
