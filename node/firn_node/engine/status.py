"""What ``firn status`` shows: the broker, and every partition of every topic."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.flusher import FIRST_EPOCH
from firn_node.engine.partition import DirtyState, Partition
from firn_node.engine.partitions import Partitions

if TYPE_CHECKING:
    from firn_node.replication.driver import GroupDriver


@dataclass(frozen=True, slots=True)
class Place:
    """Where a broker stands in its group."""

    role: str  # master, standby, none
    epoch: int
    is_in_sync: bool
    committed: int
    lag_bytes: int = 0
    lag_seconds: float = 0.0


def place_of(core: Core, group: "GroupDriver | None", now: float) -> Place:
    if group is None:
        return Place("master", FIRST_EPOCH, True, core.dispatched_position)
    from firn_node.replication.state import Role

    state = group.state
    record, following = state.record, state.following
    if state.role in (Role.MASTER, Role.RESIGNING):
        role = "master"
    else:
        role = "standby" if state.role in (Role.STANDBY, Role.CANDIDATE) else "none"
    is_in_sync = record is not None and state.me.log_id in record.in_sync
    if following is None:
        return Place(role, state.epoch, is_in_sync, state.committed)
    lag_seconds = max(0.0, now - following.progress_at)
    lag_bytes = max(0, following.whole - state.log.durable)
    return Place(role, state.epoch, is_in_sync, state.committed, lag_bytes, round(lag_seconds, 3))


def broker_row(core: Core, *, state: str, address: str, place: Place) -> dict[str, Any]:
    health = core.health
    return {
        "node": core.settings.node,
        "pid": os.getpid(),
        "group": core.settings.group.group if core.settings.group is not None else 0,
        "role": place.role,
        "epoch": place.epoch,
        "address": address,
        "in_sync": place.is_in_sync,
        "committed_position": place.committed,
        "log_start": core.log.start,
        "log_end": core.log.written_end,
        "lag_bytes": place.lag_bytes,
        "lag_seconds": place.lag_seconds,
        "state": state,
        "read_only": health.read_only is not None or health.failed is not None,
        "insecure": core.settings.insecure,
        "reason": health.reason,
    }


def topic_row(core: Core, partitions: Partitions, topic: TopicInfo, numbers: list[int]) -> dict[str, Any]:
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "partitions": [partition_row(core, partitions, topic, number) for number in numbers],
    }


def partition_row(core: Core, partitions: Partitions, topic: TopicInfo, number: int) -> dict[str, Any]:
    """One partition, without opening it when it is not in use."""
    key = (topic.topic_id, number)
    opened = partitions.opened(*key)
    state = partitions.state_of(*key)
    bounds = core.index.bounds(*key, core.log.start)
    if opened is not None:
        latest, horizon = opened.dispatched_end, opened.horizon
    else:
        latest, horizon = max(state.next_offset, bounds[1] if bounds else 0), state.horizon
    eligible = state.dirty_bytes + state.clean_bytes
    return {
        "partition": number,
        "earliest": bounds[0] if bounds else latest,
        "latest": latest,
        "horizon": horizon,
        "live_records": state.clean_rows + latest - horizon,
        "dirty_ratio": round(state.dirty_bytes / eligible, 4) if eligible else 0.0,
        "raw_bytes": partitions.raw_bytes.of(key, bounds, state.raw_bytes),
        "compacted_bytes": state.clean_bytes,
        "last_compaction": _last_compaction(state),
        "state": _state(opened),
        "reason": opened.parked if opened is not None else None,
    }


def _state(opened: Partition | None) -> str:
    if opened is None:
        return "idle"
    return "parked" if opened.parked is not None else "compacting" if opened.compacting else "ready"


def _last_compaction(state: DirtyState) -> dict[str, Any] | None:
    if state.last_started_ms < 0:
        return None
    return {
        "started": state.last_started_ms,
        "seconds": round(state.last_seconds, 3),
        "result": state.last_result,
        "reason": state.last_reason or None,
    }
