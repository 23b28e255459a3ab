"""What a broker's own status shows: itself, the record of its group, and every partition of every topic.

``firn status`` puts the ones of all brokers together (``firn.client.clusterstatus``).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firn_node.engine.api import TopicInfo
from firn_node.engine.core import Core
from firn_node.engine.flusher import FIRST_EPOCH
from firn_node.engine.partition import DirtyState, Partition
from firn_node.engine.partitions import Partitions

if TYPE_CHECKING:
    from firn_node.replication.driver import GroupDriver
    from firn_node.replication.record import GroupRecord, LogId
    from firn_node.replication.state import State

_NO_LAG: dict[str, Any] = {"lag_bytes": None, "lag_seconds": None}  # nobody knows


@dataclass(frozen=True, slots=True)
class Place:
    """Where a broker stands in its group."""

    role: str  # master, standby, none
    epoch: int
    is_in_sync: bool
    committed: int
    lag_bytes: int | None = 0  # None: no master tells of its log
    lag_seconds: float | None = 0.0
    trouble: str | None = None
    hindrance: str | None = None  # why it neither acts as master nor follows one


def place_of(core: Core, group: "GroupDriver | None", now: float) -> Place:
    if group is None:
        return Place("master", FIRST_EPOCH, True, core.dispatched_position)
    from firn_node.replication.state import Role

    state = group.state
    record = state.record
    is_in_sync = record is not None and state.me.log_id in record.in_sync
    if state.role in (Role.MASTER, Role.RESIGNING):
        return Place(
            "master",
            state.epoch,
            is_in_sync,
            state.committed,
            trouble=group.trouble,
            hindrance=group.hindrance,
        )
    role = "standby" if state.role in (Role.STANDBY, Role.CANDIDATE) else "none"
    return Place(
        role, state.epoch, is_in_sync, state.committed, *_own_lag(state, now), group.trouble, group.hindrance
    )


def _own_lag(state: "State", now: float) -> tuple[int | None, float | None]:
    """Bytes and seconds that a standby lacks of what its master has told of; None: no master has."""
    following, log = state.following, state.log
    if following is None or following.end == 0:
        return None, None
    lag_bytes = max(following.end, log.written) - log.durable
    seconds = now - max(following.caught_up_at, state.started_at)
    return lag_bytes, round(seconds, 3) if lag_bytes else 0.0


def group_rows(core: Core, group: "GroupDriver | None", now: float) -> list[dict[str, Any]]:
    """The records of the cluster's groups as this broker knows them; how far its own group's members are, where it is
    their master.
    """
    if group is None or group.state.record is None:
        return []
    own = group.state.record
    others = [] if core.others is None else core.others.records.values()
    return [
        _group_row(own, lambda log_id: _lag_of(group.state, log_id, now)),
        *(_group_row(record, lambda _: _NO_LAG) for record in others if record.group_id != own.group_id),
    ]


def _group_row(record: "GroupRecord", lag_of: Callable[["LogId"], dict[str, Any]]) -> dict[str, Any]:
    master = record.members.get(record.master.log_id) if record.master is not None else None
    members = [
        {
            "node": member.node, "address": member.address, "ordinal": member.ordinal, "log_id": log_id,
            "in_sync": log_id in record.in_sync, **lag_of(log_id),
        }
        for log_id, member in record.members.items()
    ]  # fmt: skip
    return {
        "group": int(record.group_id),
        "version": record.version,
        "epoch": record.epoch,
        "master": master.node if master is not None else None,
        "forced_epoch": record.forced_epoch,
        "members": sorted(members, key=lambda member: (member["ordinal"], member["node"])),
    }


def _lag_of(state: "State", log_id: "LogId", now: float) -> dict[str, Any]:
    """What a member lacks, as its master knows; None where nobody knows."""
    mastery = state.mastery
    if mastery is None:
        return _NO_LAG
    if log_id == state.me.log_id:
        return {"lag_bytes": 0, "lag_seconds": 0.0}
    heard = state.heard.get(log_id)
    is_heard = heard is not None and heard.epoch == mastery.epoch
    lag_bytes = max(0, state.log.written - heard.durable) if heard is not None and is_heard else None
    seconds = now - mastery.caught_up_at.get(log_id, mastery.since)
    return {"lag_bytes": lag_bytes, "lag_seconds": 0.0 if lag_bytes == 0 else round(seconds, 3)}


def broker_row(
    core: Core, *, state: str, address: str, place: Place, rebuild: dict[str, Any] | None = None
) -> dict[str, Any]:
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
        "rebuild": rebuild,
        "reason": health.reason or place.trouble or place.hindrance,
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
