"""What ``firn status`` shows: the broker, and every partition of every topic."""

import os
from typing import Any

from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.partition import DirtyState, Partition
from firn_node.engine.partitions import Partitions

_RAW_ENTRIES_MAX = 100_000


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
        "reason": health.failed or health.read_only or health.index_error,
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
    state = opened.state if opened is not None else partitions.states.get(key, DirtyState())
    latest = opened.dispatched_end if opened is not None else state.next_offset
    horizon = opened.horizon if opened is not None else state.horizon
    bounds = core.index.bounds(*key, core.log.start)
    eligible = state.dirty_bytes + state.clean_bytes
    return {
        "partition": number,
        "earliest": bounds[0] if bounds else latest,
        "latest": latest,
        "horizon": horizon,
        "live_records": state.clean_rows + latest - horizon,
        "dirty_ratio": round(state.dirty_bytes / eligible, 4) if eligible else 0.0,
        "raw_bytes": _raw_bytes(core, key, bounds),
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


def _raw_bytes(core: Core, key: tuple[int, int], bounds: tuple[int, int] | None) -> int:
    if bounds is None:
        return 0
    entries = core.index.scan(*key, bounds[0], limit=_RAW_ENTRIES_MAX)
    return sum(entry.size for entry in entries)
