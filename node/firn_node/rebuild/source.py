"""What a master gives to a standby that is being rebuilt: a list of what its log no longer tells, and pinned files.

The standby's own log begins at ``start``; it has, or will get, everything from there on. The list says of everything
before: which partitions have to be pulled, where each partition's offsets had come to (the newest rows may be
dropped tombstones), what producers wrote last, how far light queues were counted.

A pin is one generation of one partition's compacted log, as it is on this disk, with its horizon. It is given only
if every dirty offset lies at or behind ``start``: pulled files and the standby's own log then join without a gap.
After a change of master that may not be so, because replicas compact when they like: the partition is compacted
first. Pins are leased, renewed by each use, and gone with the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from firn.errors import Invalid, LimitExceeded, SnapshotExpired, Unavailable, UnknownTopic
from firn_node.compaction import mask as masks
from firn_node.compaction.log import Pin
from firn_node.compaction.manifest import Manifest
from firn_node.compaction.view import SegmentView
from firn_node.engine.core import Core
from firn_node.engine.partitions import Partitions
from firn_node.engine.scheduler import Scheduler
from firn_node.filecache import FileRange

LEASE_S = 120.0  # a standby syncs a whole segment between two uses
PINS_MAX = 64

Row = list[Any]  # a kind and its fields, see ``Source.rows``


@dataclass(slots=True)
class _Held:
    pin: Pin
    expires: float


@dataclass(frozen=True, slots=True)
class Given:
    """A pin as it is told. ``position``: its records, and all that they superseded, lie before it in the log."""

    id: str
    manifest: Manifest
    position: int


class Source:
    def __init__(self, core: Core, partitions: Partitions, scheduler: Scheduler) -> None:
        self._core = core
        self._partitions = partitions
        self._scheduler = scheduler
        self._held: dict[str, _Held] = {}

    @contextmanager
    def rows(self, start: int) -> Iterator[Iterator[Row]]:
        """The list, for a log that begins at ``start``; made on the event loop, drawn from one thread at a time.

        *Shape*: ``["partition", topic_id, partition, bytes]`` to be pulled, ``["end", topic_id, partition, offset,
        timestamp]``, ``["queue", topic_id, partition, name, count, timestamp]``, ``["producer", topic_id, partition,
        producer_id, row]``; last ``["all", position]``: what is listed speaks of nothing behind it.
        """
        states = {key: (s.clean_bytes, s.oldest_position) for key, s in self._partitions.states.items()}
        core = self._core
        hold = core.log.hold(
            core.log.start
        )  # ends and counts of queues are of one and the same place in the log
        try:
            yield self._draw(max(start, core.log.start), states, core.dispatched_position)
        finally:
            hold.release()

    def _draw(
        self, start: int, states: dict[tuple[int, int], tuple[int, int]], position: int
    ) -> Iterator[Row]:
        core = self._core
        known = {key for key, (_, oldest) in states.items() if 0 <= oldest < start}
        for topic in core.disk.list(self._partitions.root):
            for number in core.disk.list(f"{self._partitions.root}/{topic}"):
                if topic.isdigit() and number.isdigit():
                    known.add((int(topic), int(number)))
        for key in sorted(known):
            yield ["partition", *key, states.get(key, (0, -1))[0]]
        for end in core.index.partitions():
            bounds = core.index.bounds(end.topic_id, end.partition, start)
            first = bounds[0] if bounds is not None else end.end_offset
            entry = core.index.find(end.topic_id, end.partition, first)
            yield [
                "end",
                end.topic_id,
                end.partition,
                first,
                entry.max_timestamp if entry else end.max_timestamp,
            ]
        for row in core.index.producers():
            yield ["producer", row.topic_id, row.partition, row.producer_id, row.row]
        for queue, lights in groupby(core.index.lights(), key=lambda light: light[:3]):
            count, timestamp = 0, 0
            for light in lights:
                count, timestamp = light.queue_offset, light.max_timestamp
                if light.position >= start:
                    break
                count += 1
            yield ["queue", *queue, count, timestamp]
        yield ["all", position]

    def give(self, topic_id: int, number: int, start: int) -> Given:
        """Pin a partition for a log that begins at ``start``.

        *Errors*: UnknownTopic: deleted; Unavailable: not yet, a compaction is on its way; LimitExceeded.
        """
        core = self._core
        topic = core.catalogue.by_id.get(topic_id)
        if topic is None:
            raise UnknownTopic(f"topic id {topic_id} does not exist")
        self.expire()
        if len(self._held) >= PINS_MAX:
            raise LimitExceeded(f"{PINS_MAX} partitions are being pulled; try again", retry=True)
        partition = self._partitions.get(topic, number)
        pin = partition.log.pin()
        try:
            entry = core.index.find(*partition.key, pin.manifest.horizon)
            if entry is not None and entry.position < start:
                self._scheduler.request(topic, force=True)
                raise Unavailable(
                    f"{topic.name}/{number}: its dirty records begin at {entry.position}, before {start}: it is "
                    "being compacted, try again"
                )
        except BaseException:
            pin.release()
            raise
        id = core.randomness.bytes(8).hex()
        self._held[id] = _Held(pin, self._expiry())
        return Given(id, pin.manifest, core.dispatched_position)

    def batches(self, id: str, number: int, position: int, size: int) -> FileRange:
        """Bytes of a segment's batches, leased; the taker releases. *Errors*: SnapshotExpired; Invalid."""
        segment = self._segment(id, number)
        if position < 0 or size <= 0 or position + size > segment.info.bytes:
            raise Invalid(f"segment {number} has {segment.info.bytes} bytes of batches")
        return segment.reader.range(position, size)

    def mask(self, id: str, number: int) -> bytes:
        """A segment's mask as a file of its own; from any thread. *Errors*: SnapshotExpired; Corrupt; Invalid."""
        segment = self._segment(id, number)
        bits = segment.mask
        if bits is None:
            raise Invalid(f"segment {number} has no mask")
        return masks.encode(bits, segment.info.rows)

    def take_back(self, id: str) -> None:
        """A pin is needed no more; one that is gone already is no error."""
        held = self._held.pop(id, None)
        if held is not None:
            held.pin.release()

    def expire(self) -> None:
        now = self._core.machine_clock.monotonic()
        for id in [id for id, held in self._held.items() if held.expires < now]:
            self.take_back(id)

    def take_all_back(self) -> None:
        for id in list(self._held):
            self.take_back(id)

    def _segment(self, id: str, number: int) -> SegmentView:
        held = self._held.get(id)
        if held is None:
            raise SnapshotExpired(f"pin {id!r} has expired or never was: start the partition over")
        held.expires = self._expiry()
        if not 0 <= number < len(held.pin.view.segments):
            raise Invalid(f"a generation of {len(held.pin.view.segments)} segments has no segment {number}")
        return held.pin.view.segments[number]

    def _expiry(self) -> float:
        return self._core.machine_clock.monotonic() + LEASE_S
