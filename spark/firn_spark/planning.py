"""From what a query asks for to the ranges that its tasks read: decided once, in the driver, by asking the brokers.

A read of the compacted view is of one snapshot, which is opened here unless the query names one: tasks read at different
times, and are repeated, while brokers compact. The raw view needs none: between two offsets it is always the same, until
retention removes it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from firn.client.cursor import Cursor
from firn.client.feed import Source, read_page
from firn.client.routes import Target
from firn.client.snapshot import Snapshot
from firn.client.transport import path_of
from firn.errors import (
    BadOffset,
    FirnError,
    Invalid,
    NotFound,
    OffsetExpired,
    SnapshotExpired,
    UnknownPartition,
)
from firn_spark.fetch import Link, Range
from firn_spark.filters import Span, Wanted
from firn_spark.options import EARLIEST, LATEST, Position, Positions, ReadOptions

AT_ONCE = 32  # partitions asked for their bounds
US_OF_MS = 1000


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a partition holds now. ``earliest``: of the raw view; ``horizon``: the end of what compaction has covered."""

    earliest: int
    end: int
    horizon: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A snapshot that somebody has to hold, and how it is reached: ``options`` are those of a Connection."""

    topic: str
    id: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """What each task reads. ``lease``: the snapshot that was opened for it."""

    tasks: Sequence[tuple[Range, ...]]
    lease: Lease | None = None


def plan(options: ReadOptions, wanted: Wanted) -> Plan:
    """Errors: UnknownTopic, Unavailable, BadOffset (a position that the topic does not have), OffsetExpired."""
    with Link(options.connection) as link:
        return link.run(_plan(link, options, wanted))


async def _plan(link: Link, options: ReadOptions, wanted: Wanted) -> Plan:
    target = await link.target(options.topic)
    chosen = [p for p in range(target.partitions) if wanted.partition.low <= p <= wanted.partition.high]
    check_partitions(options, target.partitions)
    if options.view == "raw":
        return await _planned(target, options, wanted, chosen, None)
    if options.snapshot is not None:
        found = await _renewed(target, options.topic, options.snapshot)
        return await _planned(target, options, wanted, chosen, found)
    found = await Snapshot.open(options.topic, target)
    try:
        planned = await _planned(target, options, wanted, chosen, found)
    except BaseException:
        with suppress(FirnError):  # what cannot be given back ends by itself
            await found.close()
        raise
    return replace(planned, lease=Lease(options.topic, found.id, options.connection.options()))


async def _planned(
    target: Target,
    options: ReadOptions,
    wanted: Wanted,
    chosen: Sequence[int],
    pinned: Snapshot | None,
) -> Plan:
    """The tasks. ``pinned``: the snapshot of the compacted view that they read."""
    ranges = await _ranges(target, options, wanted, chosen, None if pinned is None else pinned.ends)
    snapshot = None if pinned is None else pinned.id
    ranges = [replace(found, snapshot=snapshot) for found in ranges if found.start < found.end]
    if options.bytes_per_task is not None:
        sizes = await _sizes(target, options)
        return Plan([(part,) for each in ranges for part in _sliced(each, sizes, options.bytes_per_task)])
    step = options.partitions_per_task
    return Plan([tuple(ranges[at : at + step]) for at in range(0, len(ranges), step)])


def check_partitions(options: ReadOptions, partitions: int) -> None:
    """Errors: UnknownPartition for an offset of a partition that the topic does not have."""
    for positions in (options.starting, options.ending):
        if isinstance(positions, Mapping) and positions and max(positions) >= partitions:
            raise UnknownPartition(f"{options.topic}: partition {max(positions)}: the topic has {partitions}")


async def _renewed(target: Target, topic: str, snapshot: str) -> Snapshot:
    """The one that somebody else has opened. Errors: SnapshotExpired; Invalid for one of another number of broker groups."""
    ids = snapshot.split(",")
    if len(ids) != len(target.transports):
        raise Invalid(f"snapshot {snapshot!r} names {len(ids)} parts, the topic has {len(target.transports)}")
    ways = zip(target.transports, ids, strict=True)
    try:
        answers = await asyncio.gather(
            *(way.request("PUT", path_of("topics", topic, "snapshots", id)) for way, id in ways)
        )
    except NotFound as error:
        raise SnapshotExpired(f"snapshot {snapshot} of {topic}: {error.message}") from None
    return Snapshot(
        topic, [(way, answer.document()) for way, answer in zip(target.transports, answers, strict=True)]
    )


async def _ranges(
    target: Target,
    options: ReadOptions,
    wanted: Wanted,
    chosen: Sequence[int],
    ends: Mapping[int, int] | None,
) -> list[Range]:
    if ends is not None:
        bounds = {p: Bounds(0, ends[p], 0) for p in chosen}
    else:
        bounds = await bounds_of(target, options.topic, chosen, view="raw")
    found = []
    for partition in chosen:
        known = bounds[partition]
        start = resolved(options.starting, partition, known, EARLIEST, options.topic)
        end = resolved(options.ending, partition, known, LATEST, options.topic)
        start = max(start, wanted.offset.low)
        if options.view == "raw" and wanted.timestamp.low > Span().low and start < end:
            since = -(-wanted.timestamp.low // US_OF_MS)
            start = max(start, await _at_time(target, options.topic, partition, since))
        end = min(end, wanted.offset.high + 1)
        found.append(
            Range(
                topic=options.topic, topic_id=target.topic_id, partition=partition, start=start, end=end,
                view=options.view, projection=options.projection, read_from=options.read_from,
            )
        )  # fmt: skip
    return found


def resolved(positions: Positions, partition: int, bounds: Bounds, default: str, topic: str) -> int:
    """The offset that is meant. Errors: BadOffset past the end, OffsetExpired below the earliest."""
    position: Position | str = positions if isinstance(positions, str) else positions.get(partition, default)
    if position == EARLIEST:
        return bounds.earliest
    if position == LATEST:
        return bounds.end
    offset = int(position)
    if offset > bounds.end:
        raise BadOffset(f"{topic}/{partition}: offset {offset} is past the end {bounds.end}", end=bounds.end)
    if offset < bounds.earliest and offset != bounds.end:
        raise OffsetExpired(
            f"{topic}/{partition}: offset {offset} has expired; the earliest is {bounds.earliest}",
            earliest=bounds.earliest,
        )
    return offset


async def bounds_of(target: Target, topic: str, partitions: Sequence[int], *, view: str) -> dict[int, Bounds]:
    """What the masters hold of each partition, everything included that was acknowledged before."""
    room = asyncio.Semaphore(AT_ONCE)

    async def of(partition: int) -> Bounds:
        source = Source(topic, view, keys_only=True)
        earliest = 0
        async with room:
            while True:
                cursor = Cursor(partition, offset=earliest, view=view, keys_only=True)
                try:
                    meta, _ = await read_page(target, source, cursor, max_bytes=1)
                    return Bounds(earliest, meta.end, meta.horizon)
                except OffsetExpired as error:
                    found = error.details.get("earliest")
                    if not isinstance(found, int) or found <= earliest:
                        raise
                    earliest = found

    return dict(zip(partitions, await asyncio.gather(*map(of, partitions)), strict=True))


async def _at_time(target: Target, topic: str, partition: int, since_ms: int) -> int:
    """The first offset behind records that are all older than this time."""
    path = path_of("topics", topic, "partitions", partition, "offset")
    answer = await target.transport_of(partition).request("GET", path, query={"timestamp": since_ms})
    return int(answer.document()["offset"])


async def _sizes(target: Target, options: ReadOptions) -> dict[int, float]:
    """About how many bytes an offset of each partition takes in the view that is read."""
    found: dict[int, float] = {}
    for way in target.transports:
        after = -1
        while True:
            query = {"after": after, "limit": 1000}
            answer = await way.request("GET", path_of("topics", options.topic), query=query)
            rows = answer.document()["partitions"]
            for row in rows:
                raw = row["raw_bytes"] / max(1, row["latest"] - row["earliest"])
                dirty = raw * (row["latest"] - row["horizon"])
                compacted = (dirty + row["compacted_bytes"]) / max(1, row["latest"])
                found[int(row["partition"])] = raw if options.view == "raw" else compacted
            if len(rows) < 1000:
                break
            after = int(rows[-1]["partition"])
    return found


def _sliced(whole: Range, sizes: Mapping[int, float], bytes_per_task: int) -> list[Range]:
    """The range in parts of about so many bytes, as if the bytes lay evenly among its offsets."""
    count = whole.end - whole.start
    parts = max(1, min(count, round(count * sizes.get(whole.partition, 0.0) / bytes_per_task)))
    cuts = [whole.start + count * n // parts for n in range(parts + 1)]
    return [replace(whole, start=a, end=b) for a, b in pairwise(cuts)]
