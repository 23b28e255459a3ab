"""The offsets that groups commit. ``since`` goes with each: a tombstone that was removed after it may be missed."""

from collections.abc import Mapping
from typing import NamedTuple

from firn.client.transport import Transport, path_of


class GroupOffset(NamedTuple):
    """Where to go on, and the least horizon seen until there (None: a raw reader, or none yet)."""

    offset: int
    since: int | None


async def commit_offsets(
    transport: Transport,
    group: str,
    topic: str,
    offsets: Mapping[int, GroupOffset | tuple[int, int | None] | int],
) -> None:
    """Keep a group's offsets. *Effects*: durable on return; they replace those of the same partitions."""
    document = {}
    for partition, found in offsets.items():
        offset, since = (found, None) if isinstance(found, int) else found
        document[str(partition)] = {"offset": offset, "since": since}
    await transport.request("PUT", path_of("groups", group, "offsets", topic), body={"offsets": document})


async def fetch_offsets(transport: Transport, group: str, topic: str) -> dict[int, GroupOffset]:
    """A group's offsets, of the partitions that have any."""
    answer = await transport.request("GET", path_of("groups", group, "offsets", topic))
    found = answer.document()["offsets"]
    return {int(p): GroupOffset(int(o["offset"]), o.get("since")) for p, o in found.items()}
