"""Snapshots: one exact map of a topic, held for a reader under a lease.

A snapshot pins, per partition, a generation of the compacted log, its files, and the commit log up to the end at
that moment. Leases are renewed by their holder and are gone with the process.
"""

from dataclasses import dataclass, field
from typing import Any

from firn.errors import SnapshotExpired
from firn_node.compaction.log import Pin
from firn_node.engine.api import SnapshotInfo, TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.partition import Partition
from firn_node.log import Hold


@dataclass(frozen=True, slots=True)
class Pinned:
    pin: Pin
    end: int
    horizon: int
    tombstone_floor: int
    generation: int


@dataclass(slots=True)
class _Snapshot:
    topic: TopicInfo
    hold: Hold | None
    expires: float
    renewals: int = 0
    partitions: dict[int, Pinned] = field(default_factory=dict)


class Snapshots:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._held: dict[str, _Snapshot] = {}

    def __len__(self) -> int:
        return len(self._held)

    def open(self, topic: TopicInfo, partitions: list[Partition]) -> SnapshotInfo:
        core = self._core
        positions = [self._dirty_position(p) for p in partitions]
        known = [p for p in positions if p is not None]
        hold = core.log.hold(min(known)) if known else None
        snapshot = _Snapshot(topic, hold, self._expiry())
        for partition in partitions:
            pin = partition.log.pin()
            manifest = pin.manifest  # not the log's: a compaction may swap it in between
            snapshot.partitions[partition.number] = Pinned(
                pin, partition.dispatched_end, manifest.horizon, manifest.tombstone_floor, manifest.generation
            )
        id = core.randomness.bytes(8).hex()
        self._held[id] = snapshot
        return self._info(id, snapshot)

    def _dirty_position(self, partition: Partition) -> int | None:
        entry = self._core.index.find(*partition.key, partition.horizon)
        return None if entry is None else max(entry.position, self._core.log.start)

    def renew(self, id: str) -> SnapshotInfo:
        snapshot = self._find(id)
        snapshot.expires = self._expiry()
        snapshot.renewals += 1
        return self._info(id, snapshot)

    def close(self, id: str) -> None:
        """Let go of a snapshot; one that is gone already is no error."""
        snapshot = self._held.pop(id, None)
        if snapshot is not None:
            _release(snapshot)

    def pinned(self, id: str, partition: Partition) -> Pinned:
        snapshot = self._find(id)
        if snapshot.topic.topic_id != partition.topic.topic_id:
            raise SnapshotExpired(
                f"snapshot {id!r} is of topic {snapshot.topic.name!r}, not of {partition.topic.name!r}"
            )
        return snapshot.partitions[partition.number]

    def expire(self) -> None:
        now = self._core.machine_clock.monotonic()
        for id in [id for id, s in self._held.items() if s.expires < now]:
            self.close(id)

    def drop_topic(self, topic_id: int) -> None:
        for id in [id for id, s in self._held.items() if s.topic.topic_id == topic_id]:
            self.close(id)

    def close_all(self) -> None:
        for id in list(self._held):
            self.close(id)

    def _find(self, id: str) -> _Snapshot:
        self.expire()
        found = self._held.get(id)
        if found is None:
            raise SnapshotExpired(f"snapshot {id!r} has expired or never was; open a new one")
        return found

    def _expiry(self) -> float:
        return self._core.machine_clock.monotonic() + self._core.settings.snapshot_ttl_ms / 1000

    def _info(self, id: str, snapshot: _Snapshot) -> SnapshotInfo:
        left = snapshot.expires - self._core.machine_clock.monotonic()
        partitions: dict[int, dict[str, Any]] = {
            number: {"end": p.end, "horizon": p.horizon, "generation": p.generation}
            for number, p in snapshot.partitions.items()
        }
        return SnapshotInfo(id, snapshot.topic.name, partitions, int(left * 1000), snapshot.renewals)


def _release(snapshot: _Snapshot) -> None:
    for pinned in snapshot.partitions.values():
        pinned.pin.release()
    if snapshot.hold is not None:
        snapshot.hold.release()
