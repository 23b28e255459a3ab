"""What ``firn status`` shows: the broker, and every partition of every topic."""

import os
from typing import Any

from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.partition import DirtyState, Partition
from firn_node.engine.partitions import Partitions


def broker_row(core: Core, *, state: str, address: str) -> dict[str, Any]:
    health = core.health
    return {
        "node": core.settings.node,
        "pid": os.getpid(),
        "group": 0,
        "role": "master",
        "epoch": core.epoch,
        "address": address,
        "in_sync": True,
        "committed_position": core.dispatched_position,
        "log_start": core.log.start,
        "log_end": core.log.written_end,
        "lag_bytes": 0,
        "lag_seconds": 0.0,
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
